"""The definition of multi-LoRA arithmetic: plain torch, a loop over slots and slices.

`segments` is a list of (slot, rows): rows indexes the tokens of one active slot, as a slice where
they are neighbours and as a tensor of indices otherwise. Sums are float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch

from lora_backends.weights import LoRAWeights

Rows: TypeAlias = slice | torch.Tensor
Segments: TypeAlias = list[tuple[int, Rows]]


def active_slices(
    weights: LoRAWeights, segments: Segments
) -> Iterator[tuple[int, Rows, int, int, slice, float]]:
    """Yield (slot, rows, slice index, rank, output columns, scaling) wherever the rank is not 0."""
    ranks, scalings = weights.ranks.tolist(), weights.scalings.tolist()
    offsets = weights.slice_offsets
    for slot, rows in segments:
        for s in range(weights.num_slices):
            if ranks[slot][s]:
                columns = slice(offsets[s], offsets[s + 1])
                yield slot, rows, s, ranks[slot][s], columns, scalings[slot][s]


def shrink(
    x: torch.Tensor, weights: LoRAWeights, segments: Segments, sum_dtype: torch.dtype
) -> torch.Tensor:
    """Return h, ``h[s, t, :r] = x[t] @ lora_a[l, s, :r].T``: [num_slices, num_tokens, max_rank]."""
    h = x.new_zeros((weights.num_slices, x.shape[0], weights.max_rank), dtype=sum_dtype)
    for slot, rows, s, rank, _, _ in active_slices(weights, segments):
        h[s, rows, :rank] = x[rows].to(sum_dtype) @ weights.lora_a[slot, s, :rank].to(sum_dtype).T
    return h


def shrink_one_hot(
    token_ids: torch.Tensor, weights: LoRAWeights, segments: Segments, sum_dtype: torch.dtype
) -> torch.Tensor:
    """Return h for ``x = one_hot(token_ids)``: a column of lora_a per token."""
    shape = (weights.num_slices, token_ids.shape[0], weights.max_rank)
    h = weights.lora_a.new_zeros(shape, dtype=sum_dtype)
    for slot, rows, s, rank, _, _ in active_slices(weights, segments):
        h[s, rows, :rank] = weights.lora_a[slot, s, :rank, token_ids[rows]].to(sum_dtype).T
    return h


def expand(
    h: torch.Tensor, weights: LoRAWeights, segments: Segments, y: torch.Tensor
) -> torch.Tensor:
    """Add ``scaling * (h @ lora_b.T) + bias`` to y in place, rounding each element once."""
    if weights.bias is None:
        for slot, rows, s, rank, columns, scaling in active_slices(weights, segments):
            delta = h[s, rows, :rank] @ weights.lora_b[slot, columns, :rank].to(h.dtype).T
            add_rows(y[:, columns], rows, scaling * delta)
        return y
    for slot, rows in segments:  # with a bias, all columns of a row change, once
        delta = torch.zeros_like(y[rows], dtype=h.dtype)
        for _, _, s, rank, columns, scaling in active_slices(weights, [(slot, rows)]):
            b = weights.lora_b[slot, columns, :rank].to(h.dtype)
            delta[:, columns] = scaling * (h[s, rows, :rank] @ b.T)
        add_rows(y, rows, delta + weights.bias[slot].to(h.dtype))
    return y


def add_rows(y: torch.Tensor, rows: Rows, delta: torch.Tensor) -> None:
    """Add delta to some rows of y in place: widened, summed, then rounded to y's dtype once."""
    if delta.dtype == y.dtype and isinstance(rows, torch.Tensor):
        y.index_add_(0, rows, delta)
    elif delta.dtype == y.dtype:
        y[rows] += delta
    else:
        y[rows] = (y[rows].to(delta.dtype) + delta).to(y.dtype)
