"""The backward of dense operations in plain torch: the definition, and every backend's default.

For token t of slot l, with g = output_scales * dL/dy and c = scalings[l, s] * token_scales[t]:

    dh[s, t, :r]        = c * g[t, o:o'] @ lora_b[l, o:o', :r]
    dlora_b[l, o:o', :r] = sum over t of slot l of c * g[t, o:o'].T h[s, t, :r]
    dx[t]               = sum over s of dh[s, t, :r] @ lora_a[l, s, :r]
    dlora_a[l, s, :r]   = sum over t of slot l of dh[s, t, :r].T x[t]

One product per slot and slice, over the slot's own rows, so nothing of another adapter or of
padding can reach a gradient. Its bits do not depend on where in the batch the rows lie: a matrix
library chooses its order of sums by shapes, strides and alignment, so rows are copied, and results
too, unless they lie as new memory does. Sums are kept in float32,
or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lora_backends.dtypes import accumulator_dtype
from lora_backends.weights import LoRAWeights

ALIGNMENT = 64
"""Bytes to which torch aligns new memory on a CPU."""

Rows: TypeAlias = slice | Tensor
Active: TypeAlias = list[tuple[int, Rows, list[int], list[float]]]
Segments: TypeAlias = Sequence[tuple[int, Rows]]
"""Each slot that has tokens, and their rows."""


def segments_of(token_slots: Tensor) -> list[tuple[int, Rows]]:
    """Return the rows of each active slot, slots ascending; waits for the device.

    token_slots [rows] are negative for none.
    """
    slots = torch.unique(token_slots).tolist()
    return [(slot, (token_slots == slot).nonzero().flatten()) for slot in slots if slot >= 0]


def b_backward(
    grad: Tensor,
    h: Tensor | None,
    weights: LoRAWeights,
    segments: Segments,
    token_scales: Tensor | None,
    *,
    needs_h: bool,
    lora_b: Tensor | None,
    slots: Sequence[int] | None,
) -> Tensor | None:
    """Return dh, or None; arguments as in `LoRABackend.run_lora_b_backward`."""
    sums, dh = _sums(grad, weights), None
    if needs_h:
        shape = weights.num_slices, grad.shape[0], weights.max_rank
        dh = torch.zeros(shape, dtype=sums, device=grad.device)
    places, active = _places(slots, weights.num_slots), _active(weights, segments)
    if lora_b is not None and not _fills(active, places, weights.max_rank):
        lora_b.zero_()
    for slot, rows, ranks, scalings in active:
        g = _own(grad, rows, sums)
        if token_scales is not None:
            g = token_scales[rows, None] * g
        for s, (rank, scaling) in enumerate(zip(ranks, scalings, strict=True)):
            columns = slice(*weights.slice_offsets[s : s + 2])
            of_slice = g if weights.num_slices == 1 else g[:, columns]
            if rank and dh is not None:
                b = weights.b_values(slot, s, rank, sums)
                _write(dh[s], rows, rank, of_slice, b, scaling)
            if rank and lora_b is not None and slot in places:
                assert h is not None
                h_rows = _own(h[s], rows, sums, rank)
                _write(lora_b[places[slot]], columns, rank, of_slice.T, h_rows, scaling)
    return dh


def a_backward(
    dh: Tensor,
    x: Tensor | None,
    weights: LoRAWeights,
    segments: Segments,
    *,
    dx: Tensor | None,
    lora_a: Tensor | None,
    slots: Sequence[int] | None,
) -> None:
    """Add to dx, and write lora_a; arguments as in `LoRABackend.run_lora_a_backward`."""
    sums = _sums(dh, weights)
    places, active = _places(slots, weights.num_slots), _active(weights, segments)
    if lora_a is not None and not _fills(active, places, weights.max_rank):
        lora_a.zero_()
    for slot, rows, ranks, _ in active:
        wanted = lora_a is not None and slot in places
        x_slot = _own(x, rows, sums) if wanted and x is not None and any(ranks) else None
        total = None if dx is None or not any(ranks) else _own(dx, rows, sums)
        for s, rank in enumerate(ranks):
            part = _own(dh[s], rows, sums, rank)
            if rank and total is not None:
                total.addmm_(part, weights.a_values(slot, s, rank, sums))
            if rank and x_slot is not None and lora_a is not None:
                _write(lora_a[places[slot], s], slice(rank), None, part.T, x_slot)
        if dx is not None and total is not None and not _is_part_of(total, dx):
            dx[rows] = total.to(dx.dtype)


def add_columns(
    dh: Tensor,
    token_ids: Tensor,
    weights: LoRAWeights,
    segments: Segments,
    *,
    lora_a: Tensor,
    slots: Sequence[int] | None,
) -> None:
    """`LoRABackend.run_embedding_backward`: a token adds its dh to the column of its id."""
    lora_a.zero_()
    places = _places(slots, weights.num_slots)
    for slot, rows, ranks, _ in _active(weights, segments):
        if slot not in places:
            continue
        for s, rank in enumerate(ranks):
            if rank:
                columns = dh.new_zeros(weights.in_features, rank)
                ids, dh_rows = token_ids[rows].long(), _own(dh[s], rows, dh.dtype, rank)
                # equal ids are summed in one order: each of the two has atomics on the other device
                if dh_rows.is_cpu:
                    columns.index_add_(0, ids, dh_rows)
                else:
                    columns.index_put_((ids,), dh_rows, accumulate=True)
                lora_a[places[slot], s, :rank] = columns.T


def sum_rows(values: Tensor, segments: Segments, out: Tensor, slots: Sequence[int] | None) -> None:
    """Write the sum of each slot's rows; arguments as in `LoRABackend.sum_tokens`."""
    out.zero_()
    places = _places(slots, out.shape[0])
    for slot, rows in segments:
        if slot in places:
            out[places[slot]] = _own(values, rows, accumulator_dtype(values.dtype)).sum(0)


def one_hot_h(token_ids: Tensor, weights: LoRAWeights, segments: Segments) -> Tensor:
    """Return h [num_slices, rows, max_rank] of an embedding: a column of lora_a per token."""
    sums = accumulator_dtype(weights.input_dtypes[0])
    shape = weights.num_slices, token_ids.shape[0], weights.max_rank
    h = torch.zeros(shape, dtype=sums, device=weights.device)
    for slot, rows, ranks, _ in _active(weights, segments):
        for s, rank in enumerate(ranks):
            h[s, rows, :rank] = weights.a_values(slot, s, rank, sums)[:, token_ids[rows].long()].T
    return h


def _sums(values: Tensor, weights: LoRAWeights) -> torch.dtype:
    """Return the dtype of sums of products of values with a layer's."""
    return accumulator_dtype(torch.promote_types(values.dtype, weights.input_dtypes[0]))


def _own(values: Tensor, rows: Rows, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Return some rows of a matrix, cut to a width, contiguous and aligned: a view or a copy."""
    cut = _cut(values, rows, width)
    if isinstance(rows, slice) and cut.dtype == dtype and _is_as_new(cut):
        return cut
    return torch.empty(cut.shape, dtype=dtype, device=cut.device).copy_(cut)


def _write(
    out: Tensor, rows: Rows, width: int | None, a: Tensor, b: Tensor, factor: float = 1.0
) -> None:
    """Write ``factor * (a @ b)`` into rows of a matrix, from the first column on."""
    if isinstance(rows, slice):
        part = _cut(out, rows, width)
        if part.dtype == a.dtype and _is_as_new(part):
            torch.addmm(part, a, b, beta=0, alpha=factor, out=part)
            return
    if out.is_cpu:
        new = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        out[rows, :width] = torch.addmm(new, a, b, beta=0, alpha=factor, out=new).to(out.dtype)
    else:
        out[rows, :width] = (factor * (a @ b)).to(out.dtype)


def _cut(values: Tensor, rows: Rows, width: int | None) -> Tensor:
    """Return rows of a matrix, cut to a width, by as few views as can be: they take time."""
    part = values[rows]
    return part if width is None or width == part.shape[1] else part[:, :width]


def _fills(active: Active, places: Mapping[int, int], max_rank: int) -> bool:
    """Return whether the gradients of all wanted slots are written, up to the last rank."""
    full = {slot for slot, _, ranks, _ in active if all(rank == max_rank for rank in ranks)}
    return places.keys() <= full


def _is_as_new(values: Tensor) -> bool:
    """Return whether a matrix library cannot tell values from a copy: not known of GPUs."""
    if not values.is_cpu or values.data_ptr() % ALIGNMENT:
        return False
    # By strides: one row alone is contiguous with any, and a library may look at them.
    return values.stride() == (values.shape[1], 1)


def _is_part_of(values: Tensor, whole: Tensor) -> bool:
    return values.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _active(weights: LoRAWeights, segments: Segments) -> Active:
    """Return slot, rows, ranks and scalings of each segment; waits for the device once."""
    ranks, scalings = weights.ranks.tolist(), weights.scalings.tolist()
    return [(slot, rows, ranks[slot], scalings[slot]) for slot, rows in segments]


def _places(slots: Sequence[int] | None, num_slots: int) -> dict[int, int]:
    """Return where the gradient of each slot goes."""
    return {slot: at for at, slot in enumerate(range(num_slots) if slots is None else slots)}
