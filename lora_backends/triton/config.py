"""Tile sizes: pure functions of shapes and device, measured on one H200 in bfloat16.

The rules are what the measured optima of 80 shapes have in common; docs/explanation/
triton-backend.md has the figures. Any result of these functions is correct on any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lora_backends.gpu.tiles import WIDEST_RANK_BLOCK, padded_rank, power_of_two
from lora_backends.gpu.tiles import ExpandTiles as ExpandTiles
from lora_backends.gpu.tiles import ShrinkTiles as ShrinkTiles
from lora_backends.gpu.tiles import TileConfig as TileConfig

_ROW_TILE = 16  # tokens of the smallest tile: the rows of one matrix instruction
_MANY_TILES = 32  # about a quarter of an H200's multiprocessors
_PREFILL_TOKENS = 512
_LONG = 8192  # inputs from which on more parts pay
_WIDE = 16384  # columns of y from which on a plane of h is read too often


def block_tokens(num_tokens: int, active_slots: int) -> int:
    """Return the tokens per tile: as many as an active slot has on average, within 16 to 64.

    Tiles of 16 waste least on slots with few tokens; wider ones read B less often.
    """
    average = num_tokens // max(1, active_slots)
    if num_tokens >= _PREFILL_TOKENS:
        return 64 if average >= 64 else 32 if average >= 32 else _ROW_TILE
    return 32 if average >= 32 and num_tokens > _MANY_TILES else _ROW_TILE


@lru_cache(maxsize=4096)
def choose_tiles(
    num_tokens: int,
    active_slots: int,
    tile_tokens: int,
    num_slices: int,
    max_rank: int,
    in_features: int,
    out_features: int,
    item_bytes: int,
) -> TileConfig:
    """Return the sizes for one layer and batch.

    Args:
        num_tokens: of the batch.
        active_slots: slots that have tokens.
        tile_tokens: from `block_tokens`.
        num_slices: of the layer.
        max_rank: of the layer's stack.
        in_features: of the layer.
        out_features: of the layer.
        item_bytes: of one weight; 4 for float32.

    Returns:
        A `TileConfig`.
    """
    shape = _Shape(
        tiles=max(active_slots, num_tokens // tile_tokens, 1),
        tile_tokens=tile_tokens,
        rank_pad=padded_rank(max_rank),
        stacked=num_slices * padded_rank(max_rank),
        in_features=in_features,
        out_features=out_features,
    )
    if num_tokens >= _PREFILL_TOKENS:
        shrink, expand = _shrink_prefill(shape), _expand_prefill(shape)
    else:
        shrink, expand = _shrink_decode(shape), _expand_decode(shape)
    if item_bytes == 4:  # float32 products take more registers and shared memory
        shrink = ShrinkTiles(min(shrink.block_n, 64), 32, shrink.split_k, num_stages=2)
        expand = ExpandTiles(64, min(expand.block_r, 32))
    if expand.block_r < shape.rank_pad:
        expand = ExpandTiles(expand.block_c, expand.block_r)
    return TileConfig(shrink, expand)


@dataclass(frozen=True)
class _Shape:
    """What the rules look at."""

    tiles: int  # tiles of the batch, about
    tile_tokens: int  # tokens per tile
    rank_pad: int  # padded rank of one slice
    stacked: int  # rows of A, all slices
    in_features: int
    out_features: int


def _shrink_decode(shape: _Shape) -> ShrinkTiles:
    """Split the inputs until the multiprocessors have work; every plane is read by the expand."""
    stacked, long = power_of_two(shape.stacked), shape.in_features >= _LONG
    narrow, many = shape.rank_pad <= 16, shape.tiles >= _MANY_TILES
    if shape.tiles == 1:
        block_n, programs, planes = 16, 128, 28 if long and narrow else 16
    elif many:
        block_n = 16 if stacked <= (32 if narrow else 128) else 64
        programs, planes = 512 if long and not narrow else 256, 4 if long else 2
    else:
        compact = shape.tile_tokens > 16 or shape.stacked == shape.rank_pad > 16
        compact = compact and not long and shape.out_features < _WIDE
        block_n, programs = (16, 512) if compact else (min(64, stacked), 128)
        planes = 16 if shape.stacked == shape.rank_pad else 8
        planes = planes // (1 if narrow else 2) // (shape.tile_tokens // 16) * (4 if long else 1)
        planes = max(4, planes)
    blocks = -(-shape.stacked // block_n) * shape.tiles
    split_k = equal_parts(shape.in_features, min(planes, programs // blocks))
    if block_n == 16 and shape.tile_tokens == 16 and (many or long):
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_prefill(shape: _Shape) -> ShrinkTiles:
    wide, single = shape.out_features >= _WIDE, shape.stacked == shape.rank_pad
    narrow = shape.rank_pad <= 16
    most = 4 if single or not (narrow or wide) else 2
    split_k = equal_parts(shape.in_features, min(most, 256 // shape.tiles))
    stacked = power_of_two(shape.stacked)
    if stacked >= 128:
        if stacked == 256 and shape.tiles >= 64:  # x is read again for every block of 64 rows
            split_k = 1
        return ShrinkTiles(64, 64, split_k)
    if wide and stacked <= 32 and shape.tiles >= 64:
        return ShrinkTiles(stacked, 64, split_k, num_warps=8, num_stages=4)
    return ShrinkTiles(stacked, 128, split_k)


def _expand_decode(shape: _Shape) -> ExpandTiles:
    block_r = min(shape.rank_pad, WIDEST_RANK_BLOCK)
    if shape.rank_pad <= 16:
        many = shape.tiles * shape.out_features >= 200_000
        return ExpandTiles(128, block_r, 4) if many else ExpandTiles(256, block_r)
    wide = shape.out_features >= _WIDE and shape.tile_tokens > 16
    return ExpandTiles(128, block_r, 4 if wide else 1)


def _expand_prefill(shape: _Shape) -> ExpandTiles:
    few = shape.tiles < 64 and shape.out_features < _WIDE
    return ExpandTiles(64 if few else 128, min(shape.rank_pad, WIDEST_RANK_BLOCK), 8)


def equal_parts(in_features: int, most: int) -> int:
    """Return the largest number of equal parts, in steps of 256, that is at most `most`."""
    steps = max(1, in_features // 256)
    return max(parts for parts in range(1, max(1, most) + 1) if steps % parts == 0)
