"""Flags that say which compiled routines a call needs; a call combines them by a cheap `|`."""

from __future__ import annotations

SHRINK = 1  # h from x
GATHER = 2  # h from token ids
EXPAND = 4  # y from h
LONG = 8  # some segment may have `LONG_SEGMENT` tokens or more
MULTIPLIED = 16  # the layer has output_scales
RAGGED = 32  # the width of some slice is no multiple of 16
BIAS = 64
IN_REGISTERS = 128  # the weights are int8 with a scale per row, which registers widen
