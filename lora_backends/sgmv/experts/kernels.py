# mypy: ignore-errors
"""The kernels of a site: shrink, expand, and the sum over the pairs of a token.

A row of the grid is one tile of the routing: pairs of one slot and expert. h has a row for every
place of the sorted pairs. Axes: T (pairs of a tile), N (rows of A, all its matrices stacked), R
(rank), C (columns of y).

Offsets that a stride multiplies are int64: slot times stride exceeds int32 in large stacks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.experts.expand import expand_general, expand_single
from lora_backends.sgmv.experts.routing_kernels import RECORD
from lora_backends.sgmv.kernels.expand import expand_columns, expand_tma
from lora_backends.sgmv.kernels.indexing import columns_of, group_of, in_elements, in_groups
from lora_backends.sgmv.kernels.operands import ARows, RowsOfY, Tile
from lora_backends.sgmv.kernels.prefetch import prefetch_rows
from lora_backends.sgmv.kernels.products import rounded
from lora_backends.sgmv.kernels.shrink import partial_sums, row_sums, scale_of_rows


@triton.jit
def pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE: tl.constexpr):
    """Return the slot, expert, first place and number of pairs of a row, and its pairs [T].

    A tile has PARTS rows of the grid, of at most ROWS pairs each.
    """
    part = row % SITE.PARTS
    at = tiles_ptr + row // SITE.PARTS * RECORD
    slot, expert = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    # `only`, the first pair, is in the record: a tile of one pair needs no second load
    place, count, only = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    # with ROWS 1 the tiles are `singles` of the routing
    NUMBER: tl.constexpr = 1 if SITE.ROWS == 1 else 0
    used = row // SITE.PARTS < tl.load(count_ptr + NUMBER)
    count = tl.where(used, tl.minimum(count - part * SITE.ROWS, SITE.ROWS), 0)
    place += part * SITE.ROWS
    t = tl.arange(0, SITE.ROWS)  # [T]
    in_order = t < count
    if SITE.PARTS == 1:
        in_order = in_order & (t > 0)
    pair = tl.load(order_ptr + place + t, mask=in_order, other=0)  # [T]
    if SITE.PARTS == 1:
        pair = tl.where(t == 0, only, pair)
    return slot, expert, place, count, pair


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
    SITE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """h[k, place, s, :r] = x[row of the pair, part k] @ a[l, e, s, :r, part k].T.

    Pair p has row p // TOP_K of x: TOP_K is 1 where every pair has a row of its own. EAGER reads A
    up to MAX_RANK, whatever the rank: few programs wait for loads that follow each other.

    BY_TOKEN: tiles hold tokens of one slot, and h has a row for every token, of MAX_RANK ranks.

    SETTLED: the pairs were sorted before the kernel in front started (`SgmvRouting.settled`).
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    part = program % SIZES.SPLIT_K
    n = program // SIZES.SPLIT_K * SIZES.BLOCK_N + tl.arange(0, SIZES.BLOCK_N)  # [N]
    s = n // SIZES.RANK_PAD  # [N]
    r = n % SIZES.RANK_PAD  # [N]
    rows_of_slot = s.to(tl.int64) * a_stride_s + r.to(tl.int64) * a_stride_r  # [N]
    if SITE.SETTLED:
        slot, expert, place, count, pair = pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE)
        live = s < tl.where(count > 0, SITE.NUM_A, 0)  # [N]
        wanted = live & (r < SITE.MAX_RANK)
        if not SITE.EAGER:
            # a stale rank only prefetches too many rows or too few
            ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
            wanted &= r < tl.load(ranks_at, mask=live, other=0, cache_modifier=".cg")
        at = a_ptr + slot * a_stride_l + expert * a_stride_e + rows_of_slot  # [N]
        prefetch_rows(at, wanted, part, in_features, SIZES)
    if SIZES.PROGRAMMATIC:
        gdc_wait()  # before reading x, A, ranks and an unsettled routing: a kernel may write them
        gdc_launch_dependents()
    if not SITE.SETTLED:
        slot, expert, place, count, pair = pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE)
    if count <= 0:
        return
    t = tl.arange(0, SITE.ROWS)  # [T]
    if SITE.BY_TOKEN:
        rank = tl.where(s < SITE.NUM_A, SITE.MAX_RANK, 0)  # [N]
    else:
        ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
        # from L2: a line of L1 that came before the wait may be old
        FROM: tl.constexpr = ".cg" if SITE.SETTLED else ""
        rank = tl.load(ranks_at, mask=s < SITE.NUM_A, other=0, cache_modifier=FROM)  # [N]
    if SITE.EAGER:
        used = (s < SITE.NUM_A) & (r < SITE.MAX_RANK)
    else:
        used = r < rank
        if tl.max(rank - r) <= 0:
            return
    at = a_ptr + slot * a_stride_l + expert * a_stride_e + rows_of_slot  # [N]
    scales = (
        a_scales_ptr + slot * a_scales_stride_l + expert * a_scales_stride_e
        + s.to(tl.int64) * a_scales_stride_s + group_of(r, SIZES.GROUP_R) * a_scales_stride_r
    )  # [N] # fmt: skip
    a_rows = ARows(at=at, scales=scales, scale=scale_of_rows(scales, used, SIZES), used=used)
    if SITE.ROWS == 1:
        x_row = x_ptr + (tl.sum(pair) // SITE.TOP_K).to(tl.int64) * x_stride_t
        h = row_sums(x_row, a_rows, part, in_features, SIZES)  # [1, N]
    else:
        x_rows = x_ptr + (pair // SITE.TOP_K).to(tl.int64) * x_stride_t  # [T]
        h = partial_sums(x_rows, t < count, a_rows, part, in_features, SIZES)  # [T, N]
    h_row = pair if SITE.BY_TOKEN else place + t  # [T]
    WIDTH: tl.constexpr = SITE.NUM_A * SIZES.RANK_PAD
    h_at = h_ptr + (part * h_rows.to(tl.int64) + h_row) * WIDTH  # [T]
    mask = (t < count)[:, None] & in_groups(r, rank, SIZES.EVEN_R)[None, :]
    h_at = h_at[:, None] + n[None, :]  # [T, N]
    tl.store(h_at, rounded(h, h_ptr.dtype.element_ty, SIZES.INTERPRETED), mask=mask)


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
    PROGRAMS: tl.constexpr,
    SITE: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[pair, c] += factor * scaling * (h[place, s, :r] @ b[l, e, c, :r].T).

    With FRESH y is not read. INTERLEAVED: column c has slice c % NUM_A, else slices are blocks of
    columns, where NUM_A is 1 a single one. EAGER reads B up to MAX_RANK, whatever the rank.
    BY_TOKEN: h has a row for every token instead of every place.
    """
    row = tl.program_id(0) // PROGRAMS
    program = tl.program_id(0) % PROGRAMS
    slot, expert, place, count, pair = pairs_of(row, tiles_ptr, order_ptr, count_ptr, SITE)
    if count <= 0:
        if SIZES.PROGRAMMATIC:
            gdc_wait()  # so that this grid ends after the shrink, on which later kernels rely
        return
    s, first, end = columns_of(program, SIZES)
    t = tl.arange(0, SITE.ROWS)  # [T]
    NUM_A: tl.constexpr = SITE.NUM_A
    ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
    scalings_at = scalings_ptr + slot * scalings_stride_l + expert * scalings_stride_e + s
    rank = tl.load(ranks_at)
    if SITE.INTERLEAVED:
        for i in tl.static_range(1, NUM_A):
            rank = tl.maximum(rank, tl.load(ranks_at + i))
    GENERAL: tl.constexpr = SITE.INTERLEAVED or SIZES.RANK_PAD > SIZES.BLOCK_R
    # such kernels read B only after the rank is known, EAGER or not
    LATE: tl.constexpr = SITE.ROWS > 1 and (GENERAL or SIZES.STAGES > 1)
    has_pair = t < count  # [T]
    read, read_y = rank, has_pair
    if SITE.EAGER:
        has_pair = t < tl.where(rank > 0, count, 0)
        if LATE:
            read_y = has_pair
        else:
            read = rank * 0 + SITE.MAX_RANK
    else:
        if rank == 0:
            if SIZES.PROGRAMMATIC:
                gdc_wait()
            return
    scaling = 1.0
    if not SITE.INTERLEAVED:
        scaling = tl.load(scalings_at)
    WIDTH: tl.constexpr = NUM_A * SIZES.RANK_PAD
    plane = h_rows.to(tl.int64) * WIDTH
    h_slice = h_ptr + s * SIZES.RANK_PAD
    b_stride_l = in_elements(b_stride_l, b_ptr, SIZES.EVEN_R)
    b_stride_e = in_elements(b_stride_e, b_ptr, SIZES.EVEN_R)
    b_stride_c = in_elements(b_stride_c, b_ptr, SIZES.EVEN_R)
    b = b_ptr + slot * b_stride_l + expert * b_stride_e
    scales = b_scales_ptr + slot * b_scales_stride_l + expert * b_scales_stride_e
    if SITE.ROWS == 1:  # a pair alone has no axis T
        pair = tl.sum(pair)
        factor = scaling
        if SITE.WEIGHTED:
            factor = scaling * tl.load(factors_ptr + pair)
    else:
        factor = tl.full((SITE.ROWS,), 1.0, dtype=tl.float32) * scaling  # [T]
        if SITE.WEIGHTED:
            factor *= tl.load(factors_ptr + pair, mask=t < count, other=0.0)
    t_offset, j_offset = (pair // SITE.TOP_K).to(tl.int64), (pair % SITE.TOP_K).to(tl.int64)
    at = y_ptr + t_offset * y_stride_t + j_offset * y_stride_j
    if SITE.BY_TOKEN:
        h_row = pair // SITE.TOP_K
    elif SITE.ROWS == 1:
        h_row = place
    else:
        h_row = place + t  # [T]
    h = h_slice + h_row.to(tl.int64) * WIDTH
    y = RowsOfY(at=at, read=read_y, written=has_pair)
    if SITE.ROWS == 1:
        end = tl.where(read > 0, end, 0)
    else:
        factor = factor[:, None]
    tile = Tile(
        h=h, plane=plane, y=y, factor=factor, b=b, b_stride=b_stride_c, read=read, rank=rank,
        scales=scales, scales_stride=b_scales_stride_c, first=first, end=end,
    )  # fmt: skip
    if SITE.ROWS == 1:
        expand_single(tile, ranks_at, scalings_at, SITE, SIZES)
    elif SIZES.STAGES > 1:
        b_row = ((slot * b_stride_l + expert * b_stride_e) // b_stride_c).to(tl.int32)
        expand_tma(tile, b_tma, b_row, SIZES)
    elif GENERAL:
        expand_general(tile, ranks_at, scalings_at, SITE, SIZES)
    else:
        expand_columns(tile, SIZES.BLOCK_R, SIZES)


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
    SIZES: tl.constexpr,
):
    """y[t, c] += the sum over j of deltas[t * TOP_K + j, c], in order, where any pair has a rank.

    STARTS are the first columns of the slices; where NUM_A is 1 there is one.
    """
    SLICES: tl.constexpr = len(SIZES.STARTS)
    C: tl.constexpr = SIZES.BLOCK_C
    t = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    c = tl.program_id(0) % PROGRAMS * C + tl.arange(0, C)  # [C]
    if SIZES.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + t).to(tl.int64)
    s = c * 0  # [C]
    if SIZES.INTERLEAVED:
        s = c % SIZES.NUM_A
    else:
        for i in tl.static_range(1, SLICES):
            s += (c >= SIZES.STARTS[i]).to(tl.int32)
    total = tl.zeros((C,), dtype=tl.float32)
    touched = c < 0
    for j in range(SIZES.TOP_K):
        pair = t * SIZES.TOP_K + j
        expert = tl.load(experts_ptr + pair)
        end = tl.where((expert >= 0) & (slot >= 0), out_features, 0)
        ranks_at = ranks_ptr + slot * ranks_stride_l + expert * ranks_stride_e + s
        live = tl.load(ranks_at, mask=c < end, other=0) > 0
        total += tl.load(deltas_ptr + pair * out_features + c, mask=live, other=0.0)
        touched = touched | live
    y_at = y_ptr + t * y_stride_t + c
    y = tl.load(y_at, mask=touched, other=0.0)
    tl.store(y_at, rounded(y.to(tl.float32) + total, y.dtype, SIZES.INTERPRETED), mask=touched)
