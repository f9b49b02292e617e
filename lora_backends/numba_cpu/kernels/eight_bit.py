"""Shrink and expand for 8-bit stacks: one set of kernels for every dtype and every block of scales.

int8 with a scale per row is widened in registers: A in segments below `LONG_SEGMENT` tokens, B in
segments of any length where the layer has no output_scales. The scales of A multiply h, those of B
the sums of a column. Where x is bfloat16 and the CPU multiplies pairs of it, int8 of A becomes
bfloat16, for segments of any length: products are exact, and sums stay float32.

All else takes the way of long segments of 16 bits: rows of A and tiles of B are widened, multiplied
by their scales and stored as float32. While one row is widened, the next is prefetched.

`shrink_dots` reads x in bfloat16, and `expand_int8` is compiled for each dtype of y. All other
routines work on float32 copies of x, and of y unless it is float32 already, so they are compiled
once for any dtypes of x and y.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.config import (
    DOT_AHEAD,
    DOT_CHUNK,
    EXPAND_COST,
    FETCH_COST,
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    MAX_SEGMENT,
)
from lora_backends.numba_cpu.kernels.bias import load_bias
from lora_backends.numba_cpu.kernels.dense import (
    SEGMENT_BYTES,
    SLICE_BYTES,
    Call,
    Segment,
    expand_work,
    factors_of,
    highest_rank,
    own_units,
    place_of,
    rank_of,
    rows_of,
    share_of,
    shrink_work,
    start_of,
)
from lora_backends.numba_cpu.kernels.long import (
    A_BYTES,
    LINE,
    MANY_TILES,
    SUMS_BYTES,
    TOKENS,
    aligned,
    sums_bytes,
)
from lora_backends.numba_cpu.kernels.short import (
    EIGHT,
    FOUR,
    NO_STEPS,
    ONE,
    TWO,
    read_scaling,
    steps_of,
)
from lora_backends.numba_cpu.layer import BIAS_BFLOAT16, BIAS_FLOAT32, E4M3, INT8, Layer, Slice
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined
from lora_backends.numba_cpu.needs import GATHER, SHRINK

LANES = v.LANES
TILE_AHEAD = 4096  # distance in bytes of prefetches of B, whose 16 rows are few bytes
ORDER_BYTES = 8 * MAX_SEGMENT  # the order of a copy of x or y
DOT_BYTES = 8 * (2 * DOT_CHUNK + LONG_PANEL * LINE)  # copies of 8 rows of x, and sums
X_ROW = 4 * LONG_CHUNK  # bytes of a row of the copy of x
TILE_BYTES = LINE * len(MANY_TILES)  # of a row of it
SCALES_BYTES = 4 * LANES * len(MANY_TILES)  # of the rows of b that meet all tokens in turn
SCRATCH = (ORDER_BYTES + TILE_BYTES * MAX_SEGMENT + LINE) // 4


class Routines(NamedTuple):
    """The addresses of routines; 0 where a call needs none."""

    shrink_dots: int  # of int8 by bfloat16
    copy_x: int  # as float32, for the next
    shrink_short: int  # of int8 by float32
    shrink_panel: int
    add_block: int
    gather: int
    expand_int8: int  # for the dtype of y
    expand_stored: int
    add_many: int  # `add_stored` to float32, for 4 tiles and for one
    add_one: int
    expand_ragged: int
    expand_column: int  # of float32


def entry() -> Any:
    """Compile what the host calls; it takes a `Call`'s address."""

    def run(address):
        call = v.record(Call, address)
        layer = v.record(Layer, call.layer)
        routines = v.record(Routines, call.routines)
        part, parts, barrier, low, high = share_of(call, layer)
        if call.first == SHRINK:
            shrink_part(part, parts, call, layer, routines, low, call.a_count if high < 0 else high)
        elif call.first == GATHER and part == 0:
            v.invoke(routines.gather, (address, low, call.a_count if high < 0 else high))
        if barrier != 0:
            v.call(barrier)
        if call.expand:
            expand_part(part, parts, call, layer, routines, low, call.b_count if high < 0 else high)

    return compiled(run)


@function
def a_of(layer, item, key):
    """Return A of a segment: its rows, and their scales."""
    a = start_of(item.a, item.a_slot, item.a_expert, key)
    at = start_of(item.a_scales, item.a_scales_slot, item.a_scales_expert, key)
    steps = (item.a_scales_row, item.a_scales_column)
    return (a, item.a_row, layer.in_features), (at, steps, (layer.block_rows, layer.block_columns))


@function
def b_scales_of(layer, item, key):
    """Return the scales of B of a segment."""
    at = start_of(item.b_scales, item.b_scales_slot, item.b_scales_expert, key)
    steps = (item.b_scales_row, item.b_scales_column)
    return at, steps, (layer.block_rows, layer.block_columns)


@function
def group_scales(scales, row):
    """Return where the scales of a row's groups lie."""
    at, (step, _), (rows, _) = scales
    return at + row // rows * step if rows != 0 else at


@function
def scale_of(scales, row, column):
    """Return the scale of one element."""
    _, (_, step), (_, columns) = scales
    group = column // columns if columns != 0 else 0
    return v.read(v.FLOAT32, group_scales(scales, row) + group * step)


@function
def read_stored(stored, address):
    """Return one element as float32."""
    if stored == INT8:
        return v.read(v.INT8, address)
    if stored == E4M3:
        return v.read(v.E4M3, address)
    return v.read(v.E5M2, address)


def gather() -> Any:
    """Compile ``h[s, t, :r] = a[l, s, :r, ids[t]]`` for a call's segments; ids are int64."""

    def run(address, low, high):
        call = v.record(Call, address)
        layer = v.record(Layer, call.layer)
        ids = (call.x, call.x_row, call.x_order)
        for i in range(low, high):
            key, start, stop = v.fields(Segment, call.a_segments + i * SEGMENT_BYTES)
            for s in range(layer.num_slices):
                item = v.record(Slice, layer.slices + s * SLICE_BYTES)
                (a, a_row, _n), scales = a_of(layer, item, key)
                h = (call.h + s * call.h_slice, call.h_row, call.to_order)
                rows = (layer.stored, a, a_row, rank_of(layer, key, s))
                gather_rows(rows, scales, start, stop, ids, h)

    return compiled(run)


@function
def gather_rows(rows, scales, t, end, ids, h):
    """Write columns of a as rows of h. Its own function: LLVM compiles the caller for size."""
    stored, a, a_row, rank = rows
    for i in range(t, end):
        (at,), (to,) = v.rows(ids, i, ONE), v.rows(h, i, ONE)
        column = v.read_id(at)
        for j in range(rank):
            element = read_stored(stored, a + j * a_row + column)
            v.write(v.FLOAT32, to + 4 * j, element * scale_of(scales, j, column))


@inlined
def shrink_part(part, parts, call, layer, routines, low, high):
    """Write this part's blocks of ``h[s, t, :r] = x[t] @ a[l, s, :r].T``."""
    total, longest = shrink_work(layer, call.a_segments, low, high, call.a_span, LONG_RANKS)
    whole_x = min(longest, LONG_SEGMENT) * (4 * layer.in_features + LINE)
    long = longest * X_ROW + A_BYTES + sums_bytes(longest)
    scratch = np.empty((ORDER_BYTES + max(long, whole_x, DOT_BYTES) + LINE) // 4, np.float32)
    for t in range(longest):
        v.write_id(aligned(scratch) + 8 * t, t)
    before = np.int64(0)
    for i in range(low, high):
        key, start, stop = v.fields(Segment, call.a_segments + i * SEGMENT_BYTES)
        x, copied = (call.x, call.x_row, call.x_order + 8 * start), False
        for s in range(layer.num_slices):
            rank, cost = highest_rank(layer, key, call.a_span, s), FETCH_COST + stop - start
            blocks = (rank + LONG_RANKS - 1) // LONG_RANKS
            first, last = own_units(part, parts, total, before, blocks, cost)
            before += blocks * cost
            first, last, tokens = first * LONG_RANKS, min(last * LONG_RANKS, rank), stop - start
            if first >= last:
                continue
            item = v.record(Slice, layer.slices + s * SLICE_BYTES)
            (a, a_row, n), scales = a_of(layer, item, key)
            own_scratch = aligned(scratch)
            h = (call.h + s * call.h_slice, call.h_row, call.to_order + 8 * start)
            if routines.shrink_dots != 0:
                for j in range(first, last, LONG_PANEL):
                    part_of_a = (a + j * a_row, a_row, n, min(last - j, LONG_PANEL), tokens)
                    own_h = (h[0] + 4 * j, h[1], h[2])
                    v.invoke(routines.shrink_dots, (own_scratch,) + part_of_a + x + own_h)
            elif layer.stored == INT8 and layer.block_columns == 0 and tokens < LONG_SEGMENT:
                if not copied:
                    v.invoke(routines.copy_x, (call.x_dtype, *x, tokens, n, own_scratch))
                    copied = True
                copy = (own_scratch + ORDER_BYTES, row_bytes(n), own_scratch)
                own_rows = (a, a_row, n, first, last, int(last == layer.max_rank))
                v.invoke(routines.shrink_short, (*own_rows, 0, tokens) + copy + h)
            else:
                at, steps, sizes = scales
                for j in range(first, last, LONG_PANEL):
                    panel = (layer.stored, a, a_row, n, at, *steps, *sizes)
                    columns = (j, min(last - j, LONG_PANEL), tokens, call.x_dtype)
                    to = (h[0] + 4 * j, h[1], h[2])
                    own = (routines.add_block, own_scratch)
                    v.invoke(routines.shrink_panel, own + panel + columns + x + to)
                copied = False
            if layer.block_columns == 0:
                scale_h(scales, first, last, tokens, h)


def shrink_dots() -> Any:
    """Compile up to `LONG_PANEL` columns of ``h = x @ a.T`` for a of int8 and x of bfloat16.

    int8 is widened to bfloat16, which the CPU multiplies in pairs. A segment of any length is cut
    into groups of 8, 4, 2 and 1 tokens. A group is multiplied by all rows of a, one chunk of the
    inputs after the other.
    """

    def run(scratch, a, a_row, n, count, tokens, x, x_row, x_order, h, h_row, h_order):
        rows, own_x, own_h = (a, a_row, n, count), (x, x_row, x_order), (h, h_row, h_order)
        t = 0
        while t + 8 <= tokens:
            dot_columns(two_rows, TWO, scratch, rows, t, EIGHT, own_x, own_h)
            t += 8
        if t + 4 <= tokens:
            dot_columns(four_rows, FOUR, scratch, rows, t, FOUR, own_x, own_h)
            t += 4
        if t + 2 <= tokens:
            dot_columns(four_rows, FOUR, scratch, rows, t, TWO, own_x, own_h)
            t += 2
        if t < tokens:
            dot_columns(four_rows, FOUR, scratch, rows, t, ONE, own_x, own_h)

    return compiled(run)


@inlined
def dot_columns(rows_of_a, ranks, scratch, rows, t, tokens, x, h):
    """Write columns of h, as many at a time as `ranks` has items, for some tokens from t on.

    A chunk of x is copied in the order of its use, because rows whose distance is a power of two
    compete for few sets of the first-level cache. Between chunks, sums are kept behind the copy.
    """
    a, a_row, n, count = rows
    x_rows, h_rows = v.rows(x, t, tokens), v.rows(h, t, tokens)
    whole, step = n - n % (2 * LANES), LINE * len(tokens)
    for chunk in range(0, max(whole, 1), DOT_CHUNK):
        end, at = min(chunk + DOT_CHUNK, whole), scratch
        width = end - chunk
        for k in range(chunk, end, 2 * LANES):
            v.store_all(at, LINE, v.load_bfloat16(v.BFLOAT16, x_rows, k))
            at += step
        for j in range(0, count, len(ranks)):
            a_rows = rows_of_a(a + j * a_row, a_row, count - j)
            begun, sums = scratch + 2 * DOT_CHUNK * len(tokens) + j * step, v.zeros(ranks, tokens)
            if chunk > 0:
                sums = v.load_all(begun, sums)
            new_chunk = end < whole and j + len(ranks) >= count
            ahead, to_next = ahead_of(width, len(ranks) * a_row, -j * a_row, new_chunk)
            k, at = chunk, scratch
            while k < end:
                if t == 0:  # a is not in a cache yet
                    v.prefetch(a_rows, k + ahead + (to_next if k + ahead >= end else 0))
                sums = v.add_dots(sums, v.load_bfloat16(v.INT8, a_rows, k), v.load_all(at, tokens))
                k += 2 * LANES
                at += step
            if end < whole:
                v.store_all(begun, LINE, sums)
                continue
            while k < n:
                rest = min(n - k, LANES)
                a_rest = v.load_some(v.INT8, a_rows, k, rest)
                sums = v.add_products(sums, a_rest, v.load_some(v.BFLOAT16, x_rows, k, rest))
                k += LANES
            v.write_totals(v.shifted(h_rows, 4 * j), count - j, sums)


@function
def ahead_of(width, step, first, new_chunk):
    """Return the prefetch distance, and the offset to add to it past the end of a chunk's rows."""
    ahead, turns = min(DOT_AHEAD, width), max(1, DOT_AHEAD // max(width, 1))
    if new_chunk:
        return ahead, first  # back to the first row
    return ahead, turns * step - width  # to the next rows; short rows need several


@function
def two_rows(a, a_row, count):
    """Return the addresses of two rows of a; the last one fills up."""
    return a, a + min(1, count - 1) * a_row


@function
def four_rows(a, a_row, count):
    """Return the addresses of four rows of a; the last one fills up."""
    last = count - 1
    return a, a + min(1, last) * a_row, a + min(2, last) * a_row, a + min(3, last) * a_row


def copy_x() -> Any:
    """Compile the copy of rows of x as float32, behind their order."""

    def run(x_dtype, x, x_row, x_order, tokens, width, to):
        for t in range(tokens):
            (row,) = v.rows((x, x_row, x_order), t, ONE)
            copy = to + ORDER_BYTES + t * row_bytes(width)
            pack_x(x_dtype, row, (np.int64(0), width), copy, LINE)

    return compiled(run)


@inlined
def row_bytes(width):
    """Return the bytes of a row of float32, whole cache lines."""
    return (4 * width + LINE - 1) // LINE * LINE


@function
def scale_h(scales, first, last, tokens, h):
    """Multiply columns of h by the scales of their rows of a."""
    at, (step, _), (rows, _) = scales
    whole = (last - first) // LANES * LANES if rows == 1 and step == 4 else 0
    for t in range(tokens):
        (row,) = v.rows(h, t, ONE)
        for j in range(first, first + whole, LANES):
            columns = (v.load(v.FLOAT32, row + 4 * j),)
            v.store_all(row + 4 * j, 0, v.multiply(columns, v.load(v.FLOAT32, at + 4 * j)))
        for j in range(first + whole, last):
            total = v.read(v.FLOAT32, row + 4 * j)
            v.write(v.FLOAT32, row + 4 * j, total * scale_of(scales, j, np.int64(0)))


def shrink_panel() -> Any:
    """Compile up to `LONG_PANEL` columns of h, by chunks of the inputs.

    x is copied as float32 behind its order: the numbers from 0. The last row of a pads its block
    of rows.
    """

    def run(
        add_block, order, stored, a, a_row, n, at, scales_row, scales_column, block_rows,
        block_columns, first, count, tokens, x_dtype, x, x_row, x_order, h, h_row, h_order,
    ):  # fmt: skip
        scales = (at, (scales_row, scales_column), (block_rows, block_columns))
        copy, sums_step = order + ORDER_BYTES, (tokens + TOKENS - 1) // TOKENS * SUMS_BYTES
        packed_a = copy + tokens * X_ROW
        all_sums = packed_a + A_BYTES  # [vectors, LONG_RANKS, 16] float32 before
        a += first * a_row
        for k in range(0, max(n, 1), LONG_CHUNK):  # without inputs one empty chunk writes zeros
            columns = (k, min(n - k, LONG_CHUNK))
            for t in range(tokens):
                (row_x,) = v.rows((x, x_row, x_order), t, ONE)
                pack_x(x_dtype, row_x, columns, copy + t * X_ROW, LINE)
            sums = all_sums  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
            for j in range(0, count, LONG_RANKS):
                ahead = LONG_RANKS * a_row
                if j + LONG_RANKS >= count and k + LONG_CHUNK < n:
                    ahead = LONG_CHUNK - j * a_row
                for i in range(LONG_RANKS):
                    row = min(j + i, count - 1)
                    of_row = (group_scales(scales, first + row), scales_column, block_columns)
                    to = packed_a + i * LINE
                    pack_a(stored, a + row * a_row, columns, of_row, to, ahead)
                whole = (columns[1] + LANES - 1) // LANES * LANES  # zeros fill up the last vector
                fetch = (0, 0, 0, 0, 0)  # `pack_a` has fetched
                state = (int(k > 0), int(k + LONG_CHUNK >= n), count - j, tokens)
                rows = (copy, X_ROW, order, h + 4 * j, h_row, h_order)
                v.invoke(add_block, (packed_a, sums, whole, *fetch, *state, *rows))
                sums += sums_step

    return compiled(run)


@function
def pack_x(x_dtype, row, columns, to, step):
    """Store some columns of a row of x as vectors of float32, `step` bytes apart."""
    if x_dtype == BIAS_FLOAT32:
        pack(v.FLOAT32, row, columns, np.float32(1), to, step, 0)
    elif x_dtype == BIAS_BFLOAT16:
        pack(v.BFLOAT16, row, columns, np.float32(1), to, step, 0)
    else:
        pack(v.FLOAT16, row, columns, np.float32(1), to, step, 0)


@function
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


@function
def pack_scaled(stored, row, columns, factor, to, ahead):
    """Store some columns of a row of a, times one scale, as vectors of float32."""
    if stored == INT8:
        pack(v.INT8, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    elif stored == E4M3:
        pack(v.E4M3, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    else:
        pack(v.E5M2, row, columns, factor, to, LONG_RANKS * LINE, ahead)


@function
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


@inlined
def expand_part(part, parts, call, layer, routines, low, high):
    """Add this part's columns of ``scale * scaling * h @ b.T + bias`` to y."""
    total, _ = expand_work(layer, call.b_segments, low, high)
    scratch = np.empty(SCRATCH + SCALES_BYTES // 4 + MAX_SEGMENT * layer.max_rank, np.float32)
    to_y = aligned(scratch)
    for t in range(MAX_SEGMENT):
        v.write_id(to_y + 8 * t, t)
    before = np.int64(0)
    for i in range(low, high):
        key, start, stop = v.fields(Segment, call.b_segments + i * SEGMENT_BYTES)
        for s in range(layer.num_slices):
            item = v.record(Slice, layer.slices + s * SLICE_BYTES)
            rank = rank_of(layer, key, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            cost = (FETCH_COST + stop - start) * (rank + EXPAND_COST)
            first, last = own_units(part, parts, total, before, tiles, cost)
            before += tiles * cost
            if rank == 0 and layer.bias == 0 and layer.output_scales == 0:
                continue
            factors = factors_of(call, layer, key, s, rank)
            stored = stored_of(call, layer, item, key, to_y)
            rows = rows_of(call, s, start, stop)
            full = (item.last - item.first) // LANES
            at, end = first * LANES, min(last, full) * LANES
            if at < end:
                place = place_of(layer, item, key, at)
                in_registers = layer.stored == INT8 and layer.block_columns == 0 and rank > 0
                if in_registers and layer.output_scales == 0:
                    v.invoke(routines.expand_int8, stored + (at, end) + place + factors + rows)
                else:
                    own = (routines.add_many, routines.add_one)
                    call_args = stored + (at, end) + place + factors + rows
                    v.invoke(routines.expand_stored, own + call_args)
            at, end = full * LANES, item.last - item.first
            if first <= full < last and at < end:
                place = place_of(layer, item, key, at)
                columns = (routines.expand_column,) + stored + (at, end) + place
                v.invoke(routines.expand_ragged, columns + factors + rows)


@function
def stored_of(call, layer, item, key, to_y):
    """Return the dtype and the scales of B, the dtype of y, and where y is copied to."""
    at, (step, other), (rows, columns) = b_scales_of(layer, item, key)
    return layer.stored, at, step, other, rows, columns, call.y_dtype, to_y


def expand_ragged() -> Any:
    """Compile the addition to single columns of y; `row` is their first row of b in the slice."""

    def run(
        expand_column, dtype, at, scales_row, scales_column, block_rows, block_columns, y_dtype,
        to_y, row, end_row, b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank,
        scaling, scales, scales_step, scales_order, t, end, h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        own_scales = (at, (scales_row, scales_column), (block_rows, block_columns))
        to, own_y = to_y + ORDER_BYTES + TILE_BYTES * MAX_SEGMENT, (y_dtype, (y, y_row, y_order))
        single = np.int64(1)
        for i in range(row, end_row):
            for j in range(rank):
                item = read_stored(dtype, b + j) * scale_of(own_scales, i, j)
                v.write(v.FLOAT32, to + 4 * j, item)
            target, within = widen_y(own_y, (t, end), column, single, to_y)
            place = (to, 0, bias_dtype, bias, bias_size, output_scale, within)
            factors = (rank, scaling, scales, scales_step, scales_order)
            v.invoke(expand_column, place + factors + (1, t, end, h, h_row, h_order) + target)
            narrow_y(own_y, (t, end), column, single, to_y)
            b += b_row
            column += 1
            if bias != 0:
                bias += bias_size
            if output_scale != 0:
                output_scale += 4

    return compiled(run)


def expand_stored() -> Any:
    """Compile the addition to columns of y, 64 or 16 at a time; `row` is their row of b."""

    def run(
        add_many, add_one, dtype, at, scales_row, scales_column, block_rows, block_columns,
        y_dtype, to_y, row, end_row, b, b_row, bias_dtype, bias, bias_size, output_scale, column,
        rank, scaling, scales, scales_step, scales_order, t, end, h, h_row, h_order,
        y, y_row, y_order,
    ):  # fmt: skip
        own_scales = (at, (scales_row, scales_column), (block_rows, block_columns))
        columns, own_y = (
            to_y + ORDER_BYTES + TILE_BYTES * MAX_SEGMENT,
            (y_dtype, (y, y_row, y_order)),
        )
        paired = rank - rank % 4  # as in `expand_column` for float32
        while row < end_row:
            tiles, add = len(MANY_TILES), add_many
            if row + LANES * len(MANY_TILES) > end_row:
                tiles, add = 1, add_one
            width, step = LANES * tiles, LINE * tiles
            for i in range(tiles):
                rows = (b + i * LANES * b_row, b_row, row + i * LANES)
                prefetch_rows(rows[0], b_row, rank)
                store_tile(dtype, rows, rank, own_scales, columns + i * LINE, step)
            target, within = widen_y(own_y, (t, end), column, width, to_y)
            place = (b, b_row, bias_dtype, bias, bias_size, output_scale, within)
            factors = (rank, scaling, scales, scales_step, scales_order)
            stored = (paired, 0, columns, t, end, h, h_row, h_order)
            v.invoke(add, place + factors + stored + target)
            narrow_y(own_y, (t, end), column, width, to_y)
            b += width * b_row
            row += width
            column += width
            if bias != 0:
                bias += width * bias_size
            if output_scale != 0:
                output_scale += 4 * width

    return compiled(run)


def expand_int8(kind_y: Any) -> Any:
    """Compile what `expand_stored` does for int8 with a scale per row, widened in registers."""

    def run(
        dtype, at, scales_row, scales_column, block_rows, block_columns, y_dtype, to_y, row,
        end_row, b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank, scaling,
        scales, scales_step, scales_order, t, end, h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        own_scales = (at, (scales_row, scales_column), (block_rows, block_columns))
        spare = to_y + ORDER_BYTES + TILE_BYTES * MAX_SEGMENT
        packed, own_y = spare + SCALES_BYTES, (y, y_row, y_order)
        factors = (read_scaling(rank, scaling), (scales, scales_step, scales_order))
        pack_h((h, h_row, h_order), rank, factors, t, end, packed)
        while row < end_row:
            tiles = min(end_row - row, LANES * len(MANY_TILES)) // LANES
            of_rows = rows_of_scales(own_scales, row, LANES * tiles, spare)
            place = (b, b_row, (bias_dtype, bias, bias_size), of_rows, column)
            steps, i, own_h = steps_of(b_row, rank), t, packed
            while i + 8 <= end:
                int8_rows(kind_y, place, tiles, rank, steps, i, EIGHT, own_h, own_y)
                i, own_h, steps = i + 8, own_h + 32 * rank, NO_STEPS
            if i + 4 <= end:
                int8_rows(kind_y, place, tiles, rank, steps, i, FOUR, own_h, own_y)
                i, own_h, steps = i + 4, own_h + 16 * rank, NO_STEPS
            if i + 2 <= end:
                int8_rows(kind_y, place, tiles, rank, steps, i, TWO, own_h, own_y)
                i, own_h, steps = i + 2, own_h + 8 * rank, NO_STEPS
            if i < end:
                int8_rows(kind_y, place, tiles, rank, steps, i, ONE, own_h, own_y)
            b += LANES * tiles * b_row
            row += LANES * tiles
            column += LANES * tiles
            if bias != 0:
                bias += LANES * tiles * bias_size

    return compiled(run)


@function
def pack_h(h, rank, factors, t, end, to):
    """Store h times the scalings as `add_interleaved` takes it, 8, 4, 2 and 1 tokens at a time.

    Rows of h whose distance is a power of two would compete for few sets of the first-level cache.
    """
    scaling, scales = factors
    while t < end:
        tokens = 8
        while t + tokens > end:
            tokens //= 2
        for i in range(tokens):
            (row,) = v.rows(h, t + i, ONE)
            (own,) = v.read_scaled(v.rows(scales, t + i, ONE), scaling)
            for j in range(rank):
                v.write(v.FLOAT32, to + 4 * (j * tokens + i), v.read(v.FLOAT32, row + 4 * j) * own)
        to += 4 * rank * tokens
        t += tokens


@inlined
def int8_rows(kind_y, place, tiles, rank, steps, t, tokens, h, y):
    """Add to `tiles` times 16 columns of some rows of y; `h` has been packed."""
    b, b_row, (bias_dtype, bias, bias_size), of_rows, column = place
    distance, apart, on, turn, row, fetched = steps
    y_rows = v.rows(y, t, tokens)
    added = v.splat(np.float32(0))
    for _ in range(tiles):
        if bias != 0:
            added = load_bias(bias_dtype, bias)
            bias += LANES * bias_size
        ahead = b + distance
        for i in range(row, LANES):
            v.prefetch((ahead,), i * b_row + fetched)
        sums = v.zeros((0, 0), tokens)
        j, own_h = 0, h
        if rank == 16 and b_row == 16:
            v.prefetch((ahead, ahead + LINE, ahead + 2 * LINE, ahead + 3 * LINE), 0)
            sums, j = v.add_interleaved(sums, v.load_square(v.INT8, b), own_h), 16
        while j + 16 <= rank:
            v.prefetch((ahead, ahead + apart, ahead + 2 * apart, ahead + 3 * apart), 0)
            sums = v.add_interleaved(sums, v.load_columns(v.INT8, b + j, b_row), own_h)
            j += 16
            own_h += 64 * len(tokens)
            ahead += on if j % LINE > 0 else turn
        while j + 4 <= rank:
            sums = v.add_interleaved(sums, v.load_four(v.INT8, b + j, b_row), own_h)
            j += 4
            own_h += 16 * len(tokens)
        while j < rank:
            sums = v.add_interleaved(sums, (v.load_column(v.INT8, b + j, b_row),), own_h)
            j += 1
            own_h += 4 * len(tokens)
        v.update_scaled(kind_y, y_rows, column, sums, v.load(v.FLOAT32, of_rows), added)
        b += LANES * b_row
        of_rows += LINE
        column += LANES


@function
def rows_of_scales(scales, row, count, spare):
    """Return where the scales of so many rows lie, one after the other: in the stack or `spare`."""
    at, (step, _), (rows, _) = scales
    if rows == 1 and step == 4:
        return at + 4 * row
    for i in range(count):
        v.write(v.FLOAT32, spare + 4 * i, scale_of(scales, row + i, np.int64(0)))
    return spare


@function
def prefetch_rows(b, b_row, width):
    """Ask for the `width` bytes of each of 16 rows that are needed in a while."""
    if 2 * width > b_row:  # hardly a gap: line by line
        b += LANES * b_row * max(1, TILE_AHEAD // max(LANES * b_row, 1))
        for line in range(0, LANES * b_row, LINE):
            v.prefetch((b,), line)
    else:
        b += LANES * b_row * max(1, TILE_AHEAD // (LANES * width + 1))
        for i in range(LANES):
            for line in range(0, width, LINE):
                v.prefetch((b,), i * b_row + line)


@function
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
            widen_row(v.BFLOAT16, v.rows(rows, t, ONE)[0] + 2 * column, width, to)
        else:
            widen_row(v.FLOAT16, v.rows(rows, t, ONE)[0] + 2 * column, width, to)
    return (to_y + ORDER_BYTES, TILE_BYTES, to_y - 8 * tokens[0]), 0


@function
def widen_row(kind, row, width, to):
    """Store `width` elements as float32, and fetch as many behind them."""
    v.prefetch((row,), 2 * width)
    for k in range(0, width - LANES + 1, LANES):
        v.store(v.FLOAT32, to + 4 * k, v.load(kind, row + 2 * k))
    for k in range(width - width % LANES, width):
        v.write(v.FLOAT32, to + 4 * k, v.read(kind, row + 2 * k))


@function
def narrow_y(y, tokens, column, width, to_y):
    """Store the copy that `widen_y` made, each element rounded."""
    dtype, rows = y
    if dtype == BIAS_FLOAT32:
        return
    for t in range(tokens[0], tokens[1]):
        at = to_y + ORDER_BYTES + (t - tokens[0]) * TILE_BYTES
        if dtype == BIAS_BFLOAT16:
            narrow_row(v.BFLOAT16, at, width, v.rows(rows, t, ONE)[0] + 2 * column)
        else:
            narrow_row(v.FLOAT16, at, width, v.rows(rows, t, ONE)[0] + 2 * column)


@function
def narrow_row(kind, row, width, to):
    """Store `width` elements of float32 as another kind."""
    for k in range(0, width - LANES + 1, LANES):
        v.store(kind, to + 2 * k, v.load(v.FLOAT32, row + 4 * k))
    for k in range(width - width % LANES, width):
        v.write(kind, to + 2 * k, v.read(v.FLOAT32, row + 4 * k))


@function
def store_tile(dtype, rows, rank, scales, to, step):
    """Do what `store_columns` does for a dtype."""
    if dtype == INT8:
        store_columns(v.INT8, rows, rank, scales, to, step)
    elif dtype == E4M3:
        store_columns(v.E4M3, rows, rank, scales, to, step)
    else:
        store_columns(v.E5M2, rows, rank, scales, to, step)


@function
def store_columns(kind, rows, rank, scales, to, step):
    """Store 16 rows of b, times their scales, as `rank` vectors of float32, `step` bytes apart."""
    b, b_row, row = rows
    size, j = scales[2][1], np.int64(0)
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


@function
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
