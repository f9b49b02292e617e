# mypy: ignore-errors
"""The expands of tiles of like tokens, whose adapters act as one of a higher rank."""

import triton
import triton.language as tl

from lora_backends.sgmv.blends.tile_kernels import (
    b_of_slot,
    entry_of,
    load_pair,
    prefetch_b,
    store_block,
)
from lora_backends.sgmv.kernels.blocks import load_b_rows, load_h_row, load_y, wait_for_h
from lora_backends.sgmv.kernels.indexing import entry, in_groups, slice_entry
from lora_backends.sgmv.kernels.operands import RowsOfY, Tile
from lora_backends.sgmv.kernels.products import multiply, rounded, row_product, within


@triton.jit
def add_together(tile, b, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns, TOGETHER entries a product; loads of B run one product ahead.

    V: the ranks of the entries of a product, stacked.
    """
    CHUNKS: tl.constexpr = S.CHUNKS
    PARTS: tl.constexpr = S.RANK_PAD // S.BLOCK_R * (ENTRIES // TOGETHER)
    C: tl.constexpr = S.BLOCK_C
    T: tl.constexpr = tile.tokens.shape[0]
    c = tile.first + tl.arange(0, C)  # [C]
    block = _load_b(tile, b, 0, c, ENTRIES, TOGETHER, S)
    _, slots, ranks, _ = _entries_of(tile, 0, ENTRIES, ENTRIES, S)
    y_rows = _rows_of_y(tile, tl.max(ranks), S)
    y = load_y(tile, y_rows, c, S)
    if S.PROGRAMMATIC and PARTS > 1:
        prefetch_b(tile, b, slots, ranks > 0, c, S)
    wait_for_h(S)
    if PARTS == 1:
        h = _load_h(tile, 0, block.dtype, ENTRIES, TOGETHER, S)
    for chunk in tl.static_range(CHUNKS):
        c_now, y_now = c, y
        if PARTS == 1:
            delta = multiply(h, block, None, S)
        else:
            delta = tl.zeros((T, C), dtype=tl.float32)
            # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
            # registers
            for part in tl.range(0, PARTS, num_stages=1):
                h = _load_h(tile, part, block.dtype, ENTRIES, TOGETHER, S)
                now = block
                block = _load_b(tile, b, part + 1, c, ENTRIES, TOGETHER, S)
                delta = multiply(h, now, delta, S)
        if chunk + 1 < CHUNKS:
            c = c + C
            block = _load_b(tile, b, 0, c, ENTRIES, TOGETHER, S)
            y = load_y(tile, y_rows, c, S)
        if S.HAS_BIAS:
            delta = _add_bias(tile, c_now, delta, ENTRIES, S)
        store_block(tile, y_rows, c_now, y_now, delta, S)


@triton.jit
def _rows_of_y(tile, rank, S: tl.constexpr):
    """Return the rows of y that the tile changes; `rank` is the largest of its entries."""
    if S.HAS_BIAS:
        written = tile.tokens >= 0
    else:
        written = tl.where(rank > 0, tile.tokens, -1) >= 0
    return RowsOfY(at=tile.y, read=written, written=written)


@triton.jit
def _entries_of(tile, part, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr):
    """Return e, slot and rank of the entries of a product [E], and its ranks r [R]."""
    STEPS: tl.constexpr = S.RANK_PAD // S.BLOCK_R
    e = part // STEPS * TOGETHER + tl.arange(0, TOGETHER)
    slot = tl.load(tile.slots + e, mask=e < ENTRIES, other=-1).to(tl.int64)
    rank = tl.load(tile.ranks + slot * S.NUM_SLICES, mask=slot >= 0, other=0)
    r = part % STEPS * S.BLOCK_R + tl.arange(0, S.BLOCK_R)
    return e.to(tl.int64), tl.maximum(slot, 0), rank, r


@triton.jit
def _load_b(tile, b, part, c, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr):
    """Return B of the entries of a product, stacked by rank, transposed: zero beyond the ranks."""
    V: tl.constexpr = TOGETHER * S.BLOCK_R
    C: tl.constexpr = c.shape[0]
    _, slot, rank, r = _entries_of(tile, part, ENTRIES, TOGETHER, S)
    at, b_stride = b_of_slot(b, slot, tile.s, S)
    offsets = c.to(tl.int64)[None, None, :] * b_stride + r[None, :, None]
    mask = in_groups(r[None, :], rank[:, None], S.EVEN_R)[:, :, None]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[None, None, :]
    values = tl.load(at[:, None, None] + offsets, mask=mask, other=0.0)  # [E, R, C]
    values = tl.where((r[None, :] < rank[:, None])[:, :, None], values, 0)
    return tl.reshape(values, (V, C))


@triton.jit
def _load_h(
    tile, part, dtype: tl.constexpr, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr
):
    """Return the tokens' h of the entries of a product [T, V], rounded, times their factors.

    It is zero where a token lacks the adapter. Factors multiply h, not the product, because a
    product has several; dtypes of the narrow exponents of float16 never come here.
    """
    PLANES: tl.constexpr = S.SPLIT_K
    T: tl.constexpr = tile.tokens.shape[0]
    V: tl.constexpr = TOGETHER * S.BLOCK_R
    e, slot, rank, r = _entries_of(tile, part, ENTRIES, TOGETHER, S)
    scaling = tl.load(tile.scalings + slot * S.NUM_SLICES, mask=rank > 0, other=0.0)
    has_token = (tile.tokens >= 0)[:, None]
    factor = tl.load(tile.factors[:, None] + e[None, :], mask=has_token, other=float("nan"))
    member = (factor == factor)[:, :, None]  # [T, E, 1]
    at = tile.h[:, None, None] + (e * tile.h_stride)[None, :, None] + r[None, None, :]
    mask = member & in_groups(r[None, :], rank[:, None], S.EVEN_H)[None, :, :]
    h = tl.load(at, mask=mask, other=0.0)  # [T, E, R]
    for k in tl.static_range(1, PLANES):
        h += tl.load(at + k * tile.plane, mask=mask, other=0.0)
    h *= (factor * scaling[None, :])[:, :, None]
    h = tl.where(member & (r[None, :] < rank[:, None])[None, :, :], h, 0.0)
    return rounded(tl.reshape(h, (T, V)), dtype, S.INTERPRETED)


@triton.jit
def add_tma(tile, b, b_tma, WIDTH: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns of a tile of like tokens, with STAGES loads of B in flight.

    The products of the adapters go to one sum, as if they were one of a higher rank. Factors
    multiply h: dtypes of the narrow exponents of float16 never come here.
    """
    r = tl.arange(0, S.BLOCK_R)
    has_token = tile.tokens >= 0
    ranks, rows, scalings, factors = (), (), (), ()
    least, most = S.BLOCK_R, 0
    for j in tl.static_range(WIDTH):
        slot, rank, scaling = entry_of(tile, j, S)
        if S.SLICE_ALIGN > 0:
            own, slot_stride, b_stride = slice_entry(b.slices, tile.s, True, S.SLICE_ALIGN)
            b_row = (own + slot * slot_stride) // b_stride
        else:
            b_row = slot * (b.stride_l // b.stride_c)
        ranks, scalings = ranks + (rank,), scalings + (scaling,)
        rows = rows + (b_row.to(tl.int32),)
        factors = factors + (tl.load(tile.factors + j, mask=has_token, other=0.0),)
        least, most = tl.minimum(rank, least), tl.maximum(rank, most)
    wait_for_h(S)
    h = ()
    for j in tl.static_range(WIDTH):
        used = tl.where(ranks[j] > 0, tile.tokens, -1) >= 0
        pair = load_pair(tile, j, used, r, S) * (factors[j] * scalings[j])[:, None]
        pair = tl.where(used[:, None] & (r < ranks[j])[None, :], pair, 0.0)
        h = h + (rounded(pair, b.ptr.dtype.element_ty, S.INTERPRETED),)
    y_rows = _rows_of_y(tile, most, S)
    if least < S.BLOCK_R:
        _add_tma_blocks(tile, y_rows, b_tma, ranks, rows, h, True, WIDTH, S)
    else:
        _add_tma_blocks(tile, y_rows, b_tma, ranks, rows, h, False, WIDTH, S)


@triton.jit
def _add_tma_blocks(
    tile, y_rows, b_tma, ranks, rows, h, MASKED: tl.constexpr, WIDTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add the blocks. MASKED: a rank ends inside a block, beyond it B may hold anything."""
    r = tl.arange(0, S.BLOCK_R)
    for chunk in tl.range(0, S.CHUNKS, num_stages=S.STAGES):
        c_first = tile.first + chunk * S.BLOCK_C
        c = c_first + tl.arange(0, S.BLOCK_C)
        y = load_y(tile, y_rows, c, S)
        block = b_tma.load([rows[0] + c_first, 0]).T
        if MASKED:
            block = within(block, r, ranks[0])
        total = multiply(h[0], block, None, S)
        for j in tl.static_range(1, WIDTH):
            block = b_tma.load([rows[j] + c_first, 0]).T
            if MASKED:
                block = within(block, r, ranks[j])
            total = multiply(h[j], block, total, S)
        if S.HAS_BIAS:
            total = _add_bias(tile, c, total, WIDTH, S)
        store_block(tile, y_rows, c, y, total, S)


@triton.jit
def add_rows(
    tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add one block of columns of a tile of like tokens, token by token, without a matrix product.

    B of all adapters goes from memory straight to the registers that multiply it.
    """
    C: tl.constexpr = S.BLOCK_C
    c, r = tile.first + tl.arange(0, C), tl.arange(0, S.ROW_RANKS)
    t = tl.arange(0, tile.tokens.shape[0])
    one = tl.zeros((1,), dtype=tl.int64)
    blocks, ranks, scalings = (), (), ()
    most = 0
    for j in tl.static_range(WIDTH):
        slot, rank, scaling = entry_of(tile, j, S)
        at, stride = b_of_slot(b, slot, tile.s, S)
        block = load_b_rows(
            Tile(
                h=0, plane=0, y=0, factor=0, b=at, b_stride=stride, read=rank, rank=rank, scales=0,
                scales_stride=0, first=0, end=tile.end,
            ),
            c, r, S,
        )  # fmt: skip
        blocks, ranks, scalings = blocks + (block,), ranks + (rank,), scalings + (scaling,)
        most = tl.maximum(most, rank)
    last = tl.max(tl.where(tile.tokens >= 0, t + 1, 0))
    if S.HAS_BIAS:
        written = (one + 1) > 0
    else:
        written = (one + most) > 0
    for i in tl.range(0, last, num_stages=1):
        token = entry(tile.tokens, t, i)
        y_rows = RowsOfY(at=y_ptr + token * y_stride_t + one, read=written, written=written)
        y = load_y(tile, y_rows, c, S)
        h_at = h_slice + token * (WIDTH * tile.h_stride)
        factors_at, factors = factors_ptr + entry(positions, t, i) * WIDTH, ()
        for j in tl.static_range(WIDTH):
            factors = factors + (tl.load(factors_at + j) * scalings[j],)
        wait_for_h(S)
        total = tl.zeros((C,), dtype=tl.float32)
        for j in tl.static_range(WIDTH):
            h = load_h_row(h_at + j * tile.h_stride, tile.plane, r, ranks[j], S)
            sums = row_product(h, blocks[j], 0.0, r, ranks[j], S)
            total += tl.where(ranks[j] > 0, factors[j] * sums, 0.0)
        total = total[None, :]
        if S.HAS_BIAS:
            total = _add_bias(tile, c, total, WIDTH, S)
        store_block(tile, y_rows, c, y, total, S)


@triton.jit
def add_row(
    tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add one block of columns of one token as `add_rows`; h of all its adapters is one load.

    V: the ranks of its adapters, stacked: they act as one adapter of a higher rank.
    """
    C: tl.constexpr = S.BLOCK_C
    R: tl.constexpr = S.ROW_RANKS
    V: tl.constexpr = WIDTH * R
    PLANES: tl.constexpr = S.PLANES
    c, t = tile.first + tl.arange(0, C), tl.arange(0, tile.tokens.shape[0])
    j, r, v = tl.arange(0, WIDTH), tl.arange(0, R), tl.arange(0, V)
    one = tl.zeros((1,), dtype=tl.int64)
    slot = tl.load(tile.slots + j).to(tl.int64)  # [WIDTH]
    ranks_at = tile.ranks + tl.maximum(slot, 0) * S.NUM_SLICES
    rank = tl.load(ranks_at, mask=slot >= 0, other=0)
    block = tl.reshape(_load_rows_of_b(tile, b, slot, rank, c, r, S), (C, V))
    # the same, once per rank [V]: a second load costs less than a change of layout
    slot_of = tl.load(tile.slots + v // R).to(tl.int64)
    slot_at = tl.maximum(slot_of, 0) * S.NUM_SLICES
    used = v % R < tl.load(tile.ranks + slot_at, mask=slot_of >= 0, other=0)
    scaling = tl.load(tile.scalings + slot_at, mask=slot_of >= 0, other=0.0)
    last = tl.max(tl.where(tile.tokens >= 0, t + 1, 0))
    if S.HAS_BIAS:
        written = (one + 1) > 0
    else:
        written = (one + tl.max(rank)) > 0
    plane = tl.arange(0, PLANES)[:, None]
    h_mask = (plane < S.SPLIT_K) & used[None, :]
    for i in tl.range(0, last, num_stages=1):
        token = entry(tile.tokens, t, i)
        y_rows = RowsOfY(at=y_ptr + token * y_stride_t + one, read=written, written=written)
        y = load_y(tile, y_rows, c, S)
        factor = tl.load(factors_ptr + entry(positions, t, i) * WIDTH + v // R) * scaling
        h_at = h_slice + token * (WIDTH * tile.h_stride) + v // R * tile.h_stride + v % R
        wait_for_h(S)
        h = tl.load(h_at[None, :] + plane * tile.plane, mask=h_mask, other=0.0)  # [planes, V]
        h = rounded(tl.sum(h, axis=0), b.ptr.dtype.element_ty, S.INTERPRETED).to(tl.float32)
        # The gather keeps the layout of h from spreading to the product, see `load_h_row`.
        h = tl.gather(tl.where(used, h * factor, 0.0), v, 0)
        total = tl.sum(block.to(tl.float32) * h[None, :], axis=1)[None, :]
        if S.HAS_BIAS:
            total = _add_bias(tile, c, total, WIDTH, S)
        store_block(tile, y_rows, c, y, total, S)


@triton.jit
def _load_rows_of_b(tile, b, slot, rank, c, r, S: tl.constexpr):
    """Return B of some slots [E] as it lies in memory [C, E, R], zero beyond their ranks."""
    at, b_stride = b_of_slot(b, tl.maximum(slot, 0), tile.s, S)
    offsets = c.to(tl.int64)[:, None, None] * b_stride + r[None, None, :]
    mask = in_groups(r[None, :], rank[:, None], S.EVEN_R)[None, :, :]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[:, None, None]
    values = tl.load(at[None, :, None] + offsets, mask=mask, other=0.0)
    return tl.where((r[None, :] < rank[:, None])[None, :, :], values, 0)


@triton.jit
def _add_bias(tile, c, total, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Return total [T, C] with the biases of all entries."""
    for e in tl.static_range(ENTRIES):
        slot = tl.load(tile.slots + e).to(tl.int64)
        at = tile.bias + tl.maximum(slot, 0) * tile.bias_stride + c
        mask = c < tl.where(slot >= 0, tile.end, 0)
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)[None, :]
    return total
