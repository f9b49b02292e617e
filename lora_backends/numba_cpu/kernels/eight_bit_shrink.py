"""The shrink for 8-bit stacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_backends.numba_cpu.config import (
    FLOAT32_BLOCKS,
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    MAX_SEGMENT,
    PAIR_BLOCKS,
)
from lora_backends.numba_cpu.kernels.arguments import (
    Copy,
    EightBitGather,
    EightBitPanel,
    Panel,
    RowPointers,
)
from lora_backends.numba_cpu.kernels.long import (
    A_BYTES,
    LINE,
    SUMS_BYTES,
    TOKENS,
    block_of,
    sums_bytes,
)
from lora_backends.numba_cpu.kernels.scales import (
    group_scales,
    one_after_the_other,
    read_stored,
    scale_of,
)
from lora_backends.numba_cpu.kernels.short import EIGHT, FOUR, ONE, TWO
from lora_backends.numba_cpu.layer import CODE_BFLOAT16, CODE_FLOAT32, E4M3, INT8
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined
from lora_backends.numba_cpu.machine.records import fields, invoke, read_id

LANES = v.LANES
ORDER_BYTES = 8 * MAX_SEGMENT  # the order of a copy of x or y
DOT_COPY = max(2 * PAIR_BLOCKS.inputs, 4 * FLOAT32_BLOCKS.inputs)  # bytes of a chunk of a row of x
DOT_BYTES = 8 * (DOT_COPY + LONG_PANEL * LINE)  # copies of 8 rows of x, and sums
X_ROW = 4 * LONG_CHUNK  # bytes of a row of the copy of x


@function
def scratch_bytes(longest, in_features):
    """Return the bytes that the routines need for segments of at most `longest` tokens."""
    whole_x = min(longest, LONG_SEGMENT) * (4 * in_features + LINE)
    panel = longest * X_ROW + A_BYTES + sums_bytes(longest)
    return ORDER_BYTES + max(panel, whole_x, DOT_BYTES)


def gather() -> Any:
    """Compile ``h[t, :rank] = a[:rank, ids[t]]``; ids are int64."""

    def run(address):
        of = fields(EightBitGather, address)
        rows = of.gather
        for i in range(rows.start, rows.stop):
            (at,), (to,) = v.rows(rows.ids, i, ONE), v.rows(rows.h, i, ONE)
            column = read_id(at)
            for j in range(rows.rank):
                element = read_stored(of.stored, rows.a + j * rows.a_row + column)
                v.write(v.FLOAT32, to + 4 * j, element * scale_of(of.scales, j, column))

    return compiled(run)


def shrink_dots(kind: Any) -> Any:
    """Compile up to `LONG_PANEL` columns of ``h = x @ a.T`` for a of int8 and x of bfloat16.

    Both are multiplied as `kind`, float32 or bfloat16. int8 is widened once for up to 8 tokens.
    """
    like = (0,) * (kind.itemsize // 2)  # vectors for 32 elements
    blocks = PAIR_BLOCKS if len(like) == 1 else FLOAT32_BLOCKS

    def run(address):
        of, t = fields(Panel, address), 0
        # each group is multiplied by all rows of a, one chunk of the inputs after the other
        while t + 8 <= of.tokens:
            dot_columns(like, blocks, two_rows, TWO, of, t, EIGHT)
            t += 8
        if t + 4 <= of.tokens:
            dot_columns(like, blocks, four_rows, FOUR, of, t, FOUR)
            t += 4
        if t + 2 <= of.tokens:
            dot_columns(like, blocks, four_rows, FOUR, of, t, TWO)
            t += 2
        if t < of.tokens:
            dot_columns(like, blocks, four_rows, FOUR, of, t, ONE)

    return compiled(run)


@inlined
def dot_columns(like, blocks, rows_of_a, ranks, of, t, tokens):
    """Write columns of h, as many at a time as `ranks` has items, for some tokens from t on."""
    scratch, a_row, n, count = of.scratch, of.a_row, of.n, of.ranks
    x_rows, h_rows = v.rows(of.x, t, tokens), v.rows(of.h, t, tokens)
    whole, step, size = n - n % (2 * LANES), LINE * len(tokens), blocks.inputs
    copied = 2 * size * len(like) * len(tokens)
    for chunk in range(0, max(whole, 1), size):
        end, at = min(chunk + size, whole), scratch
        width = end - chunk
        early = np.int64(0)  # rows of a to prefetch while x is copied
        if blocks.in_order and chunk + t == 0:
            early = min(count, blocks.ahead // max(width, 1) * len(ranks))
        # in the order of use: rows whose distance is a power of two compete for few sets of the
        # cache
        for k in range(chunk, end, 2 * LANES):
            for j in range(early):
                v.prefetch((of.a + j * a_row,), k)
            v.store_all(at, LINE, v.load_wide(v.BFLOAT16, x_rows, k, like))
            at += step * len(like)
        for j in range(0, count, len(ranks)):
            a_rows = rows_of_a(of.a + j * a_row, a_row, count - j)
            begun, sums = scratch + copied + j * step, v.zeros(ranks, tokens)
            if chunk > 0:
                sums = v.load_all(begun, sums)
            ahead = ahead_of(blocks, len(ranks), (j, count, a_row), (chunk, width, end < whole))
            k, at = chunk, scratch
            while k < end:
                if t == 0:  # a is not in a cache yet
                    v.prefetch(a_rows, k + ahead)
                a, x = v.load_wide(v.INT8, a_rows, k, like), v.load_all(at, v.zeros(tokens, like))
                sums = v.add_wide(sums, a, x, like)
                k += 2 * LANES
                at += step * len(like)
            if end < whole:
                # between chunks, sums are kept after the copy of x
                v.store_all(begun, LINE, sums)
                continue
            while k < n:
                rest = min(n - k, LANES)
                a_rest = v.load_some(v.INT8, a_rows, k, rest)
                sums = v.add_products(sums, a_rest, v.load_some(v.BFLOAT16, x_rows, k, rest))
                k += LANES
            v.write_totals(v.shifted(h_rows, 4 * j), count - j, sums)


@function
def ahead_of(blocks, ranks, rows, columns):
    """Return how many bytes past a chunk of row j of a to prefetch, `ranks` rows at a time.

    A prefetch past the end of a never faults.
    """
    j, count, a_row = rows
    chunk, width, more = columns
    later = max(1, blocks.ahead // max(width, 1)) * ranks  # short rows need several turns
    if blocks.in_order:
        turns = (count + ranks - 1) // ranks * ranks
        later = min(later, turns)
        if j + later < count:
            return later * a_row
        if more:
            return (later - turns) * a_row + width  # the first rows of the next chunk
        return later * a_row - chunk  # the rows that follow in memory are often next
    if more and j + ranks >= count:
        return width - j * a_row  # the first row of the next chunk
    return later * a_row


@function
def two_rows(a, a_row, count):
    """Return the addresses of two rows of a; the last one fills up."""
    return a, a + min(1, count - 1) * a_row


@function
def four_rows(a, a_row, count):
    """Return the addresses of four rows of a; the last one fills up."""
    last = count - 1
    return a, a + min(1, last) * a_row, a + min(2, last) * a_row, a + min(3, last) * a_row


def copy_x() -> Any:
    """Compile the copy of rows of x as float32, after their order."""

    def run(address):
        of = fields(Copy, address)
        for t in range(of.tokens):
            (row,) = v.rows(of.x, t, ONE)
            to = of.to + ORDER_BYTES + t * row_bytes(of.width)
            pack_x(of.x_dtype, row, (np.int64(0), of.width), to)

    return compiled(run)


@inlined
def row_bytes(width):
    """Return the bytes of a row of float32, whole cache lines."""
    return (4 * width + LINE - 1) // LINE * LINE


@function
def scale_h(scales, first, last, tokens, h):
    """Multiply columns of h by the scales of their rows of a."""
    whole = (last - first) // LANES * LANES if one_after_the_other(scales) else 0
    for t in range(tokens):
        (row,) = v.rows(h, t, ONE)
        for j in range(first, first + whole, LANES):
            columns = (v.load(v.FLOAT32, row + 4 * j),)
            v.store_all(
                row + 4 * j, 0, v.multiply(columns, v.load(v.FLOAT32, scales.start + 4 * j))
            )
        for j in range(first + whole, last):
            total = v.read(v.FLOAT32, row + 4 * j)
            v.write(v.FLOAT32, row + 4 * j, total * scale_of(scales, j, np.int64(0)))


def shrink_panel() -> Any:
    """Compile up to `LONG_PANEL` columns of h, by chunks of the inputs."""

    def run(address):
        of = fields(EightBitPanel, address)
        panel, order = of.panel, of.panel.scratch
        n, count, tokens, a_row = panel.n, panel.ranks, panel.tokens, panel.a_row
        copy, sums_step = order + ORDER_BYTES, (tokens + TOKENS - 1) // TOKENS * SUMS_BYTES
        packed = copy + tokens * X_ROW
        for k in range(0, max(n, 1), LONG_CHUNK):  # without inputs one empty chunk writes zeros
            columns = (k, min(n - k, LONG_CHUNK))
            for t in range(tokens):
                (row_x,) = v.rows(panel.x, t, ONE)
                pack_x(of.x_dtype, row_x, columns, copy + t * X_ROW)
            sums = packed + A_BYTES  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
            for j in range(0, count, LONG_RANKS):
                ahead = LONG_RANKS * a_row
                if j + LONG_RANKS >= count and k + LONG_CHUNK < n:
                    ahead = LONG_CHUNK - j * a_row
                for i in range(LONG_RANKS):
                    # the last row of a pads its block of rows
                    row = min(j + i, count - 1)
                    scales = group_scales(of.scales, of.first + row)
                    of_row = (scales, of.scales.column, of.scales.columns)
                    to = packed + i * LINE
                    pack_a(of.stored, panel.a + row * a_row, columns, of_row, to, ahead)
                whole = (columns[1] + LANES - 1) // LANES * LANES  # zeros fill up the last vector
                fetched = np.int64(0)  # `pack_a` has fetched
                sizes = (whole, fetched, int(k > 0), int(k + LONG_CHUNK >= n), count - j, tokens)
                # float32, after its order: the numbers from 0
                x = RowPointers(copy, np.int64(X_ROW), order)
                h = RowPointers(panel.h.start + 4 * j, panel.h.step, panel.h.order)
                nothing = (fetched, fetched, fetched, fetched)
                invoke(panel.add_block, block_of(packed, sums, sizes, nothing, x, h))
                sums += sums_step

    return compiled(run)


@function
def pack_x(x_dtype, row, columns, to):
    """Store some columns of a row of x as float32."""
    if x_dtype == CODE_FLOAT32:
        pack(v.FLOAT32, row, columns, np.float32(1), to, LINE, 0)
    elif x_dtype == CODE_BFLOAT16:
        pack(v.BFLOAT16, row, columns, np.float32(1), to, LINE, 0)
    else:
        pack(v.FLOAT16, row, columns, np.float32(1), to, LINE, 0)


@function
def pack_a(stored, row, columns, scales, to, ahead):
    """Store a chunk of a row of a, times its scales, as vectors of float32."""
    at, step, size = scales
    first, width = columns
    if size == 0:  # `scale_h` multiplies the sums
        pack_scaled(stored, row, columns, np.float32(1), to, ahead)
    elif size % LANES == 0:  # whole vectors have one scale
        k = first
        while k < first + width:
            part = min(size - k % size, first + width - k)
            factor = v.read(v.FLOAT32, at + k // size * step)
            at_k = to + (k - first) // LANES * LINE * LONG_RANKS
            pack_scaled(stored, row, (k, part), factor, at_k, ahead)
            k += part
    else:
        for i in range((width + LANES - 1) // LANES * LANES):
            item = np.float32(0)
            if i < width:
                item = read_stored(stored, row + first + i)
                item *= v.read(v.FLOAT32, at + (first + i) // size * step)
            v.write(v.FLOAT32, to + i // LANES * LINE * LONG_RANKS + i % LANES * 4, item)


@function
def pack_scaled(stored, row, columns, factor, to, ahead):
    """Store some columns of a row of a, times one scale, as vectors of float32."""
    if stored == INT8:
        pack(v.INT8, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    elif stored == E4M3:
        pack(v.E4M3, row, columns, factor, to, LONG_RANKS * LINE, ahead)
    else:
        pack(v.E5M2, row, columns, factor, to, LONG_RANKS * LINE, ahead)


@function
def pack(kind, row, columns, factor, to, step, ahead):
    """Store some columns of a row, times a factor, as vectors of float32 `step` bytes apart."""
    first, width = columns
    at, factors, k = row + first * v.size(kind), v.splat(factor), 0
    while k + 4 * LANES <= width:
        v.prefetch((at,), ahead)
        loaded = (
            v.load(kind, at),
            v.load(kind, at + LANES * v.size(kind)),
            v.load(kind, at + 2 * LANES * v.size(kind)),
            v.load(kind, at + 3 * LANES * v.size(kind)),
        )
        v.store_all(to, step, v.multiply(loaded, factors))
        at += 4 * LANES * v.size(kind)
        to += 4 * step
        k += 4 * LANES
    while k + LANES <= width:
        v.store_all(to, step, v.multiply((v.load(kind, at),), factors))
        at += LANES * v.size(kind)
        to += step
        k += LANES
    if k < width:
        v.store_all(to, step, v.multiply(v.load_some(kind, (at,), 0, width - k), factors))
