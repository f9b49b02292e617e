"""Routines for segments of a few tokens, and for single columns: widened in registers.

A routine works on one segment and slice. The kernel calls it through its address, so
that it is compiled when a batch first needs it, and by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_backends.numba_cpu.config import EXPAND_AHEAD, SHRINK_AHEAD, SHRINK_RANKS
from lora_backends.numba_cpu.kernels.addressing import following
from lora_backends.numba_cpu.kernels.arguments import Expand, Gather, RowPointers, Shrink
from lora_backends.numba_cpu.kernels.bias import load_bias, read_bias
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined
from lora_backends.numba_cpu.machine.records import fields, read_id

LANES = v.LANES
LINE = 64  # bytes of a cache line
ONE, TWO, FOUR, EIGHT = ((0,) * count for count in (1, 2, 4, 8))  # tokens at a time
NO_STEPS = tuple(map(np.int64, (0, 0, 0, 0, LANES, 0)))  # of `steps_of`: the rows are in a cache
PLAIN, MULTIPLIED = (), (0,)  # vectors of output_scales per 16 columns of y


def shrink_short(kind: Any, kind_x: Any) -> Any:
    """Compile ``h[t, first:last] = x[t] @ a[first:last].T`` for weights and x of these kinds."""

    def run(address):
        of = fields(Shrink, address)
        for j in range(of.first, of.last, SHRINK_RANKS):
            # `goes_on`: the rows that follow in memory are often next
            to_next = SHRINK_RANKS * of.a_row if of.goes_on or j + SHRINK_RANKS < of.last else 0
            rows = (of.a + j * of.a_row, of.a_row, of.n, to_next)
            h = RowPointers(of.h.start + 4 * j, of.h.step, of.h.order)
            count = min(of.last - j, SHRINK_RANKS)
            shrink_block((kind, kind_x), rows, count, of.start, of.stop, of.x, h)

    return compiled(run)


def gather(kind: Any) -> Any:
    """Compile ``h[t, :rank] = a[:rank, ids[t]]`` for weights of a kind; ids are int64."""

    def run(address):
        of = fields(Gather, address)
        for i in range(of.start, of.stop):
            (at,), (to,) = v.rows(of.ids, i, ONE), v.rows(of.h, i, ONE)
            column = of.a + read_id(at) * v.size(kind)
            for j in range(of.rank):
                v.write(v.FLOAT32, to + 4 * j, v.read(kind, column + j * of.a_row))

    return compiled(run)


def expand_short(kind: Any, kind_y: Any) -> Any:
    """Compile the addition to `tiles` times 16 columns of y, for weights and y of these kinds."""

    def run(address):
        of = fields(Expand, address)
        scaling, i, end = read_scaling(of.factors), of.start, of.stop
        kinds = (kind, kind_y)
        steps = steps_of(of.columns.b_row, of.factors.rank * v.size(kind))
        while i + 8 <= end:
            expand_rows(PLAIN, kinds, of, scaling, steps, i, EIGHT)
            i, steps = i + 8, NO_STEPS
        if i + 4 <= end:
            expand_rows(PLAIN, kinds, of, scaling, steps, i, FOUR)
            i, steps = i + 4, NO_STEPS
        if i + 2 <= end:
            expand_rows(PLAIN, kinds, of, scaling, steps, i, TWO)
            i, steps = i + 2, NO_STEPS
        is_square = of.factors.rank == LANES and of.columns.b_row == LANES * v.size(kind)
        if i < end and of.columns.bias == 0 and is_square:
            expand_squares(kinds, of, scaling, i)
        elif i < end:
            expand_rows(PLAIN, kinds, of, scaling, steps, i, ONE)

    return compiled(run)


def expand_multiplied(kind: Any, kind_y: Any) -> Any:
    """Compile what `expand_short` does, with output_scales; few variants compile sooner."""

    def run(address):
        of = fields(Expand, address)
        scaling, i, end = read_scaling(of.factors), of.start, of.stop
        kinds = (kind, kind_y)
        steps = steps_of(of.columns.b_row, of.factors.rank * v.size(kind))
        while i + 4 <= end:
            expand_rows(MULTIPLIED, kinds, of, scaling, steps, i, FOUR)
            i, steps = i + 4, NO_STEPS
        while i < end:
            expand_rows(MULTIPLIED, kinds, of, scaling, steps, i, ONE)
            i, steps = i + 1, NO_STEPS

    return compiled(run)


def expand_column(kind: Any, kind_y: Any) -> Any:
    """Compile the addition to single columns of y, in the order of sums of `expand_short`."""

    def run(address):
        of = fields(Expand, address)
        scaling = read_scaling(of.factors)
        for i in range(of.groups):
            add_column((kind, kind_y), following(of.columns, i), of, scaling)

    return compiled(run)


@inlined
def shrink_block(kinds, rows, count, t, end, x, h):
    """Write up to 4 columns of h for the tokens of a segment; the last row of a fills up to 4."""
    a, a_row, n, to_next = rows
    last, i = count - 1, t
    a_rows = (a, a + min(1, last) * a_row, a + min(2, last) * a_row, a + last * a_row)
    passes = (end - t) // 4 + (end - t) // 2 % 2 + (end - t) % 2
    ahead, step = prefetches_of(n * v.size(kinds[0]), 2 * LANES * v.size(kinds[0]), passes)
    while i + 4 <= end:
        sums, ahead = dot_rows(kinds, a_rows, v.rows(x, i, FOUR), n, ahead, step, to_next)
        v.write_totals(v.rows(h, i, FOUR), count, sums)
        i += 4
    if i + 2 <= end:
        sums2, ahead = dot_rows(kinds, a_rows, v.rows(x, i, TWO), n, ahead, step, to_next)
        v.write_totals(v.rows(h, i, TWO), count, sums2)
        i += 2
    if i < end:
        sums1, ahead = dot_rows(kinds, a_rows, v.rows(x, i, ONE), n, ahead, step, to_next)
        v.write_totals(v.rows(h, i, ONE), count, sums1)


@function
def prefetches_of(width, step, passes):
    """Return the offset of the first prefetch in a row of a, and the bytes from one to the next."""
    if passes == 1:
        # ahead in its own rows, then in the next 4; in rows no longer than that, only in those
        return min(SHRINK_AHEAD, width), step
    # later passes read rows from a cache: each prefetches an equal share of the next 4 rows
    return width, step // passes


@inlined
def dot_rows(kinds, a_rows, x_rows, n, ahead, step, to_next):
    """Return a vector of partial sums of ``a @ x`` per pair of rows, and the next prefetch."""
    kind, kind_x = kinds
    width = n * v.size(kind)
    sums = v.zeros(a_rows, x_rows)
    k = 0
    while k + 2 * LANES <= n:
        # offsets beyond the end of a row continue in the row `to_next` bytes later
        at = ahead if ahead < width else ahead + to_next - width
        v.prefetch(a_rows, at)
        # a step longer than a line prefetches the next line, too
        if step > LINE:
            v.prefetch(a_rows, at + LINE)
        ahead += step
        a = v.load_rows(kind, a_rows, k)  # 32 of every row
        x = v.load_rows(kind_x, x_rows, k)
        sums = v.add_products(sums, a, x)
        k += 2 * LANES
    while k < n:
        count = min(n - k, LANES)
        a_tail = v.load_some(kind, a_rows, k, count)
        x_tail = v.load_some(kind_x, x_rows, k, count)
        sums = v.add_products(sums, a_tail, x_tail)
        k += LANES
    return sums, ahead


@inlined
def read_scaling(factors):
    """Return the scaling of a slot's slice; a slice of rank 0 has none."""
    return np.float32(0) if factors.rank == 0 else v.read(v.FLOAT32, factors.scaling)


@inlined
def expand_rows(multiplied, kinds, of, scaling, steps, t, tokens):
    """Add to `groups` times 16 columns of some rows of y; `multiplied`: PLAIN or MULTIPLIED."""
    kind, kind_y = kinds
    b, b_row, bias_dtype, bias, bias_size, output_scale, column = of.columns
    scalings = v.read_scaled(v.rows(of.factors.scales, t, tokens), scaling)
    h_rows, y_rows = v.rows(of.h, t, tokens), v.rows(of.y, t, tokens)
    added = v.zeros((0,), (0,))
    for _ in range(of.groups):
        if bias != 0:
            added = (load_bias(bias_dtype, bias),)
            bias += LANES * bias_size
        sums = b_sums(kind, b, b_row, of.factors.rank, h_rows, steps)
        output_scales = v.load_all(output_scale, multiplied)
        v.update_rows(kind_y, y_rows, column, sums, scalings, added, output_scales)
        output_scale += LANES * 4 * len(multiplied)
        b += LANES * b_row
        column += LANES


@inlined
def expand_squares(kinds, of, scaling, t):
    """Do the work of `expand_rows` faster for one row of y, rank 16 without gaps and no bias."""
    kind, kind_y = kinds
    # LLVM knows all distances in b, so there are half as many instructions
    b, column, square = of.columns.b, of.columns.column, LANES * LANES * v.size(kind)
    scalings = v.read_scaled(v.rows(of.factors.scales, t, ONE), scaling)
    h_rows, y_rows = v.rows(of.h, t, ONE), v.rows(of.y, t, ONE)
    for _ in range(of.groups):
        for line in range(0, square, LINE):
            v.prefetch((b,), EXPAND_AHEAD + line)
        sums = v.add_columns(v.zeros((0, 0), h_rows), v.load_square(kind, b), h_rows, 0)
        v.update_rows(kind_y, y_rows, column, sums, scalings, v.zeros((0,), (0,)), ())
        b += square
        column += LANES


@inlined
def b_sums(kind, b, b_row, rank, h_rows, steps):
    """Return ``h @ b.T`` for 16 rows of b: an even and an odd sum per row of h."""
    sums = v.zeros((0, 0), h_rows)
    j, step = 0, 16 // v.size(kind)
    # how other rows are prefetched meanwhile
    distance, apart, on, turn, row, column = steps
    ahead = b + distance
    for i in range(row, LANES):
        v.prefetch((ahead,), i * b_row + column)
    while j + step <= rank:
        v.prefetch((ahead, ahead + apart, ahead + 2 * apart, ahead + 3 * apart), 0)
        sums = v.add_columns(sums, v.load_columns(kind, b + j * v.size(kind), b_row), h_rows, j)
        j += step
        ahead += on if j * v.size(kind) % LINE > 0 else turn
    while j < rank:
        last = (v.load_column(kind, b + j * v.size(kind), b_row),)
        sums = v.add_columns(sums, last, h_rows, j)
        j += 1
    return sums


@inlined
def add_column(kinds, at, of, scaling):
    """Add to one column of y, the first of `at`."""
    kind, kind_y = kinds
    added, rank = np.float32(0), of.factors.rank
    if at.bias != 0:
        added = read_bias(at.bias_dtype, at.bias)
    paired = rank - rank % (16 // v.size(kind))
    for i in range(of.start, of.stop):
        (h_row,), (y_row,) = v.rows(of.h, i, ONE), v.rows(of.y, i, ONE)
        even, odd = np.float32(0), np.float32(0)
        for j in range(rank):
            factor = v.read(v.FLOAT32, h_row + 4 * j)
            item = v.read(kind, at.b + j * v.size(kind))
            if j % 2 and j < paired:
                odd = v.multiply_add(item, factor, odd)
            else:
                even = v.multiply_add(item, factor, even)
        target = y_row + at.column * v.size(kind_y)
        (scale,) = v.read_scaled(v.rows(of.factors.scales, i, ONE), scaling)
        if at.output_scale == 0:
            total = v.read(kind_y, target) + v.multiply_add(even + odd, scale, added)
        else:
            total = v.multiply_add(even + odd, scale, v.read(kind_y, target))
            total = v.multiply_add(total, v.read(v.FLOAT32, at.output_scale), added)
        v.write(kind_y, target, total)


@function
def steps_of(b_row, width):
    """Return how to prefetch later rows of b: (distance, apart, on, turn, row, column).

    Each vector of columns prefetches four lines, `apart` bytes apart. The first vector starts
    `distance` bytes ahead, each next one `on` bytes further, every fourth one `turn` bytes.
    """
    if b_row == width:  # no gaps: line after line
        return EXPAND_AHEAD, LINE, 4 * LINE, 4 * LINE, LANES, 0
    # all lines of 16 rows at once would stall other loads
    distance = LANES * b_row * max(1, EXPAND_AHEAD // (LANES * width + 1))
    rest = width % LINE
    # If rows end within a line, these steps reach the last line, at `column`, only in the first
    # `row` rows; the last lines of the other rows are prefetched first.
    row = rest // 16 * 4 if rest > 0 else LANES
    return distance, b_row, 4 * b_row, LINE - 3 * 4 * b_row, row, width - rest
