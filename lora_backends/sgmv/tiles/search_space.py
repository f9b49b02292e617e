"""The tile sizes that a search measures for one layer and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lora_backends.sgmv.tiles.rules import choose_tiles, equal_parts, fitting
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    power_of_two,
    tile_faults,
)


def candidates(batch: BatchShape, layer: LayerShape) -> list[TileConfig]:
    """Return the sizes worth measuring: the rules' sizes, then one kernel's sizes varied at a time.

    The two kernels depend on each other only through the planes of h, so a search may vary one
    while the other keeps the rules' sizes.
    """
    chosen = choose_tiles(batch, layer)
    varied = [replace(chosen, shrink=shrink) for shrink in _shrinks(batch, layer)]
    varied += [replace(chosen, expand=expand) for expand in _expands(batch, layer)]
    unique = dict.fromkeys([chosen, *varied])
    return [tiles for tiles in unique if not tile_faults(tiles, batch.tile_tokens, layer)]


def _shrinks(batch: BatchShape, layer: LayerShape) -> Iterator[ShrinkTiles]:
    widest = min(256, power_of_two(layer.stacked))
    widths = [width for width in (16, 32, 64, 128, 256) if width <= widest][-4:]
    for block_n in widths:
        blocks = -(-layer.stacked // block_n) * batch.rows
        splits = {equal_parts(layer.in_features, max(1, n // blocks)) for n in (128, 256, 512)}
        most = equal_parts(layer.in_features, 32)
        for split_k in sorted({min(split, most) for split in splits}):
            yield fitting(ShrinkTiles(block_n, 128, split_k, num_stages=4), batch, layer)
            yield fitting(ShrinkTiles(block_n, 64, split_k, num_stages=4), batch, layer)
            if block_n * batch.tile_tokens <= 512:
                yield fitting(ShrinkTiles(block_n, 256, split_k, warps_k=4), batch, layer)
            if block_n * batch.tile_tokens >= 4096:
                yield fitting(ShrinkTiles(block_n, 64, split_k, num_warps=8), batch, layer)


def _expands(batch: BatchShape, layer: LayerShape) -> Iterator[ExpandTiles]:
    rank_pad = padded_rank(layer.max_rank)
    block_r = min(rank_pad, 32 if layer.item_bytes == 4 else MAX_BLOCK_R)
    for block_c in (64, 128, 256):
        if block_c * batch.tile_tokens > 16384:
            continue
        for chunks in (1, 2, 4, 8) if block_r == rank_pad else (1,):
            programs = batch.rows * layer.out_features // (block_c * chunks)
            if chunks == 1 or programs >= 64:
                yield ExpandTiles(block_c, block_r, chunks)
                if chunks >= 4 and layer.item_bytes == 2:
                    yield ExpandTiles(block_c, block_r, chunks, num_stages=3)
                if block_c * batch.tile_tokens >= 4096:
                    yield ExpandTiles(block_c, block_r, chunks, num_warps=8)
