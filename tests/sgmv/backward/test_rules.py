"""Tile sizes of the backward fit on every GPU, whatever the layer."""

import itertools

import pytest
from helpers.compiling.ahead_of_time import GPUS

from lora_backends.sgmv.backward.rules import dh_tiles, dx_tiles, outer_tiles
from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.sizes import LayerShape, padded_rank

RANKS = (1, 8, 16, 33, 64, 130, 256, 512)


def is_size(value, most):
    return 16 <= value <= most and value & (value - 1) == 0


@pytest.mark.parametrize("target", GPUS)
def test_sizes_fit(target):
    gpu = Gpu(*GPUS[target])
    for rank, slices, item, casts in itertools.product(RANKS, (1, 2, 3, 5), (2, 4), (False, True)):
        layer = LayerShape(slices, rank, 4096, slices * 4096, item)
        other = (6 - item) if casts else item
        for tile, rows in ((16, 1), (64, 512), (128, 4)):
            dh = dh_tiles(layer, tile, rows, 4096, other, casts, gpu)
            assert is_size(dh.block_r, 256)
            assert is_size(dh.block_c, 128)
            loaded = dh.num_stages * dh.block_c * (tile * other + dh.block_r * item)
            assert loaded <= gpu.shared_bytes
            assert dh.parts == 1 or dh.parts * rows * slices <= gpu.multiprocessors
        dx = dx_tiles(layer)
        assert dx.block_r <= padded_rank(rank)
        for stacked in (layer.stacked, padded_rank(rank)):
            outer = outer_tiles(layer, stacked, 4096, other, casts, gpu)
            assert is_size(outer.block_t, 128)
            assert is_size(outer.block_n, 64)
            assert 4 * outer.block_n * outer.block_c <= gpu.shared_bytes
            loaded = outer.num_stages * outer.block_t
            loaded *= 4 * outer.block_n + other * outer.block_c
            assert loaded <= gpu.shared_bytes
