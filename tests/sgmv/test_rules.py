"""The rules for tile sizes, and the sizes that a search measures."""

import doctest
import itertools
from dataclasses import replace

import pytest

from lora_backends.sgmv.tiles import sizes
from lora_backends.sgmv.tiles.rules import choose_tiles, of_8_bits, tile_tokens
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    TILE_TOKENS,
    BatchShape,
    LayerShape,
    padded_rank,
    tile_faults,
)

TOKENS = [(0, 0), (1, 1), (16, 8), (64, 64), (256, 8), (512, 512), (2048, 8), (100_000, 3)]
SLICES, RANKS = (1, 2, 3, 7), (1, 8, 16, 33, 64, 128, 512)
WIDTHS = [(1, 1), (5, 3), (4096, 4096), (4096, 28672), (14336, 4096), (128_256, 4096)]


def _shapes(item_bytes=(2, 4)):
    """Yield batches and layers; a tile is as wide as the rules say, or as a longer segment."""
    for (tokens, active), slices, rank, (inputs, outputs), width in itertools.product(
        TOKENS, SLICES, RANKS, WIDTHS, item_bytes
    ):
        chosen = tile_tokens(tokens, active)
        for tile in sorted({chosen, max(chosen, 64), 128}):
            layer = LayerShape(slices, rank, inputs, outputs, width)
            yield BatchShape(tokens, active, tile), layer


def _is_power_of_two(value):
    return value & (value - 1) == 0


def _check(batch, layer, tiles):
    shrink, expand, rank_pad = tiles.shrink, tiles.expand, padded_rank(layer.max_rank)
    for size in (batch.tile_tokens, shrink.block_n, expand.block_c, expand.block_r):
        assert size >= 16 and _is_power_of_two(size)
    assert _is_power_of_two(shrink.block_k) and shrink.block_k >= 16 * shrink.warps_k
    assert 1 <= shrink.split_k <= 32 and shrink.warps_k <= shrink.num_warps
    assert expand.block_r <= min(rank_pad, MAX_BLOCK_R)
    assert expand.chunks == 1 or expand.block_r == rank_pad
    stage = shrink.block_k * (shrink.block_n + batch.tile_tokens) * layer.item_bytes
    assert stage * shrink.num_stages <= 160 * 1024  # shared memory of the smallest target
    assert expand.num_stages == 1 or layer.item_bytes == 2
    assert not tile_faults(tiles, batch.tile_tokens, layer)


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_sizes_of_any_shape_are_ones_that_the_kernels_take(item_bytes):
    for batch, layer in _shapes([item_bytes]):
        _check(batch, layer, choose_tiles(batch, layer))


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_sizes_for_8_bits_are_ones_that_the_kernels_take(item_bytes):
    for batch, layer in _shapes([item_bytes]):
        tiles = of_8_bits(choose_tiles(batch, layer), batch, layer)
        assert not tile_faults(tiles, batch.tile_tokens, layer)
        if item_bytes == 2:
            narrow = replace(layer, item_bytes=1)
            assert choose_tiles(batch, narrow) == tiles
            assert not tile_faults(tiles, batch.tile_tokens, narrow)


def test_a_tile_has_as_many_tokens_as_an_active_slot_has_on_average():
    for tokens, active in TOKENS:
        tile, average = tile_tokens(tokens, active), tokens // max(1, active)
        assert tile in TILE_TOKENS
        assert tile == 16 or tile <= average


def test_tma_loads_of_b_are_for_long_batches_of_16_bit_weights():
    def stages(tokens, item_bytes):
        batch = BatchShape(tokens, 8, tile_tokens(tokens, 8))
        return choose_tiles(batch, LayerShape(1, 64, 4096, 4096, item_bytes)).expand.num_stages

    assert stages(8192, 2) == 3
    assert stages(256, 2) == stages(8192, 4) == 1


def test_a_lone_token_of_rank_16_is_split_over_many_programs():
    tiles = choose_tiles(BatchShape(1, 1, 16), LayerShape(1, 16, 4096, 4096, 2))
    assert tiles.shrink.split_k == 16


def test_parts_of_the_inputs_are_equal():
    for inputs, parts in ((4096, {1, 2, 4, 8, 16}), (14336, {1, 2, 4, 7, 8, 14, 28})):
        for tokens, active in TOKENS[1:]:
            batch = BatchShape(tokens, active, tile_tokens(tokens, active))
            split_k = choose_tiles(batch, LayerShape(1, 16, inputs, 4096, 2)).shrink.split_k
            assert split_k in parts and (inputs // 256) % split_k == 0


@pytest.mark.parametrize("rank, padded", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_padded_rank(rank, padded):
    assert padded_rank(rank) == padded


def test_worked_examples_of_sizes():
    failed, attempted = doctest.testmod(sizes)
    assert attempted and not failed
