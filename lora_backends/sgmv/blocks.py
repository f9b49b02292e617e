# mypy: ignore-errors
"""The arithmetic of one tile: device functions that the entry kernels of both engines call.

An entry kernel finds the rows and the matrix that its program works on; a function here computes.
Shapes in comments name the axes T (rows of the tile), N (rows of A, all slices stacked), K
(inputs), R (rank), C (columns of y), W (groups of warps that share out a step of K).

Offsets that a stride multiplies are int64: slot times stride exceeds int32 in large stacks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.elements import (
    group_of,
    in_groups,
    load_b,
    load_b_rows,
    load_b_scales,
    load_columns,
    load_h,
    load_h_row,
    load_y,
    multiply,
    prefetch_lines,
    product_of_operands,
    right_operand,
    row_product,
    row_sums,
    scaled_product,
    slice_entry,
    store_y,
    widened,
    within,
)


@triton.jit
def row_and_program(PROGRAMS: tl.constexpr):
    """Return this program's row of the grid and its index within the row.

    With PROGRAMS > 0 the grid has one axis and the programs of a row follow each other; with 0 it
    has two axes, (programs, rows).
    """
    if PROGRAMS > 0:
        row = tl.program_id(0) // PROGRAMS
        program = tl.program_id(0) % PROGRAMS
    else:
        row = tl.program_id(1)
        program = tl.program_id(0)
    return row.to(tl.int64), program


@triton.jit
def columns_of(program, STARTS: tl.constexpr, FIRST_PROGRAMS: tl.constexpr, STRIDE: tl.constexpr):
    """Return a program's slice, its first column of y, and the end of the slice."""
    s = program * 0
    first = program * STRIDE
    end = program * 0 + STARTS[1]
    for i in tl.static_range(1, len(FIRST_PROGRAMS)):
        beyond = program >= FIRST_PROGRAMS[i]
        s = tl.where(beyond, i, s)
        first = tl.where(beyond, STARTS[i] + (program - FIRST_PROGRAMS[i]) * STRIDE, first)
        end = tl.where(beyond, STARTS[i + 1], end)
    return s, first, end


@triton.jit
def entry(values, t, i):
    """Return element i of a block [T] of integers."""
    return tl.sum(tl.where(t == i, values, 0))


@triton.jit
def _rows_of_a(
    a_ptr,
    a_slices_ptr,
    slot,
    s,
    r,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
):
    """Return the addresses of rows r [N] of a slot's A, in slices s [N]."""
    if SLICE_ALIGN > 0:
        own, slot_stride, row_stride = slice_entry(a_slices_ptr, s, s < NUM_SLICES, SLICE_ALIGN)
        a_rows = a_ptr + own + slot * slot_stride + r.to(tl.int64) * row_stride
    else:
        a_rows = (
            a_ptr + slot * a_stride_l + s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r
        )
    return a_rows


@triton.jit
def prefetch_a(
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    slot,
    program,
    in_features,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Bring into L2 the first 512 bytes that `shrink_tile` will read of each of its rows of A.

    It may run while an earlier kernel writes A and the ranks: L2 takes the new values. A rank read
    before that write makes it prefetch too many rows or too few. It has no branch, because every
    program must wait before it may end.
    """
    LINE: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth  # values of 128 bytes
    PART: tl.constexpr = STEPS * BLOCK_K
    n = program // SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    s, r = n // RANK_PAD, n % RANK_PAD  # [N]
    has_rank = s < tl.where(slot >= 0, NUM_SLICES, 0)  # [N]
    ranks_at = ranks_ptr + slot * NUM_SLICES + s
    rank = tl.load(ranks_at, mask=has_rank, other=0, cache_modifier=".cg")  # [N]
    a_rows = _rows_of_a(
        a_ptr, a_slices_ptr, slot, s, r, a_stride_l, a_stride_s, a_stride_r, NUM_SLICES, SLICE_ALIGN
    )
    own = tl.arange(0, 4) * LINE
    k = program % SPLIT_K * PART + own
    wanted = (r < rank)[:, None] & ((own < PART) & (k < in_features))[None, :]
    prefetch_lines(a_rows[:, None] + k[None, :], wanted)


@triton.jit
def prefetch_x(
    x_ptr,
    x_row,
    program,
    in_features,
    x_stride_t,
    LINES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Prefetch into L2 the first LINES * 128 bytes of each row of x that `shrink_tile` will read.

    As in `prefetch_a`, an earlier kernel may still write x. Only the programs of the first rows of
    A prefetch: the others read the same lines.
    """
    LINE: tl.constexpr = 1024 // x_ptr.dtype.element_ty.primitive_bitwidth  # values of 128 bytes
    PART: tl.constexpr = STEPS * BLOCK_K
    own = tl.arange(0, LINES) * LINE
    k = program % SPLIT_K * PART + own
    wanted = (x_row >= 0) & (program < SPLIT_K)  # [T]
    wanted = wanted[:, None] & ((own < PART) & (k < in_features))[None, :]
    prefetch_lines((x_ptr + x_row * x_stride_t)[:, None] + k[None, :], wanted)


@triton.jit
def shrink_tile(
    x_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    h_ptr,
    slot,
    x_row,
    h_row,
    program,
    in_features,
    x_stride_t,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_s,
    a_scales_stride_r,
    h_rows,
    h_stride_s,
    h_stride_t,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr,
    EXITS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h[k, s, h_row, :r] = x[x_row, part k] @ a[slot, s, :r, part k].T for one block of rows of A.

    Each part k of the inputs writes its own plane of partial sums; x_row [T] is -1 where the tile
    has no token. EXITS: a program whose rows of A all lie beyond the ranks ends early; to know
    that, every program waits for its ranks. Without EXITS such a program runs on, and loads no A.
    """
    part = program % SPLIT_K
    n = program // SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    s = n // RANK_PAD  # [N]
    r = n % RANK_PAD  # [N]
    ranks_at = ranks_ptr + slot * NUM_SLICES + s
    rank = tl.load(ranks_at, mask=s < NUM_SLICES, other=0, cache_modifier=".cg")  # [N]
    if EXITS:
        if tl.max(rank - r) <= 0:
            return
    has_token = x_row >= 0  # [T]
    x_rows = x_ptr + x_row * x_stride_t  # [T]
    a_rows = _rows_of_a(
        a_ptr, a_slices_ptr, slot, s, r, a_stride_l, a_stride_s, a_stride_r, NUM_SLICES, SLICE_ALIGN
    )
    used = r < rank
    scale_rows = (
        a_scales_ptr + slot * a_scales_stride_l + s.to(tl.int64) * a_scales_stride_s
        + group_of(r, GROUP_R) * a_scales_stride_r
    )  # fmt: skip
    if STORAGE > 0 and GROUP_K == 0:  # one scale for a row of A: it multiplies the sum
        row_scale = tl.load(scale_rows, mask=used, other=0.0)
    plane = NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    h_columns = h_ptr + part * plane + s.to(tl.int64) * h_stride_s + r  # [N]
    # zeros are written beyond the rank, up to the end of its group
    if WARPS_K == 0:  # token by token, without a matrix product
        t = tl.arange(0, x_row.shape[0])  # [T]
        for i in tl.range(0, tl.max(tl.where(has_token, t + 1, 0)), num_stages=1):
            x_at, h_at = entry(x_row, t, i), entry(h_row, t, i)
            h = row_sums(
                x_ptr + tl.maximum(x_at, 0) * x_stride_t, a_rows, scale_rows, used,
                part * (STEPS * BLOCK_K), in_features, STORAGE, GROUP_K, BLOCK_K, STEPS, EVEN_K,
            )  # [1, N] # fmt: skip
            if STORAGE > 0 and GROUP_K == 0:
                h *= row_scale[None, :]
            written = in_groups(r, tl.where(x_at >= 0, rank, 0), EVEN_R)
            tl.store(h_columns[None, :] + h_at * h_stride_t, h, mask=written[None, :])
    else:
        h = partial_sums(
            x_rows, a_rows, scale_rows, has_token, used, part * (STEPS * BLOCK_K), in_features,
            STORAGE, GROUP_K, BLOCK_K, WARPS_K, STEPS, EVEN_K, PRECISION, INTERPRETED,
        )  # [T, N] # fmt: skip
        if STORAGE > 0 and GROUP_K == 0:
            h *= row_scale[None, :]
        mask = has_token[:, None] & in_groups(r, rank, EVEN_R)[None, :]
        tl.store(h_columns[None, :] + (h_row * h_stride_t)[:, None], h, mask=mask)


@triton.jit
def partial_sums(
    x_rows,
    a_rows,
    scale_rows,
    has_token,
    used,
    k_first,
    in_features,
    STORAGE: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return x @ A.T over STEPS blocks of inputs; each of WARPS_K groups sums part of a block."""
    ROWS: tl.constexpr = x_rows.shape[0]
    BLOCK_N: tl.constexpr = a_rows.shape[0]
    if WARPS_K == 1:
        k = k_first + tl.arange(0, BLOCK_K)  # [K]
        x_k, a_k = k[None, :], k[:, None]
        x_at, a_at = x_rows[:, None] + x_k, a_rows[None, :] + a_k  # [T, K], [K, N]
        x_in, a_in = has_token[:, None], used[None, :]
        scales_at = scale_rows[None, :]
        acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    else:
        WIDTH: tl.constexpr = BLOCK_K // WARPS_K
        k = k_first + tl.arange(0, WARPS_K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x_k, a_k = k[:, None, :], k[:, :, None]
        x_at = x_rows[None, :, None] + x_k  # [W, T, K]
        a_at = a_rows[None, None, :] + a_k  # [W, K, N]
        x_in, a_in = has_token[None, :, None], used[None, None, :]
        scales_at = scale_rows[None, None, :]
        acc = tl.zeros((WARPS_K, ROWS, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        done = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_at + done, mask=x_in, other=0.0)
            a = tl.load(a_at + done, mask=a_in, other=0.0)
        else:
            x = tl.load(x_at + done, mask=x_in & (x_k < in_features - done), other=0.0)
            a = tl.load(a_at + done, mask=a_in & (a_k < in_features - done), other=0.0)
        if STORAGE > 0:
            if GROUP_K > 0:  # scales change along the sum: products are float32
                mask = a_in & (a_k < in_features - done)
                scale = tl.load(scales_at + (a_k + done) // GROUP_K, mask=mask, other=0.0)
                a = widened(a, tl.float32, STORAGE) * scale
                x = x.to(tl.float32)
            else:
                a = widened(a, x.dtype, STORAGE)
        acc = multiply(x, a, acc, PRECISION, INTERPRETED)
    if WARPS_K > 1:
        acc = sum_of_groups(acc)
    return acc


@triton.jit
def sum_of_groups(parts):
    """Return the sum of parts [W, T, N] over W, pair by pair.

    `tl.sum` would send every value through shared memory by itself, `tl.split` sends four.
    """
    sums = tl.permute(parts, (1, 2, 0))
    if parts.shape[0] == 8:
        low, high = tl.split(tl.reshape(sums, (parts.shape[1], parts.shape[2], 4, 2)))
        sums = low + high
    if parts.shape[0] >= 4:
        low, high = tl.split(tl.reshape(sums, (parts.shape[1], parts.shape[2], 2, 2)))
        sums = low + high
    low, high = tl.split(sums)
    return low + high


@triton.jit
def gather_tile(
    token_ids_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    h_ptr,
    slot,
    x_row,
    h_row,
    program,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_s,
    a_scales_stride_r,
    h_stride_s,
    h_stride_t,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """h[s, h_row, :r] = a[slot, s, :r, token_ids[x_row]]: the shrink of one-hot rows."""
    s = (program % NUM_SLICES).to(tl.int64)
    r = program // NUM_SLICES * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    used = r < tl.load(ranks_ptr + slot * NUM_SLICES + s)  # [R]
    has_token = x_row >= 0  # [T]
    ids = tl.load(token_ids_ptr + x_row, mask=has_token, other=0).to(tl.int64)  # [T]
    if SLICE_ALIGN > 0:
        own, slot_stride, row_stride = slice_entry(a_slices_ptr, s, True, SLICE_ALIGN)
        a_columns = a_ptr + own + slot * slot_stride + r.to(tl.int64) * row_stride  # [R]
    else:
        a_columns = a_ptr + slot * a_stride_l + s * a_stride_s + r.to(tl.int64) * a_stride_r  # [R]
    mask = has_token[:, None] & used[None, :]
    a = tl.load(a_columns[None, :] + ids[:, None], mask=mask, other=0.0)  # [T, R]
    a = widened(a, tl.float32, STORAGE)
    if STORAGE > 0:
        scale_rows = (
            a_scales_ptr + slot * a_scales_stride_l + s * a_scales_stride_s
            + group_of(r, GROUP_R) * a_scales_stride_r
        )  # [R] # fmt: skip
        scales_at = scale_rows[None, :] + group_of(ids, GROUP_K)[:, None]
        a *= tl.load(scales_at, mask=mask, other=0.0)
    h_rows = h_ptr + s * h_stride_s + h_row * h_stride_t  # [T]
    tl.store(h_rows[:, None] + r[None, :], a, mask=mask)


@triton.jit
def expand_tile(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    output_scales_ptr,
    scalings_ptr,
    token_scales_ptr,
    b_slices_ptr,
    b_scales_ptr,
    b_tma,
    slot,
    h_row,
    y_row,
    s,
    first,
    end,
    rank,
    h_rows,
    h_stride_s,
    h_stride_t,
    b_stride_l,
    b_stride_c,
    y_stride_t,
    bias_stride_l,
    output_scales_stride_l,
    b_scales_stride_l,
    b_scales_stride_c,
    STARTS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE_Y: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """y[y_row, c] = output_scale * (y[y_row, c] + factor * (h[s, h_row, :r] @ b.T)) + bias.

    b is b[slot, c, :r], and the factor scaling * token_scale; scales that are not given are 1.

    c runs over CHUNKS blocks of columns from `first`, none beyond `end`; h is the sum of its
    planes; y_row [T] is -1 where the tile has no token. LATE_Y: y, too, is read behind the wait.
    """
    scaling = tl.where(rank > 0, tl.load(scalings_ptr + slot * NUM_SLICES + s), 0.0)
    has_token = y_row >= 0  # [T]
    if HAS_TOKEN_SCALES:
        scaling *= tl.load(token_scales_ptr + y_row, mask=has_token, other=0.0)[:, None]  # [T, 1]
    h_at = h_ptr + s.to(tl.int64) * h_stride_s + h_row * h_stride_t  # [T]
    y_rows = y_ptr + y_row * y_stride_t  # [T]
    # Computed here, not passed: ptxas then keeps the loads of all planes in flight. With a stride
    # that it can fold into the addresses it adds plane after plane, 1.5 times the time of a call
    # with 16 planes.
    plane = NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    if SLICE_ALIGN > 0:
        own, slot_stride, b_stride = slice_entry(b_slices_ptr, s, True, SLICE_ALIGN)
        b_slot = b_ptr + own + slot * slot_stride
    else:
        b_slot, b_stride = b_ptr + slot * b_stride_l, b_stride_c
    bias_row = bias_ptr + slot * bias_stride_l
    scales_row = output_scales_ptr + slot * output_scales_stride_l
    group_rows = b_scales_ptr + slot * b_scales_stride_l
    # the first group and the first column of the slice, for the groups of rows of B
    s_group, s_start = s * 0, s * 0
    if STORAGE > 0:
        for i in tl.static_range(len(FIRST_GROUPS)):
            s_group = tl.where(s == i, FIRST_GROUPS[i], s_group)
            s_start = tl.where(s == i, STARTS[i], s_start)
    # A low rank in a small tile takes 16 lanes instead of BLOCK_R: decode waits on products.
    NARROW: tl.constexpr = y_row.shape[0] <= 32 and RANK_PAD > 16
    if STAGES == 0:
        _expand_rows(
            h_ptr + s.to(tl.int64) * h_stride_s, h_row, h_stride_t, plane, b_slot, b_stride,
            group_rows, b_scales_stride_c, s_group, s_start, y_ptr, y_row, y_stride_t, bias_row,
            scales_row, first, end, rank, scaling, RANK_PAD, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C,
            EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, HAS_TOKEN_SCALES, STORAGE, GROUP_C, GROUP_R, WIDE,
            EXACT_H, INTERPRETED, PROGRAMMATIC, LATE_Y,
        )  # fmt: skip
    elif STAGES > 1:
        if SLICE_ALIGN > 0:
            b_row = ((own + slot * slot_stride) // b_stride).to(tl.int32)
        else:
            b_row = (slot * (b_stride_l // b_stride_c)).to(tl.int32)
        _expand_tma(
            b_tma, b_row, h_at, plane, group_rows, b_scales_stride_c, s_group, s_start, y_rows,
            bias_row, scales_row, first, end, rank, scaling, has_token, BLOCK_R, SPLIT_K, BLOCK_C,
            CHUNKS, STAGES, EVEN_C, EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, WIDE,
            PRECISION, INTERPRETED, PROGRAMMATIC, PREFETCH,
        )  # fmt: skip
    elif NARROW and rank <= 16:
        _expand_columns(
            h_at, plane, b_slot, b_stride, group_rows, b_scales_stride_c, s_group, s_start, y_rows,
            bias_row, scales_row, first, end, rank, scaling, has_token, 16, SPLIT_K, BLOCK_C,
            CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, GROUP_R, WIDE,
            EXACT_H, PRECISION, INTERPRETED, PROGRAMMATIC, LATE_Y,
        )  # fmt: skip
    elif RANK_PAD == BLOCK_R:
        _expand_columns(
            h_at, plane, b_slot, b_stride, group_rows, b_scales_stride_c, s_group, s_start, y_rows,
            bias_row, scales_row, first, end, rank, scaling, has_token, BLOCK_R, SPLIT_K, BLOCK_C,
            CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, GROUP_R, WIDE,
            EXACT_H, PRECISION, INTERPRETED, PROGRAMMATIC, LATE_Y,
        )  # fmt: skip
    else:
        _expand_long_ranks(
            h_at, plane, b_slot, b_stride, group_rows, b_scales_stride_c, s_group, s_start, y_rows,
            bias_row, scales_row, first, end, rank, scaling, has_token, BLOCK_R, SPLIT_K, BLOCK_C,
            EVEN_C, EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, GROUP_R, WIDE, EXACT_H,
            PRECISION, INTERPRETED, PROGRAMMATIC, LATE_Y,
        )  # fmt: skip


@triton.jit
def _expand_columns(
    h_rows,
    plane,
    b_slot,
    b_stride_c,
    group_rows,
    group_stride,
    s_group,
    s_start,
    y_rows,
    bias_row,
    scales_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE_Y: tl.constexpr,
):
    """Add CHUNKS blocks of columns, all ranks in one product; loads run one block ahead."""
    r = tl.arange(0, BLOCK_R)  # [R]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
    own = load_b_scales(
        group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C, GROUP_R
    )
    if not LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)
    scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
    if STORAGE > 0:  # widened while the shrink still runs
        b = right_operand(b, own, r, rank, STORAGE, GROUP_R, WIDE)
    if PROGRAMMATIC:
        gdc_wait()  # only h needs the wait: the shrink waits for all earlier kernels itself
        gdc_launch_dependents()
    if LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)
    h = load_h(h_rows, plane, r, rank, has_token, SPLIT_K, EVEN_R)  # [T, R]
    for chunk in tl.static_range(CHUNKS):
        if STORAGE == 0 or chunk > 0:
            b = right_operand(b, own, r, rank, STORAGE, GROUP_R, WIDE)
        delta = product_of_operands(
            scaling, h, b, own, STORAGE, GROUP_R, EXACT_H, PRECISION, INTERPRETED
        )  # [T, C]
        c_now, y_now, scales_now = c, y, scales
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
            own = load_b_scales(
                group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C,
                GROUP_R,
            )  # fmt: skip
            y = load_y(y_rows, c, has_token, end, EVEN_C)
            scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
        store_y(
            y_rows, c_now, y_now, delta, bias_row, scales_now, has_token, end, HAS_BIAS,
            HAS_OUTPUT_SCALES, EVEN_C, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _expand_rows(
    h_slice,
    h_row,
    h_stride_t,
    plane,
    b_slot,
    b_stride_c,
    group_rows,
    group_stride,
    s_group,
    s_start,
    y_ptr,
    y_row,
    y_stride_t,
    bias_row,
    scales_row,
    first,
    end,
    rank,
    scaling,
    RANK_PAD: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE_Y: tl.constexpr,
):
    """Add CHUNKS blocks of columns token by token, without a matrix product.

    B goes from memory straight to the registers that multiply it; loads run one block ahead. Most
    tiles on this path have one token: its h is loaded once for all blocks, its y with B. Later
    tokens load both again for each block. The compiler may form other FMAs for the first token than
    for later ones, so batch-invariant engines never take this path.
    """
    r = tl.arange(0, RANK_PAD)  # [R]
    t = tl.arange(0, y_row.shape[0])  # [T]
    tokens = tl.max(tl.where(y_row >= 0, t + 1, 0))
    y_at = entry(y_row, t, 0) + tl.zeros((1,), dtype=tl.int64)
    y_rows, has_token = y_ptr + y_at * y_stride_t, y_at >= 0  # [1]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    b = load_b_rows(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
    own = load_b_scales(
        group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C, GROUP_R
    )
    if not LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)  # [1, C]
    scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    if LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)
    h = load_h_row(h_slice + entry(h_row, t, 0) * h_stride_t, plane, r, rank, SPLIT_K)
    for chunk in tl.static_range(CHUNKS):
        c_now, b_now, own_now, y_now, scales_now = c, b, own, y, scales
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = load_b_rows(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
            own = load_b_scales(
                group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C,
                GROUP_R,
            )  # fmt: skip
            y = load_y(y_rows, c, has_token, end, EVEN_C)
            scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
        _add_row(
            h, b_now, own_now, y_rows, c_now, y_now, scales_now, bias_row, has_token, end, r, rank,
            t, 0, scaling, STORAGE, GROUP_R, WIDE, EXACT_H, HAS_BIAS, HAS_OUTPUT_SCALES,
            HAS_TOKEN_SCALES, EVEN_C, INTERPRETED,
        )  # fmt: skip
        for i in tl.range(1, tokens, num_stages=1):  # few tiles have a second token
            at = entry(y_row, t, i) + tl.zeros((1,), dtype=tl.int64)
            rows, has_row = y_ptr + at * y_stride_t, at >= 0  # [1]
            _add_row(
                load_h_row(h_slice + entry(h_row, t, i) * h_stride_t, plane, r, rank, SPLIT_K),
                b_now, own_now, rows, c_now, load_y(rows, c_now, has_row, end, EVEN_C), scales_now,
                bias_row, has_row, end, r, rank, t, i, scaling, STORAGE, GROUP_R, WIDE, EXACT_H,
                HAS_BIAS, HAS_OUTPUT_SCALES, HAS_TOKEN_SCALES, EVEN_C, INTERPRETED,
            )  # fmt: skip


@triton.jit
def _add_row(
    h,
    b,
    own,
    y_rows,
    c,
    y,
    scales,
    bias_row,
    has_token,
    end,
    r,
    rank,
    t,
    i,
    scaling,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    EVEN_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add one block of columns to token i of the tile, from its h [R] and y [1, C]."""
    sums = row_product(h, b, own, r, rank, STORAGE, GROUP_R, WIDE, EXACT_H, INTERPRETED)  # [C]
    if HAS_TOKEN_SCALES:
        factor = tl.sum(tl.where((t == i)[:, None], scaling, 0.0))
    else:
        factor = scaling
    store_y(
        y_rows, c, y, (factor * sums)[None, :], bias_row, scales, has_token, end, HAS_BIAS,
        HAS_OUTPUT_SCALES, EVEN_C, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _expand_long_ranks(
    h_rows,
    plane,
    b_slot,
    b_stride_c,
    group_rows,
    group_stride,
    s_group,
    s_start,
    y_rows,
    bias_row,
    scales_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE_Y: tl.constexpr,
):
    """Add one block of columns, BLOCK_R ranks at a time."""
    c = first + tl.arange(0, BLOCK_C)  # [C]
    if not LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)
    scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    if LATE_Y:
        y = load_y(y_rows, c, has_token, end, EVEN_C)
    acc = tl.zeros((y_rows.shape[0], BLOCK_C), dtype=tl.float32)
    # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in registers
    for done in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = done + tl.arange(0, BLOCK_R)  # [R]
        b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
        h = load_h(h_rows, plane, r, rank, has_token, SPLIT_K, EVEN_R)
        own = load_b_scales(
            group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C, GROUP_R
        )
        acc += scaled_product(
            1.0, h, b, own, r, rank, STORAGE, GROUP_R, WIDE, EXACT_H, PRECISION, INTERPRETED
        )  # fmt: skip
    store_y(
        y_rows, c, y, scaling * acc, bias_row, scales, has_token, end, HAS_BIAS, HAS_OUTPUT_SCALES,
        EVEN_C, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _expand_tma(
    b_tma,
    b_row,
    h_rows,
    plane,
    group_rows,
    group_stride,
    s_group,
    s_start,
    y_rows,
    bias_row,
    scales_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Add CHUNKS blocks of columns with STAGES loads of B through TMA in flight.

    PREFETCH: lines of 128 bytes to prefetch into L2 from each row of y while the shrink still runs.
    """
    if PREFETCH > 0:
        LINE: tl.constexpr = 1024 // y_rows.dtype.element_ty.primitive_bitwidth
        c = first + tl.arange(0, PREFETCH) * LINE
        prefetch_lines(y_rows[:, None] + c[None, :], has_token[:, None] & (c < end)[None, :])
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    h = load_h(h_rows, plane, tl.arange(0, BLOCK_R), rank, has_token, SPLIT_K, EVEN_R)
    if STORAGE == 0 and rank < BLOCK_R:
        _add_tma_blocks(
            b_tma, b_row, h, group_rows, group_stride, s_group, s_start, y_rows, bias_row,
            scales_row, first, end, rank, scaling, has_token, BLOCK_R, BLOCK_C, CHUNKS, STAGES,
            EVEN_C, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, WIDE, True, PRECISION,
            INTERPRETED,
        )  # fmt: skip
    else:  # a block of full rank needs no mask, so it is multiplied straight from shared memory
        _add_tma_blocks(
            b_tma, b_row, h, group_rows, group_stride, s_group, s_start, y_rows, bias_row,
            scales_row, first, end, rank, scaling, has_token, BLOCK_R, BLOCK_C, CHUNKS, STAGES,
            EVEN_C, HAS_BIAS, HAS_OUTPUT_SCALES, STORAGE, GROUP_C, WIDE, False, PRECISION,
            INTERPRETED,
        )  # fmt: skip


@triton.jit
def _add_tma_blocks(
    b_tma,
    b_row,
    h,
    group_rows,
    group_stride,
    s_group,
    s_start,
    y_rows,
    bias_row,
    scales_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the blocks. MASKED: the rank ends inside a block, beyond it B may hold anything."""
    r = tl.arange(0, BLOCK_R)  # [R]
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        c_first = first + chunk * BLOCK_C
        c = c_first + tl.arange(0, BLOCK_C)  # [C]
        y = load_y(y_rows, c, has_token, end, EVEN_C)
        b = b_tma.load([b_row + c_first, 0]).T  # [R, C]; beyond the end another slice's columns
        if STORAGE > 0:
            own = load_b_scales(
                group_rows, group_stride, s_group, s_start, c, r, end, rank, STORAGE, GROUP_C, 0
            )
            b = right_operand(b, own, r, rank, STORAGE, 0, WIDE)
        else:
            own = 0.0
            if MASKED:
                b = within(b, r, rank)
        delta = product_of_operands(
            scaling, h, b, own, STORAGE, 0, False, PRECISION, INTERPRETED
        )  # [T, C]
        # here, not with y: among the pipelined loads it costs a stage of shared memory
        scales = load_columns(scales_row, c, end, HAS_OUTPUT_SCALES, EVEN_C)
        store_y(
            y_rows, c, y, delta, bias_row, scales, has_token, end, HAS_BIAS, HAS_OUTPUT_SCALES,
            EVEN_C, INTERPRETED,
        )  # fmt: skip
