"""The steps of a kernel for stacks of 16 and 32 bits: they call routines by a segment's length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.config import (
    EXPAND_TILES,
    LONG_PANEL,
    LONG_SEGMENT,
    LONG_TILES,
    SHRINK_RANKS,
)
from lora_backends.numba_cpu.kernels import long
from lora_backends.numba_cpu.kernels.addressing import ALL, columns_of, expand_of, h_of, x_of
from lora_backends.numba_cpu.kernels.arguments import ExpandLong, Gather, Panel, Shrink
from lora_backends.numba_cpu.kernels.blend import run_blend
from lora_backends.numba_cpu.kernels.driver import run_call
from lora_backends.numba_cpu.kernels.long import aligned
from lora_backends.numba_cpu.kernels.shares import rank_of, slice_of, start_of
from lora_backends.numba_cpu.machine.compiling import compiled, function, part
from lora_backends.numba_cpu.machine.records import invoke, record
from lora_backends.numba_cpu.machine.vectors import LANES


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


@function
def shrink_scratch(layer, longest):
    """Return the memory that `shrink_long` needs."""
    return np.empty(long.shrink_scratch(longest), np.float32)


@part
def shrink_columns(call, layer, segment, s, first, last, scratch, copied):
    """Write ``h[s, t, first:last] = x[t] @ a[l, s, first:last].T``."""
    routines, item = record(Routines, call.routines), slice_of(layer, s)
    a = start_of(item.a, item.a_slot, item.a_expert, segment.key)
    n, tokens = layer.in_features, segment.stop - segment.start
    if tokens < LONG_SEGMENT:
        goes_on = int(last == layer.max_rank)  # the next slice's or slot's rows follow
        x, h = x_of(call, ALL), h_of(call, s, ALL, ALL)
        shrink = Shrink(a, item.a_row, n, first, last, goes_on, segment.start, segment.stop, x, h)
        invoke(routines.shrink_short, shrink)
        return copied
    for j in range(first, last, LONG_PANEL):
        x, h = x_of(call, segment.start), h_of(call, s, j, segment.start)
        count, at = min(last - j, LONG_PANEL), a + j * item.a_row
        memory = aligned(scratch)
        panel = Panel(routines.add_block, memory, at, item.a_row, n, count, tokens, x, h)
        invoke(routines.shrink_long, panel)
    return copied


@part
def gather_columns(call, layer, segment, s):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``."""
    item = slice_of(layer, s)
    a, rank = item.a + segment.key * item.a_slot, rank_of(layer, segment.key, s)
    ids, h = x_of(call, ALL), h_of(call, s, ALL, ALL)
    rows = Gather(a, item.a_row, rank, segment.start, segment.stop, ids, h)
    invoke(record(Routines, call.routines).gather, rows)


@function
def expand_scratch(layer, longest):
    """Return the memory that `expand_long` needs."""
    return np.empty(long.expand_scratch(longest, layer.max_rank), np.float32)


@part
def expand_columns(call, layer, segment, s, item, rank, first, last, scratch):
    """Add to groups of 16 columns of y, and to the columns that are left over."""
    routines = record(Routines, call.routines)
    short = routines.expand_short if layer.output_scales == 0 else routines.expand_multiplied
    is_long = segment.stop - segment.start >= LONG_SEGMENT
    full = (item.last - item.first) // LANES
    for tile in range(first, min(last, full), EXPAND_TILES):
        count, done = min(last, full, tile + EXPAND_TILES) - tile, 0
        if is_long and count >= LONG_TILES:
            groups = count // LONG_TILES
            columns = columns_of(layer, item, segment.key, tile * LANES)
            expand = expand_of(call, layer, segment, s, columns, groups, rank)
            memory = aligned(scratch)
            invoke(routines.expand_long, ExpandLong(routines.add_stored, memory, expand))
            done = groups * LONG_TILES
        if done < count:
            columns = columns_of(layer, item, segment.key, (tile + done) * LANES)
            invoke(short, expand_of(call, layer, segment, s, columns, count - done, rank))
    width = item.last - item.first - full * LANES
    if first <= full < last and width > 0:
        columns = columns_of(layer, item, segment.key, full * LANES)
        invoke(routines.expand_column, expand_of(call, layer, segment, s, columns, width, rank))


def entry() -> Any:
    """Compile the kernel; it takes a `KernelCall`'s address."""

    def run(address):
        run_call(
            address,
            SHRINK_RANKS,
            shrink_scratch,
            shrink_columns,
            gather_columns,
            expand_scratch,
            expand_columns,
        )

    return compiled(run)


def blend_entry() -> Any:
    """Compile the expand of several adapters per token, of a `KernelCall` with its `Blocks`."""

    def run(address):
        run_blend(address, expand_scratch, expand_columns)

    return compiled(run)
