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

from lora_backends.sgmv.blocks import columns_of
from lora_backends.sgmv.elements import in_groups, multiply, product, rounded, within
from lora_backends.sgmv.experts.routing_kernels import RECORD


@triton.jit
def _tile(row, tiles_ptr, order_ptr, count_ptr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Return the slot, expert, first place and number of pairs of a row, and its pairs [T].

    A tile has PARTS rows of the grid, of at most ROWS pairs each. A row that has none has 0 pairs.
    The first pair stands in the record, so that a tile of one pair needs no second load.
    """
    part = row % PARTS
    at = tiles_ptr + row // PARTS * RECORD
    slot, expert = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    place, count, only = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    used = row // PARTS < tl.load(count_ptr)
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


@triton.jit(do_not_specialize=["h_rows"])
def shrink_kernel(
    x_ptr,
    a_ptr,
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
    slot, expert, place, count, pair = _tile(row, tiles_ptr, order_ptr, count_ptr, ROWS, PARTS)
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
    x_rows = x_ptr + (pair // TOP_K).to(tl.int64) * x_stride_t  # [T]
    a_rows = a_ptr + slot * a_stride_l + expert * a_stride_e
    a_rows = a_rows + s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r  # [N]
    h = _partial_sums(
        x_rows, a_rows, t < count, used, part * (STEPS * BLOCK_K), in_features,
        BLOCK_K, WARPS_K, STEPS, EVEN_K, PRECISION, INTERPRETED,
    )  # [T, N] # fmt: skip
    h_row = pair if BY_TOKEN else place + t  # [T]
    h_at = h_ptr + (part * h_rows.to(tl.int64) + h_row) * (NUM_A * RANK_PAD)  # [T]
    mask = (t < count)[:, None] & in_groups(r, rank, True)[None, :]  # beyond, anything is written
    tl.store(h_at[:, None] + n[None, :], rounded(h, h_ptr.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit
def _partial_sums(
    x_rows,
    a_rows,
    has_pair,
    used,
    k_first,
    in_features,
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
        x_in, a_in = has_pair[:, None], used[None, :]
        acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    else:
        WIDTH: tl.constexpr = BLOCK_K // WARPS_K
        k = k_first + tl.arange(0, WARPS_K)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x_k, a_k = k[:, None, :], k[:, :, None]
        x_at = x_rows[None, :, None] + x_k  # [W, T, K]
        a_at = a_rows[None, None, :] + a_k  # [W, K, N]
        x_in, a_in = has_pair[None, :, None], used[None, None, :]
        acc = tl.zeros((WARPS_K, ROWS, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        done = step * BLOCK_K
        if EVEN_K:
            x = tl.load(x_at + done, mask=x_in, other=0.0)
            a = tl.load(a_at + done, mask=a_in, other=0.0)
        else:
            x = tl.load(x_at + done, mask=x_in & (x_k < in_features - done), other=0.0)
            a = tl.load(a_at + done, mask=a_in & (a_k < in_features - done), other=0.0)
        acc = multiply(x, a, acc, PRECISION, INTERPRETED)
    if WARPS_K > 1:
        acc = tl.sum(acc, axis=0)
    return acc


@triton.jit(do_not_specialize=["h_rows"])
def expand_kernel(
    h_ptr,
    b_ptr,
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
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    slot, expert, place, count, pair = _tile(row, tiles_ptr, order_ptr, count_ptr, ROWS, PARTS)
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
    if ROWS == 1:
        only = tl.sum(pair)
        factor = scaling
        if WEIGHTED:
            factor = scaling * tl.load(factors_ptr + only)
        t_offset, j_offset = (only // TOP_K).to(tl.int64), (only % TOP_K).to(tl.int64)
        y_row = y_ptr + t_offset * y_stride_t + j_offset * y_stride_j
        h_row = only // TOP_K if BY_TOKEN else place
        h_at = h_slice + h_row.to(tl.int64) * (NUM_A * RANK_PAD)
        _expand_single(
            h_at, plane, b_key, b_stride_c, y_row, factor, ranks_at, scalings_at, first, end,
            read, rank, NUM_A, RANK_PAD, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, INTERLEAVED,
            FRESH, INTERPRETED, PROGRAMMATIC,
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
        _expand_tma(
            b_tma, b_row, h_at, plane, y_rows, factor, first, end, rank, has_pair, BLOCK_R,
            SPLIT_K, BLOCK_C, CHUNKS, STAGES, EVEN_C, FRESH, PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    elif INTERLEAVED or RANK_PAD > BLOCK_R:
        _expand_general(
            h_at, plane, b_key, b_stride_c, y_rows, factor, ranks_at, scalings_at, first, end,
            rank, has_pair, NUM_A, RANK_PAD, BLOCK_R, SPLIT_K, BLOCK_C, EVEN_C, EVEN_R,
            INTERLEAVED, FRESH, PRECISION, INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip
    else:
        _expand_columns(
            h_at, plane, b_key, b_stride_c, y_rows, factor, first, end, read, rank, has_pair,
            t < count, BLOCK_R, SPLIT_K, BLOCK_C, CHUNKS, EVEN_C, EVEN_R, FRESH, PRECISION,
            INTERPRETED, PROGRAMMATIC,
        )  # fmt: skip


@triton.jit
def _expand_single(
    h_at,
    plane,
    b_key,
    b_stride_c,
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
    end = tl.where(rank > 0, end, 0)
    b = _load_b_rows(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
    y = _load_y_row(y_row, c, end, FRESH)
    if PROGRAMMATIC:
        gdc_wait()  # only h needs the wait: the shrink waits for all earlier kernels itself
        gdc_launch_dependents()
    for chunk in tl.static_range(CHUNKS):
        c_now, y_now, b_now = c, y, b
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = _load_b_rows(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
            y = _load_y_row(y_row, c, end, FRESH)
        delta = tl.zeros((BLOCK_C,), dtype=tl.float32)
        touched = c_now < end  # [C]
        for s in tl.static_range(SLICES):
            used, scaling = rank, 1.0
            if INTERLEAVED:
                used, scaling = tl.load(ranks_at + s), tl.load(scalings_at + s)
            h = _load_h_row(h_at + s * RANK_PAD, plane, r, used, SPLIT_K)  # [R]
            h = rounded(h, b.dtype, INTERPRETED).to(tl.float32)
            products = tl.where((r < used)[None, :], b_now.to(tl.float32), 0.0) * h[None, :]
            sums = scaling * tl.sum(products, axis=1)  # [C]
            if INTERLEAVED:
                mine = c_now % NUM_A == s
                delta = tl.where(mine, sums, delta)
                touched = touched & (tl.where(mine, used, 1) > 0)
            else:
                delta = sums
        total = y_now.to(tl.float32) + factor * delta
        tl.store(y_row + c_now, rounded(total, y_now.dtype, INTERPRETED), mask=touched)


@triton.jit
def _load_h_row(h_at, plane, r, rank, SPLIT_K: tl.constexpr):
    """Return h of one pair, its planes summed, zero beyond the rank.

    One load takes all planes: code for each of up to 32 would not stay in the caches.
    """
    PLANES: tl.constexpr = triton.next_power_of_2(SPLIT_K)
    k = tl.arange(0, PLANES)  # [planes]
    mask = (k < SPLIT_K)[:, None] & (r < rank)[None, :]
    h = tl.load(h_at + k[:, None] * plane + r[None, :], mask=mask, other=0.0)
    return tl.sum(h.to(tl.float32), axis=0)


@triton.jit
def _load_y_row(y_row, c, end, FRESH: tl.constexpr):
    """Return a block of a row of y, or zeros where y is fresh."""
    if FRESH:
        return tl.zeros((c.shape[0],), dtype=y_row.dtype.element_ty)
    return tl.load(y_row + c, mask=c < end, other=0.0)


@triton.jit
def _expand_columns(
    h_at,
    plane,
    b_key,
    b_stride_c,
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
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add CHUNKS blocks of columns, all ranks in one product; loads run one block ahead."""
    r = tl.arange(0, BLOCK_R)  # [R]
    c = first + tl.arange(0, BLOCK_C)  # [C]
    b = _load_b(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
    y = _load_y(y_rows, c, has_y, end, EVEN_C, FRESH)
    if PROGRAMMATIC:
        gdc_wait()  # only h needs the wait: the shrink waits for all earlier kernels itself
        gdc_launch_dependents()
    h = _load_h(h_at, plane, r, rank, has_pair, SPLIT_K)  # [T, R]
    for chunk in tl.static_range(CHUNKS):
        delta = product(h, within(b, r, rank), False, PRECISION, INTERPRETED)  # [T, C]
        c_now, y_now = c, y
        if chunk + 1 < CHUNKS:
            c = c + BLOCK_C
            b = _load_b(b_key, b_stride_c, c, r, end, read, EVEN_C, EVEN_R)
            y = _load_y(y_rows, c, has_y, end, EVEN_C, FRESH)
        _store_y(y_rows, c_now, y_now, factor[:, None] * delta, has_pair, end, EVEN_C, INTERPRETED)


@triton.jit
def _expand_general(
    h_at,
    plane,
    b_key,
    b_stride_c,
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
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Add one block of columns, BLOCK_R ranks at a time, each column with h of its own slice."""
    c = first + tl.arange(0, BLOCK_C)  # [C]
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
            b = _load_b(b_key, b_stride_c, c, r, end, highest, EVEN_C, EVEN_R)
            h = _load_h(h_at + s * RANK_PAD, plane, r, rank, has_pair, SPLIT_K)
            acc += product(h, within(b, r, rank), False, PRECISION, INTERPRETED)
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
def _expand_tma(
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
def _load_b(b_key, b_stride_c, c, r, end, rank, EVEN_C: tl.constexpr, EVEN_R: tl.constexpr):
    """Return a block of B, transposed; values beyond the rank are arbitrary."""
    mask = in_groups(r, rank, EVEN_R)[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    offsets = c.to(tl.int64)[None, :] * b_stride_c + r[:, None]
    return tl.load(b_key + offsets, mask=mask, other=0.0)  # [R, C]


@triton.jit
def _load_b_rows(b_key, b_stride_c, c, r, end, rank, EVEN_C: tl.constexpr, EVEN_R: tl.constexpr):
    """Return a block of B as it lies in memory; values beyond the rank are arbitrary."""
    mask = in_groups(r, rank, EVEN_R)[None, :]
    if not EVEN_C:
        mask = mask & (c < end)[:, None]
    offsets = c.to(tl.int64)[:, None] * b_stride_c + r[None, :]
    return tl.load(b_key + offsets, mask=mask, other=0.0)  # [C, R]


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
