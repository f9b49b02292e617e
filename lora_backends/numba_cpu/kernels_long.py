"""Shrink and expand for segments of `LONG_SEGMENT` tokens and more, where arithmetic is the limit.

What many products need is widened once and stored in the order in which it is used, so that the
innermost loops only load whole vectors, one after the other, multiply and add. Sums have the order
of the short segments' kernels: those of the inputs wait in memory between two chunks of the inputs.
While a block is worked on, the next one is fetched.
"""

# numba infers the types of kernels
# ruff: noqa: ANN001, ANN003, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

from numba import njit

from lora_backends.numba_cpu import vectors as v
from lora_backends.numba_cpu.config import (
    LONG_CHUNK,
    LONG_PANEL,
    LONG_RANKS,
    LONG_SEGMENT,
    LONG_TILES,
    MAX_SEGMENT,
)
from lora_backends.numba_cpu.kernels_bias import load_bias

LANES = v.LANES
LINE = 64  # bytes of a cache line, and of a vector
TOKENS = 3  # at a time, see `three_rows`
RANKS_EACH, TOKENS_EACH = (0,) * LONG_RANKS, (0,) * TOKENS
SUMS_EACH = (0,) * (LONG_RANKS * TOKENS)
ONE_TILE, MANY_TILES = (0,), (0,) * LONG_TILES

MAX_GROUPS = (MAX_SEGMENT + TOKENS - 1) // TOKENS
X_BYTES = 4 * LONG_CHUNK * TOKENS  # of a group of tokens
A_BYTES = 4 * LONG_CHUNK * LONG_RANKS
SUMS_BYTES = LINE * LONG_RANKS * TOKENS


@njit(nogil=True)
def shrink_scratch(longest):
    """Return how many float32 `shrink_long` needs for segments of so many tokens."""
    if longest < LONG_SEGMENT:
        return 0
    blocks = LONG_PANEL // LONG_RANKS
    return (MAX_GROUPS * (X_BYTES + blocks * SUMS_BYTES) + A_BYTES + LINE) // 4


@njit(nogil=True)
def expand_scratch(longest, rank):
    """Return how many float32 `expand_long` needs for segments of so many tokens."""
    if longest < LONG_SEGMENT:
        return 0
    return LANES * LONG_TILES * (rank + 1) + LINE // 4


@njit(nogil=True)
def aligned(scratch):
    """Return the address of the first whole cache line: a vector across two takes two loads."""
    return (scratch.ctypes.data + LINE - 1) // LINE * LINE


@njit(nogil=True, forceinline=True)
def row_at(base, t):
    """Return the address of the row at a position."""
    return base[0] + v.read_id(base[2] + 8 * t) * base[1]


@njit(nogil=True, forceinline=True)
def two_rows(base, t):
    """Return the addresses of two tokens' rows."""
    return row_at(base, t), row_at(base, t + 1)


@njit(nogil=True, forceinline=True)
def three_rows(base, t):
    """Return the addresses of three tokens' rows."""
    return two_rows(base, t) + (row_at(base, t + 2),)


@njit(nogil=True)
def shrink_long(kind, rows, columns, scratch, t, end, x, h):
    """Write some columns of h for the tokens of a segment."""
    a, a_row, n = rows
    first, last = columns
    own_x = (x[0], x[1], x[2] + 8 * t)
    for j in range(first, last, LONG_PANEL):
        panel = (a + j * a_row, a_row, n)
        to = (h[0] + 4 * j, h[1], h[2] + 8 * t)
        count = min(last - j, LONG_PANEL)
        shrink_panel(kind, panel, count, aligned(scratch), end - t, own_x, to)


@njit(nogil=True)
def shrink_panel(kind, rows, count, packed_x, tokens, x, h):
    """Write up to `LONG_PANEL` columns of h, by chunks of the inputs.

    The last token fills up a group of tokens, the last row of a a block of rows.
    """
    a, a_row, n = rows
    groups = (tokens + TOKENS - 1) // TOKENS
    packed_a = packed_x + MAX_GROUPS * X_BYTES  # [groups, vectors, TOKENS, 16] float32 before
    all_sums = packed_a + A_BYTES  # [vectors, LONG_RANKS, 16] float32 before
    for k in range(0, n, LONG_CHUNK):
        at, width, begun, ends = (
            k * v.size(kind),
            min(n - k, LONG_CHUNK),
            k > 0,
            k + LONG_CHUNK >= n,
        )
        for i in range(groups * TOKENS):
            row = row_at(x, min(i, tokens - 1)) + at
            to = packed_x + i // TOKENS * X_BYTES + i % TOKENS * LINE
            pack_row(kind, row, width, to, TOKENS * LINE)
        sums = all_sums  # [blocks, groups, TOKENS, LONG_RANKS, 16] float32
        for j in range(0, count, LONG_RANKS):
            for i in range(LONG_RANKS):
                row = a + min(j + i, count - 1) * a_row + at
                pack_row(kind, row, width, packed_a + i * LINE, LONG_RANKS * LINE)
            block = (packed_a, packed_x, sums, (width + LANES - 1) // LANES)
            fetch = next_block(kind, rows, count, x, j, k)
            add_block(block, fetch, begun, ends, count - j, tokens, (h[0] + 4 * j, h[1], h[2]))
            sums += groups * SUMS_BYTES


@njit(nogil=True)
def next_block(kind, rows, count, x, j, k):
    """Return what to fetch during a block: rows of a that come next, this block's share of x.

    That is the address of the next rows of a, how many they are, the bytes between them and the
    lines of each, then x as of the next chunk and the first and last + 1 of the lines of each row.
    """
    a, a_row, n = rows
    size = v.size(kind)
    lines = min(n - k, LONG_CHUNK) * size // LINE
    following = max(0, min(n - k - LONG_CHUNK, LONG_CHUNK) * size // LINE)
    if j + LONG_RANKS < count:
        j += LONG_RANKS
        next_a = (a + j * a_row + k * size, count - j, a_row, lines)
        first, last = (j - LONG_RANKS) * following // count, j * following // count
    else:
        next_a = (a + (k + LONG_CHUNK) * size, count, a_row, following)
        first, last = j * following // count, following
    return next_a, (x[0] + (k + LONG_CHUNK) * size, x[1], x[2]), first, last


@njit(nogil=True)
def add_block(block, fetch, begun, ends, count, tokens, h):
    """Add a chunk's products of a block of rows and all tokens; write h after the last chunk."""
    packed_a, packed_x, all_sums, vectors = block
    (a, a_rows, a_row, a_lines), x, x_first, x_last = fetch
    last = tokens - TOKENS
    groups = (tokens + TOKENS - 1) // TOKENS
    share = (a_lines * LONG_RANKS + groups - 1) // groups
    for g in range(groups):
        for i in range(g * share, (g + 1) * share):
            v.prefetch((a,), min(i % LONG_RANKS, a_rows - 1) * a_row + i // LONG_RANKS * LINE)
        for line in range(x_first, x_last):
            v.prefetch(three_rows(x, min(g * TOKENS, last)), line * LINE)
        if begun:
            sums = v.load_all(all_sums, SUMS_EACH)
        else:
            sums = v.zeros(RANKS_EACH, TOKENS_EACH)
        sums = packed_products(sums, packed_a, packed_x, vectors)
        if ends:
            v.write_totals(filled_rows(h, tokens, g * TOKENS), count, sums)
        else:
            v.store_all(all_sums, LINE, sums)
        packed_x += X_BYTES
        all_sums += SUMS_BYTES


@njit(nogil=True, forceinline=True)
def filled_rows(base, tokens, t):
    """Return the addresses of three tokens' rows; the last token fills up."""
    last = tokens - 1
    return row_at(base, t), row_at(base, min(t + 1, last)), row_at(base, min(t + 2, last))


@njit(nogil=True, forceinline=True)
def packed_products(sums, a, x, vectors):
    """Add the products of packed rows: a vector of every row, then the next of every row."""
    for _ in range(vectors):
        sums = v.add_products(sums, v.load_all(a, RANKS_EACH), v.load_all(x, TOKENS_EACH))
        a += LINE * LONG_RANKS
        x += LINE * TOKENS
    return sums


@njit(nogil=True)
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


@njit(nogil=True)
def expand_long(kinds, place, tiles, factors, scratch, t, end, h, y):
    """Add to `tiles` times 16 columns of y for the tokens of a segment."""
    columns, tokens = aligned(scratch), (t, end)
    while tiles >= LONG_TILES:
        place = expand_columns(MANY_TILES, kinds, place, factors, columns, tokens, h, y)
        tiles -= LONG_TILES
    for _ in range(tiles):
        place = expand_columns(ONE_TILE, kinds, place, factors, columns, tokens, h, y)


@njit(nogil=True)
def expand_columns(tiles, kinds, place, factors, columns, tokens, h, y):
    """Add to 16 columns of y per item of `tiles`; return the place of the next ones."""
    kind, kind_y = kinds
    b, b_row, rank = place[0], place[1], factors[0]
    for i in range(len(tiles)):
        row, to = b + i * LANES * b_row, columns + i * LINE
        store_columns(kind, row, b_row, rank, to, LINE * len(tiles))
    paired = rank - rank % (16 // v.size(kind))
    width = rank * v.size(kind)  # bytes of a row of b
    return add_stored_columns(tiles, kind_y, place, factors, paired, width, columns, tokens, h, y)


@njit(nogil=True)
def add_stored_columns(tiles, kind_y, place, factors, paired, width, columns, tokens, h, y):
    """Do what `expand_columns` does with columns of b that are stored; fetch the next rows of b."""
    b, b_row, (bias_dtype, bias, bias_size), output_scale, column = place
    rank, scaling, scales = factors
    (t, end), step, b_rows = tokens, LINE * len(tiles), LANES * len(tiles)
    b += b_rows * b_row
    at = columns + step * rank
    added = v.zeros((0,), tiles)
    if bias != 0:
        for i in range(len(tiles)):
            v.store_all(at + i * LINE, LINE, (load_bias(bias_dtype, bias),))
            bias += LANES * bias_size
        added = v.load_all(at, tiles)
    share = (b_rows * TOKENS + end - t - 1) // (end - t)
    fetched, first = 0, t
    while t + TOKENS <= end:
        for i in range(fetched, min(fetched + share, b_rows)):
            for line in range(0, width, LINE):
                v.prefetch((b,), i * b_row + line)
        fetched += share
        fetch_ahead(y, (first, end), t, column * v.size(kind_y), b_rows * v.size(kind_y))
        sums = stored_sums(tiles, columns, paired, rank, three_rows(h, t))
        own = v.read_scaled(three_rows(scales, t), scaling)
        update(tiles, kind_y, three_rows(y, t), column, sums, own, added, output_scale)
        t += TOKENS
    while t < end:
        sums1 = stored_sums(tiles, columns, paired, rank, (row_at(h, t),))
        own1 = v.read_scaled((row_at(scales, t),), scaling)
        update(tiles, kind_y, (row_at(y, t),), column, sums1, own1, added, output_scale)
        t += 1
    if output_scale != 0:
        output_scale += LANES * 4 * len(tiles)
    return b, b_row, (bias_dtype, bias, bias_size), output_scale, column + b_rows


@njit(nogil=True, forceinline=True)
def update(tiles, kind_y, y_rows, column, sums, factors, added, output_scale):
    """Add to 16 columns of y per item of `tiles`, and multiply by output_scales if there are."""
    if output_scale == 0:
        v.update_rows(kind_y, y_rows, column, sums, factors, added, ())
    else:
        multiplied = v.load_all(output_scale, tiles)
        v.update_rows(kind_y, y_rows, column, sums, factors, added, multiplied)


@njit(nogil=True, forceinline=True)
def fetch_ahead(y, tokens, t, offset, width):
    """Ask for what is updated two groups of tokens later, at the end for the next columns."""
    (first, end), ahead = tokens, t + 2 * TOKENS
    if ahead + TOKENS > end:
        ahead = first + max(0, ahead - end)
        offset += width
    rows = three_rows(y, ahead)
    for line in range(0, width, LINE):
        v.prefetch(rows, offset + line)


@njit(nogil=True, forceinline=True)
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


@njit(nogil=True, forceinline=True)
def stored_sums(tiles, columns, paired, rank, h_rows):
    """Return what `b_sums` of the short segments returns, from the stored columns of b."""
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
