"""Routines for segments of `LONG_SEGMENT` tokens and more, where arithmetic is the limit.

Weights are widened once and stored in the order in which they are used, so that the innermost
loops load whole vectors, one after the other. x is widened in registers: a copy of it would cost
more stores than it saves conversions. Sums have the order of the short segments' routines: those of
the inputs wait in memory between two chunks of the inputs. While a block is worked on, the next one
is fetched.

The two that multiply and add, `add_block` and `add_stored`, do not depend on the dtype of the
weights; the others call them through their addresses.
"""

from __future__ import annotations

from typing import Any

from lora_backends.numba_cpu.config import (
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    LONG_TILES,
)
from lora_backends.numba_cpu.kernels.addressing import following, with_columns
from lora_backends.numba_cpu.kernels.arguments import (
    ExpandLong,
    PackedBlock,
    Panel,
    RowPointers,
    Stored,
)
from lora_backends.numba_cpu.kernels.bias import load_bias
from lora_backends.numba_cpu.kernels.short import ONE, read_scaling
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled, function, inlined, part
from lora_backends.numba_cpu.machine.records import fields, invoke

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
    """Return how many float32 `shrink_long` needs for segments of at most `longest` tokens."""
    if longest < LONG_SEGMENT:
        return 0
    return (A_BYTES + sums_bytes(longest) + LINE) // 4


@function
def sums_bytes(tokens):
    """Return the bytes of the sums that wait between chunks."""
    return (tokens + TOKENS - 1) // TOKENS * (LONG_PANEL // LONG_RANKS) * SUMS_BYTES


@function
def expand_scratch(longest, rank):
    """Return how many float32 `expand_long` needs for segments of at most `longest` tokens."""
    if longest < LONG_SEGMENT:
        return 0
    return LANES * LONG_TILES * (rank + 1) + LINE // 4


@function
def aligned(scratch):
    """Return the address of the first whole cache line: a vector across two takes two loads."""
    return (scratch.ctypes.data + LINE - 1) // LINE * LINE


def shrink_long(kind: Any) -> Any:
    """Compile up to `LONG_PANEL` columns of ``h = x @ a.T``, by chunks of the inputs."""

    def run(address):
        of = fields(Panel, address)
        all_sums = of.scratch + A_BYTES  # [vectors, LONG_RANKS, 16] float32 before
        for k in range(0, max(of.n, 1), LONG_CHUNK):  # without inputs one empty chunk writes zeros
            offset, width = k * v.size(kind), min(of.n - k, LONG_CHUNK)
            x = RowPointers(of.x.start + offset, of.x.step, of.x.order)
            begun, ends = int(k > 0), int(k + LONG_CHUNK >= of.n)
            sums = all_sums  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
            for j in range(0, of.ranks, LONG_RANKS):
                for i in range(LONG_RANKS):
                    # the last row of a pads its block of rows
                    row = of.a + min(j + i, of.ranks - 1) * of.a_row + offset
                    pack_row(kind, row, width, of.scratch + i * LINE, LONG_RANKS * LINE)
                ahead = next_block(v.size(kind), of, j, k)
                sizes = (width, int(j == 0), begun, ends, of.ranks - j, of.tokens)
                h = RowPointers(of.h.start + 4 * j, of.h.step, of.h.order)
                invoke(of.add_block, block_of(of.scratch, sums, sizes, ahead, x, h))
                sums += (of.tokens + TOKENS - 1) // TOKENS * SUMS_BYTES

    return compiled(run)


@part
def block_of(packed, sums, sizes, ahead, x, h):
    """Return the arguments of `add_block`; `ahead` is a `next_block`."""
    width, fresh, begun, ends, count, tokens = sizes
    at, rows, row, lines = ahead
    return PackedBlock(
        packed, sums, width, at, rows, row, lines, fresh, begun, ends, count, tokens, x, h
    )


@part
def next_block(size, of, j, k):
    """Return the next rows of a, to be fetched meanwhile: address, rows, step, lines of each."""
    if j + LONG_RANKS < of.ranks:
        lines = min(of.n - k, LONG_CHUNK) * size // LINE
        start = of.a + (j + LONG_RANKS) * of.a_row + k * size
        return start, of.ranks - j - LONG_RANKS, of.a_row, lines
    lines = max(0, min(of.n - k - LONG_CHUNK, LONG_CHUNK) * size // LINE)
    return of.a + (k + LONG_CHUNK) * size, of.ranks, of.a_row, lines


def add_block(kind_x: Any) -> Any:
    """Compile the product of one block of A and all tokens; the last chunk writes h."""

    def run(address):
        of = fields(PackedBlock, address)
        groups, all_sums = (of.tokens + TOKENS - 1) // TOKENS, of.sums
        share = (of.next_lines * LONG_RANKS + groups - 1) // groups
        # x that is `fresh` is not in a cache yet: the rows of the next group are fetched
        x_lines = of.width * v.size(kind_x) // LINE if of.fresh else 0
        for g in range(groups):
            for i in range(g * share, (g + 1) * share):
                row = min(i % LONG_RANKS, of.next_rows - 1)
                v.prefetch((of.next_a,), row * of.next_row + i // LONG_RANKS * LINE)
            next_x = three_rows(of.x, (g + 1) * TOKENS, of.tokens)
            for line in range(x_lines):
                v.prefetch(next_x, line * LINE)
            if of.begun:
                sums = v.load_all(all_sums, SUMS_EACH)
            else:
                sums = v.zeros(RANKS_EACH, TOKENS_EACH)
            # the last token pads its group; x is widened in registers
            x_rows, packed, k = three_rows(of.x, g * TOKENS, of.tokens), of.packed, 0
            while k + 2 * LANES <= of.width:
                products = (v.load_all(packed, PAIRS_EACH), v.load_rows(kind_x, x_rows, k))
                sums = v.add_products(sums, *products)
                packed += 2 * LINE * LONG_RANKS
                k += 2 * LANES
            while k < of.width:
                x_tail = v.load_some(kind_x, x_rows, k, min(of.width - k, LANES))
                sums = v.add_products(sums, v.load_all(packed, RANKS_EACH), x_tail)
                packed += LINE * LONG_RANKS
                k += LANES
            if of.ends:
                v.write_totals(three_rows(of.h, g * TOKENS, of.tokens), of.ranks, sums)
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
    """Compile the addition to `groups` times 64 columns of y, which `add_stored` does."""

    def run(address):
        of = fields(ExpandLong, address)
        expand, rank, step = of.expand, of.expand.factors.rank, LINE * LONG_TILES
        paired = rank - rank % (16 // v.size(kind))
        for group in range(expand.groups):
            columns = following(expand.columns, group * LANES * LONG_TILES)
            for i in range(LONG_TILES):
                b = columns.b + i * LANES * columns.b_row
                store_columns(kind, b, columns.b_row, rank, of.scratch + i * LINE, step)
            part = with_columns(expand, columns)
            invoke(of.add_stored, Stored(of.scratch, paired, rank * v.size(kind), part))

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
    """Compile the addition to 16 columns of y per item of `tiles`; fetch the next rows of b."""

    def run(address):
        of = fields(Stored, address)
        expand, at = of.expand, of.expand.columns
        step, b_rows, size = LINE * len(tiles), LANES * len(tiles), v.size(kind_y)
        next_b, scaling = at.b + b_rows * at.b_row, read_scaling(expand.factors)
        memory = of.columns + step * expand.factors.rank
        added = v.zeros((0,), tiles)
        if at.bias != 0:
            for i in range(len(tiles)):
                tile_bias = load_bias(at.bias_dtype, at.bias + i * LANES * at.bias_size)
                v.store_all(memory + i * LINE, LINE, (tile_bias,))
            added = v.load_all(memory, tiles)
        tokens = expand.stop - expand.start
        share = (b_rows * TOKENS + tokens - 1) // tokens
        fetched, i = 0, expand.start
        while i + TOKENS <= expand.stop:
            for row in range(fetched, min(fetched + share, b_rows)):
                for line in range(0, of.width, LINE):
                    v.prefetch((next_b,), row * at.b_row + line)
            fetched += share
            fetch_ahead(expand, i, at.column * size, b_rows * size)
            add_tokens(kind_y, tiles, TOKENS_EACH, i, of, scaling, added)
            i += TOKENS
        while i < expand.stop:
            add_tokens(kind_y, tiles, ONE, i, of, scaling, added)
            i += 1

    return compiled(run)


@inlined
def add_tokens(kind_y, tiles, like, t, of, scaling, added):
    """Add to 16 columns of y per item of `tiles`, and multiply by output_scales if there are."""
    expand, at = of.expand, of.expand.columns
    sums = stored_sums(tiles, of, v.rows(expand.h, t, like))
    scales = v.read_scaled(v.rows(expand.factors.scales, t, like), scaling)
    y_rows = v.rows(expand.y, t, like)
    if at.output_scale == 0:
        v.update_rows(kind_y, y_rows, at.column, sums, scales, added, ())
    else:
        multiplied = v.load_all(at.output_scale, tiles)
        v.update_rows(kind_y, y_rows, at.column, sums, scales, added, multiplied)


@function
def fetch_ahead(expand, t, offset, width):
    """Ask for what is updated two groups of tokens later, at the end for the next columns."""
    ahead = t + 2 * TOKENS
    if ahead + TOKENS > expand.stop:
        ahead = expand.start + max(0, ahead - expand.stop)
        offset += width
    rows = v.rows(expand.y, ahead, TOKENS_EACH)
    for line in range(0, width, LINE):
        v.prefetch(rows, offset + line)


@inlined
def stored_sums(tiles, of, h_rows):
    """Return the sums of `b_sums` of the short segments, from the stored columns of b."""
    columns = of.columns
    sums = v.zeros(v.zeros(tiles, (0, 0)), h_rows)
    step = LINE * len(tiles)
    for j in range(0, of.paired, 2):
        sums = v.add_stored(sums, v.load_all(columns, tiles), h_rows, j, ())
        sums = v.add_stored(sums, v.load_all(columns + step, tiles), h_rows, j, (0,))
        columns += 2 * step
    for j in range(of.paired, of.expand.factors.rank):
        sums = v.add_stored(sums, v.load_all(columns, tiles), h_rows, j, ())
        columns += step
    return sums
