# mypy: ignore-errors
"""The arithmetic of one tile of experts: device functions that the kernels call.

Axes: T (pairs of a tile), N (rows of A, all its matrices stacked), K (inputs), R (rank), C (columns
of y), W (groups of warps that share out a step of K).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.elements import (
    group_of,
    in_groups,
    load_b,
    load_b_rows,
    load_h_row,
    product,
    rounded,
    row_product,
    scaled_product,
    within,
)
from lora_backends.sgmv.experts.routing_kernels import RECORD


@triton.jit
def tile_of(row, tiles_ptr, order_ptr, count_ptr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Return the slot, expert, first place and number of pairs of a row, and its pairs [T].

    A tile has PARTS rows of the grid, of at most ROWS pairs each. A row that has none has 0 pairs.
    With ROWS 1 the tiles are `singles` of the routing; the second value of `count` is their number.
    The first pair stands in the record, so that a tile of one pair needs no second load.
    """
    part = row % PARTS
    at = tiles_ptr + row // PARTS * RECORD
    slot, expert = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    place, count, only = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    NUMBER: tl.constexpr = 1 if ROWS == 1 else 0
    used = row // PARTS < tl.load(count_ptr + NUMBER)
    count = tl.where(used, tl.minimum(count - part * ROWS, ROWS), 0)
    place += part * ROWS
    t = tl.arange(0, ROWS)  # [T]
    in_order = t < count
    if PARTS == 1:
        in_order = in_order & (t > 0)
    pair = tl.load(order_ptr + place + t, mask=in_order, other=0)  # [T]
    if PARTS == 1:
        pair = tl.where(t == 0, only, pair)
    return slot, expert, place, count, pair


@triton.jit
def rows_of_scales(
    scales,
    stride,
    c,
    STARTS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    GROUP_C: tl.constexpr,
):
    """Return where the scales of each column of y stand [C].

    Groups of rows count slice by slice: those of slice i start at FIRST_GROUPS[i]. STARTS are the
    first columns of the slices; SPREAD: column c is row c // slices of slice c % slices.
    """
    SLICES: tl.constexpr = len(FIRST_GROUPS)
    if SPREAD:
        group = c % SLICES * FIRST_GROUPS[1] + group_of(c // SLICES, GROUP_C)
    elif GROUP_C == 1:  # groups are numbered as columns are
        group = c.to(tl.int64)
    else:
        start, before = c * 0, c * 0
        for i in tl.static_range(1, SLICES):
            start = tl.where(c >= STARTS[i], STARTS[i], start)
            before = tl.where(c >= STARTS[i], FIRST_GROUPS[i], before)
        group = before + group_of(c - start, GROUP_C)
    return scales + group * stride


@triton.jit
def load_scales(rows, c, r, end, read, rank, STORAGE: tl.constexpr, GROUP_R: tl.constexpr):
    """Return the scales of a block of B: per column [C], or [R, C] where they change with r."""
    if STORAGE == 0:
        return 0.0
    elif GROUP_R == 0:
        return tl.load(rows, mask=c < tl.where(read > 0, end, 0), other=0.0)
    else:  # beyond the rank a scale may be NaN
        mask = (r < rank)[:, None] & (c < end)[None, :]
        return tl.load(rows[None, :] + (r // GROUP_R)[:, None], mask=mask, other=0.0)


@triton.jit
def expand_single(
    h_at,
    plane,
    b_key,
    b_stride_c,
    scales,
    scales_stride,
    y_row,
    factor,
    ranks_at,
    scalings_at,
    first,
    end,
    read,
    rank,
    NUM_A: tl.constexpr,
    RANK_PAD: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STARTS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    FRESH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns for one pair.

    B goes from memory straight to the registers that multiply it, so more of it is in flight than
    where it passes through shared memory for a product of 16 rows.
    """
    SLICES: tl.constexpr = NUM_A if INTERLEAVED else 1
    r = tl.arange(0, RANK_PAD)  # [R]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    written, end = tl.where(rank > 0, end, 0), tl.where(read > 0, end, 0)
    b = load_b_rows(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
    at = rows_of_scales(scales, scales_stride, c, STARTS, FIRST_GROUPS, SPREAD, GROUP_C)
    own = load_scales(at, c, r, end, read, rank, STORAGE, GROUP_R)
    y = _load_y_row(y_row, c, end, FRESH)
    if PROGRAMMATIC:
        gdc_wait()  # only h needs the wait: the shrink waits for all earlier kernels itself
        gdc_launch_dependents()
    for chunk in tl.static_range(CHUNKS):
        c_now, y_now, b_now, own_now = c, y, b, own
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = load_b_rows(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
            at = rows_of_scales(scales, scales_stride, c, STARTS, FIRST_GROUPS, SPREAD, GROUP_C)
            own = load_scales(at, c, r, end, read, rank, STORAGE, GROUP_R)
            y = _load_y_row(y_row, c, end, FRESH)
        delta = tl.zeros((BLOCK_C,), dtype=tl.float32)
        touched = c_now < written  # [C]
        for s in tl.static_range(SLICES):
            used, scaling = rank, 1.0
            if INTERLEAVED:
                used, scaling = tl.load(ranks_at + s), tl.load(scalings_at + s)
            h = load_h_row(h_at + s * RANK_PAD, plane, r, used, SPLIT_K)  # [R]
            sums = scaling * row_product(
                h, b_now, own_now, r, used, STORAGE, GROUP_R, WIDE, False, INTERPRETED
            )  # [C]
            if INTERLEAVED:
                mine = c_now % NUM_A == s
                delta = tl.where(mine, sums, delta)
                touched = touched & (tl.where(mine, used, 1) > 0)
            else:
                delta = sums
        total = y_now.to(tl.float32) + factor * delta
        tl.store(y_row + c_now, rounded(total, y_now.dtype, INTERPRETED), mask=touched)


@triton.jit
def _load_y_row(y_row, c, end, FRESH: tl.constexpr):
    """Return a block of a row of y, or zeros where y is fresh."""
    if FRESH:
        return tl.zeros((c.shape[0],), dtype=y_row.dtype.element_ty)
    return tl.load(y_row + c, mask=c < end, other=0.0)


@triton.jit
def expand_columns(
    h_at,
    plane,
    b_key,
    b_stride_c,
    scales,
    scales_stride,
    y_rows,
    factor,
    first,
    end,
    read,
    rank,
    has_pair,
    has_y,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    STARTS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns, all ranks in one product; loads run one block ahead."""
    r = tl.arange(0, BLOCK_R)  # [R]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    b = load_b(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
    at = rows_of_scales(scales, scales_stride, c, STARTS, FIRST_GROUPS, SPREAD, GROUP_C)
    own = load_scales(at, c, r, end, read, rank, STORAGE, GROUP_R)
    y = _load_y(y_rows, c, has_y, end, EVEN_C, FRESH)
    if PROGRAMMATIC:
        gdc_wait()  # only h needs the wait: the shrink waits for all earlier kernels itself
        gdc_launch_dependents()
    h = _load_h(h_at, plane, r, rank, has_pair, SPLIT_K)  # [T, R]
    for chunk in tl.static_range(CHUNKS):
        delta = scaled_product(
            factor[:, None], h, b, own, r, rank, STORAGE, GROUP_R, WIDE, False, PRECISION,
            INTERPRETED,
        )  # [T, C] # fmt: skip
        c_now, y_now = c, y
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = load_b(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
            at = rows_of_scales(scales, scales_stride, c, STARTS, FIRST_GROUPS, SPREAD, GROUP_C)
            own = load_scales(at, c, r, end, read, rank, STORAGE, GROUP_R)
            y = _load_y(y_rows, c, has_y, end, EVEN_C, FRESH)
        _store_y(y_rows, c_now, y_now, delta, has_pair, end, EVEN_C, INTERPRETED)


@triton.jit
def expand_general(
    h_at,
    plane,
    b_key,
    b_stride_c,
    scales,
    scales_stride,
    y_rows,
    factor,
    ranks_at,
    scalings_at,
    first,
    end,
    highest,
    has_pair,
    NUM_A: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STARTS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    SPREAD: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add one block of columns, BLOCK_R ranks at a time, each column with h of its own slice."""
    c = first + tl.arange(0, BLOCK_C)  # [C]
    at = rows_of_scales(scales, scales_stride, c, STARTS, FIRST_GROUPS, SPREAD, GROUP_C)
    y = _load_y(y_rows, c, has_pair, end, EVEN_C, FRESH)
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    SLICES: tl.constexpr = NUM_A if INTERLEAVED else 1
    delta = tl.zeros((y_rows.shape[0], BLOCK_C), dtype=tl.float32)
    ranks = tl.zeros((BLOCK_C,), dtype=tl.int32) + highest  # [C]
    for s in tl.static_range(SLICES):
        rank = highest
        scaling = 1.0
        if INTERLEAVED:
            rank = tl.load(ranks_at + s)
            scaling = tl.load(scalings_at + s)
        acc = tl.zeros((y_rows.shape[0], BLOCK_C), dtype=tl.float32)
        # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
        # registers
        for done in tl.range(0, rank, BLOCK_R, num_stages=1):
            r = done + tl.arange(0, BLOCK_R)  # [R]
            b = load_b(b_key, b_stride_c, c, r, end, highest, EVEN_C, EVEN_R)
            h = _load_h(h_at + s * RANK_PAD, plane, r, rank, has_pair, SPLIT_K)
            own = load_scales(at, c, r, end, rank, rank, STORAGE, GROUP_R)
            acc += scaled_product(
                1.0, h, b, own, r, rank, STORAGE, GROUP_R, WIDE, False, PRECISION, INTERPRETED
            )  # fmt: skip
        if INTERLEAVED:
            mine = c % NUM_A == s
            ranks = tl.where(mine, rank, ranks)
            delta = tl.where(mine[None, :], scaling * acc, delta)
        else:
            delta = acc
    delta = factor[:, None] * delta
    mask = has_pair[:, None] & ((c < end) & (ranks > 0))[None, :]
    total = y.to(tl.float32) + delta
    tl.store(y_rows[:, None] + c[None, :], rounded(total, y.dtype, INTERPRETED), mask=mask)


@triton.jit
def expand_tma(
    b_tma,
    b_row,
    h_at,
    plane,
    y_rows,
    factor,
    first,
    end,
    rank,
    has_pair,
    BLOCK_R: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns with STAGES loads of B through TMA in flight."""
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    h = _load_h(h_at, plane, tl.arange(0, BLOCK_R), rank, has_pair, SPLIT_K)
    if rank < BLOCK_R:
        _add_tma_blocks(
            b_tma, b_row, h, y_rows, factor, first, end, rank, has_pair, BLOCK_R, BLOCK_C, CHUNKS,
            STAGES, EVEN_C, FRESH, True, PRECISION, INTERPRETED,
        )  # fmt: skip
    else:  # a block of full rank needs no mask, so it is multiplied straight from shared memory
        _add_tma_blocks(
            b_tma, b_row, h, y_rows, factor, first, end, rank, has_pair, BLOCK_R, BLOCK_C, CHUNKS,
            STAGES, EVEN_C, FRESH, False, PRECISION, INTERPRETED,
        )  # fmt: skip


@triton.jit
def _add_tma_blocks(
    b_tma,
    b_row,
    h,
    y_rows,
    factor,
    first,
    end,
    rank,
    has_pair,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    FRESH: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add the blocks. MASKED: the rank ends inside a block, beyond it B may hold anything."""
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        c_first = first + chunk * BLOCK_C
        c = c_first + tl.arange(0, BLOCK_C)  # [C]
        y = _load_y(y_rows, c, has_pair, end, EVEN_C, FRESH)
        b = b_tma.load([b_row + c_first, 0]).T  # [R, C]; beyond the end, columns of another slice
        if MASKED:
            b = within(b, tl.arange(0, BLOCK_R), rank)
        delta = factor[:, None] * product(h, b, False, PRECISION, INTERPRETED)  # [T, C]
        _store_y(y_rows, c, y, delta, has_pair, end, EVEN_C, INTERPRETED)


@triton.jit
def _load_h(h_at, plane, r, rank, has_pair, SPLIT_K: tl.constexpr):
    """Return h, its planes summed in order, zero beyond the rank."""
    # a mask that is constant over 8 neighbours keeps the loads wide
    mask = has_pair[:, None] & in_groups(r, rank, True)[None, :]
    h = tl.load(h_at[:, None] + r[None, :], mask=mask, other=0.0).to(tl.float32)  # [T, R]
    for k in tl.static_range(1, SPLIT_K):
        h += tl.load(h_at[:, None] + k * plane + r[None, :], mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0)


@triton.jit
def _load_y(y_rows, c, has_pair, end, EVEN_C: tl.constexpr, FRESH: tl.constexpr):
    """Return a block of y, or zeros where y is fresh."""
    if FRESH:
        return tl.zeros((y_rows.shape[0], c.shape[0]), dtype=y_rows.dtype.element_ty)
    mask = has_pair[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    return tl.load(y_rows[:, None] + c[None, :], mask=mask, other=0.0)  # [T, C]


@triton.jit
def _store_y(y_rows, c, y, delta, has_pair, end, EVEN_C: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store y + delta; each element is rounded once."""
    mask = has_pair[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    total = y.to(tl.float32) + delta
    tl.store(y_rows[:, None] + c[None, :], rounded(total, y.dtype, INTERPRETED), mask=mask)
