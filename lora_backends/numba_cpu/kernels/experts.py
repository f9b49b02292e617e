"""Two kernels for experts alone: one groups pairs by slot and expert, one sums over pairs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from lora_backends.numba_cpu.config import MAX_SEGMENT
from lora_backends.numba_cpu.kernels.shares import rank_of, slice_of
from lora_backends.numba_cpu.layer import LayerPointers
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined
from lora_backends.numba_cpu.machine.records import call, ints, read_id, read_int, record
from lora_backends.numba_cpu.plan import EXPERT_BITS

LANES = v.LANES


class Grouping(NamedTuple):
    """The arguments of `run_grouping`, as int64 one after the other; arrays by address."""

    topk_ids: int  # [num_tokens, top_k]: the expert of each pair as the router names it
    topk_ids_size: int  # bytes of an element, 4 or 8; then strides in bytes
    topk_ids_row: int
    topk_ids_step: int
    expert_map: int  # [map_size] int32, or 0
    map_size: int
    ids: int  # written: [num_tokens, top_k] int64, the local expert of each pair, or -1
    top_k: int
    num_experts: int
    num_tokens: int
    num_segments: int  # of the plan
    segments: int
    order: int
    counts: int  # [num_experts] int64, any values
    pairs: int  # written: pairs by slot, then expert, then position; [num_tokens * top_k] int64
    tokens: int  # written: their tokens
    by_expert: int  # written: segments of one slot and expert, [num_tokens * top_k, 3] int64
    by_slot: int  # written: segments of one slot
    totals: int  # written: how many pairs and segments of either kind there are, [3] int64


class Reduction(NamedTuple):
    """The arguments of `run_reduction`, as int64 one after the other; arrays by address."""

    threads: int
    thread_num: int
    num_threads: int
    layer: int
    ids: int  # as in `Grouping`
    top_k: int
    num_segments: int  # of the plan
    segments: int
    order: int
    delta: int  # [num_tokens * top_k, out_features] float32, contiguous
    out_features: int
    one: int  # a float32: 1
    y: int
    y_row: int


def grouping_entry() -> Any:
    """Compile `run_grouping`; it takes the address of a `Grouping`."""

    def run(address):
        run_grouping(address)

    return compiled(run)


def reduction_entry(kind_y: Any) -> Any:
    """Compile `run_reduction` for y of a kind; it takes the address of a `Reduction`."""

    def run(address):
        run_reduction(kind_y, address)

    return compiled(run)


@inlined
def run_grouping(address):
    """Sort the live pairs by slot and expert: a counting sort of the experts, slot by slot."""
    args = record(Grouping, address)
    plan = carray(ints(args.segments), (args.num_segments, 3))
    counts = carray(ints(args.counts), args.num_experts)
    by_expert = carray(ints(args.by_expert), (args.num_tokens * args.top_k, 3))
    by_slot = carray(ints(args.by_slot), (args.num_tokens * args.top_k, 3))
    totals = carray(ints(args.totals), 3)
    totals[:] = 0
    if args.topk_ids != args.ids:
        write_local_ids(args)
    i = 0
    while i < args.num_segments:
        slot, start, first = plan[i, 0], plan[i, 1], totals[0]
        while i < args.num_segments and plan[i, 0] == slot:  # a long run of a slot is cut
            stop, i = plan[i, 2], i + 1
        count_pairs(args, counts, start, stop)
        end = first
        for expert in range(args.num_experts):
            count, counts[expert] = counts[expert], end
            key = slot + (expert << EXPERT_BITS)
            totals[1] = add_segments(by_expert, totals[1], key, end, end + count)
            end += count
        totals[2] = add_segments(by_slot, totals[2], slot, first, end)
        place_pairs(args, counts, start, stop)
        totals[0] = end


@function
def write_local_ids(args):
    """Write the expert of each pair on this rank, -1 where it is not one of ours."""
    ids = carray(ints(args.ids), args.num_tokens * args.top_k)
    for t in range(args.num_tokens):
        for j in range(args.top_k):
            at = args.topk_ids + t * args.topk_ids_row + j * args.topk_ids_step
            expert = read_int(at) if args.topk_ids_size == 4 else read_id(at)
            if args.expert_map != 0 and expert >= 0:
                known = expert < args.map_size
                expert = read_int(args.expert_map + 4 * expert) if known else -1
            ids[t * args.top_k + j] = expert if 0 <= expert < args.num_experts else -1


@function
def count_pairs(args, counts, start, stop):
    """Count the pairs of each expert among tokens of one slot."""
    counts[:] = 0
    for i in range(start, stop):
        row = args.ids + 8 * args.top_k * read_id(args.order + 8 * i)
        for j in range(args.top_k):
            expert = read_id(row + 8 * j)
            if expert >= 0:
                counts[expert] += 1


@function
def place_pairs(args, places, start, stop):
    """Write the pairs of tokens of one slot where each expert's next one belongs."""
    pairs = carray(ints(args.pairs), args.num_tokens * args.top_k)
    tokens = carray(ints(args.tokens), args.num_tokens * args.top_k)
    for i in range(start, stop):
        token = read_id(args.order + 8 * i)
        for j in range(args.top_k):
            pair = token * args.top_k + j
            expert = read_id(args.ids + 8 * pair)
            if expert >= 0:
                pairs[places[expert]] = pair
                tokens[places[expert]] = token
                places[expert] += 1


@function
def add_segments(segments, count, key, start, end):
    """Append the segments of a run; return how many there are now."""
    for first in range(start, end, MAX_SEGMENT):
        segments[count, 0] = key
        segments[count, 1] = first
        segments[count, 2] = min(first + MAX_SEGMENT, end)
        count += 1
    return count


@inlined
def run_reduction(kind_y, address):
    """Add to each token's row of y the deltas of its pairs, in order of the pairs."""
    args = record(Reduction, address)
    layer = record(LayerPointers, args.layer)
    segments = carray(ints(args.segments), (args.num_segments, 3))
    part, parts = 0, 1
    if args.threads > 1:
        part, parts = call(args.thread_num), call(args.num_threads)
    total = segments[-1, 2]
    low, high = total * part // parts, total * (part + 1) // parts
    for slot, start, stop in segments:
        for i in range(max(start, low), min(stop, high)):
            token = read_id(args.order + 8 * i)
            for s in range(layer.num_slices):
                item = slice_of(layer, s)
                add_pairs(kind_y, args, layer, slot, token, s, item.first, item.last)


@inlined
def add_pairs(kind_y, args, layer, slot, token, s, first, last):
    """Add the deltas of one token's pairs to the columns of a slice; without any, keep its bits."""
    row_bytes, ids = 4 * args.out_features, args.ids + 8 * args.top_k * token
    deltas, y = args.delta + token * args.top_k * row_bytes, args.y + token * args.y_row
    touched = np.empty(args.top_k, np.int64)
    count = 0
    for j in range(args.top_k):
        expert = read_id(ids + 8 * j)
        if expert >= 0 and rank_of(layer, slot + (expert << EXPERT_BITS), s) > 0:
            touched[count] = deltas + j * row_bytes
            count += 1
    if count == 0:
        return
    column = first
    while column + LANES <= last:
        sums = v.zeros((0, 0), (0,))
        for i in range(count):
            delta = (v.load(v.FLOAT32, touched[i] + 4 * column),)
            sums = v.add_columns(sums, delta, (args.one,), 0)
        added = v.zeros((0,), (0,))
        v.update_rows(kind_y, (y,), column, sums, (np.float32(1),), added, ())
        column += LANES
    for rest in range(column, last):
        total = np.float32(0)
        for i in range(count):
            total += v.read(v.FLOAT32, touched[i] + 4 * rest)
        at = y + rest * v.size(kind_y)
        v.write(kind_y, at, v.read(kind_y, at) + total)
