# mypy: ignore-errors
"""The kernels: shrink (x times A), gather (its form for an embedding), expand (h times B).

A program works for one row of the grid, a segment, or a group of neighbouring segments of one slot.
Shapes in comments name the axes T (places of the row), N (rows of A, all slices stacked), K
(inputs), R (rank), C (columns of y), W (parts of K that the warps of a program share out).
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


@triton.jit
def _row(
    row,
    segment_slots_ptr,
    segment_tokens_ptr,
    group_starts_ptr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the slot of a row of the grid, its places and its tokens; -1 where there is none."""
    if GROUP == 1:
        places = row.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)  # [T]
        slot = tl.load(segment_slots_ptr + row)
        tokens = tl.load(segment_tokens_ptr + places)  # [T]
    else:
        first = tl.load(group_starts_ptr + row)
        end = tl.load(group_starts_ptr + row + 1)
        last = end.to(tl.int64) * SEGMENT
        places = first.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT * GROUP)  # [T]
        slot = tl.load(segment_slots_ptr + first, mask=first < end, other=-1)
        tokens = tl.load(segment_tokens_ptr + places, mask=places < last, other=-1)  # [T]
    return slot.to(tl.int64), places, tokens.to(tl.int64)


@triton.jit
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    segment_slots_ptr,
    segment_tokens_ptr,
    group_starts_ptr,
    h_ptr,
    in_features,
    x_stride_t,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    h_stride_k,
    h_stride_s,
    h_stride_t,
    PROGRAMS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    RANK_PAD: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """h[k, s, p, :r] = x[t, part k] @ a[l, s, :r, part k].T for token t at place p, or h[k, s, t].

    Every part of the inputs has a plane of partial sums.
    """
    row, program = row_and_program(PROGRAMS)
    slot, places, tokens = _row(
        row, segment_slots_ptr, segment_tokens_ptr, group_starts_ptr, SEGMENT, GROUP
    )
    part = program % SPLIT_K
    n = program // SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    s = n // RANK_PAD  # [N]
    r = n % RANK_PAD  # [N]
    if PROGRAMMATIC:
        gdc_wait()  # before all that a kernel in front may write: x, A and the ranks
        gdc_launch_dependents()
    if slot < 0:
        return
    ranks_at = ranks_ptr + slot * NUM_SLICES + s
    rank = tl.load(ranks_at, mask=s < NUM_SLICES, other=0, cache_modifier=".cg")  # [N]
    if tl.max(rank - r) <= 0:
        return
    has_token = tokens >= 0  # [T]
    x_rows = x_ptr + tokens * x_stride_t  # [T]
    a_rows = a_ptr + slot * a_stride_l + s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r
    h = _partial_sums(
        x_rows, a_rows, has_token, r < rank, part * (STEPS * BLOCK_K), in_features,
        SEGMENT * GROUP, BLOCK_N, BLOCK_K, WARPS_K, STEPS, EVEN_K, PRECISION, INTERPRETED,
    )  # [T, N] # fmt: skip
    h_columns = h_ptr + part.to(tl.int64) * h_stride_k + s.to(tl.int64) * h_stride_s + r  # [N]
    h_rows = (tokens if BY_TOKEN else places) * h_stride_t  # [T]
    written = in_groups(r, rank, EVEN_R)  # zeros beyond the rank, where the group goes on
    mask = has_token[:, None] & written[None, :]
    tl.store(h_columns[None, :] + h_rows[:, None], h, mask=mask)


@triton.jit
def _partial_sums(
    x_rows,
    a_rows,
    has_token,
    used,
    k_first,
    in_features,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return x @ A.T over STEPS blocks of inputs; each of WARPS_K warps sums a part of a block."""
    if WARPS_K == 1:
        k = k_first + tl.arange(0, BLOCK_K)  # [K]
        x_k, a_k = k[None, :], k[:, None]
        x_at, a_at = x_rows[:, None] + x_k, a_rows[None, :] + a_k  # [T, K], [K, N]
        x_in, a_in = has_token[:, None], used[None, :]
        acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    else:
        WIDTH: tl.constexpr = BLOCK_K // WARPS_K
        k = k_first + tl.arange(0, WARPS_K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x_k, a_k = k[:, None, :], k[:, :, None]
        x_at, a_at = (
            x_rows[None, :, None] + x_k,
            a_rows[None, None, :] + a_k,
        )  # [W, T, K], [W, K, N]
        x_in, a_in = has_token[None, :, None], used[None, None, :]
        acc = tl.zeros((WARPS_K, ROWS, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        done = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_at + done, mask=x_in, other=0.0)
            a = tl.load(a_at + done, mask=a_in, other=0.0)
        else:
            x = tl.load(x_at + done, mask=x_in & (x_k < in_features - done), other=0.0)
            a = tl.load(a_at + done, mask=a_in & (a_k < in_features - done), other=0.0)
        acc = multiply_add(x, a, acc, PRECISION, INTERPRETED)
    if WARPS_K > 1:
        acc = tl.sum(acc, axis=0)
    return acc


@triton.jit
def gather_kernel(
    token_ids_ptr,
    a_ptr,
    ranks_ptr,
    segment_slots_ptr,
    segment_tokens_ptr,
    group_starts_ptr,
    h_ptr,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    h_stride_s,
    h_stride_t,
    PROGRAMS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """h[s, p, :r] = a[l, s, :r, token_ids[t]]: the shrink of one-hot rows."""
    row, program = row_and_program(PROGRAMS)
    slot, places, tokens = _row(
        row, segment_slots_ptr, segment_tokens_ptr, group_starts_ptr, SEGMENT, GROUP
    )
    if slot < 0:
        return
    s = (program % NUM_SLICES).to(tl.int64)
    r = program // NUM_SLICES * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    used = r < tl.load(ranks_ptr + slot * NUM_SLICES + s)  # [R]
    ids = tl.load(token_ids_ptr + tokens, mask=tokens >= 0, other=0).to(tl.int64)  # [T]
    a_columns = a_ptr + slot * a_stride_l + s * a_stride_s + r.to(tl.int64) * a_stride_r  # [R]
    mask = (tokens >= 0)[:, None] & used[None, :]
    a = tl.load(a_columns[None, :] + ids[:, None], mask=mask, other=0.0)  # [T, R]
    h_rows = h_ptr + s * h_stride_s + places * h_stride_t  # [T]
    tl.store(h_rows[:, None] + r[None, :], a.to(tl.float32), mask=mask)


@triton.jit
def expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    ranks_ptr,
    scalings_ptr,
    segment_slots_ptr,
    segment_tokens_ptr,
    group_starts_ptr,
    b_boxes,
    h_stride_k,
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
    SEGMENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """y[t, c] += scaling * (h[s, p, :r] @ b[l, c, :r].T) + bias, h summed over its planes.

    By token, h[s, t] stands for h[s, p] and is multiplied as it is, in float32.
    """
    row, program = row_and_program(PROGRAMS)
    slot, places, tokens = _row(
        row, segment_slots_ptr, segment_tokens_ptr, group_starts_ptr, SEGMENT, GROUP
    )
    s, first, end = columns_of(program, STARTS, FIRST_PROGRAMS, BLOCK_C * CHUNKS)
    rank = tl.load(ranks_ptr + slot * NUM_SLICES + s, mask=slot >= 0, other=0)
    if slot < 0 or (rank == 0 and not HAS_BIAS):
        if PROGRAMMATIC:
            gdc_wait()
        return
    scaling = tl.where(rank > 0, tl.load(scalings_ptr + slot * NUM_SLICES + s), 0.0)
    has_token = tokens >= 0  # [T]
    h_rows = h_ptr + s.to(tl.int64) * h_stride_s + (tokens if BY_TOKEN else places) * h_stride_t
    y_rows = y_ptr + tokens * y_stride_t  # [T]
    b_slot = b_ptr + slot * b_stride_l
    bias_row = bias_ptr + slot * bias_stride_l
    NARROW: tl.constexpr = SEGMENT * GROUP <= 32 and RANK_PAD > 16
    if STAGES > 1:
        b_row = (slot * (b_stride_l // b_stride_c)).to(tl.int32)
        expand_boxes(
            b_boxes, b_row, h_rows, h_stride_k, y_rows, bias_row, first, end, rank, scaling,
            has_token, BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, STAGES, EVEN_C, EVEN_R, HAS_BIAS,
            PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    elif NARROW and rank <= 16:  # costs what a stack of that width would
        expand_columns(
            h_rows, h_stride_k, b_slot, b_stride_c, y_rows, bias_row, first, end, rank, scaling,
            has_token, 16, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, BY_TOKEN,
            PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    elif RANK_PAD == BLOCK_R:
        expand_columns(
            h_rows, h_stride_k, b_slot, b_stride_c, y_rows, bias_row, first, end, rank, scaling,
            has_token, BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, HAS_BIAS, BY_TOKEN,
            PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    else:
        _expand_long_ranks(
            h_rows, h_stride_k, b_slot, b_stride_c, y_rows, bias_row, first, end, rank, scaling,
            has_token, SEGMENT * GROUP, BLOCK_R, SPLIT_K, BLOCK_C, EVEN_C, EVEN_R, HAS_BIAS,
            BY_TOKEN, PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip


@triton.jit
def _expand_long_ranks(
    h_rows,
    h_stride_k,
    b_slot,
    b_stride_c,
    y_rows,
    bias_row,
    first,
    end,
    rank,
    scaling,
    has_token,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add one block of columns, BLOCK_R ranks at a time."""
    c = first + tl.arange(0, BLOCK_C)  # [C]
    y = load_y(y_rows, c, has_token, end, EVEN_C)
    if PROGRAMMATIC:
        gdc_wait()  # before h alone, as in expand_columns
        gdc_launch_dependents()
    acc = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    for done in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = done + tl.arange(0, BLOCK_R)  # [R]
        b = load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C, EVEN_R)
        h = load_h(h_rows, h_stride_k, r, rank, has_token, SPLIT_K, EVEN_R)
        acc += product(h, within(b, r, rank), EXACT_H, PRECISION, INTERPRETED)
    store_y(y_rows, c, y, scaling * acc, bias_row, has_token, end, HAS_BIAS, EVEN_C, INTERPRETED)
