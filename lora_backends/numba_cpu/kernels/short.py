"""Routines for segments of a few tokens, and for single columns: widened in registers.

A routine works on one segment and slice. The kernel in `kernels` calls it through its address, so
that it is compiled when a batch first needs it, and by itself. x, h and y are (address, bytes from
row to row, address of the row of each position).
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

import numpy as np

from lora_backends.numba_cpu.config import EXPAND_AHEAD, SHRINK_AHEAD, SHRINK_RANKS
from lora_backends.numba_cpu.kernels.bias import load_bias, read_bias
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined

LANES = v.LANES
LINE = 64  # bytes of a cache line
ONE, TWO, FOUR, EIGHT = ((0,) * count for count in (1, 2, 4, 8))  # tokens at a time
NO_STEPS = tuple(map(np.int64, (0, 0, 0, 0, LANES, 0)))  # of `steps_of`: the rows are in a cache
PLAIN, MULTIPLIED = (), (0,)  # vectors of output_scales per 16 columns of y


def shrink_short(kind: Any, kind_x: Any) -> Any:
    """Compile ``h[t, first:last] = x[t] @ a[first:last].T`` for weights and x of these kinds.

    `goes_on`: whether to prefetch past the last row: the rows that follow in memory are often next.
    """

    def run(a, a_row, n, first, last, goes_on, t, end, x, x_row, x_order, h, h_row, h_order):
        for j in range(first, last, SHRINK_RANKS):
            to_next = SHRINK_RANKS * a_row if goes_on or j + SHRINK_RANKS < last else 0
            rows, columns = (a + j * a_row, a_row, n, to_next), (h + 4 * j, h_row, h_order)
            count = min(last - j, SHRINK_RANKS)
            shrink_block((kind, kind_x), rows, count, t, end, (x, x_row, x_order), columns)

    return compiled(run)


def gather(kind: Any) -> Any:
    """Compile ``h[t, :rank] = a[:rank, ids[t]]`` for weights of a kind; ids are int64."""

    def run(a, a_row, rank, t, end, ids, ids_row, ids_order, h, h_row, h_order):
        for i in range(t, end):
            (at,), (to,) = (
                v.rows((ids, ids_row, ids_order), i, ONE),
                v.rows((h, h_row, h_order), i, ONE),
            )
            column = a + v.read_id(at) * v.size(kind)
            for j in range(rank):
                v.write(v.FLOAT32, to + 4 * j, v.read(kind, column + j * a_row))

    return compiled(run)


def expand_short(kind: Any, kind_y: Any) -> Any:
    """Compile the addition to `tiles` times 16 columns of y, for weights and y of these kinds."""

    def run(
        b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank, scaling,
        scales, scales_row, scales_order, tiles, t, end, h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        place = (b, b_row, (bias_dtype, bias, bias_size), output_scale, column)
        factors = (rank, read_scaling(rank, scaling), (scales, scales_row, scales_order))
        own_h, own_y = (h, h_row, h_order), (y, y_row, y_order)
        kinds, steps, i = (kind, kind_y), steps_of(b_row, rank * v.size(kind)), t
        while i + 8 <= end:
            expand_rows(PLAIN, kinds, place, tiles, factors, steps, i, EIGHT, own_h, own_y)
            i, steps = i + 8, NO_STEPS
        if i + 4 <= end:
            expand_rows(PLAIN, kinds, place, tiles, factors, steps, i, FOUR, own_h, own_y)
            i, steps = i + 4, NO_STEPS
        if i + 2 <= end:
            expand_rows(PLAIN, kinds, place, tiles, factors, steps, i, TWO, own_h, own_y)
            i, steps = i + 2, NO_STEPS
        if i < end and bias == 0 and rank == LANES and b_row == LANES * v.size(kind):
            expand_squares(kinds, place, tiles, factors, i, own_h, own_y)
        elif i < end:
            expand_rows(PLAIN, kinds, place, tiles, factors, steps, i, ONE, own_h, own_y)

    return compiled(run)


def expand_multiplied(kind: Any, kind_y: Any) -> Any:
    """Compile what `expand_short` does, with output_scales; few variants compile sooner."""

    def run(
        b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank, scaling,
        scales, scales_row, scales_order, tiles, t, end, h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        place = (b, b_row, (bias_dtype, bias, bias_size), output_scale, column)
        factors = (rank, read_scaling(rank, scaling), (scales, scales_row, scales_order))
        own_h, own_y = (h, h_row, h_order), (y, y_row, y_order)
        kinds, steps, i = (kind, kind_y), steps_of(b_row, rank * v.size(kind)), t
        while i + 4 <= end:
            expand_rows(MULTIPLIED, kinds, place, tiles, factors, steps, i, FOUR, own_h, own_y)
            i, steps = i + 4, NO_STEPS
        while i < end:
            expand_rows(MULTIPLIED, kinds, place, tiles, factors, steps, i, ONE, own_h, own_y)
            i, steps = i + 1, NO_STEPS

    return compiled(run)


def expand_column(kind: Any, kind_y: Any) -> Any:
    """Compile the addition to single columns of y, in the order of sums of `expand_short`."""

    def run(
        b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank, scaling,
        scales, scales_row, scales_order, columns, t, end, h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        factors = (rank, read_scaling(rank, scaling), (scales, scales_row, scales_order))
        own_h, own_y = (h, h_row, h_order), (y, y_row, y_order)
        for i in range(columns):
            own_scale = output_scale + 4 * i if output_scale != 0 else 0
            own_bias = (bias_dtype, bias + i * bias_size if bias != 0 else 0)
            place = (b + i * b_row, own_bias, own_scale, column + i)
            add_column((kind, kind_y), place, factors, t, end, own_h, own_y)

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
    """Return the offset of the first prefetch in a row of a, and the bytes from one to the next.

    A single pass prefetches SHRINK_AHEAD bytes ahead, in its own rows and then in the next 4; in
    rows no longer than that, only in the next 4. Several passes read the same rows, from a cache
    after the first pass, so each of them prefetches an equal share of the next 4 rows.
    """
    if passes == 1:
        return min(SHRINK_AHEAD, width), step
    return width, step // passes


@inlined
def dot_rows(kinds, a_rows, x_rows, n, ahead, step, to_next):
    """Return a vector of partial sums of ``a @ x`` per pair of rows, and the next prefetch offset.

    Each step prefetches the line at offset `ahead` of every row, and the next line if `step` is
    longer than a line, then adds `step` to `ahead`. Offsets beyond the end of a row continue in the
    row `to_next` bytes later.
    """
    kind, kind_x = kinds
    width = n * v.size(kind)
    sums = v.zeros(a_rows, x_rows)
    k = 0
    while k + 2 * LANES <= n:
        at = ahead if ahead < width else ahead + to_next - width
        v.prefetch(a_rows, at)
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
def read_scaling(rank, scaling):
    """Return the scaling at an address; a slice of rank 0 has none."""
    return np.float32(0) if rank == 0 else v.read(v.FLOAT32, scaling)


@inlined
def expand_rows(multiplied, kinds, place, tiles, factors, steps, t, tokens, h, y):
    """Add to `tiles` times 16 columns of some rows of y; `multiplied`: PLAIN or MULTIPLIED."""
    kind, kind_y = kinds
    b, b_row, (bias_dtype, bias, bias_size), output_scale, column = place
    rank, scaling, scales = factors
    scalings = v.read_scaled(v.rows(scales, t, tokens), scaling)
    h_rows, y_rows = v.rows(h, t, tokens), v.rows(y, t, tokens)
    added = v.zeros((0,), (0,))
    for _ in range(tiles):
        if bias != 0:
            added = (load_bias(bias_dtype, bias),)
            bias += LANES * bias_size
        sums = b_sums(kind, b, b_row, rank, h_rows, steps)
        output_scales = v.load_all(output_scale, multiplied)
        v.update_rows(kind_y, y_rows, column, sums, scalings, added, output_scales)
        output_scale += LANES * 4 * len(multiplied)
        b += LANES * b_row
        column += LANES


@inlined
def expand_squares(kinds, place, tiles, factors, t, h, y):
    """Do the work of `expand_rows` faster for one row of y, rank 16 without gaps and no bias.

    LLVM knows all distances in b, so there are half as many instructions.
    """
    kind, kind_y = kinds
    b, column, square = place[0], place[4], LANES * LANES * v.size(kind)
    scalings = v.read_scaled(v.rows(factors[2], t, ONE), factors[1])
    h_rows, y_rows = v.rows(h, t, ONE), v.rows(y, t, ONE)
    for _ in range(tiles):
        for line in range(0, square, LINE):
            v.prefetch((b,), EXPAND_AHEAD + line)
        sums = v.add_columns(v.zeros((0, 0), h_rows), v.load_square(kind, b), h_rows, 0)
        v.update_rows(kind_y, y_rows, column, sums, scalings, v.zeros((0,), (0,)), ())
        b += square
        column += LANES


@inlined
def b_sums(kind, b, b_row, rank, h_rows, steps):
    """Return ``h @ b.T`` for 16 rows of b: an even and an odd sum per row of h.

    Meanwhile other rows are prefetched, in `steps_of`.
    """
    sums = v.zeros((0, 0), h_rows)
    j, step = 0, 16 // v.size(kind)
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
def add_column(kinds, place, factors, t, end, h, y):
    """Add to one column of y."""
    kind, kind_y = kinds
    b, (bias_dtype, bias), output_scale, column = place
    rank, scaling, scales = factors
    added = np.float32(0)
    if bias != 0:
        added = read_bias(bias_dtype, bias)
    paired = rank - rank % (16 // v.size(kind))
    for i in range(t, end):
        (h_row,), (y_row,) = v.rows(h, i, ONE), v.rows(y, i, ONE)
        even, odd = np.float32(0), np.float32(0)
        for j in range(rank):
            factor = v.read(v.FLOAT32, h_row + 4 * j)
            item = v.read(kind, b + j * v.size(kind))
            if j % 2 and j < paired:
                odd = v.multiply_add(item, factor, odd)
            else:
                even = v.multiply_add(item, factor, even)
        at = y_row + column * v.size(kind_y)
        (own,) = v.read_scaled(v.rows(scales, i, ONE), scaling)
        if output_scale == 0:
            total = v.read(kind_y, at) + v.multiply_add(even + odd, own, added)
        else:
            total = v.multiply_add(even + odd, own, v.read(kind_y, at))
            total = v.multiply_add(total, v.read(v.FLOAT32, output_scale), added)
        v.write(kind_y, at, total)


@function
def steps_of(b_row, width):
    """Return how to prefetch later rows of b: (distance, apart, on, turn, row, column).

    Each vector of columns prefetches four lines, `apart` bytes apart. The first vector starts
    `distance` bytes ahead, each next one `on` bytes further, every fourth one `turn` bytes. If rows
    end within a line, these steps reach the last line, at `column`, only in the first `row` rows;
    the last lines of the other rows are prefetched first. Prefetching all lines of 16 rows at once
    would stall other loads.
    """
    if b_row == width:  # no gaps: line after line
        return EXPAND_AHEAD, LINE, 4 * LINE, 4 * LINE, LANES, 0
    distance = LANES * b_row * max(1, EXPAND_AHEAD // (LANES * width + 1))
    rest = width % LINE
    row = rest // 16 * 4 if rest > 0 else LANES
    return distance, b_row, 4 * b_row, LINE - 3 * 4 * b_row, row, width - rest
