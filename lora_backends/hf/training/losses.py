"""The loss of each adapter of a batch, over its own labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.calls.entries import adapter_names, entries_of, is_per_token
from lora_backends.hf.words import without_base

IGNORED = -100
"""The label of a position without a loss, as in Transformers."""


def adapter_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    adapters: Sequence[Any],
    counts: Mapping[str, float | torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return each adapter's mean cross-entropy; see `MultiLoRAModel.adapter_losses`."""
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        given = list(logits.shape) if isinstance(logits, torch.Tensor) else shown(logits)
        raise InvalidInputError(
            f"logits is {given}\n  allowed: a tensor [rows, tokens, vocabulary]"
        )
    rows, targets = _targets(labels, adapters, logits.shape[:2])
    if counts is not None and (missing := rows.keys() - counts.keys()):
        raise InvalidInputError(
            f"counts lacks {', '.join(sorted(missing))}\n"
            f"  allowed: a count for every adapter of the batch"
        )
    targets = targets.to(logits.device)
    return {
        name: _loss(logits, targets, at, None if counts is None else counts[name])
        for name, at in rows.items()
    }


def label_counts(labels: torch.Tensor, adapters: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the number of labels that the loss of each adapter is the mean of.

    Args:
        labels: as of `adapter_losses`.
        adapters: as of `adapter_losses`.

    Returns:
        By name, in the order of the rows, an int64 scalar on the labels' device.

    Raises:
        InvalidInputError: labels are no tensor [rows, tokens], or not one adapter per row.
        UnsupportedInputError: as `adapter_losses`.
    """
    rows, targets = _targets(labels, adapters, None)
    per_row = (targets != IGNORED).sum(1)
    return {
        name: per_row[torch.tensor(at, device=labels.device)].sum() for name, at in rows.items()
    }


def _targets(
    labels: torch.Tensor, adapters: Sequence[Any], shape: Sequence[int] | None
) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Return the rows of each adapter, and the labels that positions predict."""
    rows = _rows_of(adapters)
    if not isinstance(labels, torch.Tensor) or labels.ndim != 2:
        given = list(labels.shape) if isinstance(labels, torch.Tensor) else shown(labels)
        raise InvalidInputError(f"labels is {given}\n  allowed: a tensor [rows, tokens]")
    if len(adapters) != len(labels) or (shape is not None and labels.shape != shape):
        logits = "" if shape is None else f"logits of {list(shape)} positions, "
        raise InvalidInputError(
            f"labels, adapters and logits do not belong together\n  given: {logits}labels "
            f"{list(labels.shape)}, {len(adapters)} adapters\n"
            f"  allowed: [rows, tokens, vocabulary], [rows, tokens], and one adapter per row"
        )
    return rows, labels[:, 1:]


def _loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    rows: list[int],
    count: float | torch.Tensor | None,
) -> torch.Tensor:
    """Return the sum of the losses of rows over a count, else over that of their labels.

    It is 0 where they have no label.
    """
    first, last = rows[0], rows[-1] + 1
    if last - first == len(rows):  # a view; indices would copy the logits
        logits, targets = logits[first:last, :-1], targets[first:last]
    else:
        at = torch.tensor(rows, device=logits.device)
        logits, targets = logits[at, :-1], targets[at]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    targets = targets.flatten()
    total = functional.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
    # Without a wait for the device: the count of labels stays there.
    divisor = (targets != IGNORED).sum() if count is None else torch.as_tensor(count).to(total)
    return total / torch.where(divisor > 0, divisor, 1)


def _rows_of(adapters: Sequence[Any]) -> dict[str, list[int]]:
    adapter_names(adapters)  # refuses what is no entry
    rows: dict[str, list[int]] = {}
    for row, entry in enumerate(map(without_base, adapters)):
        if is_per_token(entry):
            entry = _one_of(row, entries_of(entry))
        if isinstance(entry, str):
            rows.setdefault(entry, []).append(row)
        elif entry is not None:
            raise UnsupportedInputError(
                f"adapters[{row}] is a blend, whose loss belongs to no adapter alone\n"
                f"  given: {shown(entry)}\n  allowed: a name or None per row"
            )
    return rows


def _one_of(row: int, entries: Sequence[Any]) -> Any:
    raise UnsupportedInputError(
        f"adapters[{row}] has {len(entries)} entries, one per token, and a loss would belong to "
        f"several adapters\n  allowed: a name or None per row\n"
        f"  to do: compute the loss of each token from the logits"
    )
