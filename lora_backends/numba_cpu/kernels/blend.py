"""The expand of several adapters per token: each block of y is read, added to and stored once.

A block is up to MAX_SEGMENT tokens with any adapters; each of its segments has the (token, adapter)
pairs of one slot. A thread takes BLEND_BYTES of float32 at a time: it widens columns of the block's
rows of y, lets the routines of single adapters add segment after segment, and stores the rows that
changed. A float32 y is added to in place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lora_backends.numba_cpu.config import BLEND_BYTES, EXPAND_COST, FETCH_COST, MAX_SEGMENT
from lora_backends.numba_cpu.kernels.arguments import KernelCall
from lora_backends.numba_cpu.kernels.eight_bit_expand import narrow_row, widen_row
from lora_backends.numba_cpu.kernels.shares import (
    expand_work,
    rank_of,
    segment_at,
    slice_of,
    units_of,
)
from lora_backends.numba_cpu.layer import CODE_BFLOAT16, CODE_FLOAT32, LayerPointers
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import function, inlined
from lora_backends.numba_cpu.machine.records import call as call_function
from lora_backends.numba_cpu.machine.records import read_id, record, write_id

LANES = v.LANES
CALL_FIELDS = len(KernelCall._fields)
Y_AT, Y_ROW_AT = (8 * KernelCall._fields.index(name) for name in ("y", "y_row"))
LINE = 64  # bytes of a cache line, and of 16 columns of float32


class Blocks(NamedTuple):
    """The blocks of a blend; in memory they follow a `KernelCall`, whose y is set block by block.

    Arrays are given by their addresses; block b ends where block b + 1 begins.
    """

    number: int
    segments: int  # [number + 1] int64: the first segment of each block
    starts: int  # [number + 1] int64: its first entry in `tokens`
    tokens: int  # int64: the row of y of each token
    y: int
    y_row: int
    y_dtype: int  # CODE_FLOAT32, ...


@inlined
def run_blend(address, expand_scratch, expand_columns):
    """Run a `KernelCall` and its `Blocks` by the functions that `driver.run_call` takes."""
    call, blocks = record(KernelCall, address), record(Blocks, address + 8 * CALL_FIELDS)
    layer = record(LayerPointers, call.layer)
    part, parts = np.int64(0), np.int64(1)
    if call.threads > 1:
        part, parts = call_function(call.thread_num), call_function(call.num_threads)
    total, longest = expand_work(layer, call.b_segments, np.int64(0), call.b_count)
    scratch = expand_scratch(layer, longest)
    memory, copied = np.empty(CALL_FIELDS, np.int64), np.empty(0, np.float32)
    copy = memory.ctypes.data
    for field in range(CALL_FIELDS):
        write_id(copy + 8 * field, read_id(address + 8 * field))
    narrow = blocks.y_dtype != CODE_FLOAT32
    if narrow:
        copied = np.empty((BLEND_BYTES + LINE) // 4, np.float32)
    else:
        write_id(copy + Y_AT, blocks.y)
        write_id(copy + Y_ROW_AT, blocks.y_row)
    rows = (copied.ctypes.data + LINE - 1) // LINE * LINE
    changed, before = np.empty(MAX_SEGMENT, np.int64), np.int64(0)
    for b in range(blocks.number):
        low, high = read_id(blocks.segments + 8 * b), read_id(blocks.segments + 8 * b + 8)
        start, stop = read_id(blocks.starts + 8 * b), read_id(blocks.starts + 8 * b + 8)
        many = BLEND_BYTES // (LINE * (stop - start))  # groups of 16 columns at a time
        for s in range(layer.num_slices):
            item = slice_of(layer, s)
            tiles = (item.last - item.first + LANES - 1) // LANES
            cost = block_cost(layer, call.b_segments, low, high, s)
            units = units_of(part, parts, total, before, tiles, cost)
            before += tiles * cost
            if units[0] == units[1]:
                continue
            if narrow:
                note_changed(layer, call, low, high, s, changed)
            for tile in range(units[0], units[1], many):
                end = min(units[1], tile + many)
                first = item.first + tile * LANES
                width = min(item.first + end * LANES, item.last) - first
                row = LINE * (end - tile)
                if narrow:
                    widen_block(blocks, start, stop, changed, first, width, rows, row)
                    write_id(copy + Y_AT, rows - 4 * first)
                    write_id(copy + Y_ROW_AT, row)
                of_block = record(KernelCall, copy)
                for i in range(low, high):
                    segment = segment_at(call.b_segments, i)
                    rank = rank_of(layer, segment.key, s)
                    if rank > 0 or layer.bias:
                        expand_columns(of_block, layer, segment, s, item, rank, tile, end, scratch)
                if narrow:
                    narrow_block(blocks, start, stop, changed, first, width, rows, row)


@function
def block_cost(layer, segments, low, high, s):
    """Return the cost of 16 columns of a slice for a block, as `expand_work` counts it."""
    cost = 0
    for i in range(low, high):
        segment = segment_at(segments, i)
        rank = rank_of(layer, segment.key, s)
        cost += (FETCH_COST + segment.stop - segment.start) * (rank + EXPAND_COST)
    return cost


@function
def note_changed(layer, call, low, high, s, changed):
    """Mark the rows of a block that change in a slice; the others keep their bits."""
    changed[:] = 0
    for i in range(low, high):
        segment = segment_at(call.b_segments, i)
        if rank_of(layer, segment.key, s) > 0 or layer.bias != 0:
            for position in range(segment.start, segment.stop):
                changed[read_id(call.y_order + 8 * position)] = 1


@function
def widen_block(blocks, start, stop, changed, first, width, to, step):
    """Store columns of a block's rows of y as float32, `step` bytes apart."""
    for t in range(start, stop):
        if changed[t - start] != 0:
            row = blocks.y + read_id(blocks.tokens + 8 * t) * blocks.y_row + 2 * first
            if blocks.y_dtype == CODE_BFLOAT16:
                widen_row(v.BFLOAT16, row, width, to)
            else:
                widen_row(v.FLOAT16, row, width, to)
        to += step


@function
def narrow_block(blocks, start, stop, changed, first, width, rows, step):
    """Round the columns that `widen_block` widened, and store them in y."""
    for t in range(start, stop):
        if changed[t - start] != 0:
            row = blocks.y + read_id(blocks.tokens + 8 * t) * blocks.y_row + 2 * first
            if blocks.y_dtype == CODE_BFLOAT16:
                narrow_row(v.BFLOAT16, rows, width, row)
            else:
                narrow_row(v.FLOAT16, rows, width, row)
        rows += step
