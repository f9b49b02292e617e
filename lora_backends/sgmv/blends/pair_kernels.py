# mypy: ignore-errors
"""The expand of blends whose h has a row for every pair of a token and an adapter.

Pair ``t * WIDTH + j`` is the j-th adapter of token t, slots ascending. Axes: T (tokens of the
tile), R (rank), C (columns of y).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lora_backends.sgmv.blends.kernels import _positions, _product
from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_b_rows,
    load_h_row,
    load_y,
    wait_for_h,
)
from lora_backends.sgmv.kernels.indexing import (
    columns_of,
    entry,
    in_groups,
    row_and_program,
    slice_entry,
)
from lora_backends.sgmv.kernels.operands import BStack, RowsOfY, Tile
from lora_backends.sgmv.kernels.prefetch import prefetch_lines
from lora_backends.sgmv.kernels.products import multiply, rounded, row_product, within


class PairTile(NamedTuple):
    """A tile of tokens and its pairs, for one slice."""

    tokens: Any  # [T], -1 where there is none
    slots: Any  # address of the slots of its entries
    ids: Any  # addresses of the entries of each token's pairs [T]
    factors: Any  # addresses of their factors [T]
    ranks: Any  # address of the rank of slot 0
    scalings: Any
    h: Any  # addresses of h of each token's first pair [T]
    h_stride: Any  # from pair to pair; also the ranks that a row of h has
    plane: Any  # from one plane of h to the next
    y: Any  # addresses of rows of y [T]
    bias: Any
    bias_stride: Any
    s: Any  # the slice
    first: Any  # the program's first column
    end: Any  # of the slice


@triton.jit(do_not_specialize=["h_rows", "grid_rows"])
def pair_expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    ranks_ptr,
    scalings_ptr,
    b_slices_ptr,
    b_scales_ptr,
    num_tiles_ptr,
    starts_ptr,
    tokens_ptr,
    slots_ptr,
    factors_ptr,
    ids_ptr,
    b_tma,
    h_rows,
    h_stride_s,
    h_stride_t,
    b_stride_l,
    b_stride_c,
    y_stride_t,
    bias_stride_l,
    b_scales_stride_l,
    b_scales_stride_c,
    grid_rows,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    WIDTH: tl.constexpr,
    MERGED: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[t, c] += sum over j of factors[t, j] * scaling * (h[s, t, j, :r] @ b[l, c, :r].T) + bias.

    The sum is float32 and rounded once. MERGED: tokens of a tile may have other adapters than their
    neighbours; else pair j of each token has entry j.
    """
    row, program = row_and_program(PROGRAMS)
    b = BStack(
        ptr=b_ptr, slices=b_slices_ptr, scales=b_scales_ptr, stride_l=b_stride_l,
        stride_c=b_stride_c, scales_stride_l=b_scales_stride_l, scales_stride_c=b_scales_stride_c,
    )  # fmt: skip
    s, first, end = columns_of(program, SIZES)
    num_tiles = tl.load(num_tiles_ptr)
    plane = SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    h_slice = h_ptr + s.to(tl.int64) * h_stride_s
    for tile_row in tl.range(row, num_tiles, grid_rows, num_stages=1):
        tokens, positions = _positions(starts_ptr, tokens_ptr, tile_row, TILE)
        tile = PairTile(
            tokens=tokens, slots=slots_ptr + tile_row * ENTRIES, ids=ids_ptr + positions * WIDTH,
            factors=factors_ptr + positions * WIDTH, ranks=ranks_ptr + s,
            scalings=scalings_ptr + s, h=h_slice + tokens * (WIDTH * h_stride_t),
            h_stride=h_stride_t, plane=plane, y=y_ptr + tokens * y_stride_t, bias=bias_ptr,
            bias_stride=bias_stride_l, s=s, first=first, end=end,
        )  # fmt: skip
        if MERGED:
            if SIZES.STORAGE > 0 or SIZES.RANK_PAD > SIZES.BLOCK_R:
                _add_each(tile, b, WIDTH, ENTRIES, SIZES)
            else:
                _add_entries(tile, b, WIDTH, ENTRIES, SIZES)
        elif SIZES.STAGES == 0:
            _add_rows(tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH, SIZES)
        else:
            _add_tma(tile, b, b_tma, WIDTH, SIZES)
    wait_for_h(SIZES)  # this grid must end after the shrink, on which later kernels rely


@triton.jit
def _b_of_slot(b, slot, s, S: tl.constexpr):
    """Return the address of column 0 of a slot's B, and the stride of columns."""
    if S.SLICE_ALIGN > 0:
        own, slot_stride, b_stride = slice_entry(b.slices, s, True, S.SLICE_ALIGN)
        at = b.ptr + own + slot * slot_stride
    else:
        at, b_stride = b.ptr + slot * b.stride_l, b.stride_c
    return at, b_stride


@triton.jit
def _entry_of(tile, e, S: tl.constexpr):
    """Return slot, rank and scaling of an entry; without a slot the rank is 0."""
    slot = tl.load(tile.slots + e).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(tile.ranks + slot * S.NUM_SLICES, mask=live, other=0)
    scaling = tl.load(tile.scalings + slot * S.NUM_SLICES, mask=live, other=0.0)
    return slot, rank, scaling


@triton.jit
def _load_pair(tile, j, used, r, S: tl.constexpr):
    """Return h of the j-th pair of each token [T, R], its planes summed; anything beyond a rank."""
    PLANES: tl.constexpr = S.SPLIT_K
    at = (tile.h + j * tile.h_stride)[:, None] + r[None, :]
    mask = used[:, None] & in_groups(r, tile.h_stride, S.EVEN_H)[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    for k in tl.static_range(1, PLANES):
        h += tl.load(at + k * tile.plane, mask=mask, other=0.0)
    return h


@triton.jit
def _add_entries(tile, b, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, S: tl.constexpr):
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
            slot, rank, scaling = _entry_of(tile, i, S)
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
        used = tl.sum(live.to(tl.int32))
        if S.PROGRAMMATIC:
            _prefetch_b(tile, b, slots, live, c, S)
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
    _store_block(tile, c, y, total, written > 0, S)


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
        h = h + (rounded(_load_pair(tile, j, ids[j] >= 0, r, S), dtype, S.INTERPRETED),)
    return h


@triton.jit
def _load_block(tile, b, slot, rank, c, r, S: tl.constexpr):
    """Return a block of B of a slot, transposed; values beyond the rank are arbitrary."""
    at, stride = _b_of_slot(b, slot, tile.s, S)
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
    """Return the sums with entry i added where a token has it, and the rows that it writes."""
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
    added = total + (factor * scaling)[:, None] * product
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
def _prefetch_b(tile, b, slots, live, c, S: tl.constexpr):
    """Bring the first line of 128 bytes of each column of B of all entries into L2."""
    at, stride = _b_of_slot(b, slots.to(tl.int64), tile.s, S)
    wanted = live[:, None] & (c < tile.end)[None, :]
    prefetch_lines(at[:, None] + c.to(tl.int64)[None, :] * stride, wanted)


@triton.jit
def _add_each(tile, b, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Do so for 8 bits and long ranks, CHUNKS blocks of columns; h is loaded for each product."""
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
            slot, rank, scaling = _entry_of(tile, i, S)
            member, pair = tl.zeros((T,), dtype=tl.int32), tl.zeros((T,), dtype=tl.int64)
            factor = tl.zeros((T,), dtype=tl.float32)
            for j in tl.static_range(WIDTH):
                mine = tl.load(tile.ids + j, mask=has_token, other=-1) == i
                factor = tl.where(mine, tl.load(tile.factors + j, mask=mine, other=0.0), factor)
                pair, member = tl.where(mine, j, pair), tl.where(mine, 1, member)
            rows = RowsOfY(at=tile.y, read=member > 0, written=member > 0)
            h = tile.h + pair * tile.h_stride
            product = _product(h, tile.plane, rows, b, slot, tile.s, rank, tile.end, c, S)
            added = total + (factor * scaling)[:, None] * product
            if S.HAS_BIAS:
                bias_at = tile.bias + slot * tile.bias_stride + c
                bias = tl.load(bias_at, mask=c < tile.end, other=0.0)
                added += bias.to(tl.float32)[None, :]
                written = tl.maximum(written, member)
            else:
                written = tl.where(rank > 0, tl.maximum(written, member), written)
            total = tl.where((member > 0)[:, None], added, total)
        _store_block(tile, c, y, total, written > 0, S)


@triton.jit
def _store_block(tile, c, y, total, written, S: tl.constexpr):
    """Store y + total, rounded once."""
    mask = written[:, None]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[None, :]
    total = y.to(tl.float32) + total
    tl.store(tile.y[:, None] + c[None, :], rounded(total, y.dtype, S.INTERPRETED), mask=mask)


@triton.jit
def _add_bias(tile, slots, c, total, WIDTH: tl.constexpr, S: tl.constexpr):
    """Return total with the biases of a tile of like tokens; `slots` are -1 where there is none."""
    for j in tl.static_range(WIDTH):
        bias_at = tile.bias + tl.maximum(slots[j], 0) * tile.bias_stride + c
        mask = c < tl.where(slots[j] >= 0, tile.end, 0)
        total += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _add_tma(tile, b, b_tma, WIDTH: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns of a tile of like tokens, with STAGES loads of B in flight.

    The products of the adapters go to one sum, as if they were one of a higher rank. Factors
    multiply h: dtypes of the narrow exponents of float16 never come here.
    """
    r = tl.arange(0, S.BLOCK_R)
    has_token = tile.tokens >= 0
    slots, ranks, rows, scalings, factors = (), (), (), (), ()
    least, most = S.BLOCK_R, 0
    for j in tl.static_range(WIDTH):
        slot, rank, scaling = _entry_of(tile, j, S)
        if S.SLICE_ALIGN > 0:
            own, slot_stride, b_stride = slice_entry(b.slices, tile.s, True, S.SLICE_ALIGN)
            b_row = (own + slot * slot_stride) // b_stride
        else:
            b_row = slot * (b.stride_l // b.stride_c)
        slots = slots + (tl.load(tile.slots + j).to(tl.int64),)
        ranks, scalings = ranks + (rank,), scalings + (scaling,)
        rows = rows + (b_row.to(tl.int32),)
        factors = factors + (tl.load(tile.factors + j, mask=has_token, other=0.0),)
        least, most = tl.minimum(rank, least), tl.maximum(rank, most)
    wait_for_h(S)
    h = ()
    for j in tl.static_range(WIDTH):
        used = tl.where(ranks[j] > 0, tile.tokens, -1) >= 0
        pair = _load_pair(tile, j, used, r, S) * (factors[j] * scalings[j])[:, None]
        pair = tl.where(used[:, None] & (r < ranks[j])[None, :], pair, 0.0)
        h = h + (rounded(pair, b.ptr.dtype.element_ty, S.INTERPRETED),)
    if S.HAS_BIAS:
        written = has_token
    else:
        written = tl.where(most > 0, tile.tokens, -1) >= 0
    y_rows = RowsOfY(at=tile.y, read=written, written=written)
    if least < S.BLOCK_R:
        _add_tma_blocks(tile, y_rows, b_tma, slots, ranks, rows, h, True, WIDTH, S)
    else:
        _add_tma_blocks(tile, y_rows, b_tma, slots, ranks, rows, h, False, WIDTH, S)


@triton.jit
def _add_tma_blocks(
    tile, y_rows, b_tma, slots, ranks, rows, h, MASKED: tl.constexpr, WIDTH: tl.constexpr,
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
            total = _add_bias(tile, slots, c, total, WIDTH, S)
        _store_block(tile, c, y, total, y_rows.written, S)


@triton.jit
def _add_rows(
    tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add one block of columns of a tile of like tokens, token by token, without a matrix product.

    B of all adapters goes from memory straight to the registers that multiply it.
    """
    C: tl.constexpr = S.BLOCK_C
    c, r = tile.first + tl.arange(0, C), tl.arange(0, S.RANK_PAD)
    t = tl.arange(0, tile.tokens.shape[0])
    one = tl.zeros((1,), dtype=tl.int64)
    blocks, slots, ranks, scalings = (), (), (), ()
    most = 0
    for j in tl.static_range(WIDTH):
        slot, rank, scaling = _entry_of(tile, j, S)
        at, stride = _b_of_slot(b, slot, tile.s, S)
        block = load_b_rows(
            Tile(
                h=0, plane=0, y=0, factor=0, b=at, b_stride=stride, read=rank, rank=rank, scales=0,
                scales_stride=0, first=0, end=tile.end,
            ),
            c, r, S,
        )  # fmt: skip
        slots = slots + (tl.load(tile.slots + j).to(tl.int64),)
        blocks, ranks, scalings = blocks + (block,), ranks + (rank,), scalings + (scaling,)
        most = tl.maximum(most, rank)
    last = tl.max(tl.where(tile.tokens >= 0, t + 1, 0))
    if S.HAS_BIAS:
        written = (one + 1) > 0
    else:
        written = (one + most) > 0
    for i in tl.range(0, last, num_stages=1):
        token = entry(tile.tokens, t, i)
        y_at = y_ptr + token * y_stride_t + one
        y = load_y(tile, RowsOfY(at=y_at, read=written, written=written), c, S)
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
            total = _add_bias(tile, slots, c, total, WIDTH, S)
        mask = written[:, None]
        if not S.EVEN_C:
            mask = mask & (c < tile.end)[None, :]
        total = rounded(y.to(tl.float32) + total, y.dtype, S.INTERPRETED)
        tl.store(y_at[:, None] + c[None, :], total, mask=mask)
