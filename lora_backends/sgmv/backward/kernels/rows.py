# mypy: ignore-errors
"""The kernels whose programs own rows: dh = grad @ B, and dx += dh @ A.

A and B are read as they lie in memory. ROW is as in `sgmv.kernels.entry`.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.indexing import (
    find_rows,
    group_of,
    in_elements,
    in_groups,
    row_and_program,
    rows_of_a,
    scales_of_a,
    slice_entry,
)
from lora_backends.sgmv.kernels.operands import AStack
from lora_backends.sgmv.kernels.products import multiply, rounded
from lora_backends.sgmv.kernels.widening import wide_dtype, widened


@triton.jit
def factor_of(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return a factor of a product in the product's dtype."""
    if value.dtype == dtype:
        return value
    else:
        return rounded(value.to(tl.float32), dtype, INTERPRETED)


@triton.jit
def inside(c, end, EVEN: tl.constexpr):
    """Return c < end. With EVEN > 0 both ends of a slice are multiples of it: loads stay wide."""
    if EVEN > 0:
        return c // EVEN * EVEN < end
    else:
        return c < end


@triton.jit(do_not_specialize=["dh_rows"])
def dh_kernel(
    grad_ptr,
    b_ptr,
    ranks_ptr,
    scalings_ptr,
    token_scales_ptr,
    b_slices_ptr,
    b_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    group_starts_ptr,
    dh_ptr,
    dh_rows,
    grad_stride_t,
    b_stride_l,
    b_stride_c,
    b_scales_stride_l,
    b_scales_stride_c,
    PROGRAMS: tl.constexpr,
    ROW: tl.constexpr,
    SIZES: tl.constexpr,
):
    """dh[k, s, t, :r] = scaling * token_scale * grad[t, part k of o:o'] @ b[l, part k, :r].

    Zeros are written beyond the rank, where B may hold anything: the ranks are columns of the
    product, so none of it reaches another.
    """
    row, program = row_and_program(PROGRAMS)
    rows = find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW)
    slot = rows.slot
    if slot < 0:
        return
    part = program % SIZES.PARTS
    r_first = program // SIZES.PARTS % SIZES.RANK_BLOCKS * SIZES.BLOCK_R
    s = program // (SIZES.PARTS * SIZES.RANK_BLOCKS)
    SLICES: tl.constexpr = SIZES.NUM_SLICES
    start, end, group = s * 0, s * 0 + SIZES.STARTS[1], s * 0
    for i in tl.static_range(1, SLICES):
        start = tl.where(s == i, SIZES.STARTS[i], start)
        end = tl.where(s == i, SIZES.STARTS[i + 1], end)
        group = tl.where(s == i, SIZES.FIRST_GROUPS[i], group)
    rank = tl.load(ranks_ptr + slot * SLICES + s)
    if SIZES.SLICE_ALIGN > 0:
        distance, slot_stride, b_stride = slice_entry(b_slices_ptr, s, True, SIZES.SLICE_ALIGN)
        b_slot = b_ptr + distance + slot * slot_stride
    else:
        b_slot = b_ptr + slot * in_elements(b_stride_l, b_ptr, SIZES.EVEN_R)
        b_stride = in_elements(b_stride_c, b_ptr, SIZES.EVEN_R)
    scales = b_scales_ptr + slot * b_scales_stride_l
    r = r_first + tl.arange(0, SIZES.BLOCK_R)  # [R]
    has_token = rows.tokens >= 0  # [T]
    grad_rows = grad_ptr + rows.tokens * grad_stride_t  # [T]
    T: tl.constexpr = rows.tokens.shape[0]
    R: tl.constexpr = SIZES.BLOCK_R
    acc = tl.zeros((T, R), dtype=tl.float32)
    own_columns = tl.cdiv(tl.cdiv(end - start, SIZES.BLOCK_C), SIZES.PARTS) * SIZES.BLOCK_C
    c_first = start + part * own_columns
    c_end = tl.where(rank > r_first, tl.minimum(end, c_first + own_columns), c_first)
    in_rank = in_groups(r, rank, SIZES.EVEN_R)  # [R]
    for first in range(c_first, c_end, SIZES.BLOCK_C):
        c = first + tl.arange(0, SIZES.BLOCK_C)  # [C]
        b_at = b_slot + c.to(tl.int64)[:, None] * b_stride + r[None, :]
        if SIZES.EVEN_C == SIZES.BLOCK_C:
            g = tl.load(grad_rows[:, None] + c[None, :], mask=has_token[:, None], other=0.0)
            b = tl.load(b_at, mask=in_rank[None, :], other=0.0)
        else:
            within = inside(c, end, SIZES.EVEN_C)
            mask = has_token[:, None] & within[None, :]
            g = tl.load(grad_rows[:, None] + c[None, :], mask=mask, other=0.0)
            b = tl.load(b_at, mask=within[:, None] & in_rank[None, :], other=0.0)
        if SIZES.STORAGE == 0:
            g = factor_of(g, b.dtype, SIZES.INTERPRETED)
        elif SIZES.GROUP_C == 0:
            b = widened(b, wide_dtype(SIZES.WIDE), SIZES.STORAGE, True)
        else:  # scales change along the sum: the product is float32
            groups = group + group_of(c - start, SIZES.GROUP_C)
            scales_at = scales + (groups * b_scales_stride_c)[:, None]
            scales_at += group_of(r, SIZES.GROUP_R)[None, :]
            mask = (c < end)[:, None] & (r < rank)[None, :]
            b = widened(b, tl.float32, SIZES.STORAGE) * tl.load(scales_at, mask=mask, other=0.0)
            g = g.to(tl.float32)
        acc = multiply(g, b, acc, SIZES)
    if SIZES.STORAGE > 0 and SIZES.GROUP_C == 0:
        scales_at = scales + group.to(tl.int64) * b_scales_stride_c + group_of(r, SIZES.GROUP_R)
        acc *= tl.load(scales_at, mask=r < rank, other=0.0)[None, :]
    factor = tl.load(scalings_ptr + slot * SLICES + s)
    if SIZES.HAS_TOKEN_SCALES:
        factor = (
            factor * tl.load(token_scales_ptr + rows.tokens, mask=has_token, other=0.0)[:, None]
        )
    dh = tl.where((r < rank)[None, :], acc * factor, 0.0)
    plane = (part * SLICES + s).to(tl.int64) * dh_rows
    dh_at = dh_ptr + ((plane + rows.tokens) * SIZES.MAX_RANK)[:, None] + r[None, :]
    dh = rounded(dh, dh_ptr.dtype.element_ty, SIZES.INTERPRETED)
    tl.store(dh_at, dh, mask=has_token[:, None] & (r < SIZES.MAX_RANK)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "tiles"])
def dx_kernel(
    dh_ptr,
    a_ptr,
    dx_ptr,
    ranks_ptr,
    token_slots_ptr,
    a_slices_ptr,
    a_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    group_starts_ptr,
    num_tokens,
    tiles,
    in_features,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_s,
    a_scales_stride_r,
    dh_stride_s,
    dh_stride_t,
    dx_stride_t,
    PROGRAMS: tl.constexpr,
    ROW: tl.constexpr,
    SIZES: tl.constexpr,
):
    """dx[t] (+)= sum over s of dh[s, t, :r] @ a[l, s, :r].

    Without ADDS dx holds nothing yet: rows of the grid behind the `tiles` clear the rows of tokens
    without adapter.
    """
    row, program = row_and_program(PROGRAMS)
    first = program * SIZES.BLOCK_C * SIZES.BLOCKS
    if not SIZES.ADDS:
        if row >= tiles:
            t = (row - tiles) * SIZES.BLOCK_T + tl.arange(0, SIZES.BLOCK_T)  # [T]
            slots = tl.load(token_slots_ptr + t, mask=t < num_tokens, other=0)
            for done in tl.range(0, SIZES.BLOCK_C * SIZES.BLOCKS, SIZES.BLOCK_C):
                c = first + done + tl.arange(0, SIZES.BLOCK_C)  # [C]
                at = dx_ptr + (t * dx_stride_t)[:, None] + c[None, :]
                zeros = tl.zeros(at.shape, dtype=dx_ptr.dtype.element_ty)
                in_row = inside(c, in_features, SIZES.EVEN_C)
                tl.store(at, zeros, mask=(slots < 0)[:, None] & in_row[None, :])
            return
    rows = find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW)
    if rows.slot < 0:
        return
    SLICES: tl.constexpr = SIZES.NUM_SLICES
    ranks = ranks_ptr + rows.slot * SLICES
    if SIZES.ADDS:  # rows without any rank keep their bits, the sign of zero included
        highest = tl.load(ranks)
        for k in tl.static_range(1, SLICES):
            highest = tl.maximum(highest, tl.load(ranks + k))
        if highest == 0:
            return
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=a_slices_ptr, scales=a_scales_ptr, stride_l=a_stride_l,
        stride_s=a_stride_s, stride_r=a_stride_r, scales_stride_l=a_scales_stride_l,
        scales_stride_s=a_scales_stride_s, scales_stride_r=a_scales_stride_r,
    )  # fmt: skip
    has_token = rows.tokens >= 0  # [T]
    dx_rows = dx_ptr + rows.tokens * dx_stride_t  # [T]
    dh_rows = dh_ptr + rows.tokens * dh_stride_t  # [T]
    T: tl.constexpr = rows.tokens.shape[0]
    C: tl.constexpr = SIZES.BLOCK_C
    # the blocks of a program read the same dh, from the second on out of the first cache
    for done in tl.range(0, C * SIZES.BLOCKS, C, num_stages=1):
        c = first + done + tl.arange(0, C)  # [C]
        in_row = inside(c, in_features, SIZES.EVEN_C)
        mask = has_token[:, None] & in_row[None, :]
        dx_at = dx_rows[:, None] + c[None, :]
        if SIZES.ADDS:
            before = tl.load(dx_at, mask=mask, other=0.0)
        acc = tl.zeros((T, C), dtype=tl.float32)
        for i in tl.static_range(SLICES):
            s = program * 0 + i  # a tensor, also in the interpreter
            rank = tl.load(ranks + s)
            dh_slice = dh_rows + s.to(tl.int64) * dh_stride_s
            if SIZES.RANK_PAD == SIZES.BLOCK_R:
                acc = _add_ranks(
                    acc, dh_slice, has_token, a, rows.slot, s, 0, rank, c, in_row, SIZES
                )
            else:
                # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is
                # in registers
                for r in tl.range(0, rank, SIZES.BLOCK_R, num_stages=1):
                    acc = _add_ranks(
                        acc, dh_slice, has_token, a, rows.slot, s, r, rank, c, in_row, SIZES
                    )
        if SIZES.ADDS:
            acc += before.to(tl.float32)
        tl.store(dx_at, rounded(acc, dx_ptr.dtype.element_ty, SIZES.INTERPRETED), mask=mask)


@triton.jit
def _add_ranks(acc, dh_rows, has_token, a, slot, s, done, rank, c, in_row, S: tl.constexpr):
    """Return acc + dh @ A over one block of ranks of a slice."""
    r = done + tl.arange(0, S.BLOCK_R)  # [R]
    in_rank = r < rank
    dh_mask = has_token[:, None] & in_groups(r, rank, S.EVEN_H)[None, :]
    dh = tl.load(dh_rows[:, None] + r[None, :], mask=dh_mask, other=0.0)
    dh = tl.where(in_rank[None, :], dh, 0.0)  # beyond the rank it may hold anything
    mask = in_rank[:, None] & in_row[None, :]
    values = tl.load(rows_of_a(a, slot, s, r, S)[:, None] + c[None, :], mask=mask, other=0.0)
    if S.STORAGE == 0:
        dh = factor_of(dh, values.dtype, S.INTERPRETED)
    else:
        scales = scales_of_a(a, slot, s, r, S)  # [R]
        if S.GROUP_K == 0:
            dh *= tl.load(scales, mask=in_rank, other=0.0)[None, :]
            values = widened(values, wide_dtype(S.WIDE), S.STORAGE, True)
            dh = factor_of(dh, wide_dtype(S.WIDE), S.INTERPRETED)
        else:  # a scale for each block of the product's right side: float32
            at = scales[:, None] + group_of(c, S.GROUP_K)[None, :]
            values = widened(values, tl.float32, S.STORAGE) * tl.load(at, mask=mask, other=0.0)
    return multiply(dh, values, acc, S)
