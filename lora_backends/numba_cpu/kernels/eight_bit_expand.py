"""The expand for 8-bit stacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_backends.numba_cpu.config import MAX_SEGMENT
from lora_backends.numba_cpu.kernels.addressing import following, with_columns
from lora_backends.numba_cpu.kernels.arguments import (
    ColumnPointers,
    EightBitExpand,
    Expand,
    RowPointers,
    Stored,
)
from lora_backends.numba_cpu.kernels.bias import load_bias
from lora_backends.numba_cpu.kernels.eight_bit_shrink import ORDER_BYTES
from lora_backends.numba_cpu.kernels.long import LINE, MANY_TILES
from lora_backends.numba_cpu.kernels.scales import one_after_the_other, read_stored, scale_of
from lora_backends.numba_cpu.kernels.short import (
    EIGHT,
    FOUR,
    NO_STEPS,
    ONE,
    TWO,
    read_scaling,
    steps_of,
)
from lora_backends.numba_cpu.layer import CODE_BFLOAT16, CODE_FLOAT32, E4M3, INT8
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined, part
from lora_backends.numba_cpu.machine.records import fields, invoke

LANES = v.LANES
TILE_AHEAD = 4096  # distance in bytes of prefetches of B, whose 16 rows are few bytes
TILE_BYTES = LINE * len(MANY_TILES)  # of a row of the copy of y
COPY_BYTES = ORDER_BYTES + TILE_BYTES * MAX_SEGMENT  # of y, and its order
SCALES_BYTES = 4 * LANES * len(MANY_TILES)  # of the rows of b that meet all tokens in turn


@function
def scratch_bytes(rank):
    """Return the bytes that the routines need for a layer."""
    return COPY_BYTES + SCALES_BYTES + 4 * MAX_SEGMENT * rank


def expand_ragged() -> Any:
    """Compile the addition to single columns of y."""

    def run(address):
        of, width = fields(EightBitExpand, address), np.int64(1)
        wide = of.scratch + COPY_BYTES  # a row of b
        for i in range(of.end - of.row):
            at, rank = following(of.expand.columns, i), of.expand.factors.rank
            for j in range(rank):
                element = read_stored(of.stored, at.b + j)
                v.write(v.FLOAT32, wide + 4 * j, element * scale_of(of.scales, of.row + i, j))
            part = widen_y(of, at, width)
            invoke(of.expand_column, from_float32(part, wide))
            narrow_y(of, at, width)

    return compiled(run)


def expand_stored() -> Any:
    """Compile the addition to columns of y, 64 or 16 at a time."""

    def run(address):
        of = fields(EightBitExpand, address)
        wide, rank = of.scratch + COPY_BYTES, of.expand.factors.rank
        paired = rank - rank % 4  # as in `expand_column` for float32
        row, unread = of.row, np.int64(0)
        while row < of.end:
            tiles, add = len(MANY_TILES), of.add_many
            if row + LANES * len(MANY_TILES) > of.end:
                tiles, add = 1, of.add_one
            width, step = LANES * tiles, LINE * tiles
            at = following(of.expand.columns, row - of.row)
            for i in range(tiles):
                rows = (at.b + i * LANES * at.b_row, at.b_row, row + i * LANES)
                prefetch_rows(rows[0], at.b_row, rank)
                store_tile(of.stored, rows, rank, of.scales, wide + i * LINE, step)
            invoke(add, Stored(wide, paired, unread, widen_y(of, at, width)))
            narrow_y(of, at, width)
            row += width

    return compiled(run)


def expand_int8(kind_y: Any) -> Any:
    """Compile what `expand_stored` does for int8 with a scale per row, widened in registers."""

    def run(address):
        of = fields(EightBitExpand, address)
        expand, row = of.expand, of.row
        rank, end, b_row = expand.factors.rank, expand.stop, expand.columns.b_row
        spare = of.scratch + COPY_BYTES
        packed = spare + SCALES_BYTES
        pack_h(expand, read_scaling(expand.factors), packed)
        while row < of.end:
            tiles = min(of.end - row, LANES * len(MANY_TILES)) // LANES
            of_rows = rows_of_scales(of.scales, row, LANES * tiles, spare)
            place = (following(expand.columns, row - of.row), of_rows, tiles)
            steps, i, h = steps_of(b_row, rank), expand.start, packed
            while i + 8 <= end:
                int8_rows(kind_y, place, rank, steps, v.rows(expand.y, i, EIGHT), h)
                i, h, steps = i + 8, h + 32 * rank, NO_STEPS
            if i + 4 <= end:
                int8_rows(kind_y, place, rank, steps, v.rows(expand.y, i, FOUR), h)
                i, h, steps = i + 4, h + 16 * rank, NO_STEPS
            if i + 2 <= end:
                int8_rows(kind_y, place, rank, steps, v.rows(expand.y, i, TWO), h)
                i, h, steps = i + 2, h + 8 * rank, NO_STEPS
            if i < end:
                int8_rows(kind_y, place, rank, steps, v.rows(expand.y, i, ONE), h)
            row += LANES * tiles

    return compiled(run)


@function
def pack_h(expand, scaling, to):
    """Store h times the scalings as `add_interleaved` takes it, 8, 4, 2 and 1 tokens at a time."""
    t, end, rank = expand.start, expand.stop, expand.factors.rank
    while t < end:
        tokens = 8
        while t + tokens > end:
            tokens //= 2
        for i in range(tokens):
            # rows of h whose distance is a power of two would compete for few sets of the
            # first-level cache
            (row,) = v.rows(expand.h, t + i, ONE)
            (factor,) = v.read_scaled(v.rows(expand.factors.scales, t + i, ONE), scaling)
            for j in range(rank):
                element = v.read(v.FLOAT32, row + 4 * j) * factor
                v.write(v.FLOAT32, to + 4 * (j * tokens + i), element)
        to += 4 * rank * tokens
        t += tokens


@inlined
def int8_rows(kind_y, place, rank, steps, y_rows, packed_h):
    """Add to `tiles` times 16 columns of some rows of y; h is as `pack_h` stored it."""
    (b, b_row, bias_dtype, bias, bias_size, _, column), of_rows, tiles = place
    distance, apart, on, turn, row, fetched = steps
    added = v.splat(np.float32(0))
    for _ in range(tiles):
        if bias != 0:
            added = load_bias(bias_dtype, bias)
            bias += LANES * bias_size
        ahead = b + distance
        for i in range(row, LANES):
            v.prefetch((ahead,), i * b_row + fetched)
        sums = v.zeros((0, 0), y_rows)
        j, h = 0, packed_h
        if rank == 16 and b_row == 16:
            v.prefetch((ahead, ahead + LINE, ahead + 2 * LINE, ahead + 3 * LINE), 0)
            sums, j = v.add_interleaved(sums, v.load_square(v.INT8, b), h), 16
        while j + 16 <= rank:
            v.prefetch((ahead, ahead + apart, ahead + 2 * apart, ahead + 3 * apart), 0)
            sums = v.add_interleaved(sums, v.load_columns(v.INT8, b + j, b_row), h)
            j += 16
            h += 64 * len(y_rows)
            ahead += on if j % LINE > 0 else turn
        while j + 4 <= rank:
            sums = v.add_interleaved(sums, v.load_four(v.INT8, b + j, b_row), h)
            j += 4
            h += 16 * len(y_rows)
        while j < rank:
            sums = v.add_interleaved(sums, (v.load_column(v.INT8, b + j, b_row),), h)
            j += 1
            h += 4 * len(y_rows)
        v.update_scaled(kind_y, y_rows, column, sums, v.load(v.FLOAT32, of_rows), added)
        b += LANES * b_row
        of_rows += LINE
        column += LANES


@function
def rows_of_scales(scales, row, count, spare):
    """Return the address of the scales of `count` rows without gaps, in the stack or in `spare`."""
    if one_after_the_other(scales):
        return scales.start + 4 * row
    for i in range(count):
        v.write(v.FLOAT32, spare + 4 * i, scale_of(scales, row + i, np.int64(0)))
    return spare


@function
def prefetch_rows(b, b_row, width):
    """Ask for the `width` bytes of each of 16 rows that are needed in a while."""
    if 2 * width > b_row:  # hardly a gap: line by line
        b += LANES * b_row * max(1, TILE_AHEAD // max(LANES * b_row, 1))
        for line in range(0, LANES * b_row, LINE):
            v.prefetch((b,), line)
    else:
        b += LANES * b_row * max(1, TILE_AHEAD // (LANES * width + 1))
        for i in range(LANES):
            for line in range(0, width, LINE):
                v.prefetch((b,), i * b_row + line)


@part
def widen_y(of, at, width):
    """Return the arguments for y as float32: as it is, or a copy of some columns."""
    expand = of.expand
    y, column = expand.y, at.column
    if of.y_dtype != CODE_FLOAT32:
        for t in range(expand.start, expand.stop):
            to = of.scratch + ORDER_BYTES + (t - expand.start) * TILE_BYTES
            (row,) = v.rows(expand.y, t, ONE)
            if of.y_dtype == CODE_BFLOAT16:
                widen_row(v.BFLOAT16, row + 2 * at.column, width, to)
            else:
                widen_row(v.FLOAT16, row + 2 * at.column, width, to)
        # the copy lies after its order in the scratch buffer, the numbers from 0
        order, column = of.scratch - 8 * expand.start, np.int64(0)
        y = RowPointers(of.scratch + ORDER_BYTES, np.int64(TILE_BYTES), order)
    columns = ColumnPointers(
        at.b, at.b_row, at.bias_dtype, at.bias, at.bias_size, at.output_scale, column
    )
    return Expand(columns, width, expand.factors, expand.start, expand.stop, expand.h, y)


@part
def from_float32(expand, b):
    """Return the same arguments with a row of b that is float32."""
    at = expand.columns
    columns = ColumnPointers(
        b, np.int64(0), at.bias_dtype, at.bias, at.bias_size, at.output_scale, at.column
    )
    return with_columns(expand, columns)


@function
def widen_row(kind, row, width, to):
    """Store `width` elements as float32, and fetch as many after them."""
    v.prefetch((row,), 2 * width)
    for k in range(0, width - LANES + 1, LANES):
        v.store(v.FLOAT32, to + 4 * k, v.load(kind, row + 2 * k))
    for k in range(width - width % LANES, width):
        v.write(v.FLOAT32, to + 4 * k, v.read(kind, row + 2 * k))


@part
def narrow_y(of, at, width):
    """Store the copy that `widen_y` made, each element rounded."""
    if of.y_dtype == CODE_FLOAT32:
        return
    for t in range(of.expand.start, of.expand.stop):
        copy = of.scratch + ORDER_BYTES + (t - of.expand.start) * TILE_BYTES
        (row,) = v.rows(of.expand.y, t, ONE)
        if of.y_dtype == CODE_BFLOAT16:
            narrow_row(v.BFLOAT16, copy, width, row + 2 * at.column)
        else:
            narrow_row(v.FLOAT16, copy, width, row + 2 * at.column)


@function
def narrow_row(kind, row, width, to):
    """Store `width` elements of float32 as another kind."""
    for k in range(0, width - LANES + 1, LANES):
        v.store(kind, to + 2 * k, v.load(v.FLOAT32, row + 4 * k))
    for k in range(width - width % LANES, width):
        v.write(kind, to + 2 * k, v.read(v.FLOAT32, row + 4 * k))


@function
def store_tile(dtype, rows, rank, scales, to, step):
    """Do what `store_columns` does for a dtype."""
    if dtype == INT8:
        store_columns(v.INT8, rows, rank, scales, to, step)
    elif dtype == E4M3:
        store_columns(v.E4M3, rows, rank, scales, to, step)
    else:
        store_columns(v.E5M2, rows, rank, scales, to, step)


@function
def store_columns(kind, rows, rank, scales, to, step):
    """Store 16 rows of b, times their scales, as `rank` vectors of float32, `step` bytes apart."""
    b, b_row, row = rows
    size, j = scales.columns, np.int64(0)
    while j < rank:
        end = rank if size == 0 else min(rank, j + size)  # j is the first of a group
        factors = row_scales(scales, row, j, to + step * j)
        while j + 16 <= end:
            columns = v.load_columns(kind, b + j, b_row)
            v.store_all(to + step * j, step, v.multiply(columns, factors))
            j += 16
        while j + 4 <= end:
            four = v.load_four(kind, b + j, b_row)
            v.store_all(to + step * j, step, v.multiply(four, factors))
            j += 4
        while j < end:
            column = (v.load_column(kind, b + j, b_row),)
            v.store_all(to + step * j, step, v.multiply(column, factors))
            j += 1


@function
def row_scales(scales, row, column, spare):
    """Return the scales of 16 rows in a column's group; `spare` is memory for a vector."""
    if scales.rows == 0:
        return v.splat(scale_of(scales, row, column))
    if one_after_the_other(scales):
        return v.load(v.FLOAT32, scales.start + 4 * row)
    for lane in range(LANES):
        v.write(v.FLOAT32, spare + 4 * lane, scale_of(scales, row + lane, column))
    return v.load(v.FLOAT32, spare)
