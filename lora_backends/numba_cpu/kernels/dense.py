"""The kernel: shrink, expand and both, over the segments of a plan, for 16- and 32-bit dtypes.

A part (one thread's share) owns whole blocks of h and y, cut from the segments in proportion to
their cost, so threads share nothing and need no atomics. The kernel shares out the work and finds
the weights. Routines (`kernels_short`, `kernels_long`), each compiled for its dtypes and called
through its address, read them. Every routine sums over the inputs in 16 lanes, 32 inputs at a time,
and over the rank in two lanes (even and odd columns of b).

x and y are (address, bytes from row to row, address of the row of each position), h has the bytes
from slice to slice behind its address; a segment is a key and a range of positions.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.config import (
    EXPAND_COST,
    EXPAND_TILES,
    FETCH_COST,
    LONG_PANEL,
    LONG_SEGMENT,
    LONG_TILES,
    SHRINK_RANKS,
)
from lora_backends.numba_cpu.kernels.long import aligned, expand_scratch, shrink_scratch
from lora_backends.numba_cpu.layer import Layer, Slice
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined
from lora_backends.numba_cpu.needs import GATHER, SHRINK
from lora_backends.numba_cpu.plan import EXPERT_BITS

LANES = v.LANES
SLOT_MASK = (1 << EXPERT_BITS) - 1


class Call(NamedTuple):
    """The arguments of a kernel, as int64 one after the other."""

    first: int  # SHRINK, GATHER or 0
    routines: int  # address of the fields of a `Routines`
    expand: int  # whether that is followed by the second half
    thread_num: int  # addresses of OpenMP's functions
    num_threads: int
    barrier: int
    layer: int  # address of the fields of a `Layer`
    x_row: int
    h_row: int
    y_row: int
    x_dtype: int  # BIAS_FLOAT32, ...; kernels of 8-bit stacks ask for it
    y_dtype: int
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
    whole: int  # whether a thread does both halves of its share of the segments
    threads: int  # 1: OpenMP is not asked
    x: int
    h: int
    h_slice: int
    y: int


class Routines(NamedTuple):
    """The addresses of routines; 0 where a call needs none."""

    shrink_short: int
    shrink_long: int
    add_block: int
    gather: int
    expand_short: int
    expand_multiplied: int  # with output_scales
    expand_long: int
    add_stored: int
    expand_column: int


class Segment(NamedTuple):
    """A range of positions whose rows read the same weights."""

    key: int  # slot + (expert << EXPERT_BITS)
    start: int
    stop: int


SEGMENT_BYTES, SLICE_BYTES = 8 * len(Segment._fields), 8 * len(Slice._fields)


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
            gather(call, layer, routines, low, call.a_count if high < 0 else high)
        if barrier != 0:
            v.call(barrier)
        if call.expand:
            expand_part(part, parts, call, layer, routines, low, call.b_count if high < 0 else high)

    return compiled(run)


@function
def share_of(call, layer):
    """Return (part, parts, barrier, low, high): the share of this thread.

    With `whole` it does both halves of segments low to high - 1, as part 0 of 1, without a barrier.
    Else it does part `part` of `parts` of every segment (low 0, high -1), and all threads meet at
    the barrier between the halves, unless there is one thread or no first half (barrier 0).
    """
    if call.threads == 1:
        return 0, 1, 0, 0, -1
    part, parts = v.call(call.thread_num), v.call(call.num_threads)
    if parts == 1:
        return 0, 1, 0, 0, -1
    if call.whole:
        low, high = own_segments(part, parts, layer, call.b_segments, call.b_count)
        return 0, 1, 0, low, high
    return part, parts, call.barrier if call.first != 0 else 0, 0, -1


@function
def own_segments(part, parts, layer, segments, count):
    """Return the first and last + 1 of the segments whose middle lies in this part's share."""
    total = 0
    for i in range(count):
        total += segment_cost(layer, segments + i * SEGMENT_BYTES)
    low, high, before = 0, 0, 0
    for i in range(count):
        cost = segment_cost(layer, segments + i * SEGMENT_BYTES)
        middle = 2 * before + cost
        low += middle * parts < 2 * total * part
        high += middle * parts < 2 * total * (part + 1)
        before += cost
    return low, high


@function
def segment_cost(layer, segment):
    """Return the cost of a segment, in arbitrary units."""
    key, start, stop = v.fields(Segment, segment)
    cost = 0
    for s in range(layer.num_slices):
        item = v.record(Slice, layer.slices + s * SLICE_BYTES)
        width = layer.in_features + item.last - item.first
        cost += width * (rank_of(layer, key, s) + 1)
    return cost * (FETCH_COST + stop - start)


@function
def own_units(part, parts, total, before, units, cost):
    """Return which of `units` units, `cost` each after `before`, start in this part's share."""
    low, high = total * part // parts, total * (part + 1) // parts
    first = -((before - low) // cost)
    last = -((before - high) // cost)
    return min(max(first, 0), units), min(max(last, 0), units)


@function
def shrink_work(layer, segments, low, high, span, ranks):
    """Return the cost of the shrink in blocks of as many ranks, and the longest segment."""
    total, longest = 0, 0
    for i in range(low, high):
        key, start, stop = v.fields(Segment, segments + i * SEGMENT_BYTES)
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            blocks = (highest_rank(layer, key, span, s) + ranks - 1) // ranks
            total += blocks * (FETCH_COST + stop - start)
    return total, longest


@function
def expand_work(layer, segments, low, high):
    """Return the cost of the expand, and the longest segment."""
    total, longest = 0, 0
    for i in range(low, high):
        key, start, stop = v.fields(Segment, segments + i * SEGMENT_BYTES)
        longest = max(longest, stop - start)
        for s in range(layer.num_slices):
            item = v.record(Slice, layer.slices + s * SLICE_BYTES)
            tiles = (item.last - item.first + LANES - 1) // LANES
            total += tiles * (FETCH_COST + stop - start) * (rank_of(layer, key, s) + EXPAND_COST)
    return total, longest


@function
def rank_of(layer, key, s):
    """Return the rank of a slot's slice."""
    slot, expert = key & SLOT_MASK, key >> EXPERT_BITS
    return v.read_int(
        layer.ranks + slot * layer.ranks_slot + expert * layer.ranks_expert + s * layer.ranks_slice
    )


@function
def highest_rank(layer, key, span, s):
    """Return the highest rank of a slot's slice among `span` experts."""
    rank = 0
    for i in range(span):
        rank = max(rank, rank_of(layer, key + (i << EXPERT_BITS), s))
    return rank


@inlined
def start_of(start, slot_stride, expert_stride, key):
    """Return where the part of a segment's slot and expert begins."""
    return start + (key & SLOT_MASK) * slot_stride + (key >> EXPERT_BITS) * expert_stride


@inlined
def shrink_part(part, parts, call, layer, routines, low, high):
    """Write this part's blocks of ``h[s, t, :r] = x[t] @ a[l, s, :r].T``."""
    total, longest = shrink_work(layer, call.a_segments, low, high, call.a_span, SHRINK_RANKS)
    scratch = np.empty(shrink_scratch(longest), np.float32)
    before = np.int64(0)
    for i in range(low, high):
        key, start, stop = v.fields(Segment, call.a_segments + i * SEGMENT_BYTES)
        for s in range(layer.num_slices):
            rank, cost = highest_rank(layer, key, call.a_span, s), FETCH_COST + stop - start
            blocks = (rank + SHRINK_RANKS - 1) // SHRINK_RANKS
            first, last = own_units(part, parts, total, before, blocks, cost)
            before += blocks * cost
            first, last = first * SHRINK_RANKS, min(last * SHRINK_RANKS, rank)
            if first >= last:
                continue
            item = v.record(Slice, layer.slices + s * SLICE_BYTES)
            a = start_of(item.a, item.a_slot, item.a_expert, key)
            x = (call.x, call.x_row, call.x_order)
            h = (call.h + s * call.h_slice, call.h_row, call.to_order)
            if stop - start < LONG_SEGMENT:
                goes_on = int(last == layer.max_rank)  # the next slice's or slot's rows follow
                columns = (first, last, goes_on, start, stop)
                v.invoke(
                    routines.shrink_short, (a, item.a_row, layer.in_features) + columns + x + h
                )
                continue
            own_x, own_order = (call.x, call.x_row, call.x_order + 8 * start), h[2] + 8 * start
            for j in range(first, last, LONG_PANEL):
                panel = (a + j * item.a_row, item.a_row, layer.in_features)
                own = (min(last - j, LONG_PANEL), stop - start, *own_x, h[0] + 4 * j, h[1])
                v.invoke(
                    routines.shrink_long,
                    (routines.add_block, aligned(scratch), *panel, *own, own_order),
                )


@inlined
def gather(call, layer, routines, low, high):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``."""
    for i in range(low, high):
        key, start, stop = v.fields(Segment, call.a_segments + i * SEGMENT_BYTES)
        for s in range(layer.num_slices):
            item = v.record(Slice, layer.slices + s * SLICE_BYTES)
            rows = (item.a + key * item.a_slot, item.a_row, rank_of(layer, key, s), start, stop)
            ids = (call.x, call.x_row, call.x_order)
            h = (call.h + s * call.h_slice, call.h_row, call.to_order)
            v.invoke(routines.gather, rows + ids + h)


@inlined
def expand_part(part, parts, call, layer, routines, low, high):
    """Add this part's columns of ``scale * scaling * h @ b.T + bias`` to y."""
    total, longest = expand_work(layer, call.b_segments, low, high)
    scratch = np.empty(expand_scratch(longest, layer.max_rank), np.float32)
    short = routines.expand_short if layer.output_scales == 0 else routines.expand_multiplied
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
            rows = rows_of(call, s, start, stop)
            full = (item.last - item.first) // LANES
            for tile in range(first, min(last, full), EXPAND_TILES):
                count, done = min(last, full, tile + EXPAND_TILES) - tile, 0
                if stop - start >= LONG_SEGMENT and count >= LONG_TILES:
                    place, own = place_of(layer, item, key, tile * LANES), count // LONG_TILES
                    done = own * LONG_TILES
                    stored = (routines.add_stored, aligned(scratch))
                    v.invoke(routines.expand_long, stored + place + factors + (own,) + rows)
                if done < count:
                    place = place_of(layer, item, key, (tile + done) * LANES)
                    v.invoke(short, place + factors + (count - done,) + rows)
            width = item.last - item.first - full * LANES
            if first <= full < last and width > 0:
                place = place_of(layer, item, key, full * LANES)
                v.invoke(routines.expand_column, place + factors + (width,) + rows)


@function
def factors_of(call, layer, key, s, rank):
    """Return the rank, where the scaling lies, and the scales of the rows."""
    scaling = start_of(layer.scalings, layer.scalings_slot, layer.scalings_expert, key)
    scaling += s * layer.scalings_slice
    return rank, scaling, call.scales, call.scales_row, call.scales_order


@function
def rows_of(call, s, start, stop):
    """Return a segment's positions, and the rows of h and y."""
    h = (call.h + s * call.h_slice, call.h_row, call.h_order)
    return (start, stop) + h + (call.y, call.y_row, call.y_order)


@function
def place_of(layer, item, key, within):
    """Return where a column of a slice begins: row of b, bytes to the next, bias, scale, column."""
    bias, output_scale, slot, column = 0, 0, key & SLOT_MASK, item.first + within
    if layer.bias != 0:
        bias = layer.bias + slot * layer.bias_slot + column * layer.bias_size
    if layer.output_scales != 0:
        output_scale = layer.output_scales + slot * layer.output_scales_slot + 4 * column
    b = start_of(item.b, item.b_slot, item.b_expert, key) + within * item.b_row
    return b, item.b_row, layer.bias_dtype, bias, layer.bias_size, output_scale, column
