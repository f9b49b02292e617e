"""The kernels: shrink, expand and both, over the segments of a plan.

A part (one thread's share) owns whole blocks of h and y, cut from the segments in proportion to
their cost, so nothing is shared between threads and nothing is atomic. A sum over the inputs runs
in 16 lanes, 32 inputs at a time, and one over the rank in two (even and odd columns of b),
whatever the number of tokens or threads.

x and y are (address, bytes from row to row, address of the row of each position), h has the bytes
from slice to slice behind its address; a segment is a key and a range of positions. `kinds` are the
markers of the weights and of y, see `vectors`.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import carray, cfunc, config, njit, types

from lora_backends.numba_cpu import vectors as v
from lora_backends.numba_cpu.config import (
    EXPAND_AHEAD,
    EXPAND_COST,
    EXPAND_TILES,
    FETCH_COST,
    LONG_SEGMENT,
    SHRINK_AHEAD,
    SHRINK_RANKS,
)
from lora_backends.numba_cpu.kernels_bias import load_bias, read_bias
from lora_backends.numba_cpu.kernels_long import (
    expand_long,
    expand_scratch,
    row_at,
    shrink_long,
    shrink_scratch,
    two_rows,
)
from lora_backends.numba_cpu.layer import Layer, Slice
from lora_backends.numba_cpu.plan import EXPERT_BITS

LANES = v.LANES
NOTHING, SHRINK, GATHER = 0, 1, 2  # what a call begins with
PLAIN, MULTIPLIED = (), (0,)  # vectors of output_scales per 16 columns of y
SLOT_MASK = (1 << EXPERT_BITS) - 1


class Call(NamedTuple):
    """What a kernel is called with, as int64 one after the other."""

    first: int  # NOTHING, SHRINK or GATHER
    first_half: int  # address of the compiled `run_first`
    expand: int  # whether that is followed by the second half
    whole: int  # whether a thread does both halves of its share of the segments
    threads: int  # 1: OpenMP is not asked
    thread_num: int  # addresses of OpenMP's functions
    num_threads: int
    barrier: int
    layer: int  # address of the fields of a `Layer`
    a_count: int  # from here on the fields of a `Work`
    a_segments: int
    a_span: int
    b_count: int
    b_segments: int
    x_order: int
    to_order: int
    h_order: int
    y_order: int
    scales: int
    scales_row: int
    scales_order: int
    x: int
    x_row: int
    h: int
    h_slice: int
    h_row: int
    y: int
    y_row: int
    x_dtype: int  # BIAS_FLOAT32, ...; kernels of 8-bit stacks ask for it
    y_dtype: int


CALL_FIELDS, LAYER_FIELDS, SLICE_FIELDS = (len(kind._fields) for kind in (Call, Layer, Slice))


def digest_of(folder: Path) -> int:
    """Return a number that differs where any source of kernels does."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return int.from_bytes(found.digest()[:7], "big")


SOURCES = digest_of(Path(__file__).parent)
"""Each function that is kept on disk has this in its closure. numba's key for it holds the values
there and its own file alone; without the number it would load code from older callees."""


def entry(kind: Any, kind_y: Any) -> Any:
    """Compile what the host calls for weights and y of these kinds; it takes a `Call`'s address."""
    sources = SOURCES

    def run(address):
        _ = sources
        run_call(kind, kind_y, address)

    return compiled(types.void(types.int64), run)


def first_entry(kind: Any) -> Any:
    """Compile the first half for weights of a kind: a function of its own, whatever y is."""
    sources = SOURCES

    def run(address, part, parts, low, high):
        _ = sources
        run_first(kind, address, part, parts, low, high)

    return compiled(types.void(*[types.int64] * 5), run)


def compiled(signature: Any, run: Any) -> Any:
    """Return a C function, kept on disk where some folder can be written.

    `run` must have `SOURCES` in its closure.
    """
    if config.DISABLE_JIT:
        return run
    try:
        return cfunc(signature, cache=True)(run)
    except RuntimeError:  # neither this folder, nor NUMBA_CACHE_DIR, nor the user's
        return cfunc(signature)(run)


@njit(nogil=True)
def run_call(kind, kind_y, address):
    """Do one thread's part of a call.

    Where `whole` is set that is both halves of a share of the segments; else it is a share of
    every segment, and all threads end the first half before one begins the second.
    """
    call, layer, segments, part, parts = run_to_first(address)
    if call.expand:
        h = (call.h, call.h_slice, call.h_row, call.h_order)
        y = (call.y, call.y_row, call.y_order)
        scales = (call.scales, call.scales_row, call.scales_order)
        expand_part(part, parts, (kind, kind_y), layer, segments, scales, h, y)


@njit(nogil=True)
def run_to_first(address):
    """Do one thread's part of the first half; return what the second half needs."""
    call = unpack_call(carray(v.ints(address), CALL_FIELDS))
    layer = unpack(carray(v.ints(call.layer), LAYER_FIELDS))
    segments = carray(v.ints(call.b_segments), (call.b_count, 3))
    part, parts = 0, 1
    if call.threads > 1:
        part, parts = v.call(call.thread_num), v.call(call.num_threads)
    between, low, high = call.barrier, 0, call.a_count
    if parts == 1:
        between = 0
    elif call.whole:
        low, high = own_segments(part, parts, layer, segments)
        part, parts, between, segments = 0, 1, 0, segments[low:high]
    if call.first != NOTHING:
        v.call_first(call.first_half, address, part, parts, low, high)
        if between != 0:
            v.call(between)
    return call, layer, segments, part, parts


@njit(nogil=True)
def run_first(kind, address, part, parts, low, high):
    """Do a part of the first half of a call: of its segments from `low` to `high`."""
    call = unpack_call(carray(v.ints(address), CALL_FIELDS))
    layer = unpack(carray(v.ints(call.layer), LAYER_FIELDS))
    segments = carray(v.ints(call.a_segments), (call.a_count, 3))[low:high]
    x = (call.x, call.x_row, call.x_order)
    h = (call.h, call.h_slice, call.h_row, call.to_order)
    if call.first == SHRINK:
        shrink_part(part, parts, kind, layer, segments, call.a_span, x, h)
    elif part == 0:
        gather(kind, layer, segments, x, h)


@njit(nogil=True)
def unpack_call(call):
    """Return the fields of a `Call` by name."""
    # fmt: off
    return Call(
        call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8], call[9],
        call[10], call[11], call[12], call[13], call[14], call[15], call[16], call[17], call[18],
        call[19], call[20], call[21], call[22], call[23], call[24], call[25], call[26], call[27],
        call[28], call[29],
    )
    # fmt: on


@njit(nogil=True)
def unpack(layer):
    """Return the fields of a `Layer` by name."""
    # fmt: off
    return Layer(
        layer[0], layer[1], layer[2], layer[3], layer[4], layer[5], layer[6], layer[7], layer[8],
        layer[9], layer[10], layer[11], layer[12], layer[13], layer[14], layer[15], layer[16],
        layer[17], layer[18], layer[19], layer[20],
    )
    # fmt: on


@njit(nogil=True)
def slice_of(layer, s):
    """Return the fields of a `Slice` by name."""
    item = carray(v.ints(layer.slices + 8 * SLICE_FIELDS * s), SLICE_FIELDS)
    # fmt: off
    return Slice(
        item[0], item[1], item[2], item[3], item[4], item[5], item[6], item[7], item[8], item[9],
        item[10], item[11], item[12], item[13], item[14], item[15], item[16], item[17], item[18],
        item[19],
    )
    # fmt: on


@njit(nogil=True)
def own_segments(part, parts, layer, segments):
    """Return the first and last + 1 of the segments whose middle lies in this part's share."""
    total = 0
    for segment in segments:
        total += segment_cost(layer, segment)
    low, high, before = 0, 0, 0
    for segment in segments:
        cost = segment_cost(layer, segment)
        middle = 2 * before + cost
        low += middle * parts < 2 * total * part
        high += middle * parts < 2 * total * (part + 1)
        before += cost
    return low, high


@njit(nogil=True)
def segment_cost(layer, segment):
    """Return what a segment costs, in some unit."""
    cost = 0
    for s in range(layer.num_slices):
        item = slice_of(layer, s)
        width = layer.in_features + item.last - item.first
        cost += width * (rank_of(layer, segment[0], s) + 1)
    return cost * (FETCH_COST + segment[2] - segment[1])


@njit(nogil=True)
def own_units(part, parts, total, before, units, cost):
    """Return which of `units` units, `cost` each after `before`, start in this part's share."""
    low, high = total * part // parts, total * (part + 1) // parts
    first = -((before - low) // cost)
    last = -((before - high) // cost)
    return min(max(first, 0), units), min(max(last, 0), units)


@njit(nogil=True)
def shrink_work(layer, segments, span, ranks):
    """Return the cost of the shrink in blocks of as many ranks, and the longest segment."""
    total, longest = 0, 0
    for key, start, stop in segments:
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            blocks = (highest_rank(layer, key, span, s) + ranks - 1) // ranks
            total += blocks * (FETCH_COST + stop - start)
    return total, longest


@njit(nogil=True)
def expand_work(layer, segments):
    """Return the cost of the expand, and the longest segment."""
    total, longest = 0, 0
    for key, start, stop in segments:
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            item = slice_of(layer, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            total += tiles * (FETCH_COST + stop - start) * (rank_of(layer, key, s) + EXPAND_COST)
    return total, longest


@njit(nogil=True)
def rank_of(layer, key, s):
    """Return the rank of a slot's slice."""
    slot, expert = key & SLOT_MASK, key >> EXPERT_BITS
    return v.read_int(
        layer.ranks + slot * layer.ranks_slot + expert * layer.ranks_expert + s * layer.ranks_slice
    )


@njit(nogil=True)
def highest_rank(layer, key, span, s):
    """Return the highest rank of a slot's slice among `span` experts."""
    rank = 0
    for i in range(span):
        rank = max(rank, rank_of(layer, key + (i << EXPERT_BITS), s))
    return rank


@njit(nogil=True, forceinline=True)
def four_rows(base, t):
    """Return the addresses of four tokens' rows."""
    return two_rows(base, t) + two_rows(base, t + 2)


@njit(nogil=True, forceinline=True)
def eight_rows(base, t):
    """Return the addresses of eight tokens' rows."""
    return four_rows(base, t) + four_rows(base, t + 4)


@njit(nogil=True)
def shrink_part(part, parts, kind, layer, segments, span, x, h):
    """Write this part's blocks of ``h[s, t, :r] = x[t] @ a[l, s, :r].T``."""
    total, longest = shrink_work(layer, segments, span, SHRINK_RANKS)
    scratch = np.empty(shrink_scratch(longest), np.float32)
    before = 0
    for key, start, stop in segments:
        for s in range(layer.num_slices):
            rank, cost = highest_rank(layer, key, span, s), FETCH_COST + stop - start
            blocks = (rank + SHRINK_RANKS - 1) // SHRINK_RANKS
            first, last = own_units(part, parts, total, before, blocks, cost)
            before += blocks * cost
            item = slice_of(layer, s)
            a = item.a + (key & SLOT_MASK) * item.a_slot + (key >> EXPERT_BITS) * item.a_expert
            to = (h[0] + s * h[1], h[2], h[3])
            if stop - start >= LONG_SEGMENT:
                rows = (a, item.a_row, layer.in_features)
                columns = (first * SHRINK_RANKS, min(last * SHRINK_RANKS, rank))
                shrink_long(kind, rows, columns, scratch, start, stop, x, to)
                continue
            for j in range(first * SHRINK_RANKS, last * SHRINK_RANKS, SHRINK_RANKS):
                rows = (a + j * item.a_row, item.a_row, layer.in_features)
                to_columns = (to[0] + 4 * j, to[1], to[2])
                count = min(rank - j, SHRINK_RANKS)
                shrink_block((kind, kind), rows, count, start, stop, x, to_columns)


@njit(nogil=True)
def shrink_block(kinds, rows, count, t, end, x, h):
    """Write up to 4 columns of h for the tokens of a segment; the last row of a fills up to 4."""
    a, a_row, n = rows
    last = count - 1
    a_rows = (a, a + min(1, last) * a_row, a + min(2, last) * a_row, a + last * a_row)
    fresh = True  # a is not in a cache yet
    while t + 4 <= end:
        sums = dot_rows(kinds, a_rows, four_rows(x, t), n, fresh)
        v.write_totals(four_rows(h, t), count, sums)
        t, fresh = t + 4, False
    if t + 2 <= end:
        sums2 = dot_rows(kinds, a_rows, two_rows(x, t), n, fresh)
        v.write_totals(two_rows(h, t), count, sums2)
        t, fresh = t + 2, False
    if t < end:
        sums1 = dot_rows(kinds, a_rows, (row_at(x, t),), n, fresh)
        v.write_totals((row_at(h, t),), count, sums1)


@njit(nogil=True, forceinline=True)
def dot_rows(kinds, a_rows, x_rows, n, fresh):
    """Return a vector of partial sums of ``a @ x`` per pair of rows."""
    kind, kind_x = kinds
    sums = v.zeros(a_rows, x_rows)
    k = 0
    while k + 2 * LANES <= n:
        if fresh:
            v.prefetch(a_rows, k * v.size(kind) + SHRINK_AHEAD)
            if v.size(kind) > 1:  # 32 elements are more than one line
                v.prefetch(a_rows, k * v.size(kind) + SHRINK_AHEAD + 64)
        a = v.load_rows(kind, a_rows, k)  # 32 of every row
        x = v.load_rows(kind_x, x_rows, k)
        sums = v.add_products(sums, a, x)
        k += 2 * LANES
    while k < n:
        count = min(n - k, LANES)
        a_tail = v.load_some(kind, a_rows, k, count)
        x_tail = v.load_some(kind_x, x_rows, k, count)
        sums = v.add_products(sums, a_tail, x_tail)
        k += LANES
    return sums


@njit(nogil=True)
def gather(kind, layer, segments, ids, h):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``; ids are int64."""
    for slot, start, stop in segments:
        for s in range(layer.num_slices):
            item = slice_of(layer, s)
            to = (h[0] + s * h[1], h[2], h[3])
            for t in range(start, stop):
                column = item.a + slot * item.a_slot + v.read_id(row_at(ids, t)) * v.size(kind)
                for j in range(rank_of(layer, slot, s)):
                    element = v.read(kind, column + j * item.a_row)
                    v.write(v.FLOAT32, row_at(to, t) + 4 * j, element)


@njit(nogil=True)
def expand_part(part, parts, kinds, layer, segments, scales, h, y):
    """Add this part's columns of ``scale * scaling * h @ b.T + bias`` to y."""
    total, longest = expand_work(layer, segments)
    scratch = np.empty(expand_scratch(longest, layer.max_rank), np.float32)
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
            factors = (rank, scaling_of(layer, key, s, rank), scales)
            h_slice = (h[0] + s * h[1], h[2], h[3])
            full = (item.last - item.first) // LANES
            for tile in range(first, min(last, full), EXPAND_TILES):
                count = min(last, full, tile + EXPAND_TILES) - tile
                place = place_of(layer, item, key, tile * LANES)
                if stop - start < LONG_SEGMENT and layer.output_scales != 0:
                    expand_multiplied(kinds, place, count, factors, start, stop, h_slice, y)
                elif stop - start < LONG_SEGMENT:
                    expand_tiles(kinds, place, count, factors, start, stop, h_slice, y)
                else:
                    expand_long(kinds, place, count, factors, scratch, start, stop, h_slice, y)
            if first <= full < last:
                for column in range(full * LANES, item.last - item.first):
                    place = place_of(layer, item, key, column)
                    expand_column(kinds, place, factors, start, stop, h_slice, y)


@njit(nogil=True)
def scaling_of(layer, key, s, rank):
    """Return the scaling of a slot's slice; a slice of rank 0 has none."""
    if rank == 0:
        return np.float32(0)
    slot = (key & SLOT_MASK) * layer.scalings_slot + (key >> EXPERT_BITS) * layer.scalings_expert
    return v.read(v.FLOAT32, layer.scalings + slot + s * layer.scalings_slice)


@njit(nogil=True)
def place_of(layer, item, key, within):
    """Return where a column of a slice begins: row of b, bytes to the next, bias, scale, column."""
    bias, output_scale, slot, column = 0, 0, key & SLOT_MASK, item.first + within
    if layer.bias != 0:
        bias = layer.bias + slot * layer.bias_slot + column * layer.bias_size
    if layer.output_scales != 0:
        output_scale = layer.output_scales + slot * layer.output_scales_slot + 4 * column
    b = item.b + slot * item.b_slot + (key >> EXPERT_BITS) * item.b_expert + within * item.b_row
    return b, item.b_row, (layer.bias_dtype, bias, layer.bias_size), output_scale, column


@njit(nogil=True)
def expand_tiles(kinds, place, tiles, factors, t, end, h, y):
    """Add to `tiles` times 16 columns of y for the tokens of a segment."""
    rank, scaling, scales = factors
    fresh = True  # b is not in a cache yet
    while t + 8 <= end:
        own = (rank, v.read_scaled(eight_rows(scales, t), scaling))
        expand_rows(PLAIN, kinds, place, tiles, own, fresh, eight_rows(h, t), eight_rows(y, t))
        t, fresh = t + 8, False
    if t + 4 <= end:
        own4 = (rank, v.read_scaled(four_rows(scales, t), scaling))
        expand_rows(PLAIN, kinds, place, tiles, own4, fresh, four_rows(h, t), four_rows(y, t))
        t, fresh = t + 4, False
    if t + 2 <= end:
        own2 = (rank, v.read_scaled(two_rows(scales, t), scaling))
        expand_rows(PLAIN, kinds, place, tiles, own2, fresh, two_rows(h, t), two_rows(y, t))
        t, fresh = t + 2, False
    if t < end:
        own1 = (rank, v.read_scaled((row_at(scales, t),), scaling))
        expand_rows(PLAIN, kinds, place, tiles, own1, fresh, (row_at(h, t),), (row_at(y, t),))


@njit(nogil=True)
def expand_multiplied(kinds, place, tiles, factors, t, end, h, y):
    """Do what `expand_tiles` does where there are output_scales; few variants compile sooner."""
    rank, scaling, scales = factors
    fresh = True
    while t + 4 <= end:
        own4 = (rank, v.read_scaled(four_rows(scales, t), scaling))
        expand_rows(MULTIPLIED, kinds, place, tiles, own4, fresh, four_rows(h, t), four_rows(y, t))
        t, fresh = t + 4, False
    while t < end:
        own1 = (rank, v.read_scaled((row_at(scales, t),), scaling))
        h_row, y_row = (row_at(h, t),), (row_at(y, t),)
        expand_rows(MULTIPLIED, kinds, place, tiles, own1, fresh, h_row, y_row)
        t, fresh = t + 1, False


@njit(nogil=True, forceinline=True)
def expand_rows(multiplied, kinds, place, tiles, factors, fresh, h_rows, y_rows):
    """Add to `tiles` times 16 columns of some rows of y; `multiplied`: PLAIN or MULTIPLIED."""
    kind, kind_y = kinds
    b, b_row, (bias_dtype, bias, bias_size), output_scale, column = place
    rank, scalings = factors
    added = v.zeros((0,), (0,))
    for _ in range(tiles):
        if fresh:
            prefetch_rows(b, b_row, rank * v.size(kind))
        if bias != 0:
            added = (load_bias(bias_dtype, bias),)
            bias += LANES * bias_size
        sums = b_sums(kind, b, b_row, rank, h_rows)
        output_scales = v.load_all(output_scale, multiplied)
        v.update_rows(kind_y, y_rows, column, sums, scalings, added, output_scales)
        output_scale += LANES * 4 * len(multiplied)
        b += LANES * b_row
        column += LANES


@njit(nogil=True, forceinline=True)
def b_sums(kind, b, b_row, rank, h_rows):
    """Return ``h @ b.T`` for 16 rows of b: an even and an odd sum per row of h."""
    sums = v.zeros((0, 0), h_rows)
    j, step = 0, 16 // v.size(kind)
    while j + step <= rank:
        sums = v.add_columns(sums, v.load_columns(kind, b + j * v.size(kind), b_row), h_rows, j)
        j += step
    while j < rank:
        column = (v.load_column(kind, b + j * v.size(kind), b_row),)
        sums = v.add_columns(sums, column, h_rows, j)
        j += 1
    return sums


@njit(nogil=True)
def expand_column(kinds, place, factors, t, end, h, y):
    """Add to one column of y, in the same order of sums as `expand_tiles`."""
    kind, kind_y = kinds
    b, _, (bias_dtype, bias, _), output_scale, column = place
    rank, scaling, scales = factors
    added = np.float32(0)
    if bias != 0:
        added = read_bias(bias_dtype, bias)
    paired = rank - rank % (16 // v.size(kind))
    for i in range(t, end):
        even, odd = np.float32(0), np.float32(0)
        for j in range(rank):
            factor = v.read(v.FLOAT32, row_at(h, i) + 4 * j)
            item = v.read(kind, b + j * v.size(kind))
            if j % 2 and j < paired:
                odd = v.multiply_add(item, factor, odd)
            else:
                even = v.multiply_add(item, factor, even)
        at = row_at(y, i) + column * v.size(kind_y)
        own = v.read(v.FLOAT32, row_at(scales, i)) * scaling
        if output_scale == 0:
            total = v.read(kind_y, at) + v.multiply_add(even + odd, own, added)
        else:
            total = v.multiply_add(even + odd, own, v.read(kind_y, at))
            total = v.multiply_add(total, v.read(v.FLOAT32, output_scale), added)
        v.write(kind_y, at, total)


@njit(nogil=True, forceinline=True)
def prefetch_rows(b, b_row, width):
    """Ask for the `width` bytes of each of 16 rows that are needed in a while."""
    if 2 * width > b_row:  # hardly a gap: line by line
        b += LANES * b_row * max(1, EXPAND_AHEAD // max(LANES * b_row, 1))
        for line in range(0, LANES * b_row, 64):
            v.prefetch((b,), line)
    else:
        b += LANES * b_row * max(1, EXPAND_AHEAD // (LANES * width + 1))
        for i in range(LANES):
            for line in range(0, width, 64):
                v.prefetch((b,), i * b_row + line)
