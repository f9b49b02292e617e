"""Shrink and expand for 8-bit stacks: one set of kernels for every dtype and every block of scales.

All segments take the way of the long ones: rows of A and tiles of B are widened, multiplied by
their scales and stored as float32, and so are rows of x and tiles of y. The innermost loops meet
nothing but float32: dtypes are asked for once a row, and no kernel is compiled for each. What comes
next in memory is fetched while the present is widened.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from lora_backends.numba_cpu import vectors as v
from lora_backends.numba_cpu.config import (
    EXPAND_COST,
    FETCH_COST,
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    MAX_SEGMENT,
    SHRINK_RANKS,
)
from lora_backends.numba_cpu.kernels import (
    CALL_FIELDS,
    LAYER_FIELDS,
    SHRINK,
    SLOT_MASK,
    SOURCES,
    compiled,
    eight_rows,
    expand_column,
    expand_work,
    four_rows,
    highest_rank,
    own_units,
    place_of,
    prefetch_rows,
    rank_of,
    run_to_first,
    scaling_of,
    shrink_block,
    shrink_work,
    slice_of,
    unpack,
    unpack_call,
)
from lora_backends.numba_cpu.kernels_bias import load_bias
from lora_backends.numba_cpu.kernels_long import (
    A_BYTES,
    LINE,
    MANY_TILES,
    ONE_TILE,
    SUMS_BYTES,
    TOKENS,
    X_BYTES,
    add_block,
    add_stored_columns,
    aligned,
    row_at,
    two_rows,
)
from lora_backends.numba_cpu.layer import BIAS_BFLOAT16, BIAS_FLOAT32, E4M3, INT8
from lora_backends.numba_cpu.plan import EXPERT_BITS

LANES = v.LANES
ORDER_BYTES = 8 * MAX_SEGMENT  # the order of the copy of y
TILE_BYTES = LINE * len(MANY_TILES)  # of a row of it
SCRATCH = (ORDER_BYTES + TILE_BYTES * MAX_SEGMENT + LINE) // 4


def entry() -> Any:
    """Compile what the host calls; it takes a `Call`'s address."""
    sources = SOURCES

    def run(address):
        _ = sources
        run_call(address)

    return compiled(types.void(types.int64), run)


def first_entry() -> Any:
    """Compile the first half."""
    sources = SOURCES

    def run(address, part, parts, low, high):
        _ = sources
        run_first(address, part, parts, low, high)

    return compiled(types.void(*[types.int64] * 5), run)


@njit(nogil=True)
def run_call(address):
    """Do one thread's part of a call, as `kernels.run_call` does."""
    call, layer, segments, part, parts = run_to_first(address)
    if call.expand:
        h = (call.h, call.h_slice, call.h_row, call.h_order)
        y = (call.y, call.y_row, call.y_order)
        scales = (call.scales, call.scales_row, call.scales_order)
        expand_part(part, parts, layer, segments, scales, h, (call.y_dtype, y))


@njit(nogil=True)
def run_first(address, part, parts, low, high):
    """Do a part of the first half of a call: of its segments from `low` to `high`."""
    call = unpack_call(carray(v.ints(address), CALL_FIELDS))
    layer = unpack(carray(v.ints(call.layer), LAYER_FIELDS))
    segments = carray(v.ints(call.a_segments), (call.a_count, 3))[low:high]
    x = (call.x, call.x_row, call.x_order)
    h = (call.h, call.h_slice, call.h_row, call.to_order)
    if call.first == SHRINK:
        shrink_part(part, parts, layer, segments, call.a_span, call.x_dtype, x, h)
    elif part == 0:
        gather(layer, segments, x, h)


@njit(nogil=True, forceinline=True)
def start_of(start, slot_stride, expert_stride, key):
    """Return where the part of a segment's slot and expert begins."""
    return start + (key & SLOT_MASK) * slot_stride + (key >> EXPERT_BITS) * expert_stride


@njit(nogil=True)
def a_of(layer, item, key):
    """Return A of a segment: its rows, and their scales."""
    a = start_of(item.a, item.a_slot, item.a_expert, key)
    at = start_of(item.a_scales, item.a_scales_slot, item.a_scales_expert, key)
    steps = (item.a_scales_row, item.a_scales_column)
    return (a, item.a_row, layer.in_features), (at, steps, (layer.block_rows, layer.block_columns))


@njit(nogil=True)
def b_scales_of(layer, item, key):
    """Return the scales of B of a segment."""
    at = start_of(item.b_scales, item.b_scales_slot, item.b_scales_expert, key)
    steps = (item.b_scales_row, item.b_scales_column)
    return at, steps, (layer.block_rows, layer.block_columns)


@njit(nogil=True)
def group_scales(scales, row):
    """Return where the scales of a row's groups lie."""
    at, (step, _), (rows, _) = scales
    return at + row // rows * step if rows != 0 else at


@njit(nogil=True)
def scale_of(scales, row, column):
    """Return the scale of one element."""
    _, (_, step), (_, columns) = scales
    group = column // columns if columns != 0 else 0
    return v.read(v.FLOAT32, group_scales(scales, row) + group * step)


@njit(nogil=True)
def read_stored(stored, address):
    """Return one element as float32."""
    if stored == INT8:
        return v.read(v.INT8, address)
    if stored == E4M3:
        return v.read(v.E4M3, address)
    return v.read(v.E5M2, address)


@njit(nogil=True)
def gather(layer, segments, ids, h):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``; ids are int64."""
    for slot, start, stop in segments:
        for s in range(layer.num_slices):
            (a, a_row, _), scales = a_of(layer, slice_of(layer, s), slot)
            to = (h[0] + s * h[1], h[2], h[3])
            for t in range(start, stop):
                column = v.read_id(row_at(ids, t))
                for j in range(rank_of(layer, slot, s)):
                    element = read_stored(layer.stored, a + j * a_row + column)
                    element *= scale_of(scales, j, column)
                    v.write(v.FLOAT32, row_at(to, t) + 4 * j, element)


@njit(nogil=True)
def shrink_part(part, parts, layer, segments, span, x_dtype, x, h):
    """Write this part's blocks of ``h[s, t, :r] = x[t] @ a[l, s, :r].T``."""
    total, longest = shrink_work(layer, segments, span, LONG_RANKS)
    groups = (longest + TOKENS - 1) // TOKENS
    sums = LONG_PANEL // LONG_RANKS * SUMS_BYTES
    whole_x = min(longest, LONG_SEGMENT) * (4 * layer.in_features + LINE)
    long = groups * (X_BYTES + sums) + A_BYTES
    scratch = np.empty((max(long, whole_x + ORDER_BYTES) + LINE) // 4, np.float32)
    before = 0
    for key, start, stop in segments:
        own_x, copied = (x[0], x[1], x[2] + 8 * start), False
        for s in range(layer.num_slices):
            rank, cost = highest_rank(layer, key, span, s), FETCH_COST + stop - start
            blocks = (rank + LONG_RANKS - 1) // LONG_RANKS
            first, last = own_units(part, parts, total, before, blocks, cost)
            before += blocks * cost
            rows, scales = a_of(layer, slice_of(layer, s), key)
            columns, tokens = (first * LONG_RANKS, min(last * LONG_RANKS, rank)), stop - start
            to = (h[0] + s * h[1], h[2], h[3] + 8 * start)
            if columns[0] >= columns[1]:
                continue
            if layer.stored == INT8 and layer.block_columns == 0 and tokens < LONG_SEGMENT:
                if not copied:
                    copy_x(x_dtype, own_x, tokens, layer.in_features, aligned(scratch))
                    copied = True
                shrink_short(rows, columns, aligned(scratch), tokens, to)
            else:
                for j in range(columns[0], columns[1], LONG_PANEL):
                    own = (layer.stored, rows, scales, j, min(columns[1] - j, LONG_PANEL))
                    to_panel = (to[0] + 4 * j, to[1], to[2])
                    shrink_panel(own, aligned(scratch), tokens, x_dtype, own_x, to_panel)
                copied = False
            if layer.block_columns == 0:
                scale_h(scales, columns, tokens, to)


@njit(nogil=True)
def copy_x(x_dtype, x, tokens, width, to):
    """Store rows of x as float32, behind their order: the numbers from 0."""
    for t in range(tokens):
        carray(v.ints(to), MAX_SEGMENT)[t] = t
        row = to + ORDER_BYTES + t * row_bytes(width)
        pack_x(x_dtype, row_at(x, t), (0, width), row, LINE)


@njit(nogil=True, forceinline=True)
def row_bytes(width):
    """Return the bytes of a row of float32, whole cache lines."""
    return (4 * width + LINE - 1) // LINE * LINE


@njit(nogil=True)
def shrink_short(rows, columns, x, tokens, h):
    """Write some columns of h for few tokens: int8 is widened in registers, the fastest way."""
    a, a_row, n = rows
    copy = (x + ORDER_BYTES, row_bytes(n), x)
    for j in range(columns[0], columns[1], SHRINK_RANKS):
        block, count = (a + j * a_row, a_row, n), min(columns[1] - j, SHRINK_RANKS)
        to = (h[0] + 4 * j, h[1], h[2])
        shrink_block((v.INT8, v.FLOAT32), block, count, 0, tokens, copy, to)


@njit(nogil=True)
def scale_h(scales, columns, tokens, h):
    """Multiply columns of h by the scales of their rows of a."""
    for j in range(columns[0], columns[1]):
        factor = scale_of(scales, j, 0)
        for t in range(tokens):
            at = row_at(h, t) + 4 * j
            v.write(v.FLOAT32, at, v.read(v.FLOAT32, at) * factor)


@njit(nogil=True)
def shrink_panel(panel, packed_x, tokens, x_dtype, x, h):
    """Write up to `LONG_PANEL` columns of h, by chunks of the inputs.

    The last token fills up a group of tokens, the last row of a a block of rows.
    """
    stored, (a, a_row, n), scales, first, count = panel
    groups = (tokens + TOKENS - 1) // TOKENS
    packed_a = packed_x + groups * X_BYTES  # [groups, vectors, TOKENS, 16] float32 before
    all_sums = packed_a + A_BYTES  # [vectors, LONG_RANKS, 16] float32 before
    a += first * a_row
    for k in range(0, n, LONG_CHUNK):
        columns = (k, min(n - k, LONG_CHUNK))
        for i in range(groups * TOKENS):
            to = packed_x + i // TOKENS * X_BYTES + i % TOKENS * LINE
            pack_x(x_dtype, row_at(x, min(i, tokens - 1)), columns, to, TOKENS * LINE)
        sums = all_sums  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
        for j in range(0, count, LONG_RANKS):
            ahead = LONG_RANKS * a_row
            if j + LONG_RANKS >= count and k + LONG_CHUNK < n:
                ahead = LONG_CHUNK - j * a_row
            for i in range(LONG_RANKS):
                row = min(j + i, count - 1)
                of_row = (group_scales(scales, first + row), scales[1][1], scales[2][1])
                pack_a(stored, a + row * a_row, columns, of_row, packed_a + i * LINE, ahead)
            block = (packed_a, packed_x, sums, (columns[1] + LANES - 1) // LANES)
            fetch = ((0, 0, 0, 0), x, 0, 0)  # `pack_a` has fetched
            begun, ends = k > 0, k + LONG_CHUNK >= n
            add_block(block, fetch, begun, ends, count - j, tokens, (h[0] + 4 * j, h[1], h[2]))
            sums += groups * SUMS_BYTES


@njit(nogil=True)
def pack_x(x_dtype, row, columns, to, step):
    """Store some columns of a row of x as vectors of float32, `step` bytes apart."""
    if x_dtype == BIAS_FLOAT32:
        pack(v.FLOAT32, row, columns, np.float32(1), to, step, 0)
    elif x_dtype == BIAS_BFLOAT16:
        pack(v.BFLOAT16, row, columns, np.float32(1), to, step, 0)
    else:
        pack(v.FLOAT16, row, columns, np.float32(1), to, step, 0)


@njit(nogil=True)
def pack_a(stored, row, columns, scales, to, ahead):
    """Store a chunk of a row of a, times its scales, as vectors of float32."""
    at, step, size = scales
    first, width = columns
    if size == 0:  # `scale_h` multiplies the sums
        pack_scaled(stored, row, columns, np.float32(1), to, ahead)
    elif size % LANES == 0:  # whole vectors have one scale
        k = first
        while k < first + width:
            part = min(size - k % size, first + width - k)
            factor = v.read(v.FLOAT32, at + k // size * step)
            own = to + (k - first) // LANES * LINE * LONG_RANKS
            pack_scaled(stored, row, (k, part), factor, own, ahead)
            k += part
    else:
        for i in range((width + LANES - 1) // LANES * LANES):
            item = np.float32(0)
            if i < width:
                item = read_stored(stored, row + first + i)
                item *= v.read(v.FLOAT32, at + (first + i) // size * step)
            v.write(v.FLOAT32, to + i // LANES * LINE * LONG_RANKS + i % LANES * 4, item)


@njit(nogil=True)
def pack_scaled(stored, row, columns, factor, to, ahead):
    """Store some columns of a row of a, times one scale, as vectors of float32."""
    if stored == INT8:
        pack(v.INT8, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    elif stored == E4M3:
        pack(v.E4M3, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    else:
        pack(v.E5M2, row, columns, factor, to, LONG_RANKS * LINE, ahead)


@njit(nogil=True)
def pack(kind, row, columns, factor, to, step, ahead):
    """Store some columns of a row, times a factor, as vectors of float32 `step` bytes apart."""
    first, width = columns
    at, factors, k = row + first * v.size(kind), v.splat(factor), 0
    while k + 4 * LANES <= width:
        v.prefetch((at,), ahead)
        loaded = (
            v.load(kind, at),
            v.load(kind, at + LANES * v.size(kind)),
            v.load(kind, at + 2 * LANES * v.size(kind)),
            v.load(kind, at + 3 * LANES * v.size(kind)),
        )
        v.store_all(to, step, v.multiply(loaded, factors))
        at += 4 * LANES * v.size(kind)
        to += 4 * step
        k += 4 * LANES
    while k + LANES <= width:
        v.store_all(to, step, v.multiply((v.load(kind, at),), factors))
        at += LANES * v.size(kind)
        to += step
        k += LANES
    if k < width:
        v.store_all(to, step, v.multiply(v.load_some(kind, (at,), 0, width - k), factors))


@njit(nogil=True)
def expand_part(part, parts, layer, segments, token_scales, h, y):
    """Add this part's columns of ``scale * scaling * h @ b.T + bias`` to y."""
    total, _ = expand_work(layer, segments)
    scratch = np.empty(SCRATCH + LANES * len(MANY_TILES) * (layer.max_rank + 1), np.float32)
    to_y = aligned(scratch)
    for t in range(MAX_SEGMENT):
        carray(v.ints(to_y), MAX_SEGMENT)[t] = t
    before = 0
    for key, start, stop in segments:
        for s in range(layer.num_slices):
            item = slice_of(layer, s)
            rank = rank_of(layer, key, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            cost = (FETCH_COST + stop - start) * (rank + EXPAND_COST)
            first, last = own_units(part, parts, total, before, tiles, cost)
            before += tiles * cost
            if rank == 0 and layer.bias == 0 and layer.output_scales == 0:
                continue
            factors = (rank, scaling_of(layer, key, s, rank), token_scales)
            h_slice = (h[0] + s * h[1], h[2], h[3])
            columns = to_y + ORDER_BYTES + TILE_BYTES * MAX_SEGMENT
            stored = (layer.stored, b_scales_of(layer, item, key), columns)
            full = (item.last - item.first) // LANES
            at, count, tokens = first * LANES, min(last, full) - first, (start, stop)
            in_registers = layer.stored == INT8 and layer.block_columns == 0 and rank > 0
            in_registers = in_registers and layer.output_scales == 0
            while count > 0:
                place = place_of(layer, item, key, at)
                if in_registers:
                    tiles = min(count, len(MANY_TILES))
                    expand_int8(stored, place, tiles, at, factors, tokens, h_slice, y, to_y)
                    at, count = at + LANES * tiles, count - tiles
                elif count >= len(MANY_TILES):
                    expand_columns(MANY_TILES, stored, place, at, factors, tokens, h_slice, y, to_y)
                    at, count = at + LANES * len(MANY_TILES), count - len(MANY_TILES)
                else:
                    expand_columns(ONE_TILE, stored, place, at, factors, tokens, h_slice, y, to_y)
                    at, count = at + LANES, count - 1
            if first <= full < last:
                for column in range(full * LANES, item.last - item.first):
                    place = place_of(layer, item, key, column)
                    expand_row(stored, place, column, factors, tokens, h_slice, y, to_y)


@njit(nogil=True)
def expand_row(stored, place, row, factors, tokens, h, y, to_y):
    """Add to one column of y; `row` is its row of b in the slice."""
    dtype, scales, to = stored
    b, _, bias, output_scale, column = place
    for j in range(factors[0]):
        item = read_stored(dtype, b + j) * scale_of(scales, row, j)
        v.write(v.FLOAT32, to + 4 * j, item)
    target, within = widen_y(y, tokens, column, 1, to_y)
    own = (to, 0, bias, output_scale, within)
    expand_column((v.FLOAT32, v.FLOAT32), own, factors, tokens[0], tokens[1], h, target)
    narrow_y(y, tokens, column, 1, to_y)


@njit(nogil=True)
def expand_columns(tiles, stored, place, row, factors, tokens, h, y, to_y):
    """Add to 16 columns of y per item of `tiles`; `row` is their first row of b in the slice."""
    dtype, scales, columns = stored
    b, b_row, bias, output_scale, column = place
    rank, step, width = factors[0], LINE * len(tiles), LANES * len(tiles)
    for i in range(len(tiles)):
        rows = (b + i * LANES * b_row, b_row, row + i * LANES)
        prefetch_rows(rows[0], b_row, rank)
        store_tile(dtype, rows, rank, scales, columns + i * LINE, step)
    paired = rank - rank % 4  # as in `expand_column` for float32
    target, within = widen_y(y, tokens, column, width, to_y)
    own = (b, b_row, bias, output_scale, within)
    add_stored_columns(tiles, v.FLOAT32, own, factors, paired, 0, columns, tokens, h, target)
    narrow_y(y, tokens, column, width, to_y)


@njit(nogil=True)
def expand_int8(stored, place, tiles, row, factors, tokens, h, y, to_y):
    """Do what `expand_columns` does for int8 with a scale per row, which registers widen faster."""
    rank, scaling, scales = factors
    b, b_row, bias, _, column = place
    (t, end), fresh = tokens, True
    target, within = widen_y(y, tokens, column, LANES * tiles, to_y)
    own = (b, b_row, bias, row, within)
    while t + 8 <= end:
        fac8 = (rank, v.read_scaled(eight_rows(scales, t), scaling))
        int8_rows(stored, own, tiles, fac8, fresh, eight_rows(h, t), eight_rows(target, t))
        t, fresh = t + 8, False
    if t + 4 <= end:
        fac4 = (rank, v.read_scaled(four_rows(scales, t), scaling))
        int8_rows(stored, own, tiles, fac4, fresh, four_rows(h, t), four_rows(target, t))
        t, fresh = t + 4, False
    if t + 2 <= end:
        fac2 = (rank, v.read_scaled(two_rows(scales, t), scaling))
        int8_rows(stored, own, tiles, fac2, fresh, two_rows(h, t), two_rows(target, t))
        t, fresh = t + 2, False
    if t < end:
        fac1 = (rank, v.read_scaled((row_at(scales, t),), scaling))
        int8_rows(stored, own, tiles, fac1, fresh, (row_at(h, t),), (row_at(target, t),))
    narrow_y(y, tokens, column, LANES * tiles, to_y)


@njit(nogil=True, forceinline=True)
def int8_rows(stored, place, tiles, factors, fresh, h_rows, y_rows):
    """Add to `tiles` times 16 columns of some rows of y, which are float32."""
    b, b_row, (bias_dtype, bias, bias_size), row, column = place
    rank, scalings = factors
    added = v.zeros((0,), (0,))
    for _ in range(tiles):
        if fresh:
            prefetch_rows(b, b_row, rank)
        if bias != 0:
            added = (load_bias(bias_dtype, bias),)
            bias += LANES * bias_size
        sums = v.zeros((0, 0), h_rows)
        j = 0
        while j + 16 <= rank:
            sums = v.add_columns(sums, v.load_columns(v.INT8, b + j, b_row), h_rows, j)
            j += 16
        while j + 4 <= rank:
            sums = v.add_columns(sums, v.load_four(v.INT8, b + j, b_row), h_rows, j)
            j += 4
        while j < rank:
            sums = v.add_columns(sums, (v.load_column(v.INT8, b + j, b_row),), h_rows, j)
            j += 1
        sums = v.multiply(sums, row_scales(stored[1], row, 0, stored[2]))
        v.update_rows(v.FLOAT32, y_rows, column, sums, scalings, added, ())
        b += LANES * b_row
        row += LANES
        column += LANES


@njit(nogil=True)
def widen_y(y, tokens, column, width, to_y):
    """Return y as float32: itself, or a copy of some columns; and the first of the columns in it.

    The copy lies behind its order at `to_y`, the numbers from 0.
    """
    dtype, rows = y
    if dtype == BIAS_FLOAT32:
        return rows, column
    for t in range(tokens[0], tokens[1]):
        to = to_y + ORDER_BYTES + (t - tokens[0]) * TILE_BYTES
        if dtype == BIAS_BFLOAT16:
            widen_row(v.BFLOAT16, row_at(rows, t) + 2 * column, width, to)
        else:
            widen_row(v.FLOAT16, row_at(rows, t) + 2 * column, width, to)
    return (to_y + ORDER_BYTES, TILE_BYTES, to_y - 8 * tokens[0]), 0


@njit(nogil=True)
def widen_row(kind, row, width, to):
    """Store `width` elements as float32, and fetch as many behind them."""
    v.prefetch((row,), 2 * width)
    for k in range(0, width - LANES + 1, LANES):
        v.store(v.FLOAT32, to + 4 * k, v.load(kind, row + 2 * k))
    for k in range(width - width % LANES, width):
        v.write(v.FLOAT32, to + 4 * k, v.read(kind, row + 2 * k))


@njit(nogil=True)
def narrow_y(y, tokens, column, width, to_y):
    """Store the copy that `widen_y` made, each element rounded."""
    dtype, rows = y
    if dtype == BIAS_FLOAT32:
        return
    for t in range(tokens[0], tokens[1]):
        at = to_y + ORDER_BYTES + (t - tokens[0]) * TILE_BYTES
        if dtype == BIAS_BFLOAT16:
            narrow_row(v.BFLOAT16, at, width, row_at(rows, t) + 2 * column)
        else:
            narrow_row(v.FLOAT16, at, width, row_at(rows, t) + 2 * column)


@njit(nogil=True)
def narrow_row(kind, row, width, to):
    """Store `width` elements of float32 as another kind."""
    for k in range(0, width - LANES + 1, LANES):
        v.store(kind, to + 2 * k, v.load(v.FLOAT32, row + 4 * k))
    for k in range(width - width % LANES, width):
        v.write(kind, to + 2 * k, v.read(v.FLOAT32, row + 4 * k))


@njit(nogil=True)
def store_tile(dtype, rows, rank, scales, to, step):
    """Do what `store_columns` does for a dtype."""
    if dtype == INT8:
        store_columns(v.INT8, rows, rank, scales, to, step)
    elif dtype == E4M3:
        store_columns(v.E4M3, rows, rank, scales, to, step)
    else:
        store_columns(v.E5M2, rows, rank, scales, to, step)


@njit(nogil=True)
def store_columns(kind, rows, rank, scales, to, step):
    """Store 16 rows of b, times their scales, as `rank` vectors of float32, `step` bytes apart."""
    b, b_row, row = rows
    size, j = scales[2][1], 0
    while j < rank:
        end = rank if size == 0 else min(rank, j + size)  # j is the first of a group
        factors = row_scales(scales, row, j, to + step * j)
        while j + 16 <= end:
            columns = v.load_columns(kind, b + j, b_row)
            v.store_all(to + step * j, step, v.multiply(columns, factors))
            j += 16
        while j + 4 <= end:
            four = v.load_four(kind, b + j, b_row)
            v.store_all(to + step * j, step, v.multiply(four, factors))
            j += 4
        while j < end:
            column = (v.load_column(kind, b + j, b_row),)
            v.store_all(to + step * j, step, v.multiply(column, factors))
            j += 1


@njit(nogil=True)
def row_scales(scales, row, column, spare):
    """Return the scales of 16 rows in a column's group; `spare` is memory for a vector."""
    at, (step, _), (rows, _) = scales
    if rows == 0:
        return v.splat(scale_of(scales, row, column))
    if rows == 1 and step == 4:
        return v.load(v.FLOAT32, at + 4 * row)
    for lane in range(LANES):
        v.write(v.FLOAT32, spare + 4 * lane, scale_of(scales, row + lane, column))
    return v.load(v.FLOAT32, spare)
