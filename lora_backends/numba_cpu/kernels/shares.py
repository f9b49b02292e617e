"""How threads share the work of a call: blocks of h and y, cut in proportion to their cost."""

from __future__ import annotations

from lora_backends.numba_cpu.config import EXPAND_COST, FETCH_COST
from lora_backends.numba_cpu.kernels.arguments import SEGMENT_BYTES, SLICE_BYTES, Segment
from lora_backends.numba_cpu.layer import Slice
from lora_backends.numba_cpu.machine.compiling import function, inlined
from lora_backends.numba_cpu.machine.records import call, fields, read_int, record
from lora_backends.numba_cpu.machine.vectors import LANES
from lora_backends.numba_cpu.plan import EXPERT_BITS

SLOT_MASK = (1 << EXPERT_BITS) - 1


@function
def share_of(args, layer):
    """Return (part, parts, barrier, low, high): the share of this thread."""
    if args.threads == 1:
        return 0, 1, 0, 0, -1
    part, parts = call(args.thread_num), call(args.num_threads)
    if parts == 1:
        return 0, 1, 0, 0, -1
    # both halves of segments low to high - 1, without a barrier
    if args.whole:
        low, high = segments_of(part, parts, layer, args.b_segments, args.b_count)
        return 0, 1, 0, low, high
    # a part of every segment; all threads meet between the halves, unless there is no first half
    return part, parts, args.barrier if args.first != 0 else 0, 0, -1


@function
def segments_of(part, parts, layer, segments, count):
    """Return the first and last + 1 of the segments whose middle lies in this part's share."""
    total = 0
    for i in range(count):
        total += segment_cost(layer, segment_at(segments, i))
    low, high, before = 0, 0, 0
    for i in range(count):
        cost = segment_cost(layer, segment_at(segments, i))
        middle = 2 * before + cost
        low += middle * parts < 2 * total * part
        high += middle * parts < 2 * total * (part + 1)
        before += cost
    return low, high


@function
def segment_cost(layer, segment):
    """Return the cost of a segment, in arbitrary units."""
    cost = 0
    for s in range(layer.num_slices):
        item = slice_of(layer, s)
        width = layer.in_features + item.last - item.first
        cost += width * (rank_of(layer, segment.key, s) + 1)
    return cost * (FETCH_COST + segment.stop - segment.start)


@function
def units_of(part, parts, total, before, units, cost):
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
        segment = segment_at(segments, i)
        tokens = segment.stop - segment.start
        longest = max(longest, tokens)
        for s in range(layer.num_slices):
            blocks = (highest_rank(layer, segment.key, span, s) + ranks - 1) // ranks
            total += blocks * (FETCH_COST + tokens)
    return total, longest


@function
def expand_work(layer, segments, low, high):
    """Return the cost of the expand, and the longest segment."""
    total, longest = 0, 0
    for i in range(low, high):
        segment = segment_at(segments, i)
        tokens = segment.stop - segment.start
        longest = max(longest, tokens)
        for s in range(layer.num_slices):
            item = slice_of(layer, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            total += tiles * (FETCH_COST + tokens) * (rank_of(layer, segment.key, s) + EXPAND_COST)
    return total, longest


@inlined
def segment_at(segments, i):
    """Return a segment."""
    return fields(Segment, segments + i * SEGMENT_BYTES)


@inlined
def slice_of(layer, s):
    """Return where a slice lies."""
    return record(Slice, layer.slices + s * SLICE_BYTES)


@function
def rank_of(layer, key, s):
    """Return the rank of a slot's slice."""
    slot, expert = key & SLOT_MASK, key >> EXPERT_BITS
    return read_int(
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
