"""Shrink and expand for 8-bit stacks: one set of kernels for every dtype and every block of scales.

int8 with a scale per row is widened in registers: A in segments below `LONG_SEGMENT` tokens, B in
segments of any length where the layer has no output_scales. The scales of A multiply h, those of B
the sums of a column. Where x is bfloat16 and the CPU has instructions for it, A is widened in
registers for segments of any length: to bfloat16 where pairs of it are multiplied faster than
float32, and to float32 where not. Products are exact, and sums stay float32.

All else takes the way of long segments of 16 bits: rows of A and tiles of B are widened, multiplied
by their scales and stored as float32. While one row is widened, the next is prefetched.

`shrink_dots` reads x in bfloat16, and `expand_int8` is compiled for each dtype of y. All other
routines work on float32 copies of x, and of y unless it is float32 already, so they are compiled
once for any dtypes of x and y.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.config import LONG_PANEL, LONG_RANKS, LONG_SEGMENT, MAX_SEGMENT
from lora_backends.numba_cpu.kernels import eight_bit_expand, eight_bit_shrink
from lora_backends.numba_cpu.kernels.addressing import ALL, columns_of, expand_of, h_of, x_of
from lora_backends.numba_cpu.kernels.arguments import (
    Copy,
    EightBitExpand,
    EightBitGather,
    EightBitPanel,
    Gather,
    Panel,
    RowPointers,
    Shrink,
)
from lora_backends.numba_cpu.kernels.blend import run_blend
from lora_backends.numba_cpu.kernels.driver import run_call
from lora_backends.numba_cpu.kernels.eight_bit_shrink import ORDER_BYTES, row_bytes, scale_h
from lora_backends.numba_cpu.kernels.long import LINE, aligned
from lora_backends.numba_cpu.kernels.scales import a_scales_of, b_scales_of
from lora_backends.numba_cpu.kernels.shares import rank_of, slice_of, start_of
from lora_backends.numba_cpu.layer import INT8
from lora_backends.numba_cpu.machine.compiling import compiled, function, part
from lora_backends.numba_cpu.machine.records import invoke, record, write_id
from lora_backends.numba_cpu.machine.vectors import LANES


class EightBitRoutines(NamedTuple):
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


@function
def shrink_scratch(layer, longest):
    """Return memory for the routines of the shrink; it begins with the numbers from 0."""
    size = eight_bit_shrink.scratch_bytes(longest, layer.in_features) + LINE
    scratch = np.empty(size // 4, np.float32)
    write_order(aligned(scratch), longest)
    return scratch


@function
def expand_scratch(layer, longest):
    """Return memory for the routines of the expand; it begins with the numbers from 0."""
    scratch = np.empty((eight_bit_expand.scratch_bytes(layer.max_rank) + LINE) // 4, np.float32)
    write_order(aligned(scratch), np.int64(MAX_SEGMENT))
    return scratch


@function
def write_order(to, count):
    """Write the numbers from 0."""
    for t in range(count):
        write_id(to + 8 * t, t)


@part
def shrink_columns(call, layer, segment, s, first, last, scratch, copied):
    """Write ``h[s, t, first:last] = x[t] @ a[l, s, first:last].T``."""
    routines, item, key = record(EightBitRoutines, call.routines), slice_of(layer, s), segment.key
    a, a_row, n = start_of(item.a, item.a_slot, item.a_expert, key), item.a_row, layer.in_features
    tokens, x, memory = segment.stop - segment.start, x_of(call, segment.start), aligned(scratch)
    scales, h = a_scales_of(layer, item, key), h_of(call, s, ALL, segment.start)
    in_registers = layer.stored == INT8 and layer.block_columns == 0
    if routines.shrink_dots == 0 and in_registers and tokens < LONG_SEGMENT:
        if not copied:
            invoke(routines.copy_x, Copy(call.x_dtype, tokens, n, memory, x))
        copy, goes_on = (
            RowPointers(memory + ORDER_BYTES, row_bytes(n), memory),
            int(last == layer.max_rank),
        )
        start = np.int64(0)
        shrink = Shrink(a, a_row, n, first, last, goes_on, start, tokens, copy, h)
        invoke(routines.shrink_short, shrink)
        copied = True
    else:
        for j in range(first, last, LONG_PANEL):
            count, to = min(last - j, LONG_PANEL), h_of(call, s, j, segment.start)
            panel = Panel(routines.add_block, memory, a + j * a_row, a_row, n, count, tokens, x, to)
            if routines.shrink_dots != 0:
                invoke(routines.shrink_dots, panel)
            else:
                eight_bit = EightBitPanel(layer.stored, scales, j, call.x_dtype, panel)
                invoke(routines.shrink_panel, eight_bit)
        copied = copied and routines.shrink_dots != 0
    if layer.block_columns == 0:
        scale_h(scales, first, last, tokens, h)
    return copied


@part
def gather_columns(call, layer, segment, s):
    """Write ``h[s, t, :r] = a[l, s, :r, ids[t]]``."""
    item, key = slice_of(layer, s), segment.key
    a, rank = start_of(item.a, item.a_slot, item.a_expert, key), rank_of(layer, key, s)
    ids, h = x_of(call, ALL), h_of(call, s, ALL, ALL)
    rows = Gather(a, item.a_row, rank, segment.start, segment.stop, ids, h)
    eight_bit = EightBitGather(layer.stored, a_scales_of(layer, item, key), rows)
    invoke(record(EightBitRoutines, call.routines).gather, eight_bit)


@part
def expand_columns(call, layer, segment, s, item, rank, first, last, scratch):
    """Add to groups of 16 columns of y, and to the columns that are left over."""
    routines, full = record(EightBitRoutines, call.routines), (item.last - item.first) // LANES
    add = routines.expand_stored
    if layer.stored == INT8 and layer.block_columns == 0 and rank > 0 and layer.output_scales == 0:
        add = routines.expand_int8
    row, end = first * LANES, min(last, full) * LANES
    if row < end:
        expand = expand_of(
            call, layer, segment, s, columns_of(layer, item, segment.key, row), end - row, rank
        )
        invoke(add, stored_of(call, layer, item, segment.key, scratch, row, end, expand))
    row, end = full * LANES, item.last - item.first
    if first <= full < last and row < end:
        expand = expand_of(
            call, layer, segment, s, columns_of(layer, item, segment.key, row), end - row, rank
        )
        ragged = stored_of(call, layer, item, segment.key, scratch, row, end, expand)
        invoke(routines.expand_ragged, ragged)


@part
def stored_of(call, layer, item, key, scratch, row, end, expand):
    """Return the arguments of a routine for rows of b from `row` to `end`."""
    routines, scales = record(EightBitRoutines, call.routines), b_scales_of(layer, item, key)
    return EightBitExpand(
        routines.add_many,
        routines.add_one,
        routines.expand_column,
        layer.stored,
        scales,
        call.y_dtype,
        aligned(scratch),
        row,
        end,
        expand,
    )


def entry() -> Any:
    """Compile the kernel; it takes a `KernelCall`'s address."""

    def run(address):
        run_call(
            address,
            LONG_RANKS,
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
