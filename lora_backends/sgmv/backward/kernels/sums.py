# mypy: ignore-errors
"""The kernels that sum rows, pieces, planes, and the tokens of each id."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.backward.kernels.pieces import piece_of, place_of, runs_of
from lora_backends.sgmv.kernels.indexing import row_and_program
from lora_backends.sgmv.kernels.products import rounded


@triton.jit(do_not_specialize=["num_slots", "runs"])
def sum_kernel(
    values_ptr,
    slots_ptr,
    slot_table_ptr,
    token_table_ptr,
    out_ptr,
    parts_ptr,
    num_slots,
    runs,
    stride_t,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[l, c] = sum over tokens t of slot l of values[t, c]."""
    row, program = row_and_program(PROGRAMS)
    piece = piece_of(row, slots_ptr, num_slots, slot_table_ptr, runs, PIECES)
    if (row >= num_slots) & (piece.first >= piece.end):
        return
    C: tl.constexpr = SIZES.BLOCK_C
    c = program * C + tl.arange(0, C)  # [C]
    within = c < SIZES.COLUMNS
    sums = tl.zeros((C,), dtype=tl.float32)
    for start in range(piece.first, piece.end, SIZES.BLOCK_T):
        place = start + tl.arange(0, SIZES.BLOCK_T)  # [T]
        token = tl.load(token_table_ptr + place, mask=place < piece.end, other=-1).to(tl.int64)
        mask = (token >= 0)[:, None] & within[None, :]
        at = values_ptr + (token * stride_t)[:, None] + c[None, :]
        sums += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32), axis=0)
    if PIECES.RUNS > 0:
        if piece.part >= 0:
            tl.store(parts_ptr + piece.part.to(tl.int64) * SIZES.COLUMNS + c, sums, mask=within)
            return
    out = rounded(sums, out_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(out_ptr + row * SIZES.COLUMNS + c, out, mask=within)


@triton.jit(do_not_specialize=["num_slots", "runs"])
def add_pieces_kernel(
    parts_ptr,
    slots_ptr,
    slot_table_ptr,
    out_ptr,
    num_slots,
    runs,
    values,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Write the sums of slots of several pieces, added in order."""
    row, program = row_and_program(PROGRAMS)
    if PIECES.ALL:
        slot = row.to(tl.int32)
    else:
        slot = tl.load(slots_ptr + row)
    first, end = runs_of(slot, slot_table_ptr, runs)
    pieces, window = tl.cdiv(end - first, PIECES.RUNS), first // PIECES.RUNS
    if pieces < 2:
        return
    i = program.to(tl.int64) * SIZES.BLOCK + tl.arange(0, SIZES.BLOCK)
    within = i < values
    sums = tl.load(parts_ptr + window.to(tl.int64) * 2 * values + i, mask=within, other=0.0)
    for k in range(1, pieces):
        part = (window + k).to(tl.int64) * 2 + 1
        sums += tl.load(parts_ptr + part * values + i, mask=within, other=0.0)
    out = rounded(sums, out_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(out_ptr + row * values + i, out, mask=within)


@triton.jit(do_not_specialize=["plane", "rows"])
def add_planes_kernel(
    planes_ptr,
    token_slots_ptr,
    out_ptr,
    plane,
    rows,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[s, t, r] = sum over k of planes[k, s, t, r], in order; out may be the first plane.

    With CLEARS it is zero where token t has no adapter, and nothing is read there.
    """
    row, _ = row_and_program(PROGRAMS)
    i = row * SIZES.BLOCK + tl.arange(0, SIZES.BLOCK)  # int64
    within = i < plane
    read = within
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    if SIZES.CLEARS:
        t = i // SIZES.WIDTH % rows
        read = within & (tl.load(token_slots_ptr + t, mask=within, other=-1) >= 0)
    sums = tl.load(planes_ptr + i, mask=read, other=0.0)
    PLANES: tl.constexpr = SIZES.PLANES
    for k in tl.static_range(1, PLANES):
        sums += tl.load(planes_ptr + k * plane.to(tl.int64) + i, mask=read, other=0.0)
    tl.store(out_ptr + i, sums, mask=within)


@triton.jit(do_not_specialize=["rows", "num_slots", "num_slices"])
def add_columns_kernel(
    dh_ptr,
    keys_ptr,
    order_ptr,
    slots_ptr,
    ranks_ptr,
    out_ptr,
    rows,
    num_slots,
    num_slices,
    vocabulary,
    dh_stride_s,
    dh_stride_t,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[l, s, :r, v] = sum of dh[s, t, :r] over the tokens t of slot l with id v.

    keys are l * vocabulary + v, sorted, -1 without an adapter, and order is the token of each. The
    first of equal keys sums all of them, in order.
    """
    row, program = row_and_program(PROGRAMS)
    key = tl.load(keys_ptr + row)
    before = tl.load(keys_ptr + row - 1, mask=row > 0, other=-1)
    if key < 0 or key == before:
        return
    slot = (key // vocabulary).to(tl.int32)
    place = slot
    if not PIECES.ALL:
        place = place_of(slot, slots_ptr, num_slots)
        if place < 0:
            return
    s = program // SIZES.N_BLOCKS
    r = program % SIZES.N_BLOCKS * SIZES.BLOCK_R + tl.arange(0, SIZES.BLOCK_R)  # [R]
    used = r < tl.load(ranks_ptr + slot.to(tl.int64) * num_slices + s)
    R: tl.constexpr = SIZES.BLOCK_R
    sums = tl.zeros((R,), dtype=tl.float32)
    dh_at = dh_ptr + s.to(tl.int64) * dh_stride_s + r  # [R]
    at, more = row, row < rows
    while more:
        i = at + tl.arange(0, SIZES.BLOCK_T)  # [T]
        same = tl.load(keys_ptr + i, mask=i < rows, other=-1) == key
        token = tl.load(order_ptr + i, mask=same, other=0)
        mask = same[:, None] & used[None, :]
        sums += tl.sum(
            tl.load(dh_at[None, :] + (token * dh_stride_t)[:, None], mask=mask, other=0.0), axis=0
        )
        at += SIZES.BLOCK_T
        more = tl.min(same.to(tl.int32)) > 0
    out_row = (place.to(tl.int64) * num_slices + s) * SIZES.MAX_RANK + r  # [R]
    out_at = out_ptr + out_row * vocabulary + key % vocabulary
    out = rounded(sums, out_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(out_at, out, mask=used)
