# mypy: ignore-errors
"""The kernel of dlora_a and dlora_b: sums of outer products over a slot's tokens."""

import triton
import triton.language as tl

from lora_backends.sgmv.backward.kernels.pieces import piece_of
from lora_backends.sgmv.backward.kernels.rows import factor_of, inside
from lora_backends.sgmv.kernels.indexing import columns_of, in_groups, row_and_program
from lora_backends.sgmv.kernels.products import multiply, rounded
from lora_backends.sgmv.kernels.widening import wide_dtype


@triton.jit(do_not_specialize=["num_slots", "runs"])
def outer_kernel(
    h_ptr,
    right_ptr,
    ranks_ptr,
    scalings_ptr,
    token_scales_ptr,
    slots_ptr,
    slot_table_ptr,
    token_table_ptr,
    out_ptr,
    parts_ptr,
    num_slots,
    runs,
    h_stride_s,
    h_stride_t,
    right_stride_t,
    PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[l, s, :r, c] = sum over tokens t of slot l of h[s, t, :r] * right[t, c].

    lora_a takes dh and x: all slices in one program, as far as BLOCK_N goes. lora_b takes h and
    grad, a column of which belongs to one slice, times scaling and token_scale. Zeros are written
    beyond a rank, where h may hold anything: the ranks are an axis of the result, so none of it
    reaches another.
    """
    row, program = row_and_program(PROGRAMS)
    piece = piece_of(row, slots_ptr, num_slots, slot_table_ptr, runs, PIECES)
    if (row >= num_slots) & (piece.first >= piece.end):
        return
    N: tl.constexpr = SIZES.BLOCK_N
    C: tl.constexpr = SIZES.BLOCK_C
    n = program % SIZES.N_BLOCKS * N + tl.arange(0, N)  # [N]
    s_first, c_first, c_end = columns_of(program // SIZES.N_BLOCKS, SIZES)
    s = s_first + n // SIZES.RANK_PAD  # [N]
    r = n % SIZES.RANK_PAD  # [N]
    in_slices = s < SIZES.NUM_SLICES
    of_slot = piece.slot.to(tl.int64) * SIZES.NUM_SLICES
    rank = tl.load(ranks_ptr + of_slot + s, mask=in_slices, other=0)  # [N]
    h_at = h_ptr + s.to(tl.int64) * h_stride_s + r  # [N]
    h_in = in_groups(r, rank, SIZES.EVEN_H)
    c = c_first + tl.arange(0, C)  # [C]
    within = inside(c, c_end, SIZES.EVEN_C)
    if SIZES.H_LEFT:
        acc = tl.zeros((N, C), dtype=tl.float32)
    else:
        acc = tl.zeros((C, N), dtype=tl.float32)
    end = tl.where(tl.max(rank - r) > 0, piece.end, piece.first)
    for start in range(piece.first, end, SIZES.BLOCK_T):
        place = start + tl.arange(0, SIZES.BLOCK_T)  # [T]
        token = tl.load(token_table_ptr + place, mask=place < end, other=-1).to(tl.int64)
        has_token = token >= 0
        h_rows = place.to(tl.int64) if PIECES.BY_PLACE else token
        h_mask = has_token[:, None] & h_in[None, :]
        h = tl.load(h_at[None, :] + (h_rows * h_stride_t)[:, None], mask=h_mask, other=0.0)
        right_at = right_ptr + (token * right_stride_t)[:, None] + c[None, :]
        if SIZES.EVEN_C == SIZES.BLOCK_C:
            right = tl.load(right_at, mask=has_token[:, None], other=0.0)
        else:
            right = tl.load(right_at, mask=has_token[:, None] & within[None, :], other=0.0)
        if SIZES.HAS_TOKEN_SCALES:
            h *= tl.load(token_scales_ptr + token, mask=has_token, other=0.0)[:, None]
        h = factor_of(h, wide_dtype(SIZES.WIDE), SIZES.INTERPRETED)
        right = factor_of(right, wide_dtype(SIZES.WIDE), SIZES.INTERPRETED)
        if SIZES.H_LEFT:
            acc = multiply(tl.trans(h), right, acc, SIZES)
        else:
            acc = multiply(tl.trans(right), h, acc, SIZES)
    sums = acc if SIZES.H_LEFT else tl.trans(acc)  # [N, C]
    if SIZES.SCALED:
        sums *= tl.load(scalings_ptr + of_slot + s, mask=r < rank, other=0.0)[:, None]
    sums = tl.where((r < rank)[:, None], sums, 0.0)
    COLUMNS: tl.constexpr = SIZES.STARTS[len(SIZES.STARTS) - 1]
    if SIZES.BY_COLUMN:
        values = COLUMNS * SIZES.MAX_RANK
        at = r.to(tl.int64)[:, None] + c.to(tl.int64)[None, :] * SIZES.MAX_RANK
    else:
        values = SIZES.NUM_SLICES * SIZES.MAX_RANK * COLUMNS
        at = (s.to(tl.int64) * SIZES.MAX_RANK + r)[:, None] * COLUMNS + c[None, :]
    mask = (in_slices & (r < SIZES.MAX_RANK))[:, None] & within[None, :]
    if PIECES.RUNS > 0:
        if piece.part >= 0:
            tl.store(parts_ptr + piece.part.to(tl.int64) * values + at, sums, mask=mask)
            return
    out = rounded(sums, out_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(out_ptr + row * values + at, out, mask=mask)
