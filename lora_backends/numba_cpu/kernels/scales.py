"""Elements of 8 bits and their scales."""

from __future__ import annotations

from lora_backends.numba_cpu.kernels.arguments import Scales
from lora_backends.numba_cpu.kernels.shares import start_of
from lora_backends.numba_cpu.layer import E4M3, INT8
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import function, part


@part
def a_scales_of(layer, item, key):
    """Return the scales of A of a segment."""
    start = start_of(item.a_scales, item.a_scales_slot, item.a_scales_expert, key)
    row, column = item.a_scales_row, item.a_scales_column
    return Scales(start, row, column, layer.block_rows, layer.block_columns)


@part
def b_scales_of(layer, item, key):
    """Return the scales of B of a segment."""
    start = start_of(item.b_scales, item.b_scales_slot, item.b_scales_expert, key)
    row, column = item.b_scales_row, item.b_scales_column
    return Scales(start, row, column, layer.block_rows, layer.block_columns)


@part
def group_scales(scales, row):
    """Return where the scales of a row's groups lie."""
    return scales.start + row // scales.rows * scales.row if scales.rows != 0 else scales.start


@part
def scale_of(scales, row, column):
    """Return the scale of one element."""
    group = column // scales.columns if scales.columns != 0 else 0
    return v.read(v.FLOAT32, group_scales(scales, row) + group * scales.column)


@part
def one_after_the_other(scales):
    """Return whether each row has a scale, and no bytes lie between two of them."""
    return scales.rows == 1 and scales.row == 4


@function
def read_stored(stored, address):
    """Return one element as float32."""
    if stored == INT8:
        return v.read(v.INT8, address)
    if stored == E4M3:
        return v.read(v.E4M3, address)
    return v.read(v.E5M2, address)
