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
    if not isinstance(logits, torch.Tensor):
        raise InvalidInputError(f"logits is {shown(logits)}\n  allowed: a tensor")
    rows, targets = _targets(labels, adapters, logits.shape)
    if counts is not None and (missing := rows.keys() - counts.keys()):
        raise InvalidInputError(
            f"counts lacks {', '.join(sorted(missing))}\n"
            f"  allowed: a count for every adapter of the batch"
        )
    # One pass over all logits: a part for each adapter would have a gradient of all logits' size.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    targets = targets.to(logits.device)
    losses = functional.cross_entropy(
        wide, targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    # Without a wait for the device: the counts of labels stay there.
    per_row = (targets != IGNORED).sum(1)
    means = {}
    for name, at in rows.items():
        in_rows = torch.tensor(at, device=logits.device)
        count = per_row[in_rows].sum() if counts is None else torch.as_tensor(counts[name])
        count = count.to(losses)
        means[name] = losses[in_rows].sum() / torch.where(count > 0, count, 1)
    return means


def label_counts(labels: torch.Tensor, adapters: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the number of labels that the loss of each adapter is the mean of.

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
    labels: torch.Tensor, adapters: Sequence[Any], logits: Sequence[int] | None
) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Return the rows of each adapter, and the label that each of their positions predicts."""
    rows = _rows_of(adapters)
    if not isinstance(labels, torch.Tensor):
        raise InvalidInputError(f"labels is {shown(labels)}\n  allowed: a tensor")
    fits = logits is None or (len(logits) == 3 and labels.shape == logits[:2])
    if labels.ndim != 2 or len(adapters) != len(labels) or not fits:
        given = "" if logits is None else f"logits {list(logits)}, "
        raise InvalidInputError(
            f"labels, adapters and logits do not belong together\n  given: {given}labels "
            f"{list(labels.shape)}, {len(adapters)} adapters\n"
            f"  allowed: logits [rows, tokens, vocabulary], labels [rows, tokens], and one adapter "
            f"per row"
        )
    # The logits of a position predict the label of the next one; the last predicts none.
    targets = functional.pad(labels[:, 1:], (0, min(1, labels.shape[1])), value=IGNORED)
    named = torch.zeros(len(labels), dtype=torch.bool, device="cpu")
    named[[row for at in rows.values() for row in at]] = True
    return rows, targets.masked_fill(~named.to(labels.device)[:, None], IGNORED)


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
