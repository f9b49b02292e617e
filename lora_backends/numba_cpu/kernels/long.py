"""Routines for segments of `LONG_SEGMENT` tokens and more, where arithmetic is the limit.

Weights are widened once and stored in the order in which they are used, so that the innermost
loops load whole vectors, one after the other. x is widened in registers: a copy of it would cost
more stores than it saves conversions. Sums have the order of the short segments' routines: those of
the inputs wait in memory between two chunks of the inputs. While a block is worked on, the next one
is fetched.

The two that multiply and add, `add_block` and `add_stored`, do not depend on the dtype of the
weights; the others call them through their addresses.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from typing import Any

from lora_backends.numba_cpu.config import (
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    LONG_TILES,
)
from lora_backends.numba_cpu.kernels.bias import load_bias
from lora_backends.numba_cpu.kernels.short import ONE, read_scaling
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined

LANES = v.LANES
LINE = 64  # bytes of a cache line, and of a vector
TOKENS = 3  # at a time
RANKS_EACH, TOKENS_EACH = (0,) * LONG_RANKS, (0,) * TOKENS
PAIRS_EACH, SUMS_EACH = (0,) * (2 * LONG_RANKS), (0,) * (LONG_RANKS * TOKENS)
MANY_TILES = (0,) * LONG_TILES

A_BYTES = 4 * LONG_CHUNK * LONG_RANKS
SUMS_BYTES = LINE * LONG_RANKS * TOKENS  # of a group of tokens


@function
def shrink_scratch(longest):
    """Return how many float32 `shrink_long` needs for segments of so many tokens."""
    if longest < LONG_SEGMENT:
        return 0
    return (A_BYTES + sums_bytes(longest) + LINE) // 4


@function
def sums_bytes(tokens):
    """Return the bytes of the sums that wait between chunks."""
    return (tokens + TOKENS - 1) // TOKENS * (LONG_PANEL // LONG_RANKS) * SUMS_BYTES


@function
def expand_scratch(longest, rank):
    """Return how many float32 `expand_long` needs for segments of so many tokens."""
    if longest < LONG_SEGMENT:
        return 0
    return LANES * LONG_TILES * (rank + 1) + LINE // 4


@function
def aligned(scratch):
    """Return the address of the first whole cache line: a vector across two takes two loads."""
    return (scratch.ctypes.data + LINE - 1) // LINE * LINE


def shrink_long(kind: Any) -> Any:
    """Compile up to `LONG_PANEL` columns of ``h = x @ a.T``, by chunks of the inputs.

    The last row of a pads its block of rows.
    """

    def run(
        add_block, packed_a, a, a_row, n, count, tokens, x, x_row, x_order, h, h_row, h_order
    ):  # fmt: skip
        all_sums = packed_a + A_BYTES  # [vectors, LONG_RANKS, 16] float32 before
        for k in range(0, max(n, 1), LONG_CHUNK):  # without inputs one empty chunk writes zeros
            at, width = k * v.size(kind), min(n - k, LONG_CHUNK)
            sums = all_sums  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
            for j in range(0, count, LONG_RANKS):
                for i in range(LONG_RANKS):
                    row = a + min(j + i, count - 1) * a_row + at
                    pack_row(kind, row, width, packed_a + i * LINE, LONG_RANKS * LINE)
                state = (int(j == 0), int(k > 0), int(k + LONG_CHUNK >= n), count - j, tokens)
                fetch = next_block(v.size(kind), (a, a_row, n), count, j, k)
                rows = (x + at, x_row, x_order, h + 4 * j, h_row, h_order)
                v.invoke(add_block, (packed_a, sums, width, *fetch, *state, *rows))
                sums += (tokens + TOKENS - 1) // TOKENS * SUMS_BYTES

    return compiled(run)


@function
def next_block(size, rows, count, j, k):
    """Return the next rows of a, to be fetched meanwhile.

    They are given by the address, the number of rows, the bytes between them and the lines of each.
    """
    a, a_row, n = rows
    if j + LONG_RANKS < count:
        lines = min(n - k, LONG_CHUNK) * size // LINE
        return a + (j + LONG_RANKS) * a_row + k * size, count - j - LONG_RANKS, a_row, lines
    following = max(0, min(n - k - LONG_CHUNK, LONG_CHUNK) * size // LINE)
    return a + (k + LONG_CHUNK) * size, count, a_row, following


def add_block(kind_x: Any) -> Any:
    """Compile the product of one block of A and all tokens; the last chunk writes h.

    x is widened in registers. The last token pads its group. Where x is `fresh`, not in a cache
    yet, the rows of the next group are fetched.
    """

    def run(
        packed_a, all_sums, width, a, a_rows, a_row, a_lines, fresh, begun, ends, count, tokens,
        x, x_row, x_order, h, h_row, h_order,
    ):  # fmt: skip
        groups = (tokens + TOKENS - 1) // TOKENS
        share = (a_lines * LONG_RANKS + groups - 1) // groups
        x_lines = width * v.size(kind_x) // LINE if fresh else 0
        for g in range(groups):
            for i in range(g * share, (g + 1) * share):
                v.prefetch((a,), min(i % LONG_RANKS, a_rows - 1) * a_row + i // LONG_RANKS * LINE)
            following = three_rows((x, x_row, x_order), (g + 1) * TOKENS, tokens)
            for line in range(x_lines):
                v.prefetch(following, line * LINE)
            if begun:
                sums = v.load_all(all_sums, SUMS_EACH)
            else:
                sums = v.zeros(RANKS_EACH, TOKENS_EACH)
            x_rows, row, k = three_rows((x, x_row, x_order), g * TOKENS, tokens), packed_a, 0
            while k + 2 * LANES <= width:
                products = (v.load_all(row, PAIRS_EACH), v.load_rows(kind_x, x_rows, k))
                sums = v.add_products(sums, *products)
                row += 2 * LINE * LONG_RANKS
                k += 2 * LANES
            while k < width:
                x_tail = v.load_some(kind_x, x_rows, k, min(width - k, LANES))
                sums = v.add_products(sums, v.load_all(row, RANKS_EACH), x_tail)
                row += LINE * LONG_RANKS
                k += LANES
            if ends:
                v.write_totals(three_rows((h, h_row, h_order), g * TOKENS, tokens), count, sums)
            else:
                v.store_all(all_sums, LINE, sums)
            all_sums += SUMS_BYTES

    return compiled(run)


@inlined
def three_rows(base, t, tokens):
    """Return the addresses of a group of rows from t on; the last one fills up."""
    last = tokens - 1
    (row_0,) = v.rows(base, min(t, last), ONE)
    (row_1,) = v.rows(base, min(t + 1, last), ONE)
    (row_2,) = v.rows(base, min(t + 2, last), ONE)
    return row_0, row_1, row_2


@function
def pack_row(kind, row, width, to, step):
    """Store a row as vectors of float32, `step` bytes apart, in the order of its sums."""
    k = 0
    while k + 2 * LANES <= width:
        v.store_all(to, step, v.load_rows(kind, (row,), k))
        to += 2 * step
        k += 2 * LANES
    while k < width:
        v.store_all(to, step, v.load_some(kind, (row,), k, min(width - k, LANES)))
        to += step
        k += LANES


def expand_long(kind: Any) -> Any:
    """Compile the addition to `blocks` times 64 columns of y, which `add_stored` does."""

    def run(
        add_stored, columns, b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank,
        scaling, scales, scales_row, scales_order, blocks, t, end, h, h_row, h_order,
        y, y_row, y_order,
    ):  # fmt: skip
        step, width = LINE * LONG_TILES, LANES * LONG_TILES
        paired = rank - rank % (16 // v.size(kind))
        for _block in range(blocks):
            for i in range(LONG_TILES):
                store_columns(kind, b + i * LANES * b_row, b_row, rank, columns + i * LINE, step)
            place = (b, b_row, bias_dtype, bias, bias_size, output_scale, column)
            factors = (rank, scaling, scales, scales_row, scales_order)
            stored = (paired, rank * v.size(kind), columns)
            tokens = (t, end, h, h_row, h_order, y, y_row, y_order)
            v.invoke(add_stored, place + factors + stored + tokens)
            b += width * b_row
            column += width
            if bias != 0:
                bias += width * bias_size
            if output_scale != 0:
                output_scale += width * 4

    return compiled(run)


@inlined
def store_columns(kind, b, b_row, rank, to, step_to):
    """Store 16 rows of b as `rank` vectors of float32, `step_to` bytes apart."""
    j, step = 0, 16 // v.size(kind)
    while j + step <= rank:
        columns = v.load_columns(kind, b + j * v.size(kind), b_row)
        v.store_all(to + step_to * j, step_to, columns)
        j += step
    while j < rank:
        column = (v.load_column(kind, b + j * v.size(kind), b_row),)
        v.store_all(to + step_to * j, step_to, column)
        j += 1


def add_stored_one(kind_y: Any) -> Any:
    """Compile what `add_stored` does for 16 columns of y."""
    return add_stored(kind_y, ONE)


def add_stored(kind_y: Any, tiles: tuple[int, ...] = MANY_TILES) -> Any:
    """Compile the addition to 16 columns of y per item of `tiles`; fetch the next rows of b.

    The columns of b are stored as float32, `width` bytes were read of each of its rows, and
    `paired` of the columns have an even and an odd sum by turns.
    """

    def run(
        b, b_row, bias_dtype, bias, bias_size, output_scale, column, rank, scaling,
        scales, scales_row, scales_order, paired, width, columns, t, end,
        h, h_row, h_order, y, y_row, y_order,
    ):  # fmt: skip
        step, b_rows = LINE * len(tiles), LANES * len(tiles)
        own_y, size = (y, y_row, y_order), v.size(kind_y)
        factors = (read_scaling(rank, scaling), (scales, scales_row, scales_order))
        stored, target = (columns, paired, rank), (kind_y, own_y, column, output_scale)
        b += b_rows * b_row
        at = columns + step * rank
        added = v.zeros((0,), tiles)
        if bias != 0:
            for i in range(len(tiles)):
                tile_bias = load_bias(bias_dtype, bias + i * LANES * bias_size)
                v.store_all(at + i * LINE, LINE, (tile_bias,))
            added = v.load_all(at, tiles)
        share = (b_rows * TOKENS + end - t - 1) // (end - t)
        fetched, i = 0, t
        while i + TOKENS <= end:
            for row in range(fetched, min(fetched + share, b_rows)):
                for line in range(0, width, LINE):
                    v.prefetch((b,), row * b_row + line)
            fetched += share
            fetch_ahead(own_y, t, end, i, column * size, b_rows * size)
            add_tokens(tiles, TOKENS_EACH, i, stored, factors, (h, h_row, h_order), added, target)
            i += TOKENS
        while i < end:
            add_tokens(tiles, ONE, i, stored, factors, (h, h_row, h_order), added, target)
            i += 1

    return compiled(run)


@inlined
def add_tokens(tiles, like, t, stored, factors, h, added, target):
    """Add to 16 columns of y per item of `tiles`, and multiply by output_scales if there are."""
    kind_y, y, column, output_scale = target
    sums = stored_sums(tiles, stored, v.rows(h, t, like))
    own = v.read_scaled(v.rows(factors[1], t, like), factors[0])
    if output_scale == 0:
        v.update_rows(kind_y, v.rows(y, t, like), column, sums, own, added, ())
    else:
        multiplied = v.load_all(output_scale, tiles)
        v.update_rows(kind_y, v.rows(y, t, like), column, sums, own, added, multiplied)


@function
def fetch_ahead(y, first, end, t, offset, width):
    """Ask for what is updated two groups of tokens later, at the end for the next columns."""
    ahead = t + 2 * TOKENS
    if ahead + TOKENS > end:
        ahead = first + max(0, ahead - end)
        offset += width
    rows = v.rows(y, ahead, TOKENS_EACH)
    for line in range(0, width, LINE):
        v.prefetch(rows, offset + line)


@inlined
def stored_sums(tiles, stored, h_rows):
    """Return the sums of `b_sums` of the short segments, from the stored columns of b."""
    columns, paired, rank = stored
    sums = v.zeros(v.zeros(tiles, (0, 0)), h_rows)
    step = LINE * len(tiles)
    for j in range(0, paired, 2):
        sums = v.add_stored(sums, v.load_all(columns, tiles), h_rows, j, ())
        sums = v.add_stored(sums, v.load_all(columns + step, tiles), h_rows, j, (0,))
        columns += 2 * step
    for j in range(paired, rank):
        sums = v.add_stored(sums, v.load_all(columns, tiles), h_rows, j, ())
        columns += step
    return sums
