"""Sizes for experts: pure functions of shapes, fitted to one H200 in bfloat16.

Any result is correct on any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    MIN_DOT,
    ExpandTiles,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    power_of_two,
)

_MULTIPROCESSORS = 132  # of an H200
_STAGE_BYTES = 32 * 1024  # of one step of the shrink: fits on every device
_SHARED_BYTES = 96 * 1024  # for the loads of a shrink in flight


@dataclass(frozen=True)
class PairShape:
    """The sizes of a routing that tile sizes depend on."""

    pairs: int  # of a token and an expert, dead ones included
    keys: int  # pairs of a slot and an expert that are expected to be in use
    tile: int  # pairs per tile

    @property
    def tiles(self) -> int:
        """Tiles that are expected."""
        return max(1, self.keys, self.pairs // self.tile + self.keys // 2 * (self.each > 1))

    @property
    def each(self) -> int:
        """Pairs per key."""
        return self.pairs // max(1, self.keys)


@dataclass(frozen=True)
class SiteShape:
    """The sizes of a site that tile sizes depend on."""

    num_a: int  # matrices A: one per slice, or 1
    max_rank: int
    in_features: int
    out_features: int
    widest: int  # columns of the widest slice that the expand tells apart
    item_bytes: int  # bytes of one weight: 2, or 4 for float32
    general: bool  # interleaved columns, or ranks beyond one product

    @property
    def stacked(self) -> int:
        """Rows of A, each matrix padded to a power of two."""
        return self.num_a * padded_rank(self.max_rank)


def expected_keys(tokens: int, top_k: int, num_experts: int, active_slots: int) -> int:
    """Return how many (slot, expert) pairs a uniform router would use.

    >>> expected_keys(16, 8, 128, 1), expected_keys(4096, 2, 8, 8)
    (81, 64)
    """
    slots = max(1, min(active_slots, tokens))
    missed = (1 - min(1.0, top_k / num_experts)) ** (tokens / slots)
    return max(1, round(slots * num_experts * (1 - missed)))


def tile_pairs(pairs: int, keys: int) -> int:
    """Return the pairs per tile: 16, 32 or 64."""
    each = pairs / max(1, keys)
    return 16 if each < 12 else 32 if each < 24 else 64


@lru_cache(maxsize=4096)
def choose_tiles(pairs: PairShape, site: SiteShape) -> TileConfig:
    """Return the sizes for one site and routing."""
    return TileConfig(_shrink(pairs, site), _expand(pairs, site))


def _shrink(pairs: PairShape, site: SiteShape) -> ShrinkTiles:
    """Split the inputs until every multiprocessor has work; the expand reads every plane back."""
    tiles, narrow = pairs.tiles, padded_rank(site.max_rank) == MIN_DOT
    if site.item_bytes == 4:
        block_n = min(32, power_of_two(site.stacked))
        blocks = -(-site.stacked // block_n) * tiles
        return ShrinkTiles(block_n, 32, parts(site.in_features, 32, 256 // blocks), num_stages=2)
    if tiles <= 2:
        block_n, programs, planes = 16, 128, 32
    elif tiles <= 16:
        block_n, programs, planes = 16 if narrow else 32, 256, 16
    elif tiles < 2 * _MULTIPROCESSORS:
        block_n, programs, planes = min(64, power_of_two(site.stacked)), 512, 8
    else:
        block_n, programs, planes = min(64, power_of_two(site.stacked)), 512, 2
    if pairs.tile >= 64 and tiles >= _MULTIPROCESSORS:
        block_n = min(128, power_of_two(site.stacked))
    blocks = -(-site.stacked // block_n) * tiles
    split_k = parts(site.in_features, 128, min(planes, programs // blocks))
    block_k = 128
    while block_k * (block_n + pairs.tile) * site.item_bytes > _STAGE_BYTES:
        block_k //= 2
    stage = block_k * (block_n + pairs.tile) * site.item_bytes
    return ShrinkTiles(
        block_n, block_k, split_k, num_stages=max(2, min(4, _SHARED_BYTES // stage))
    )


def _expand(pairs: PairShape, site: SiteShape) -> ExpandTiles:
    rank_pad = padded_rank(site.max_rank)
    block_r = min(rank_pad, MAX_BLOCK_R)
    if site.item_bytes == 4:  # float32 products take more registers and shared memory
        return ExpandTiles(64, min(block_r, 32))
    if site.general or block_r < rank_pad:
        return ExpandTiles(128, block_r)
    many = pairs.tiles * site.out_features >= 400_000
    if pairs.tile >= 64:
        return ExpandTiles(128, block_r, chunks_of(site.widest, 128, 8), 8, 3)
    if pairs.tile == 32:
        return ExpandTiles(128, block_r, chunks_of(site.widest, 128, 4))
    if rank_pad == MIN_DOT:
        return ExpandTiles(128, block_r, chunks_of(site.widest, 128, 4)) if many else (
            ExpandTiles(256, block_r)
        )
    return ExpandTiles(128, block_r, chunks_of(site.widest, 128, 4) if many else 1)


def parts(in_features: int, block_k: int, most: int) -> int:
    """Return the most parts of the inputs, up to `most`, that waste under an eighth of the steps.

    >>> parts(2048, 128, 16), parts(2880, 128, 6), parts(77, 128, 4)
    (16, 4, 1)
    """
    steps = -(-in_features // block_k)
    for split in range(min(most, steps), 1, -1):
        if -(-steps // split) * split * 8 <= steps * 9:
            return split
    return 1


def chunks_of(width: int, block_c: int, most: int) -> int:
    """Return the chunks per program, up to `most`, that cover `width` with the least waste.

    >>> chunks_of(768, 128, 8), chunks_of(2880, 128, 8), chunks_of(64, 128, 8)
    (6, 8, 1)
    """
    blocks = -(-width // block_c)
    return min(range(min(most, blocks), 0, -1), key=lambda n: -(-blocks // n) * n)
