"""What a search for tile sizes, and a table of them, needs to know: a `TileRules`."""

from __future__ import annotations

from itertools import product

from lora_backends.gpu.config import choose_tiles, equal_parts
from lora_backends.gpu.config import row_tokens as block_tokens
from lora_backends.gpu.tiles import (
    ExpandTiles,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    power_of_two,
    tile_faults,
)

__all__ = ["TILE_TOKENS", "TileConfig", "block_tokens", "candidates", "choose_tiles", "tile_faults"]

TILE_TOKENS = (16, 32, 64)
"""Tokens per tile that a plan may have."""


def candidates(
    num_tokens: int,
    active_slots: int,
    tile_tokens: int,
    num_slices: int,
    max_rank: int,
    in_features: int,
    out_features: int,
    item_bytes: int,
) -> list[TileConfig]:
    """Return the sizes worth measuring: every shrink once, then every expand once.

    The halves are independent but for the planes of h, so a search varies one at a time.

    Args:
        num_tokens: as in `choose_tiles`, whose sizes stand in the half that is not varied.
        active_slots: as in `choose_tiles`.
        tile_tokens: as in `choose_tiles`.
        num_slices: as in `choose_tiles`.
        max_rank: as in `choose_tiles`.
        in_features: as in `choose_tiles`.
        out_features: as in `choose_tiles`.
        item_bytes: as in `choose_tiles`.

    Returns:
        Sizes without `tile_faults`.
    """
    layer = (num_slices, max_rank, in_features, out_features, item_bytes)
    chosen = choose_tiles(num_tokens, active_slots, tile_tokens, *layer)
    stacked, rank = power_of_two(num_slices * padded_rank(max_rank)), padded_rank(max_rank)
    splits = sorted({equal_parts(in_features, most) for most in (1, 2, 4, 8, 12, 16, 24, 28, 32)})
    shrinks = (
        ShrinkTiles(*sizes)
        for sizes in product(
            [size for size in (16, 32, 64, 128) if size <= stacked],
            (32, 64, 128, 256),
            splits,
            (1, 2, 4),
            (4, 8),
            (2, 3, 4, 5),
        )
    )
    expands = (
        ExpandTiles(*sizes)
        for sizes in product(
            (32, 64, 128, 256),
            [size for size in (16, 32, 64) if size <= rank],
            (1, 2, 4, 8),
            (2, 4, 8),
            (1, 2, 3),
        )
    )
    varied = [TileConfig(shrink, chosen.expand) for shrink in shrinks]
    varied += [TileConfig(chosen.shrink, expand) for expand in expands]
    return [tiles for tiles in varied if not tile_faults(tiles, tile_tokens, *layer)]
