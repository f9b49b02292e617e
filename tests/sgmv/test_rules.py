import doctest
import itertools

import pytest
from lora_backends.gpu import tiles
from lora_backends.gpu.config import choose_tiles, row_tokens
from lora_backends.gpu.tiles import WIDEST_RANK_BLOCK, padded_rank, tile_faults

TOKENS = [(0, 0), (1, 1), (16, 8), (64, 64), (256, 8), (512, 512), (2048, 8), (100_000, 3)]
SLICES, RANKS = (1, 2, 3, 7), (1, 8, 16, 33, 64, 128, 512)
WIDTHS = [(1, 1), (5, 3), (4096, 4096), (4096, 28672), (14336, 4096), (128_256, 4096)]


def _is_power_of_two(value):
    return value & (value - 1) == 0


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_sizes_of_any_shape_are_ones_that_the_kernels_take(item_bytes):
    for (tokens, active), slices, rank, (inputs, outputs) in itertools.product(
        TOKENS, SLICES, RANKS, WIDTHS
    ):
        tile = row_tokens(tokens, active)
        layer = (slices, rank, inputs, outputs, item_bytes)
        tiles = choose_tiles(tokens, active, tile, *layer)
        shrink, expand = tiles.shrink, tiles.expand
        for size in (tile, shrink.block_n, expand.block_c, expand.block_r):
            assert size >= 16 and _is_power_of_two(size)
        assert _is_power_of_two(shrink.block_k) and shrink.block_k >= 16 * shrink.warps_k
        assert 1 <= shrink.split_k <= 32
        assert expand.block_r <= min(padded_rank(rank), WIDEST_RANK_BLOCK)
        assert expand.chunks == 1 or expand.block_r == padded_rank(rank)
        stage = shrink.block_k * (shrink.block_n + tile) * item_bytes
        assert stage * shrink.num_stages <= 160 * 1024  # shared memory of the smallest target
        assert not tile_faults(tiles, tile, *layer)
        assert expand.num_stages == 1 or item_bytes == 2


def test_boxes_of_b_are_for_long_batches_of_16_bit_weights():
    def stages(tokens, item_bytes):
        tile = row_tokens(tokens, 8)
        return choose_tiles(tokens, 8, tile, 1, 64, 4096, 4096, item_bytes).expand.num_stages

    assert stages(8192, 2) == 3
    assert stages(256, 2) == stages(8192, 4) == 1


def test_a_lone_token_of_rank_16_is_split_over_many_programs():
    tiles = choose_tiles(1, 1, 16, 1, 16, 4096, 4096, 2)
    assert tiles.shrink.split_k == 16


def test_parts_of_the_inputs_are_equal():
    for inputs, parts in ((4096, {1, 2, 4, 8, 16}), (14336, {1, 2, 4, 7, 8, 14, 28})):
        for tokens, active in TOKENS[1:]:
            tile = row_tokens(tokens, active)
            tiles = choose_tiles(tokens, active, tile, 1, 16, inputs, 4096, 2)
            assert tiles.shrink.split_k in parts


@pytest.mark.parametrize("rank, padded", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_padded_rank(rank, padded):
    assert padded_rank(rank) == padded


def test_worked_examples_of_tiles():
    failed, attempted = doctest.testmod(tiles)
    assert attempted and not failed
