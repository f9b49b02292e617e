"""The definition of multi-LoRA arithmetic: plain torch, a loop over slots and slices.

`segments` is a list of (slot, rows): rows indexes the tokens of one active slot, as a slice where
they are neighbours and as a tensor of indices otherwise. Sums are float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lora_backends.weights import LoRAWeights

Rows: TypeAlias = slice | Tensor
Segments: TypeAlias = Sequence[tuple[int, Rows]]


def shrink(x: Tensor, weights: LoRAWeights, segments: Segments, h: Tensor) -> Tensor:
    """Write ``h[s, t, :r] = x[t] @ lora_a[l, s, :r].T`` to zeros [num_slices, rows, max_rank]."""
    ranks = weights.ranks.tolist()
    for slot, rows in segments:
        for s, rank in enumerate(ranks[slot]):
            a = weights.a_values(slot, s, rank, h.dtype)
            h[s, rows, :rank] = x[rows].to(h.dtype) @ a.T
    return h


def shrink_one_hot(
    token_ids: Tensor, weights: LoRAWeights, segments: Segments, sum_dtype: torch.dtype
) -> Tensor:
    """Return h for ``x = one_hot(token_ids)``: a column of lora_a per token."""
    shape = (weights.num_slices, token_ids.shape[0], weights.max_rank)
    h = torch.zeros(shape, dtype=sum_dtype, device=weights.device)
    ranks = weights.ranks.tolist()
    for slot, rows in segments:
        for s, rank in enumerate(ranks[slot]):
            h[s, rows, :rank] = weights.a_values(slot, s, rank, sum_dtype)[:, token_ids[rows]].T
    return h


def expand(
    h: Tensor, weights: LoRAWeights, segments: Segments, y: Tensor, token_scales: Tensor | None
) -> Tensor:
    """Add ``scaling * (h @ lora_b.T) + bias`` to y in place, rounding each element once."""
    ranks, scalings = weights.ranks.tolist(), weights.scalings.tolist()
    for slot, rows in segments:
        for s, rank in enumerate(ranks[slot]):
            add_slice(y, rows, slot, s, h[s, rows, :rank], scalings[slot][s], weights, token_scales)
    return y


def linear(
    x: Tensor,
    weights: LoRAWeights,
    segments: Segments,
    y: Tensor,
    sum_dtype: torch.dtype,
    token_scales: Tensor | None,
) -> Tensor:
    """Shrink and expand slot by slot, without the h of the whole batch."""
    ranks, scalings = weights.ranks.tolist(), weights.scalings.tolist()
    for slot, rows in segments:
        # once for all slices of the slot
        x_slot = x[rows].to(sum_dtype)
        for s, rank in enumerate(ranks[slot]):
            h = x_slot @ weights.a_values(slot, s, rank, sum_dtype).T
            add_slice(y, rows, slot, s, h, scalings[slot][s], weights, token_scales)
    return y


def add_slice(
    y: Tensor,
    rows: Rows,
    slot: int,
    s: int,
    h: Tensor,
    scaling: float,
    weights: LoRAWeights,
    token_scales: Tensor | None,
) -> None:
    """Add to y the delta of one slot and one slice; h: [rows, rank], the rank's own width."""
    # columns beyond the rank are cut off, not multiplied: they may hold NaN
    rank, columns = h.shape[1], slice(*weights.slice_offsets[s : s + 2])
    # y keeps its bits: adding zero would turn -0.0 into 0.0
    if rank == 0 and weights.bias is None and weights.output_scales is None:
        return
    view = y[:, columns]
    # in the dtype of sums, so that the cast back is the only rounding
    total = view[rows].to(torch.promote_types(h.dtype, y.dtype))
    if rank > 0:
        delta = scaling * (h @ weights.b_values(slot, s, rank, h.dtype).T)
        if token_scales is not None:
            delta = token_scales[rows, None] * delta
        total = total + delta
    if weights.output_scales is not None:
        total = weights.output_scales[slot, columns] * total
    if weights.bias is not None:
        total = total + weights.bias[slot, columns].to(h.dtype)
    total = total.to(y.dtype)
    if isinstance(rows, Tensor):
        view.index_copy_(0, rows, total)  # index_add_ wakes every thread for a few rows on a CPU
    else:
        view[rows] = total
