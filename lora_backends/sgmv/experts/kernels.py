# mypy: ignore-errors
"""The kernels of a site: shrink, expand, and the sum over the pairs of a token.

A row of the grid is one tile of the routing: pairs of one slot and expert. h has a row for every
place of the sorted pairs. Axes: T (pairs of a tile), N (rows of A, all its matrices stacked), K
(inputs), R (rank), C (columns of y), W (groups of warps that share out a step of K).

Offsets that a stride multiplies are int64: slot times stride exceeds int32 in large stacks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.blocks import columns_of, partial_sums
from lora_backends.sgmv.elements import group_of, in_groups, rounded, row_sums
from lora_backends.sgmv.experts.blocks import (
    expand_columns,
    expand_general,
    expand_single,
    expand_tma,
    tile_of,
)


@triton.jit(do_not_specialize=["h_rows"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    a_scales_ptr,
    ranks_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    h_ptr,
    in_features,
    x_stride_t,
    a_stride_l,
    a_stride_e,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_e,
    a_scales_stride_s,
    a_scales_stride_r,
    ranks_stride_l,
    ranks_stride_e,
    h_rows,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_A: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EAGER: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """h[k, place, s, :r] = x[row of the pair, part k] @ a[l, e, s, :r, part k].T.

    Pair p has row p // TOP_K of x: TOP_K is 1 where every pair has a row of its own. EAGER reads A
    up to MAX_RANK, whatever the rank: few programs wait for loads that follow each other.

    BY_TOKEN: tiles hold tokens of one slot, and h has a row for every token, of MAX_RANK ranks.
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    if PROGRAMMATIC:
        gdc_wait()  # before reading the routing, x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    slot, expert, place, count, pair = tile_of(row, tiles_ptr, order_ptr, count_ptr, ROWS, PARTS)
    if count <= 0:
        return
    t = tl.arange(0, ROWS)  # [T]
    part = program % SPLIT_K
    n = program // SPLIT_K * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
    s = n // RANK_PAD  # [N]
    r = n % RANK_PAD  # [N]
    if BY_TOKEN:
        rank = tl.where(s < NUM_A, MAX_RANK, 0)  # [N]
    else:
        ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
        rank = tl.load(ranks_at, mask=s < NUM_A, other=0)  # [N]
    if EAGER:
        used = (s < NUM_A) & (r < MAX_RANK)
    else:
        used = r < rank
        if tl.max(rank - r) <= 0:
            return
    a_rows = a_ptr + slot * a_stride_l + expert * a_stride_e
    a_rows = a_rows + s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r  # [N]
    scale_rows = (
        a_scales_ptr + slot * a_scales_stride_l + expert * a_scales_stride_e
        + s.to(tl.int64) * a_scales_stride_s + group_of(r, GROUP_R) * a_scales_stride_r
    )  # [N] # fmt: skip
    if STORAGE > 0 and GROUP_K == 0:  # one scale for a row of A: it multiplies the sum
        row_scale = tl.load(scale_rows, mask=used, other=0.0)
    if ROWS == 1:
        x_row = x_ptr + (tl.sum(pair) // TOP_K).to(tl.int64) * x_stride_t
        h = row_sums(
            x_row, a_rows, scale_rows, used, part * (STEPS * BLOCK_K), in_features, STORAGE,
            GROUP_K, BLOCK_K, STEPS, EVEN_K,
        )  # [1, N] # fmt: skip
    else:
        x_rows = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride_t  # [T]
        h = partial_sums(
            x_rows, a_rows, scale_rows, t < count, used, part * (STEPS * BLOCK_K), in_features,
            STORAGE, GROUP_K, BLOCK_K, WARPS_K, STEPS, EVEN_K, PRECISION, INTERPRETED,
        )  # [T, N] # fmt: skip
    if STORAGE > 0 and GROUP_K == 0:
        h *= row_scale[None, :]
    h_row = pair if BY_TOKEN else place + t  # [T]
    h_at = h_ptr + (part * h_rows.to(tl.int64) + h_row) * (NUM_A * RANK_PAD)  # [T]
    mask = (t < count)[:, None] & in_groups(r, rank, True)[None, :]  # beyond, anything is written
    tl.store(h_at[:, None] + n[None, :], rounded(h, h_ptr.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit(do_not_specialize=["h_rows"])
def expand_kernel(
    h_ptr,
    b_ptr,
    b_scales_ptr,
    y_ptr,
    ranks_ptr,
    scalings_ptr,
    factors_ptr,
    order_ptr,
    tiles_ptr,
    count_ptr,
    b_tma,
    h_rows,
    b_stride_l,
    b_stride_e,
    b_stride_c,
    b_scales_stride_l,
    b_scales_stride_e,
    b_scales_stride_c,
    y_stride_t,
    y_stride_j,
    ranks_stride_l,
    ranks_stride_e,
    scalings_stride_l,
    scalings_stride_e,
    STARTS: tl.constexpr,
    FIRST_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_A: tl.constexpr,
    SPLIT_K: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    SCALE_STARTS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    EAGER: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """y[pair, c] += factor * scaling * (h[place, s, :r] @ b[l, e, c, :r].T).

    With FRESH y is not read. INTERLEAVED: column c has slice c % NUM_A, else slices are blocks of
    columns, where NUM_A is 1 a single one. EAGER reads B up to MAX_RANK, whatever the rank.
    BY_TOKEN: h has a row for every token instead of every place.

    `rows_of_scales` finds the scales of an 8-bit B by SCALE_STARTS, FIRST_GROUPS and SPREAD.
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    slot, expert, place, count, pair = tile_of(row, tiles_ptr, order_ptr, count_ptr, ROWS, PARTS)
    if count <= 0:
        if PROGRAMMATIC:
            gdc_wait()  # so that this grid ends after the shrink, on which later kernels rely
        return
    s, first, end = columns_of(program, STARTS, FIRST_PROGRAMS, BLOCK_C * CHUNKS)
    t = tl.arange(0, ROWS)  # [T]
    ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
    scalings_at = scalings_ptr + slot * scalings_stride_l + expert * scalings_stride_e + s
    rank = tl.load(ranks_at)
    if INTERLEAVED:
        for i in tl.static_range(1, NUM_A):
            rank = tl.maximum(rank, tl.load(ranks_at + i))
    has_pair = t < count  # [T]
    if EAGER:
        read = rank * 0 + MAX_RANK
        has_pair = t < tl.where(rank > 0, count, 0)
    else:
        read = rank
        if rank == 0:
            if PROGRAMMATIC:
                gdc_wait()
            return
    scaling = 1.0
    if not INTERLEAVED:
        scaling = tl.load(scalings_at)
    plane = h_rows.to(tl.int64) * (NUM_A * RANK_PAD)
    h_slice = h_ptr + s * RANK_PAD
    b_key = b_ptr + slot * b_stride_l + expert * b_stride_e
    scales = b_scales_ptr + slot * b_scales_stride_l + expert * b_scales_stride_e
    if ROWS == 1:
        only = tl.sum(pair)
        factor = scaling
        if WEIGHTED:
            factor = scaling * tl.load(factors_ptr + only)
        t_offset, j_offset = (only // TOP_K).to(tl.int64), (only % TOP_K).to(tl.int64)
        y_row = y_ptr + t_offset * y_stride_t + j_offset * y_stride_j
        h_row = only // TOP_K if BY_TOKEN else place
        h_at = h_slice + h_row.to(tl.int64) * (NUM_A * RANK_PAD)
        expand_single(
            h_at, plane, b_key, b_stride_c, scales, b_scales_stride_c, y_row, factor, ranks_at,
            scalings_at, first, end, read, rank, NUM_A, RANK_PAD, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C,
            EVEN_R, INTERLEAVED, SCALE_STARTS, FIRST_GROUPS, SPREAD, STORAGE, GROUP_C, GROUP_R,
            WIDE, FRESH, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
        return
    factor = tl.full((ROWS,), 1.0, dtype=tl.float32) * scaling  # [T]
    if WEIGHTED:
        factor *= tl.load(factors_ptr + pair, mask=t < count, other=0.0)
    t_offset, j_offset = (pair // TOP_K).to(tl.int64), (pair % TOP_K).to(tl.int64)
    y_rows = y_ptr + t_offset * y_stride_t + j_offset * y_stride_j  # [T]
    h_row = pair // TOP_K if BY_TOKEN else place + t  # [T]
    h_at = h_slice + h_row.to(tl.int64) * (NUM_A * RANK_PAD)  # [T]
    if STAGES > 1:
        b_row = ((slot * b_stride_l + expert * b_stride_e) // b_stride_c).to(tl.int32)
        expand_tma(
            b_tma, b_row, h_at, plane, y_rows, factor, first, end, rank, has_pair, BLOCK_R,
            SPLIT_K, BLOCK_C, CHUNKS, STAGES, EVEN_C, FRESH, PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    elif INTERLEAVED or RANK_PAD > BLOCK_R:
        expand_general(
            h_at, plane, b_key, b_stride_c, scales, b_scales_stride_c, y_rows, factor, ranks_at,
            scalings_at, first, end, rank, has_pair, NUM_A, RANK_PAD, BLOCK_R, SPLIT_K, BLOCK_C,
            EVEN_C, EVEN_R, INTERLEAVED, SCALE_STARTS, FIRST_GROUPS, SPREAD, STORAGE, GROUP_C,
            GROUP_R, WIDE, FRESH, PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    else:
        expand_columns(
            h_at, plane, b_key, b_stride_c, scales, b_scales_stride_c, y_rows, factor, first, end,
            read, rank, has_pair, t < count, BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R,
            SCALE_STARTS, FIRST_GROUPS, SPREAD, STORAGE, GROUP_C, GROUP_R, WIDE, FRESH, PRECISION,
            INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip


@triton.jit
def sum_kernel(
    y_ptr,
    deltas_ptr,
    experts_ptr,
    slots_ptr,
    ranks_ptr,
    out_features,
    y_stride_t,
    ranks_stride_l,
    ranks_stride_e,
    PROGRAMS: tl.constexpr,
    STARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_A: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """y[t, c] += the sum over j of deltas[t * TOP_K + j, c], in order, where any pair has a rank.

    STARTS are the first columns of the slices; where NUM_A is 1 there is one.
    """
    t = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    c = tl.program_id(0) % PROGRAMS * BLOCK_C + tl.arange(0, BLOCK_C)  # [C]
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + t).to(tl.int64)
    s = c * 0  # [C]
    if INTERLEAVED:
        s = c % NUM_A
    else:
        for i in tl.static_range(1, len(STARTS)):
            s += (c >= STARTS[i]).to(tl.int32)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    touched = c < 0
    for j in range(TOP_K):
        pair = t * TOP_K + j
        expert = tl.load(experts_ptr + pair)
        end = tl.where((expert >= 0) & (slot >= 0), out_features, 0)
        ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
        live = tl.load(ranks_at, mask=c < end, other=0) > 0
        total += tl.load(deltas_ptr + pair * out_features + c, mask=live, other=0.0)
        touched = touched | live
    y_at = y_ptr + t * y_stride_t + c
    y = tl.load(y_at, mask=touched, other=0.0)
    tl.store(y_at, rounded(y.to(tl.float32) + total, y.dtype, INTERPRETED), mask=touched)
