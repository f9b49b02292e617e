"""The loss of each adapter of a batch, over its own labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.hf.calls.entries import adapter_names, entries_of, is_per_token
from lora_backends.hf.words import without_base

IGNORED = -100
"""The label of a position without a loss, as in Transformers."""


def adapter_losses(
    logits: torch.Tensor, labels: torch.Tensor, adapters: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """Return each adapter's mean cross-entropy; see `MultiLoRAModel.adapter_losses`."""
    rows = _rows_of(adapters)
    if not (isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor)):
        given = f"{type(logits).__name__} and {type(labels).__name__}"
        raise InvalidInputError(f"logits and labels are {given}\n  allowed: tensors")
    if logits.ndim != 3 or labels.shape != logits.shape[:2] or len(adapters) != len(labels):
        raise InvalidInputError(
            f"logits, labels and adapters do not belong together\n  given: logits "
            f"{list(logits.shape)}, labels {list(labels.shape)}, {len(adapters)} adapters\n"
            f"  allowed: [rows, tokens, vocabulary], [rows, tokens], and one adapter per row"
        )
    targets = labels[:, 1:].to(logits.device)
    return {name: _loss(logits, targets, at) for name, at in rows.items()}


def _loss(logits: torch.Tensor, targets: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the mean of the losses of rows, 0 where they have no label."""
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
    return total / (targets != IGNORED).sum().clamp(min=1)


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
