# mypy: ignore-errors
"""The expand of tiles of unlike tokens: a product for each adapter of the tile."""

import triton
import triton.language as tl

from lora_backends.sgmv.blends.tile_kernels import (
    b_of_slot,
    entry_of,
    load_pair,
    prefetch_b,
    store_block,
)
from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_h,
    load_scales,
    load_y,
    scales_of_b,
    wait_for_h,
)
from lora_backends.sgmv.kernels.indexing import entry
from lora_backends.sgmv.kernels.operands import RowsOfY, Tile
from lora_backends.sgmv.kernels.products import (
    multiply,
    product_of_operands,
    right_operand,
    rounded,
    within,
)


@triton.jit
def add_entries(tile, b, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Add one block of columns of a tile of unlike tokens: a product for each of its adapters.

    Each product takes the rows of h of the tokens that have the adapter, and zeros for others. So B
    is read once for all tokens. With one stage all of B is loaded before the wait for h.
    """
    T: tl.constexpr = tile.tokens.shape[0]
    C: tl.constexpr = S.BLOCK_C
    R: tl.constexpr = S.BLOCK_R
    c, r = tile.first + tl.arange(0, C), tl.arange(0, R)  # [C], [R]
    has_token = tile.tokens >= 0
    ids, factors = (), ()
    for j in tl.static_range(WIDTH):
        ids = ids + (tl.load(tile.ids + j, mask=has_token, other=-1),)
        factors = factors + (tl.load(tile.factors + j, mask=has_token, other=0.0),)
    y = load_y(tile, RowsOfY(at=tile.y, read=has_token, written=has_token), c, S)
    total = tl.zeros((T, C), dtype=tl.float32)
    written = tl.zeros((T,), dtype=tl.int32)
    if S.STAGES == 1:
        blocks, slots, ranks, scalings = (), (), (), ()
        for i in tl.static_range(ENTRIES):
            slot, rank, scaling = entry_of(tile, i, S)
            slots, ranks, scalings = slots + (slot,), ranks + (rank,), scalings + (scaling,)
        for i in tl.static_range(ENTRIES):
            blocks = blocks + (_load_block(tile, b, slots[i], ranks[i], c, r, S),)
        wait_for_h(S)
        h = _load_pairs(tile, ids, r, b.ptr.dtype.element_ty, WIDTH, S)
        for i in tl.static_range(ENTRIES):
            block = within(blocks[i], r, ranks[i])
            total, written = _add_entry(
                tile, block, slots[i], ranks[i], scalings[i], i, ids, factors, h, c, r, total,
                written, WIDTH, S,
            )  # fmt: skip
    else:
        # vectors: loads of scalars in the loop would each take a stage of it
        e = tl.arange(0, ENTRIES)
        slots = tl.load(tile.slots + e)
        live = slots >= 0
        slots = tl.maximum(slots, 0)
        ranks = tl.load(tile.ranks + slots * S.NUM_SLICES, mask=live, other=0)
        scalings = tl.load(tile.scalings + slots * S.NUM_SLICES, mask=live, other=0.0)
        scalings = tl.where(ranks > 0, scalings, 0.0)
        used = tl.sum(live.to(tl.int32))
        if S.PROGRAMMATIC:
            prefetch_b(tile, b, slots.to(tl.int64), live, c, S)
        least = tl.min(tl.where(live, ranks, R))
        wait_for_h(S)
        h = _load_pairs(tile, ids, r, b.ptr.dtype.element_ty, WIDTH, S)
        if least < R:
            total, written = _add_in_turn(
                tile, b, slots, ranks, scalings, used, ids, factors, h, c, r, total, written, True,
                WIDTH, S,
            )  # fmt: skip
        else:  # a block of full rank needs no mask, so it is multiplied straight from shared memory
            total, written = _add_in_turn(
                tile, b, slots, ranks, scalings, used, ids, factors, h, c, r, total, written, False,
                WIDTH, S,
            )  # fmt: skip
    y_rows = RowsOfY(at=tile.y, read=has_token, written=written > 0)
    store_block(tile, y_rows, c, y, total, S)


@triton.jit
def _add_in_turn(
    tile, b, slots, ranks, scalings, used, ids, factors, h, c, r, total, written,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the entries with STAGES loads of B in flight. MASKED: a rank ends inside a block."""
    e = tl.arange(0, slots.shape[0])
    for i in tl.range(0, used, num_stages=S.STAGES):
        slot, rank = entry(slots, e, i).to(tl.int64), entry(ranks, e, i)
        scaling = tl.sum(tl.where(e == i, scalings, 0.0))
        block = _load_block(tile, b, slot, rank, c, r, S)
        if MASKED:
            block = within(block, r, rank)
        total, written = _add_entry(
            tile, block, slot, rank, scaling, i, ids, factors, h, c, r, total, written, WIDTH, S
        )
    return total, written


@triton.jit
def _load_pairs(tile, ids, r, dtype: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """Return h of each pair of the tokens, rounded: WIDTH blocks [T, R]."""
    h = ()
    for j in tl.static_range(WIDTH):
        h = h + (rounded(load_pair(tile, j, ids[j] >= 0, r, S), dtype, S.INTERPRETED),)
    return h


@triton.jit
def _load_block(tile, b, slot, rank, c, r, S: tl.constexpr):
    """Return a block of B of a slot, transposed; values beyond the rank are arbitrary."""
    at, stride = b_of_slot(b, slot, tile.s, S)
    of_slot = Tile(
        h=0, plane=0, y=0, factor=0, b=at, b_stride=stride, read=rank, rank=rank, scales=0,
        scales_stride=0, first=0, end=tile.end,
    )  # fmt: skip
    return load_b(of_slot, c, r, S)


@triton.jit
def _add_entry(
    tile, block, slot, rank, scaling, i, ids, factors, h, c, r, total, written,
    WIDTH: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Return the sums with entry i added where a token has it, and the rows to write."""
    T: tl.constexpr = total.shape[0]
    R: tl.constexpr = r.shape[0]
    left = tl.zeros((T, R), dtype=block.dtype)
    factor = tl.zeros((T,), dtype=tl.float32)
    member = tl.zeros((T,), dtype=tl.int32)
    for j in tl.static_range(WIDTH):
        mine = ids[j] == i
        left = tl.where(mine[:, None] & (r < rank)[None, :], h[j], left)
        factor = tl.where(mine, factors[j], factor)
        member = tl.where(mine, 1, member)
    product = multiply(left, block, None, S)  # [T, C]
    return _added(tile, total, written, member, factor * scaling, product, slot, rank, c, S)


@triton.jit
def _added(tile, total, written, member, factor, product, slot, rank, c, S: tl.constexpr):
    """Return the sums with an entry's product and bias added, and the rows to write.

    Only tokens that have the entry get it.
    """
    added = total + factor[:, None] * product
    if S.HAS_BIAS:
        bias_at = tile.bias + slot * tile.bias_stride + c
        bias = tl.load(bias_at, mask=c < tile.end, other=0.0)
        added += bias.to(tl.float32)[None, :]
        written = tl.maximum(written, member)
    else:
        written = tl.where(rank > 0, tl.maximum(written, member), written)
    # not a product with 0: an adapter's infinities stay with its tokens
    return tl.where((member > 0)[:, None], added, total), written


@triton.jit
def add_each(tile, b, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, S: tl.constexpr):
    """As `add_entries`, CHUNKS blocks of columns, but each product loads h.

    For 8 bits, long ranks, and where h of all pairs would not fit in registers.
    """
    CHUNKS: tl.constexpr = S.CHUNKS
    T: tl.constexpr = tile.tokens.shape[0]
    C: tl.constexpr = S.BLOCK_C
    has_token = tile.tokens >= 0
    used = tl.sum((tl.load(tile.slots + tl.arange(0, ENTRIES)) >= 0).to(tl.int32))
    wait_for_h(S)
    for chunk in tl.static_range(CHUNKS):
        c = tile.first + chunk * C + tl.arange(0, C)
        y = load_y(tile, RowsOfY(at=tile.y, read=has_token, written=has_token), c, S)
        total = tl.zeros((T, C), dtype=tl.float32)
        written = tl.zeros((T,), dtype=tl.int32)
        for i in tl.range(0, used, num_stages=1):
            slot, rank, scaling = entry_of(tile, i, S)
            member, pair = tl.zeros((T,), dtype=tl.int32), tl.zeros((T,), dtype=tl.int64)
            factor = tl.zeros((T,), dtype=tl.float32)
            for j in tl.static_range(WIDTH):
                mine = tl.load(tile.ids + j, mask=has_token, other=-1) == i
                factor = tl.where(mine, tl.load(tile.factors + j, mask=mine, other=0.0), factor)
                pair, member = tl.where(mine, j, pair), tl.where(mine, 1, member)
            rows = RowsOfY(at=tile.y, read=member > 0, written=member > 0)
            h = tile.h + pair * tile.h_stride
            product = _product(h, tile.plane, rows, b, slot, tile.s, rank, tile.end, c, S)
            total, written = _added(
                tile, total, written, member, factor * scaling, product, slot, rank, c, S
            )
        y_rows = RowsOfY(at=tile.y, read=has_token, written=written > 0)
        store_block(tile, y_rows, c, y, total, S)


@triton.jit
def _product(h_rows, plane, y, b, slot, s, rank, end, c, S: tl.constexpr):
    """Return h @ b.T of one entry for a block of columns [T, C], BLOCK_R ranks at a time.

    `y` selects the rows of y that have the entry.
    """
    b_slot, b_stride = b_of_slot(b, slot, s, S)
    group, start = s * 0, s * 0
    if S.STORAGE > 0:
        SLICES: tl.constexpr = len(S.FIRST_GROUPS)
        for i in tl.static_range(SLICES):
            group = tl.where(s == i, S.FIRST_GROUPS[i], group)
            start = tl.where(s == i, S.STARTS[i], start)
    # Not returned by a function of its own: Triton 3.6 returns no tuple that holds None.
    tile = Tile(
        h=h_rows, plane=plane, y=y, factor=1.0, b=b_slot, b_stride=b_stride, read=rank, rank=rank,
        scales=b.scales + slot * b.scales_stride_l, scales_stride=b.scales_stride_c, first=0,
        end=end, group=group, start=start,
    )  # fmt: skip
    if S.RANK_PAD == S.BLOCK_R:
        return _part(tile, c, 0, S)
    else:
        T: tl.constexpr = tile.h.shape[0]
        C: tl.constexpr = c.shape[0]
        acc = tl.zeros((T, C), dtype=tl.float32)
        # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
        # registers
        for done in tl.range(0, tile.rank, S.BLOCK_R, num_stages=1):
            acc += _part(tile, c, done, S)
        return acc


@triton.jit
def _part(tile, c, done, S: tl.constexpr):
    """Return the product over BLOCK_R ranks from `done` on."""
    r = done + tl.arange(0, S.BLOCK_R)  # [R]
    b = load_b(tile, c, r, S)
    h = load_h(tile, tile.h, r, tile.rank, S)
    scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
    return product_of_operands(1.0, h, right_operand(b, scales, r, tile.rank, S), scales, S)
