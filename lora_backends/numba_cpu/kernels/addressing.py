"""Where the rows and columns of a part of a call lie: the arguments of its routines."""

from __future__ import annotations

import numpy as np

from lora_backends.numba_cpu.kernels.arguments import (
    ColumnPointers,
    Expand,
    RowPointers,
    SumFactors,
)
from lora_backends.numba_cpu.kernels.shares import SLOT_MASK, start_of
from lora_backends.numba_cpu.machine.compiling import part

ALL = np.int64(0)  # from the first column or position on; numba compiles once more for a plain 0


@part
def x_of(call, position):
    """Return the rows of x from a position on."""
    return RowPointers(call.x, call.x_row, call.x_order + 8 * position)


@part
def h_of(call, s, column, position):
    """Return the rows of h that the first half writes, from a column and a position on."""
    start = call.h + s * call.h_slice + 4 * column
    return RowPointers(start, call.h_row, call.to_order + 8 * position)


@part
def expand_of(call, layer, segment, s, columns, count, rank):
    """Return the arguments of a routine that adds to columns of y."""
    scaling = (
        start_of(layer.scalings, layer.scalings_slot, layer.scalings_expert, segment.key)
        + s * layer.scalings_slice
    )
    scales = RowPointers(call.scales, call.scales_row, call.scales_order)
    h = RowPointers(call.h + s * call.h_slice, call.h_row, call.h_order)
    y = RowPointers(call.y, call.y_row, call.y_order)
    factors = SumFactors(rank, scaling, scales)
    return Expand(columns, count, factors, segment.start, segment.stop, h, y)


@part
def columns_of(layer, item, key, within):
    """Return the columns of a slice from column `within` of it on."""
    bias, output_scale, slot, column = 0, 0, key & SLOT_MASK, item.first + within
    if layer.bias != 0:
        bias = layer.bias + slot * layer.bias_slot + column * layer.bias_size
    if layer.output_scales != 0:
        output_scale = layer.output_scales + slot * layer.output_scales_slot + 4 * column
    b = start_of(item.b, item.b_slot, item.b_expert, key) + within * item.b_row
    return ColumnPointers(
        b, item.b_row, layer.bias_dtype, bias, layer.bias_size, output_scale, column
    )


@part
def following(columns, count):
    """Return the columns that begin `count` columns later."""
    bias = columns.bias + count * columns.bias_size if columns.bias != 0 else 0
    scale = columns.output_scale + 4 * count if columns.output_scale != 0 else 0
    b, column = columns.b + count * columns.b_row, columns.column + count
    return ColumnPointers(
        b, columns.b_row, columns.bias_dtype, bias, columns.bias_size, scale, column
    )


@part
def with_columns(expand, columns):
    """Return the same arguments for other columns."""
    return Expand(
        columns, expand.groups, expand.factors, expand.start, expand.stop, expand.h, expand.y
    )
