"""The kernels: shrink, expand and both, over the segments of a plan.

A part (one thread's share) owns whole blocks of h and y, cut from the segments in proportion to
their cost, so nothing is shared between threads and nothing is atomic. A sum over the inputs runs
in 16 lanes, 32 inputs at a time, and one over the rank in two (even and odd columns of b),
whatever the number of tokens or threads.

x and y are (address, bytes from row to row), h is (address, bytes from slice to slice, from row to
row); `kinds` are the markers of the weights and of y, see `vectors`.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

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
    shrink_long,
    shrink_scratch,
    two_rows,
)
from lora_backends.numba_cpu.layer import Layer

LANES = v.LANES
NOTHING, SHRINK, GATHER = 0, 1, 2  # what a call begins with


class Call(NamedTuple):
    """What a kernel is called with, as int64 one after the other."""

    first: int  # NOTHING, SHRINK or GATHER
    expand: int  # whether that is followed by the second half
    whole: int  # whether a thread does both halves of its share of the segments
    threads: int  # 1: OpenMP is not asked
    thread_num: int  # addresses of OpenMP's functions
    num_threads: int
    barrier: int
    layer: int  # address of the fields of a `Layer`
    num_segments: int
    segments: int  # addresses of the arrays of a plan
    order: int
    x: int
    x_row: int
    h: int
    h_slice: int
    h_row: int
    y: int
    y_row: int


CALL_FIELDS, LAYER_FIELDS = len(Call._fields), len(Layer._fields)


def entry(kind: Any, kind_y: Any) -> Any:
    """Compile what the host calls for weights and y of these kinds; it takes a `Call`'s address.

    It is kept on disk where some folder can be written.
    """

    def run(address):
        run_call(kind, kind_y, address)

    if config.DISABLE_JIT:
        return run
    signature = types.void(types.int64)
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
    call = unpack_call(carray(v.ints(address), CALL_FIELDS))
    layer = unpack(carray(v.ints(call.layer), LAYER_FIELDS))
    segments = carray(v.ints(call.segments), (call.num_segments, 3))
    offsets = carray(v.ints(layer.offsets), layer.num_slices + 1)
    order = carray(v.ints(call.order), segments[-1, 2])
    part, parts = 0, 1
    if call.threads > 1:
        part, parts = v.call(call.thread_num), v.call(call.num_threads)
    between = call.barrier
    if parts == 1 or call.whole:
        low, high = own_segments(part, parts, layer, offsets, segments)
        part, parts, between, segments = 0, 1, 0, segments[low:high]
    x, h, y = (call.x, call.x_row), (call.h, call.h_slice, call.h_row), (call.y, call.y_row)
    if call.first == SHRINK:
        shrink_part(part, parts, kind, layer, segments, order, x, h)
    elif call.first == GATHER and part == 0:
        gather(kind, layer, segments, order, x, h)
    if call.first != NOTHING and between != 0:
        v.call(between)
    if call.expand:
        expand_part(part, parts, (kind, kind_y), layer, offsets, segments, order, h, y)


@njit(nogil=True)
def unpack_call(call):
    """Return the fields of a `Call` by name."""
    # fmt: off
    return Call(
        call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8], call[9],
        call[10], call[11], call[12], call[13], call[14], call[15], call[16], call[17],
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
def own_segments(part, parts, layer, offsets, segments):
    """Return the first and last + 1 of the segments whose middle lies in this part's share."""
    total = 0
    for segment in segments:
        total += segment_cost(layer, offsets, segment)
    low, high, before = 0, 0, 0
    for segment in segments:
        cost = segment_cost(layer, offsets, segment)
        middle = 2 * before + cost
        low += middle * parts < 2 * total * part
        high += middle * parts < 2 * total * (part + 1)
        before += cost
    return low, high


@njit(nogil=True)
def segment_cost(layer, offsets, segment):
    """Return what a segment costs, in some unit."""
    cost = 0
    for s in range(layer.num_slices):
        width = layer.in_features + offsets[s + 1] - offsets[s]
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
def rank_of(layer, slot, s):
    """Return the rank of a slot's slice."""
    return v.read_int(layer.ranks + slot * layer.ranks_slot + s * layer.ranks_slice)


@njit(nogil=True)
def rank_blocks(layer, slot, s):
    """Return how many passes over x a slot's slice needs."""
    return (rank_of(layer, slot, s) + SHRINK_RANKS - 1) // SHRINK_RANKS


@njit(nogil=True, forceinline=True)
def four_rows(base, order, t):
    """Return the addresses of four tokens' rows."""
    return two_rows(base, order, t) + two_rows(base, order, t + 2)


@njit(nogil=True, forceinline=True)
def eight_rows(base, order, t):
    """Return the addresses of eight tokens' rows."""
    return four_rows(base, order, t) + four_rows(base, order, t + 4)


@njit(nogil=True)
def shrink_part(part, parts, kind, layer, segments, order, x, h):
    """Write this part's blocks of ``h[s, t, :r] = x[t] @ a[l, s, :r].T``."""
    total, longest = 0, 0
    for slot, start, stop in segments:
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            total += rank_blocks(layer, slot, s) * (FETCH_COST + stop - start)
    scratch = np.empty(shrink_scratch(longest), np.float32)
    before = 0
    for slot, start, stop in segments:
        for s in range(layer.num_slices):
            blocks, cost = rank_blocks(layer, slot, s), FETCH_COST + stop - start
            first, last = own_units(part, parts, total, before, blocks, cost)
            before += blocks * cost
            a = layer.a + slot * layer.a_slot + s * layer.a_slice
            if stop - start >= LONG_SEGMENT:
                rows = (a, layer.a_row, layer.in_features)
                columns = (first * SHRINK_RANKS, min(last * SHRINK_RANKS, rank_of(layer, slot, s)))
                to = (h[0] + s * h[1], h[2])
                shrink_long(kind, rows, columns, scratch, order, start, stop, x, to)
                continue
            for j in range(first * SHRINK_RANKS, last * SHRINK_RANKS, SHRINK_RANKS):
                count = min(rank_of(layer, slot, s) - j, SHRINK_RANKS)
                rows = (a + j * layer.a_row, layer.a_row, layer.in_features)
                to = (h[0] + s * h[1] + 4 * j, h[2])
                shrink_block(kind, rows, count, order, start, stop, x, to)


@njit(nogil=True)
def shrink_block(kind, rows, count, order, t, end, x, h):
    """Write up to 4 columns of h for the tokens of a segment; the last row of a fills up to 4."""
    a, a_row, n = rows
    last = count - 1
    a_rows = (a, a + min(1, last) * a_row, a + min(2, last) * a_row, a + last * a_row)
    fresh = True  # a is not in a cache yet
    while t + 4 <= end:
        sums = dot_rows(kind, a_rows, four_rows(x, order, t), n, fresh)
        v.write_totals(four_rows(h, order, t), count, sums)
        t, fresh = t + 4, False
    if t + 2 <= end:
        sums2 = dot_rows(kind, a_rows, two_rows(x, order, t), n, fresh)
        v.write_totals(two_rows(h, order, t), count, sums2)
        t, fresh = t + 2, False
    if t < end:
        sums1 = dot_rows(kind, a_rows, (x[0] + order[t] * x[1],), n, fresh)
        v.write_totals((h[0] + order[t] * h[1],), count, sums1)


@njit(nogil=True, forceinline=True)
def dot_rows(kind, a_rows, x_rows, n, fresh):
    """Return a vector of partial sums of ``a @ x`` per pair of rows."""
    sums = v.zeros(a_rows, x_rows)
    k = 0
    while k + 2 * LANES <= n:
        if fresh:
            v.prefetch(a_rows, k * v.size(kind) + SHRINK_AHEAD)
            v.prefetch(a_rows, k * v.size(kind) + SHRINK_AHEAD + 64)
        a = v.load_rows(kind, a_rows, k)  # 32 of every row
        x = v.load_rows(kind, x_rows, k)
        sums = v.add_products(sums, a, x)
        k += 2 * LANES
    while k < n:
        count = min(n - k, LANES)
        a_tail = v.load_some(kind, a_rows, k, count)
        x_tail = v.load_some(kind, x_rows, k, count)
        sums = v.add_products(sums, a_tail, x_tail)
        k += LANES
    return sums


@njit(nogil=True)
def gather(kind, layer, segments, order, ids, h):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``; ids are int64."""
    for slot, start, stop in segments:
        for s in range(layer.num_slices):
            a = layer.a + slot * layer.a_slot + s * layer.a_slice
            for i in range(start, stop):
                column = a + v.read_id(ids[0] + order[i] * ids[1]) * v.size(kind)
                to = h[0] + s * h[1] + order[i] * h[2]
                for j in range(rank_of(layer, slot, s)):
                    v.write(v.FLOAT32, to + 4 * j, v.read(kind, column + j * layer.a_row))


@njit(nogil=True)
def expand_part(part, parts, kinds, layer, offsets, segments, order, h, y):
    """Add this part's columns of ``scaling * h @ b.T + bias`` to y."""
    total, longest = 0, 0
    for slot, start, stop in segments:
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            tiles = (offsets[s + 1] - offsets[s] + LANES - 1) // LANES
            cost = (FETCH_COST + stop - start) * (rank_of(layer, slot, s) + EXPAND_COST)
            total += tiles * cost
    scratch = np.empty(expand_scratch(longest, layer.max_rank), np.float32)
    before = 0
    for slot, start, stop in segments:
        for s in range(layer.num_slices):
            rank = rank_of(layer, slot, s)
            tiles = (offsets[s + 1] - offsets[s] + LANES - 1) // LANES
            cost = (FETCH_COST + stop - start) * (rank + EXPAND_COST)
            first, last = own_units(part, parts, total, before, tiles, cost)
            before += tiles * cost
            if rank == 0 and layer.bias == 0:
                continue
            factors = (rank, scaling_of(layer, slot, s, rank))
            h_slice = (h[0] + s * h[1], h[2])
            full = (offsets[s + 1] - offsets[s]) // LANES
            for tile in range(first, min(last, full), EXPAND_TILES):
                count = min(last, full, tile + EXPAND_TILES) - tile
                place = place_of(layer, slot, offsets[s] + tile * LANES)
                if stop - start < LONG_SEGMENT:
                    expand_tiles(kinds, place, count, factors, order, start, stop, h_slice, y)
                else:
                    expand_long(
                        kinds, place, count, factors, scratch, order, start, stop, h_slice, y
                    )
            if first <= full < last:
                for column in range(offsets[s] + full * LANES, offsets[s + 1]):
                    place = place_of(layer, slot, column)
                    expand_column(kinds, place, factors, order, start, stop, h_slice, y)


@njit(nogil=True)
def scaling_of(layer, slot, s, rank):
    """Return the scaling of a slot's slice; a slice of rank 0 has none."""
    if rank == 0:
        return np.float32(0)
    return v.read(v.FLOAT32, layer.scalings + slot * layer.scalings_slot + s * layer.scalings_slice)


@njit(nogil=True)
def place_of(layer, slot, column):
    """Return where an output column begins: row of b, bytes to the next, bias, column."""
    bias = 0
    if layer.bias != 0:
        bias = layer.bias + slot * layer.bias_slot + column * layer.bias_size
    row = layer.b + slot * layer.b_slot + column * layer.b_row
    return row, layer.b_row, (layer.bias_dtype, bias, layer.bias_size), column


@njit(nogil=True)
def expand_tiles(kinds, place, tiles, factors, order, t, end, h, y):
    """Add to `tiles` times 16 columns of y for the tokens of a segment."""
    fresh = True  # b is not in a cache yet
    while t + 8 <= end:
        h_rows, y_rows = eight_rows(h, order, t), eight_rows(y, order, t)
        expand_rows(kinds, place, tiles, factors, fresh, h_rows, y_rows)
        t, fresh = t + 8, False
    if t + 4 <= end:
        h_rows4, y_rows4 = four_rows(h, order, t), four_rows(y, order, t)
        expand_rows(kinds, place, tiles, factors, fresh, h_rows4, y_rows4)
        t, fresh = t + 4, False
    if t + 2 <= end:
        h_rows2, y_rows2 = two_rows(h, order, t), two_rows(y, order, t)
        expand_rows(kinds, place, tiles, factors, fresh, h_rows2, y_rows2)
        t, fresh = t + 2, False
    if t < end:
        h_rows1, y_rows1 = (h[0] + order[t] * h[1],), (y[0] + order[t] * y[1],)
        expand_rows(kinds, place, tiles, factors, fresh, h_rows1, y_rows1)


@njit(nogil=True, forceinline=True)
def expand_rows(kinds, place, tiles, factors, fresh, h_rows, y_rows):
    """Add to `tiles` times 16 columns of some rows of y."""
    kind, kind_y = kinds
    b, b_row, (bias_dtype, bias, bias_size), column = place
    rank, scaling = factors
    added = v.zeros((0,), (0,))
    for _ in range(tiles):
        if fresh:
            prefetch_rows(b, b_row, rank * v.size(kind))
        if bias != 0:
            added = (load_bias(bias_dtype, bias),)
            bias += LANES * bias_size
        sums = b_sums(kind, b, b_row, rank, h_rows)
        v.update_rows(kind_y, y_rows, column, sums, scaling, added)
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
def expand_column(kinds, place, factors, order, t, end, h, y):
    """Add to one column of y, in the same order of sums as `expand_tiles`."""
    kind, kind_y = kinds
    b, _, (bias_dtype, bias, _), column = place
    rank, scaling = factors
    added = np.float32(0)
    if bias != 0:
        added = read_bias(bias_dtype, bias)
    paired = rank - rank % (16 // v.size(kind))
    for token in order[t:end]:
        even, odd = np.float32(0), np.float32(0)
        for j in range(rank):
            factor = v.read(v.FLOAT32, h[0] + token * h[1] + 4 * j)
            item = v.read(kind, b + j * v.size(kind))
            if j % 2 and j < paired:
                odd = v.multiply_add(item, factor, odd)
            else:
                even = v.multiply_add(item, factor, even)
        at = y[0] + token * y[1] + column * v.size(kind_y)
        delta = v.multiply_add(even + odd, scaling, added)
        v.write(kind_y, at, v.read(kind_y, at) + delta)


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
