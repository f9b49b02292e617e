# mypy: ignore-errors
"""The kernels of the backward of a site.

Two run on the tiles of the routing: products of each pair's row with its A or B, and each pair's
row of dx. The sum over the pairs of a token, and the sum over the pairs of a slot and expert, add
in one order: none takes atomics.

Axes: T (pairs), R (rank), K (columns that are summed), C (columns of a result).

Offsets that a stride multiplies are int64: slot times stride exceeds int32 in large stacks.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lora_backends.sgmv.experts.kernels import pairs_of
from lora_backends.sgmv.kernels.indexing import group_of
from lora_backends.sgmv.kernels.products import multiply, rounded
from lora_backends.sgmv.kernels.widening import widened


class BackwardSizes(NamedTuple):
    """Constants of a kernel of the backward; each reads some of them."""

    BLOCK_R: int
    BLOCK_K: int  # columns of a step, or columns of a result per program
    RANK_PAD: int  # ranks of an A in the rows of a pair
    NUM_A: int
    TOP_K: int
    STARTS: tuple[int, ...]  # first columns of the slices
    WIDTHS: tuple[int, ...]  # columns of the slices
    STEP: int  # from one column of a slice to the next
    FIRST_GROUPS: tuple[int, ...]  # of the scales of rows of B, by slice
    STORAGE: int  # as `widened` numbers it; 0: not 8 bits
    GROUP_R: int  # ranks that share a scale; 0: all
    GROUP_K: int  # columns that share a scale; 0: all
    SCALED: bool  # multiply by the scaling
    HAS_FACTORS: bool  # multiply by the factor of each pair
    SHARED: bool  # all experts share the result
    ALL: bool  # results of all slots
    NUM_EXPERTS: int
    MIXED: bool  # operands of a product differ in dtype: it is float32
    PRECISION: str
    INTERPRETED: bool


class ScalePointers(NamedTuple):
    """Where the scales of an 8-bit matrix lie."""

    at: Any  # of the slot, expert and A
    stride_r: Any  # of a group of ranks
    stride_k: Any  # of a group of columns


@triton.jit
def _slice(s, S: tl.constexpr):
    """Return first column, columns and first group of scales of a slice."""
    SLICES: tl.constexpr = len(S.STARTS)
    first, width, group = s * 0 + S.STARTS[0], s * 0 + S.WIDTHS[0], s * 0
    for i in tl.static_range(1, SLICES):
        first = tl.where(s == i, S.STARTS[i], first)
        width = tl.where(s == i, S.WIDTHS[i], width)
        group = tl.where(s == i, S.FIRST_GROUPS[i], group)
    return first, width, group


@triton.jit
def _scaled_values(raw, scales, group, r, k, mask, S: tl.constexpr):
    """Return 8-bit values in float32, times their scales; r and k have the axes of `raw`."""
    at = scales.at + group_of(r, S.GROUP_R) * scales.stride_r
    at += (group + group_of(k, S.GROUP_K)) * scales.stride_k
    scale = tl.load(at, mask=mask, other=0.0)
    return tl.where(mask, widened(raw, tl.float32, S.STORAGE), 0.0) * scale


@triton.jit
def _product(left, right, acc, S: tl.constexpr):
    """Return ``left @ right + acc``: of operands of two dtypes in float32."""
    if left.dtype == right.dtype:
        return multiply(left, right, acc, S)
    else:
        return multiply(left.to(tl.float32), right.to(tl.float32), acc, S)


@triton.jit
def _narrowed(value, dtype: tl.constexpr, S: tl.constexpr):
    """Return float32 values in the dtype of the other operand; float32 for one of 8 bits."""
    if dtype == tl.int8:
        return value
    else:
        return rounded(value, dtype, S.INTERPRETED)


@triton.jit
def product_kernel(
    rows_ptr,
    w_ptr,
    w_scales_ptr,
    ranks_ptr,
    scalings_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    out_ptr,
    rows_stride_t,
    rows_stride_j,
    w_stride_l,
    w_stride_e,
    w_stride_a,
    w_stride_r,
    w_stride_k,
    w_scales_stride_l,
    w_scales_stride_e,
    w_scales_stride_a,
    w_scales_stride_r,
    w_scales_stride_k,
    ranks_stride_l,
    ranks_stride_e,
    scalings_stride_l,
    scalings_stride_e,
    PROGRAMS: tl.constexpr,
    SITE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[pair, a, :r] = scaling * the sum over columns k of rows[pair, k] * w[l, e, a, :r, k].

    w is A and rows are of x, or w is B and rows are of grad: then a sums over the columns of its
    own slice, or of every slice where it is the only A. Zeros are written beyond the rank.
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    slot, expert, _, count, pair = pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE)
    if count <= 0:
        return
    BLOCKS: tl.constexpr = SIZES.RANK_PAD // SIZES.BLOCK_R
    SLICES: tl.constexpr = len(SIZES.STARTS)
    SUMMED: tl.constexpr = SLICES if SIZES.NUM_A == 1 else 1  # slices that an A sums over
    T: tl.constexpr = SITE.ROWS
    live = tl.arange(0, T) < count  # [T]
    a = program // BLOCKS
    r = program % BLOCKS * SIZES.BLOCK_R + tl.arange(0, SIZES.BLOCK_R)  # [R]
    rank = tl.load(ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + a)
    rows = rows_ptr + (pair // SITE.TOP_K).to(tl.int64) * rows_stride_t
    rows += (pair % SITE.TOP_K).to(tl.int64) * rows_stride_j  # [T]
    w = w_ptr + slot * w_stride_l + expert * w_stride_e + a.to(tl.int64) * w_stride_a
    w += r.to(tl.int64) * w_stride_r  # [R]
    scales = ScalePointers(
        at=w_scales_ptr + slot * w_scales_stride_l + expert * w_scales_stride_e
        + a.to(tl.int64) * w_scales_stride_a,
        stride_r=w_scales_stride_r, stride_k=w_scales_stride_k,
    )  # fmt: skip
    R: tl.constexpr = SIZES.BLOCK_R
    acc = tl.zeros((T, R), dtype=tl.float32)
    for i in tl.static_range(SUMMED):
        first, width, group = _slice(a if SUMMED == 1 and SLICES > 1 else a * 0 + i, SIZES)
        width = tl.where(rank > 0, width, 0)
        for done in range(0, width, SIZES.BLOCK_K):
            k = done + tl.arange(0, SIZES.BLOCK_K)  # [K]
            column = (first + k * SIZES.STEP).to(tl.int64)
            inside = k < width
            left_mask = live[:, None] & inside[None, :]
            left = tl.load(rows[:, None] + column[None, :], mask=left_mask, other=0.0)
            mask = inside[:, None] & (r < rank)[None, :]
            right = tl.load(w[None, :] + (column * w_stride_k)[:, None], mask=mask, other=0)
            if SIZES.STORAGE > 0:
                right = _scaled_values(right, scales, group, r[None, :], k[:, None], mask, SIZES)
            acc = _product(left, right, acc, SIZES)
    if SIZES.SCALED:
        at = scalings_ptr + slot * scalings_stride_l + expert * scalings_stride_e + a
        acc *= tl.load(at, mask=rank > 0, other=0.0)
    out = out_ptr + pair.to(tl.int64) * (SIZES.NUM_A * SIZES.RANK_PAD) + a * SIZES.RANK_PAD  # [T]
    acc = tl.where((r < rank)[None, :], acc, 0.0)
    tl.store(out[:, None] + r[None, :], acc, mask=live[:, None])


@triton.jit
def dx_kernel(
    u_ptr,
    a_ptr,
    a_scales_ptr,
    ranks_ptr,
    factors_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    dx_ptr,
    in_features,
    a_stride_l,
    a_stride_e,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_e,
    a_scales_stride_s,
    a_scales_stride_r,
    a_scales_stride_k,
    ranks_stride_l,
    ranks_stride_e,
    dx_stride_p,
    PROGRAMS: tl.constexpr,
    SITE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """dx[pair, c] = factor * the sum over a of u[pair, a, :r] @ a[l, e, a, :r, c]."""
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    slot, expert, _, count, pair = pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE)
    if count <= 0:
        return
    T: tl.constexpr = SITE.ROWS
    live = tl.arange(0, T) < count  # [T]
    c = program * SIZES.BLOCK_K + tl.arange(0, SIZES.BLOCK_K)  # [C]
    inside = c < in_features
    u_rows = u_ptr + pair.to(tl.int64) * (SIZES.NUM_A * SIZES.RANK_PAD)  # [T]
    ranks = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e
    of_expert = a_ptr + slot * a_stride_l + expert * a_stride_e
    of_scales = a_scales_ptr + slot * a_scales_stride_l + expert * a_scales_stride_e
    K: tl.constexpr = SIZES.BLOCK_K
    acc = tl.zeros((T, K), dtype=tl.float32)
    NUM_A: tl.constexpr = SIZES.NUM_A
    for s in tl.static_range(NUM_A):
        rank = tl.load(ranks + s)
        scales = ScalePointers(
            at=of_scales + s * a_scales_stride_s,
            stride_r=a_scales_stride_r, stride_k=a_scales_stride_k,
        )  # fmt: skip
        # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
        # registers
        for done in tl.range(0, rank, SIZES.BLOCK_R, num_stages=1):
            r = done + tl.arange(0, SIZES.BLOCK_R)  # [R]
            u_at = u_rows[:, None] + (s * SIZES.RANK_PAD + r)[None, :]
            u = tl.load(u_at, mask=live[:, None], other=0.0)  # zero beyond the rank
            at = of_expert + s * a_stride_s + r.to(tl.int64)[:, None] * a_stride_r + c[None, :]
            mask = (r < rank)[:, None] & inside[None, :]
            a = tl.load(at, mask=mask, other=0)
            u = _narrowed(u, a.dtype, SIZES)
            if SIZES.STORAGE > 0:
                a = _scaled_values(a, scales, 0, r[:, None], c[None, :], mask, SIZES)
            acc = _product(u, a, acc, SIZES)
    if SIZES.HAS_FACTORS:
        # the sum makes 0.0 of -0.0
        acc = acc * tl.load(factors_ptr + pair, mask=live, other=0.0)[:, None] + 0.0
    dx = dx_ptr + pair.to(tl.int64) * dx_stride_p  # [T]
    value = rounded(acc, dx_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(dx[:, None] + c[None, :], value, mask=live[:, None] & inside[None, :])


@triton.jit
def sum_pairs_kernel(
    pairs_ptr,
    experts_ptr,
    slots_ptr,
    dx_ptr,
    in_features,
    dx_stride_t,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """dx[t, c] = the sum over the live pairs (t, j) of pairs[t * TOP_K + j, c], in order."""
    t = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    c = tl.program_id(0) % PROGRAMS * SIZES.BLOCK_K + tl.arange(0, SIZES.BLOCK_K)  # [C]
    has_slot = tl.load(slots_ptr + t) >= 0
    K: tl.constexpr = SIZES.BLOCK_K
    total = tl.zeros((K,), dtype=tl.float32)
    for j in range(SIZES.TOP_K):
        pair = t * SIZES.TOP_K + j
        end = tl.where(has_slot & (tl.load(experts_ptr + pair) >= 0), in_features, 0)
        total += tl.load(pairs_ptr + pair * in_features + c, mask=c < end, other=0.0)
    value = rounded(total, dx_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(dx_ptr + t * dx_stride_t + c, value, mask=c < in_features)


@triton.jit
def outer_kernel(
    left_ptr,
    right_ptr,
    factors_ptr,
    ranks_ptr,
    scalings_ptr,
    experts_ptr,
    order_ptr,
    starts_ptr,
    slots_ptr,
    out_ptr,
    right_stride_t,
    right_stride_j,
    ranks_stride_l,
    ranks_stride_e,
    scalings_stride_l,
    scalings_stride_e,
    out_stride_l,
    out_stride_e,
    out_stride_a,
    out_stride_r,
    out_stride_c,
    PROGRAMS: tl.constexpr,
    SITE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out[l, e, a, :r, c] = the sum over the pairs of (l, e) of left[pair, a, :r] * right[pair, c].

    lora_a takes u and x. lora_b takes h and grad, whose columns are those of the slice of a. Pairs
    are added in the order of their numbers; SHARED: expert by expert. Zeros are written beyond the
    ranks that take part.

    Each pair's factor and scaling multiply its row of `left`. A pair without a rank is not read.
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    BLOCKS: tl.constexpr = SIZES.RANK_PAD // SIZES.BLOCK_R
    RESULTS: tl.constexpr = 1 if SIZES.SHARED else SIZES.NUM_EXPERTS  # of a slot
    C: tl.constexpr = SIZES.BLOCK_K
    R: tl.constexpr = SIZES.BLOCK_R
    T: tl.constexpr = SITE.ROWS
    place, expert = row // RESULTS, row % RESULTS
    slot = place
    if not SIZES.ALL:
        slot = tl.load(slots_ptr + place)
    keys = starts_ptr + slot.to(tl.int64) * SIZES.NUM_EXPERTS + expert
    first, end = tl.load(keys), tl.load(keys + SIZES.NUM_EXPERTS // RESULTS)
    a = program // BLOCKS % SIZES.NUM_A
    r = program % BLOCKS * R + tl.arange(0, R)  # [R]
    start, width, _ = _slice(a, SIZES)
    c = program // (BLOCKS * SIZES.NUM_A) * C + tl.arange(0, C)  # [C]
    inside = c < width
    column = (start + c * SIZES.STEP).to(tl.int64)  # [C]
    ranks = ranks_ptr + slot.to(tl.int64) * ranks_stride_l + a
    scalings = scalings_ptr + slot.to(tl.int64) * scalings_stride_l + a
    top = a * 0  # the highest rank that takes part
    acc = tl.zeros((C, R), dtype=tl.float32)
    for i in range(first, end, T):
        at = i + tl.arange(0, T)
        pair = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)  # [T]
        of_pair = tl.load(experts_ptr + pair, mask=at < end, other=0)
        rank = tl.load(ranks + of_pair * ranks_stride_e, mask=at < end, other=0)
        top = tl.maximum(top, tl.max(rank))
        used = rank > 0
        left_at = left_ptr + pair * (SIZES.NUM_A * SIZES.RANK_PAD) + a * SIZES.RANK_PAD
        left = tl.load(left_at[:, None] + r[None, :], mask=used[:, None], other=0.0)  # [T, R]
        if SIZES.HAS_FACTORS:
            left *= tl.load(factors_ptr + pair, mask=used, other=0.0)[:, None]
        if SIZES.SCALED:
            left *= tl.load(scalings + of_pair * scalings_stride_e, mask=used, other=0.0)[:, None]
        rows = right_ptr + pair // SITE.TOP_K * right_stride_t + pair % SITE.TOP_K * right_stride_j
        mask = inside[:, None] & used[None, :]
        right = tl.load(rows[None, :] + column[:, None], mask=mask, other=0.0)  # [C, T]
        if not SIZES.MIXED:  # else grad is in another dtype than the weights
            left = _narrowed(left, right.dtype, SIZES)
        acc = _product(right, left, acc, SIZES)
    acc = tl.where((r < top)[None, :], acc, 0.0)
    out = out_ptr + place.to(tl.int64) * out_stride_l + expert.to(tl.int64) * out_stride_e
    out += a.to(tl.int64) * out_stride_a
    out_at = out + (column * out_stride_c)[:, None] + r.to(tl.int64)[None, :] * out_stride_r
    mask = inside[:, None] & (r < SITE.MAX_RANK)[None, :]
    tl.store(out_at, rounded(acc, out_ptr.dtype.element_ty, SIZES.INTERPRETED), mask=mask)
