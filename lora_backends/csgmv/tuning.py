"""What a search for tile sizes, and a table of them, needs to know: a `TileRules`.

A tile of a plan is a row of the grid here: a segment, or a group of them.
"""

from __future__ import annotations

from lora_backends.csgmv import config
from lora_backends.gpu.config import Problem, choose_tiles
from lora_backends.gpu.config import row_tokens as block_tokens
from lora_backends.gpu.tiles import TileConfig, tile_faults

__all__ = ["TILE_TOKENS", "TileConfig", "block_tokens", "candidates", "choose_tiles", "tile_faults"]

TILE_TOKENS = (16, 32, 64)
"""Tokens per row of the grid that `block_tokens` chooses from."""


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
    """Return the sizes worth measuring for one layer and batch; arguments as of `Problem`."""
    layer = (num_slices, max_rank, in_features, out_features, item_bytes)
    found = config.candidates(Problem(num_tokens, active_slots, tile_tokens, *layer))
    return [tiles for tiles in found if not tile_faults(tiles, tile_tokens, *layer)]
