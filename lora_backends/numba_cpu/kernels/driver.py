"""The kernel: shrink, expand and both, over the segments of a plan.

A part (one thread's share) owns whole blocks of h and y, cut from the segments in proportion to
their cost, so threads share nothing and need no atomics. The kernel shares out the work and calls
functions that find the weights, of 16 and 32 bits (`dense`) or of 8 (`eight_bit`). Those call
routines, each compiled for its dtypes, through their addresses. Every routine sums over the inputs
in 16 lanes, 32 inputs at a time, and over the rank in two lanes (even and odd columns of b).
"""

from __future__ import annotations

import numpy as np

from lora_backends.numba_cpu.config import EXPAND_COST, FETCH_COST
from lora_backends.numba_cpu.kernels.arguments import KernelCall
from lora_backends.numba_cpu.kernels.shares import (
    expand_work,
    highest_rank,
    rank_of,
    segment_at,
    share_of,
    shrink_work,
    slice_of,
    units_of,
)
from lora_backends.numba_cpu.layer import LayerPointers
from lora_backends.numba_cpu.machine.compiling import inlined
from lora_backends.numba_cpu.machine.records import call as call_function
from lora_backends.numba_cpu.machine.records import record
from lora_backends.numba_cpu.machine.vectors import LANES
from lora_backends.numba_cpu.needs import GATHER, SHRINK


@inlined
def run_call(
    address,
    block_ranks,
    shrink_scratch,
    shrink_columns,
    gather_columns,
    expand_scratch,
    expand_columns,
):
    """Run a `KernelCall` by functions: numba would compile closures anew in each process.

    `segment` is a `Segment`, s the number of a slice, `item` a `Slice`; `first` to `last` are
    columns of h or groups of 16 columns of y; `scratch` is an array, and `copied` says whether it
    holds a copy of the segment's rows of x. One part takes at least `block_ranks` rows of A.

        shrink_scratch, expand_scratch: (layer, longest tokens of a segment) -> scratch
        shrink_columns: (call, layer, segment, s, first, last, scratch, copied) -> copied
        gather_columns: (call, layer, segment, s); writes all columns of h
        expand_columns: (call, layer, segment, s, item, rank, first, last, scratch)
    """
    call = record(KernelCall, address)
    layer = record(LayerPointers, call.layer)
    part, parts, barrier, low, high = share_of(call, layer)
    before, end = np.int64(0), call.a_count if high < 0 else high
    if call.first == SHRINK:
        work = shrink_work(layer, call.a_segments, low, end, call.a_span, block_ranks)
        scratch_a = shrink_scratch(layer, work[1])
        for i in range(low, end):
            segment, copied = segment_at(call.a_segments, i), np.bool_(False)
            cost = FETCH_COST + segment.stop - segment.start
            for s in range(layer.num_slices):
                rank = highest_rank(layer, segment.key, call.a_span, s)
                blocks = (rank + block_ranks - 1) // block_ranks
                units = units_of(part, parts, work[0], before, blocks, cost)
                before += blocks * cost
                first, last = units[0] * block_ranks, min(units[1] * block_ranks, rank)
                if first < last:
                    copied = shrink_columns(call, layer, segment, s, first, last, scratch_a, copied)
    elif call.first == GATHER and part == 0:
        for i in range(low, end):
            for s in range(layer.num_slices):
                gather_columns(call, layer, segment_at(call.a_segments, i), s)
    if barrier != 0:
        call_function(barrier)
    if call.expand == 0:
        return
    before, end = np.int64(0), call.b_count if high < 0 else high
    work = expand_work(layer, call.b_segments, low, end)
    scratch_b = expand_scratch(layer, work[1])
    for i in range(low, end):
        segment = segment_at(call.b_segments, i)
        for s in range(layer.num_slices):
            item, rank = slice_of(layer, s), rank_of(layer, segment.key, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            cost = (FETCH_COST + segment.stop - segment.start) * (rank + EXPAND_COST)
            units = units_of(part, parts, work[0], before, tiles, cost)
            before += tiles * cost
            if units[0] < units[1] and (rank > 0 or layer.bias or layer.output_scales):
                expand_columns(call, layer, segment, s, item, rank, units[0], units[1], scratch_b)
