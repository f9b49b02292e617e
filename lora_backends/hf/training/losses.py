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
    # The labels are shifted, not the logits: a part of the logits would have a gradient of its own,
    # as large as all of them.
    targets = functional.pad(labels.to(logits.device)[:, 1:], (0, 1), value=IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(targets)
    return {name: _mean(losses, targets, at) for name, at in rows.items()}


def _mean(losses: torch.Tensor, targets: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the mean of the losses [rows, tokens] of some rows, 0 where they have no label."""
    at = torch.tensor(rows, device="cpu").to(losses.device, non_blocking=True)
    # Without a wait for the device: the count of labels stays there.
    return losses[at].sum() / (targets[at] != IGNORED).sum().clamp(min=1)


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
