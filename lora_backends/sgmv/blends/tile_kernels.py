# mypy: ignore-errors
"""What all expands of blends share: the tile, and the loads and stores of its blocks."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.indexing import in_groups, slice_entry
from lora_backends.sgmv.kernels.prefetch import prefetch_lines
from lora_backends.sgmv.kernels.products import rounded


class BlendTile(NamedTuple):
    """A tile of tokens and their adapters, as a program of the expand reads them for one slice.

    Axes of all kernels here: T (tokens of the tile), E (entries), R (rank), C (columns of y).
    Pair j of a token is its j-th adapter, slots ascending.
    """

    tokens: Any  # [T], -1 where there is none
    slots: Any  # address of the slots of its entries
    ids: Any  # addresses of the entries of each token's pairs [T]
    factors: Any  # addresses of their factors [T]
    ranks: Any  # address of the rank of slot 0
    scalings: Any
    h: Any  # addresses of h of each token's first pair [T]
    h_stride: Any  # from pair to pair; also the values that a row of h has
    plane: Any  # from one plane of h to the next
    y: Any  # addresses of rows of y [T]
    bias: Any
    bias_stride: Any
    s: Any  # the slice
    first: Any  # the program's first column
    end: Any  # of the slice


@triton.jit
def positions_of(starts_ptr, tokens_ptr, row, TILE: tl.constexpr):
    """Return the tokens of a tile [T], -1 where there is none, and their positions [T]."""
    at = tl.load(starts_ptr + row).to(tl.int64) + tl.arange(0, TILE)
    tokens = tl.load(tokens_ptr + at, mask=at < tl.load(starts_ptr + row + 1), other=-1)
    return tokens.to(tl.int64), at


@triton.jit
def b_of_slot(b, slot, s, S: tl.constexpr):
    """Return the address of column 0 of a slot's B, and the stride of columns."""
    if S.SLICE_ALIGN > 0:
        own, slot_stride, b_stride = slice_entry(b.slices, s, True, S.SLICE_ALIGN)
        at = b.ptr + own + slot * slot_stride
    else:
        at, b_stride = b.ptr + slot * b.stride_l, b.stride_c
    return at, b_stride


@triton.jit
def entry_of(tile, e, S: tl.constexpr):
    """Return slot, rank and scaling of an entry; without a slot the rank is 0.

    The scaling of rank 0 may be NaN or infinite, so it is taken as 0.
    """
    slot = tl.load(tile.slots + e).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    rank = tl.load(tile.ranks + slot * S.NUM_SLICES, mask=live, other=0)
    scaling = tl.load(tile.scalings + slot * S.NUM_SLICES, mask=live, other=0.0)
    return slot, rank, tl.where(rank > 0, scaling, 0.0)


@triton.jit
def load_pair(tile, j, used, r, S: tl.constexpr):
    """Return h of the j-th pair of each token [T, R], its planes summed; anything beyond a rank."""
    PLANES: tl.constexpr = S.SPLIT_K
    at = (tile.h + j * tile.h_stride)[:, None] + r[None, :]
    mask = used[:, None] & in_groups(r, tile.h_stride, S.EVEN_H)[None, :]
    h = tl.load(at, mask=mask, other=0.0)
    for k in tl.static_range(1, PLANES):
        h += tl.load(at + k * tile.plane, mask=mask, other=0.0)
    return h


@triton.jit
def prefetch_b(tile, b, slots, wanted, c, S: tl.constexpr):
    """Bring the first line of 128 bytes of columns c of B of some slots [E] into L2."""
    at, stride = b_of_slot(b, slots, tile.s, S)
    at = at[:, None] + c.to(tl.int64)[None, :] * stride
    prefetch_lines(at, wanted[:, None] & (c < tile.end)[None, :])


@triton.jit
def store_block(tile, y_rows, c, y, total, S: tl.constexpr):
    """Store y + total, rounded once; `y_rows` are the `RowsOfY`."""
    mask = y_rows.written[:, None]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[None, :]
    total = rounded(y.to(tl.float32) + total, y.dtype, S.INTERPRETED)
    tl.store(y_rows.at[:, None] + c[None, :], total, mask=mask)
