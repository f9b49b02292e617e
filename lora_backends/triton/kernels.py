# mypy: ignore-errors
"""The two kernels: shrink (x times A) and expand (h times B, added to y).

A program works for one tile: at most BLOCK_T tokens of one slot. Shapes in comments name the axes
T (tokens of the tile), N (rows of A, all slices stacked), K (inputs), R (rank), C (columns of y),
W (parts of K that the warps of a program share out).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.gpu.kernels import (
    columns_of,
    expand_boxes,
    expand_columns,
    in_groups,
    load_b,
    load_h,
    load_y,
    multiply_add,
    product,
    row_and_program,
    store_y,
    within,
)


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    tile_slots_ptr,
    tile_tokens_ptr,
    h_ptr,
    num_tokens,
    in_features,
    max_rank,
    x_stride_t,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    PROGRAMS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """h[k, s, t, :r] = x[t, part k] @ a[l, s, :r, part k].T: one plane of partial sums per part."""
    row, program = row_and_program(PROGRAMS)
    tile = row.to(tl.int64)
    part = program % SPLIT_K
    block = program // SPLIT_K
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    tokens = tl.load(tile_tokens_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [T]
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    s = n // RANK_PAD  # [N]
    r = n % RANK_PAD  # [N]
    in_stack = s < NUM_SLICES
    if PROGRAMMATIC:
        gdc_wait()  # before all that a kernel in front may write: x, A and the ranks
        gdc_launch_dependents()
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * NUM_SLICES + s, mask=in_stack, other=0, cache_modifier=".cg")
    used = r < rank  # [N]
    if tl.max(rank - r) <= 0:
        return
    has_token = tokens >= 0  # [T]
    a_rows = a_ptr + slot * a_stride_l + s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r
    x_rows = x_ptr + tokens * x_stride_t  # [T]
    k_part = part * (STEPS * BLOCK_K)
    if WARPS_K == 1:
        k = tl.arange(0, BLOCK_K)  # [K]
        acc = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for step in range(STEPS):
            k_now = k_part + step * BLOCK_K + k
            x_mask, a_mask = has_token[:, None], used[None, :]
            if not EVEN_K:
                x_mask = x_mask & (k_now < in_features)[None, :]
                a_mask = a_mask & (k_now < in_features)[:, None]
            x = tl.load(x_rows[:, None] + k_now[None, :], mask=x_mask, other=0.0)  # [T, K]
            a = tl.load(a_rows[None, :] + k_now[:, None], mask=a_mask, other=0.0)  # [K, N]
            acc = multiply_add(x, a, acc, PRECISION, INTERPRETED)
    else:
        WIDTH: tl.constexpr = BLOCK_K // WARPS_K
        k = tl.arange(0, WARPS_K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [W, K]
        acc3 = tl.zeros((WARPS_K, BLOCK_T, BLOCK_N), dtype=tl.float32)
        for step in range(STEPS):
            k_now = k_part + step * BLOCK_K + k
            x_mask, a_mask = has_token[None, :, None], used[None, None, :]
            if not EVEN_K:
                x_mask = x_mask & (k_now < in_features)[:, None, :]
                a_mask = a_mask & (k_now < in_features)[:, :, None]
            x = tl.load(x_rows[None, :, None] + k_now[:, None, :], mask=x_mask, other=0.0)
            a = tl.load(a_rows[None, None, :] + k_now[:, :, None], mask=a_mask, other=0.0)
            acc3 = multiply_add(x, a, acc3, PRECISION, INTERPRETED)  # [W, T, N]
        acc = tl.sum(acc3, axis=0)
    h_row = (part * NUM_SLICES + s[None, :]).to(tl.int64) * num_tokens + tokens[:, None]  # [T, N]
    written = in_groups(r, rank, EVEN_R)  # zeros beyond the rank, where the group goes on
    tl.store(h_ptr + h_row * max_rank + r[None, :], acc, mask=has_token[:, None] & written[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def gather_kernel(
    token_ids_ptr,
    a_ptr,
    ranks_ptr,
    tile_slots_ptr,
    tile_tokens_ptr,
    h_ptr,
    num_tokens,
    max_rank,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    PROGRAMS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """h[s, t, :r] = a[l, s, :r, token_ids[t]]: shrink of one-hot rows."""
    row, program = row_and_program(PROGRAMS)
    tile = row.to(tl.int64)
    s = (program % NUM_SLICES).to(tl.int64)
    r = program // NUM_SLICES * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    tokens = tl.load(tile_tokens_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [T]
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * NUM_SLICES + s)
    has_token = tokens >= 0  # [T]
    mask = has_token[:, None] & (r < rank)[None, :]  # [T, R]
    ids = tl.load(token_ids_ptr + tokens, mask=has_token, other=0).to(tl.int64)  # [T]
    a_rows = a_ptr + slot * a_stride_l + s * a_stride_s + r.to(tl.int64) * a_stride_r  # [R]
    a = tl.load(a_rows[None, :] + ids[:, None], mask=mask, other=0.0)  # [T, R]
    h_rows = h_ptr + (s * num_tokens + tokens) * max_rank  # [T]
    tl.store(h_rows[:, None] + r[None, :], a.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    ranks_ptr,
    scalings_ptr,
    tile_slots_ptr,
    tile_tokens_ptr,
    b_boxes,
    num_tokens,
    max_rank,
    h_stride_s,
    h_stride_t,
    b_stride_l,
    b_stride_c,
    y_stride_t,
    bias_stride_l,
    STARTS: tl.constexpr,
    FIRST_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """y[t, c] += scaling * (h[s, t, :r] @ b[l, c, :r].T) + bias: h is the sum of its planes."""
    row, program = row_and_program(PROGRAMS)
    tile = row.to(tl.int64)
    slot = tl.load(tile_slots_ptr + tile).to(tl.int64)
    tokens = tl.load(tile_tokens_ptr + tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)  # [T]
    if slot < 0:
        if PROGRAMMATIC:
            gdc_wait()
        return
    s, first, end = columns_of(program, STARTS, FIRST_PROGRAMS, BLOCK_C * CHUNKS)
    rank = tl.load(ranks_ptr + slot * NUM_SLICES + s)
    if rank == 0 and not HAS_BIAS:
        if PROGRAMMATIC:
            gdc_wait()
        return
    scaling = tl.where(rank > 0, tl.load(scalings_ptr + slot * NUM_SLICES + s), 0.0)
    has_token = tokens >= 0  # [T]
    h_rows = h_ptr + s.to(tl.int64) * h_stride_s + tokens * h_stride_t  # [T]
    y_rows = y_ptr + tokens * y_stride_t  # [T]
    b_slot = b_ptr + slot * b_stride_l
    plane = NUM_SLICES * num_tokens.to(tl.int64) * max_rank
    bias_row = bias_ptr + slot * bias_stride_l
    if STAGES > 1:
        b_row = (slot * (b_stride_l // b_stride_c)).to(tl.int32)
        expand_boxes(
            b_boxes, b_row, h_rows, plane, y_rows, bias_row, first, end, rank, scaling, has_token,
            BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, STAGES, EVEN_C, EVEN_R, HAS_BIAS, PRECISION,
            INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    elif RANK_PAD == BLOCK_R:
        # in decode, a rank far below the width of the stack costs what a narrow stack would
        if (BLOCK_T <= 32) & (rank <= 16):
            expand_columns(
                h_rows, plane, b_slot, b_stride_c, y_rows, bias_row, first, end, rank, scaling,
                has_token, 16, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, EXACT_H,
                PRECISION, INTERPRETED, PROGRAMMATIC,
            )  # fmt: skip
        else:
            expand_columns(
                h_rows, plane, b_slot, b_stride_c, y_rows, bias_row, first, end, rank, scaling,
                has_token, BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, EXACT_H,
                PRECISION, INTERPRETED, PROGRAMMATIC,
            )  # fmt: skip
    else:
        if PROGRAMMATIC:
            gdc_wait()
            gdc_launch_dependents()
        r = tl.arange(0, BLOCK_R)  # [R]
        c = first + tl.arange(0, BLOCK_C)  # [C]
        acc = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
        for r_first in tl.range(0, rank, BLOCK_R, num_stages=1):
            r_now = r_first + r
            h = load_h(h_rows, plane, r_now, rank, has_token, SPLIT_K, EVEN_R)
            b = load_b(b_slot, b_stride_c, c, r_now, end, rank, EVEN_C, EVEN_R)
            acc += product(h, within(b, r_now, rank), EXACT_H, PRECISION, INTERPRETED)
        y = load_y(y_rows, c, has_token, end, EVEN_C)
        store_y(
            y_rows, c, y, scaling * acc, bias_row, has_token, end, HAS_BIAS, EVEN_C, INTERPRETED
        )
