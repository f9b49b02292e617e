"""The rules for tile sizes, and the sizes that a search measures."""

import doctest
import itertools
import random
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch
from helpers.engines import ENGINES

from lora_backends import LoRABatch
from lora_backends.sgmv.blends.launch import BlendShape, choose_blend_tiles, kernels_for
from lora_backends.sgmv.experts import rules as expert_rules
from lora_backends.sgmv.launch import INVARIANT_BATCH, Options
from lora_backends.sgmv.runs import count_tokens
from lora_backends.sgmv.storage import PLAIN, Storage
from lora_backends.sgmv.tiles import alike, first_use, gpu, sizes
from lora_backends.sgmv.tiles.bounds import is_prefill
from lora_backends.sgmv.tiles.eight_bit_rules import of_8_bits
from lora_backends.sgmv.tiles.gpu import H200, Gpu, gpu_of
from lora_backends.sgmv.tiles.rules import (
    choose_tiles,
    of_scaled_blocks,
    tile_tokens,
    wider_tile,
)
from lora_backends.sgmv.tiles.sizes import (
    MAX_BLOCK_R,
    TILE_TOKENS,
    TMA_BYTES,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    part_waste,
    shrink_bytes,
    tile_faults,
)
from lora_backends.sgmv.tiles.source import fixed_source, rules_for

TOKENS = [(0, 0), (1, 1), (16, 8), (64, 64), (256, 8), (512, 512), (2048, 8), (100_000, 3)]
A100, L4, RTX_5090, MI300X = (
    Gpu(108, 163 << 10),
    Gpu(58, 99 << 10),
    Gpu(170, 99 << 10),
    Gpu(304, 64 << 10),
)
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


def _check(batch, layer, tiles, on=H200):
    shrink, expand, rank_pad = tiles.shrink, tiles.expand, padded_rank(layer.max_rank)
    for size in (batch.tile_tokens, shrink.block_n, expand.block_c, expand.block_r):
        assert size >= 16 and _is_power_of_two(size)
    assert _is_power_of_two(shrink.block_k) and shrink.block_k >= 16 * shrink.warps_k
    assert 1 <= shrink.split_k <= 32 and shrink.warps_k <= shrink.num_warps
    assert expand.block_r <= min(rank_pad, MAX_BLOCK_R)
    assert expand.chunks == 1 or expand.block_r == rank_pad
    assert expand.num_stages <= 1 or (layer.item_bytes <= 2 and on.shared_bytes >= TMA_BYTES)
    assert not tile_faults(tiles, batch.tile_tokens, layer, on)


@pytest.mark.parametrize("on", [H200, A100, L4, RTX_5090, MI300X])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_sizes_of_any_shape_are_ones_that_the_kernels_take_and_the_gpu_has_room_for(item_bytes, on):
    for batch, layer in _shapes([item_bytes]):
        tiles = choose_tiles(batch, layer, on)
        _check(batch, layer, tiles, on)
        if item_bytes > 1:
            scaled = of_scaled_blocks(tiles, batch, layer, on)
            _check(batch, layer, scaled, on)
            sizes = (batch.tile_tokens, item_bytes, True)
            assert shrink_bytes(scaled.shrink, *sizes) <= on.shared_bytes
            if shrink_bytes(tiles.shrink, *sizes) <= on.shared_bytes:
                assert scaled == tiles


@pytest.mark.parametrize("item_bytes", [2, 4])
def test_sizes_for_8_bits_are_ones_that_the_kernels_take(item_bytes):
    for batch, layer in _shapes([item_bytes]):
        tiles = of_8_bits(choose_tiles(batch, layer), batch, layer)
        assert not tile_faults(tiles, batch.tile_tokens, layer)
        assert tiles.expand.num_stages or item_bytes == 2
        if item_bytes == 2:
            narrow = replace(layer, item_bytes=1)
            assert choose_tiles(batch, narrow) == tiles
            assert not tile_faults(tiles, batch.tile_tokens, narrow)


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_a_batch_invariant_engine_expands_all_tokens_of_a_tile_by_the_same_code(item_bytes):
    """Without a matrix product, the first token of a tile has code of its own."""
    for slices, rank, (inputs, outputs), tile in itertools.product(
        SLICES, RANKS, WIDTHS, (16, 64, 128)
    ):
        batch = BatchShape(*INVARIANT_BATCH, tile)
        layer = LayerShape(slices, rank, inputs, outputs, item_bytes)
        tiles = choose_tiles(batch, layer)
        assert tiles.expand.num_stages and of_8_bits(tiles, batch, layer).expand.num_stages


@pytest.mark.parametrize("active, rank", [(1, 64), (30, 16), (64, 16), (64, 64)])
def test_a_program_without_a_matrix_product_has_at_most_4096_inputs(active, rank):
    """Its code has every step, and the loads of all of them are in flight together."""
    for inputs in (*range(2048, 32769, 512), 5120, 18944, 25600):
        batch, layer = BatchShape(active, active, 16), LayerShape(1, rank, inputs, 4096, 1)
        shrink = choose_tiles(batch, layer).shrink
        steps = -(-inputs // (shrink.block_k * shrink.split_k))
        assert shrink.warps_k == 0 and steps * shrink.block_k <= (2048 if active < 32 else 4096)
        read = shrink.block_k * shrink.split_k * steps
        assert read - inputs < shrink.block_k + inputs // 8


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_a_gpu_of_half_the_size_takes_the_sizes_for_twice_the_rows(item_bytes):
    half = Gpu(H200.multiprocessors // 2, H200.shared_bytes)
    for active, rank, width in itertools.product((40, 100, 120), (16, 64), (4096, 28672)):
        layer = LayerShape(2, rank, 4096, width, item_bytes)
        small, large = BatchShape(500, active, 16), BatchShape(500, 2 * active, 16)
        assert choose_tiles(small, layer, half) == choose_tiles(large, layer)
    alone = BatchShape(1, 1, 16)
    assert choose_tiles(alone, layer, half) == choose_tiles(alone, layer)


def test_a_gpu_with_little_shared_memory_has_fewer_loads_in_flight_and_no_tma():
    batch, layer = BatchShape(8192, 8, 64), LayerShape(1, 64, 4096, 14336, 2)
    large, small = choose_tiles(batch, layer), choose_tiles(batch, layer, RTX_5090)
    assert (large.expand.num_stages, small.expand.num_stages) == (3, 1)
    batch, layer = BatchShape(1024, 8, 64), LayerShape(1, 64, 14336, 4096, 2)
    large, small = choose_tiles(batch, layer), choose_tiles(batch, layer, L4)
    assert (large.shrink.num_stages, small.shrink.num_stages) == (4, 3)


def test_a_table_for_a_gpu_holds_no_sizes_that_another_has_no_room_for():
    batch, layer = BatchShape(1024, 8, 64), LayerShape(1, 64, 14336, 4096, 2)
    tiles = choose_tiles(batch, layer)
    assert not tile_faults(tiles, 64, layer, H200)
    (fault,) = tile_faults(tiles, 64, layer, L4)
    assert fault == "loads of the shrink take 131072 bytes of shared memory; the GPU has 101376"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{"tiles": "rules"}, {"batch_invariant": True}, {}])
def test_a_backend_takes_the_rules_for_its_gpu(engine, options, monkeypatch):
    batch, layer = BatchShape(64, 64, 16), LayerShape(1, 16, 4096, 4096, 2)
    for module in ("source", "table"):
        monkeypatch.setattr(f"lora_backends.sgmv.tiles.{module}.gpu_of", lambda _: L4)
    monkeypatch.setattr("lora_backends.sgmv.engine.gpu_of", lambda _: L4)
    backend = ENGINES[engine]("cpu", **options)
    chosen = backend.tile_source.choose_tiles(batch, layer)
    assert chosen == choose_tiles(batch, layer, L4) != choose_tiles(batch, layer)
    assert backend._options.gpu == L4


def test_the_figures_of_a_gpu_are_those_that_its_driver_names(monkeypatch):
    assert gpu_of("cpu") == H200 == Gpu(132, 232448)
    named = {"multi_processor_count": 304, "shared_memory_per_block": 65536}
    for optin, shared in ({}, 65536), ({"shared_memory_per_block_optin": 101376}, 101376):
        found = SimpleNamespace(**named, **optin)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert gpu_of("cuda") == Gpu(304, shared)


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


@pytest.mark.parametrize("inputs", [4096, 9728, 11008, 14336, 18944])
@pytest.mark.parametrize("tokens, active", [(1, 1), (16, 1), (16, 8), (2048, 8)])
def test_inputs_of_any_width_are_split_over_many_programs(inputs, tokens, active):
    """In steps of 256, 11008 inputs are a prime and 9728 and 18944 twice a prime."""
    batch = BatchShape(tokens, active, tile_tokens(tokens, active))
    for rank in (16,) if (tokens, active) == (16, 1) else (16, 64):
        layers = (LayerShape(1, rank, k, 4096, 2) for k in (inputs, 16384))
        chosen, even = (choose_tiles(batch, layer).shrink.split_k for layer in layers)
        assert chosen * 2 >= min(16, even)


@pytest.mark.parametrize("tokens", [2, 7, 15, 16])
def test_a_program_takes_1024_inputs_for_one_tile_of_a_high_rank(tokens):
    """An expand of few tokens waits for every plane of h."""
    batch = BatchShape(tokens, 1, 16)
    measured = ((1, 4096, 4096), (3, 4096, 6144), (2, 4096, 28672), (1, 14336, 4096))
    for slices, inputs, outputs in measured:
        shrink = choose_tiles(batch, LayerShape(slices, 64, inputs, outputs, 2)).shrink
        assert shrink == ShrinkTiles(16, 256, inputs // 1024, warps_k=4, num_stages=4)
    for rank, inputs in itertools.product((33, 64, 128), (2048, 5120, 8192, 14336)):
        shrink = choose_tiles(batch, LayerShape(1, rank, inputs, 4096, 2)).shrink
        assert shrink == ShrinkTiles(16, 256, inputs // 1024, warps_k=4, num_stages=4)
    for inputs in (9728, 11008, 18944):  # no multiples of 1,024
        shrink = choose_tiles(batch, LayerShape(1, 64, inputs, 4096, 2)).shrink
        assert shrink.num_stages == 3


def test_low_ranks_and_float32_take_more_parts_of_the_inputs():
    one, layer = BatchShape(16, 1, 16), LayerShape(1, 64, 4096, 4096, 2)
    for other in (replace(layer, max_rank=32), replace(layer, item_bytes=4)):
        assert choose_tiles(one, other).shrink.split_k >= 8


@pytest.mark.parametrize(
    "tokens, active, rank, slices, sizes",
    [
        (64, 8, 16, 1, (16, 256, 11, 4)),  # enough programs for the GPU, up to 16 planes
        (64, 8, 16, 3, (16, 256, 5, 4)),
        (64, 8, 64, 3, (32, 256, 4, 4)),  # 96 blocks of 16 rows: half as many programs
        (64, 64, 16, 3, (16, 256, 2, 4)),  # blocks of A fill the GPU: few planes
        (64, 64, 64, 3, (32, 256, 1, 4)),  # more than 600 blocks: x is read less often
        (256, 8, 64, 3, (32, 256, 4, 4)),
        (256, 8, 64, 1, (16, 256, 4, 4)),
        (64, 1, 16, 1, (16, 256, 11, 4)),
        (192, 1, 64, 1, (16, 256, 4, 4)),
        (5, 3, 64, 1, (16, 256, 10, 4)),
        (32, 1, 64, 1, (16, 256, 4, 4)),  # a high rank has long rows of h, so few planes
        (256, 8, 16, 1, (16, 256, 7, 4)),
        (8, 1, 16, 1, (16, 128, 10, 1)),  # one tile
    ],
)
def test_groups_of_warps_share_out_the_steps_of_small_batches(tokens, active, rank, slices, sizes):
    batch = BatchShape(tokens, active, tile_tokens(tokens, active))
    shrink = choose_tiles(batch, LayerShape(slices, rank, 5120, 5120, 2)).shrink
    assert (shrink.block_n, shrink.block_k, shrink.split_k, shrink.warps_k) == sizes


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_layers_with_few_inputs_sum_in_one_order_whatever_small_batch_a_graph_has_captured(
    item_bytes,
):
    batches = [(tokens, active) for tokens in range(1, 17) for active in range(min(tokens, 8) + 1)]
    for inputs, rank, slices, outputs in itertools.product(
        (1, 300, 513, 1024), (1, 16, 64), (1, 3), (512, 17920)
    ):
        layer = LayerShape(slices, rank, inputs, outputs, item_bytes)
        sizes = [choose_tiles(BatchShape(*batch, 16), layer) for batch in batches]
        orders = {(s.shrink.split_k, s.shrink.warps_k, bool(s.expand.num_stages)) for s in sizes}
        assert len(orders) == 1


@pytest.mark.parametrize("rank", [4, 8, 12, 16, 64, 128])
def test_tokens_alone_with_their_slot_take_no_matrix_product(rank):
    def without(tokens, active, item_bytes=2):
        tiles = choose_tiles(
            BatchShape(tokens, active, 16), LayerShape(1, rank, 4096, 4096, item_bytes)
        )
        return tiles.shrink.warps_k == 0, tiles.expand.num_stages == 0

    whole = rank in (8, 16, 32, 64)  # rows of B are loaded without a mask
    assert without(1, 1) == (whole, whole)
    assert without(4, 4) == without(7, 4) == (False, whole)
    assert without(64, 64) == (False, rank in (8, 16))
    for tokens, active, item_bytes in (
        (2, 1, 2),
        (16, 8, 2),
        (16, 16, 2),
        (1, 1, 4),
        (512, 512, 2),
    ):
        assert without(tokens, active, item_bytes) == (False, False)
    for active in (7, 8, 31, 32):  # a wide layer
        tiles = choose_tiles(BatchShape(active, active, 16), LayerShape(2, rank, 4096, 28672, 2))
        assert (tiles.expand.num_stages == 0) == (whole and (rank < 64 or active < 8))


def test_a_long_layer_of_high_rank_has_eight_planes_of_h():
    for tokens, active in ((16, 8), (35, 15), (57, 15), (32, 1)):
        batch = BatchShape(tokens, active, 16)
        assert choose_tiles(batch, LayerShape(1, 64, 14336, 4096, 2)).shrink.split_k == 8


@pytest.mark.parametrize(
    "tokens, active, slices, outputs, sizes",
    [
        (64, 8, 2, 28672, (64, 4, 4, 1)),
        (64, 16, 2, 28672, (64, 8, 4, 3)),  # TMA from 16 tiles on, or in tiles of 32 tokens
        (256, 8, 2, 28672, (64, 8, 4, 3)),
        (16, 1, 2, 28672, (128, 1, 4, 1)),  # one tile
        (32, 4, 2, 28672, (64, 4, 4, 1)),  # four tiles of 16
        (32, 3, 2, 28672, (128, 1, 4, 1)),
        (192, 1, 2, 28672, (64, 8, 4, 3)),  # six tiles of 32
        (256, 8, 3, 6144, (64, 4, 4, 1)),
        (256, 8, 1, 4096, (128, 1, 4, 1)),
        (64, 1, 3, 6144, (128, 1, 4, 1)),
        (1, 1, 1, 4096, (64, 1, 2, 0)),
        (1, 1, 2, 28672, (128, 1, 2, 0)),
    ],
)
def test_expands_of_rank_64_in_small_batches(tokens, active, slices, outputs, sizes):
    batch = BatchShape(tokens, active, tile_tokens(tokens, active))
    layer = LayerShape(slices, 64, 4096, outputs, 2)
    for on, stages in ((H200, sizes[3]), (Gpu(132, TMA_BYTES - 1), min(1, sizes[3]))):
        expand = choose_tiles(batch, layer, on).expand
        found = expand.block_c, expand.chunks, expand.num_warps, expand.num_stages
        assert found == (*sizes[:3], stages)


@pytest.mark.parametrize(
    "tokens, active, tile, rows",
    [
        (0, 0, 16, 1),
        (16, 1, 16, 1),
        (17, 1, 16, 2),
        (96, 5, 16, 10),
        (4259, 2, 64, 68),
        (64, 64, 16, 64),
        (4097, 64, 64, 65),  # one slot has a second tile
    ],
)
def test_rows_of_the_grid_are_counted_slot_by_slot(tokens, active, tile, rows):
    """One row too few, and a shrink meant for one wave takes two."""
    assert BatchShape(tokens, active, tile).rows == rows


@pytest.mark.parametrize(
    "tokens, active, tile",
    [
        (0, 0, 16),
        (32, 1, 16),
        (128, 1, 16),  # eight tiles of 16 rather than four of 32
        (176, 1, 16),
        (192, 1, 32),
        (288, 4, 32),
        (320, 1, 32),  # five tiles of 64 would leave most of a GPU idle
        (400, 1, 64),
        (128, 4, 16),
        (160, 8, 32),  # one tile of 32 rather than two of 16 for each slot
        (192, 12, 16),
        (200, 5, 16),  # tiles of 32 would leave a third of their places empty
        (300, 8, 64),  # from 300 tokens on
        (320, 10, 32),
        (1024, 28, 64),
        (2048, 100, 32),
        (1024, 64, 16),
    ],
)
def test_tokens_per_tile(tokens, active, tile):
    assert tile_tokens(tokens, active) == tile


@pytest.mark.parametrize(
    "tile, counts, wider",
    [
        (32, [40, 24] * 8, 64),  # 512 tokens: 24 tiles of 32, or 16 of 64
        (32, [32] * 16, 32),  # as many of either
        (32, [32] * 13 + [64, 32], 32),  # 16 tiles, or 15
        (32, [34] * 5 + [28] * 11, 64),  # 21 tiles, or 16
        (32, [34] * 3 + [28] * 13, 32),  # 19 tiles, or 16
        (32, [34] * 3 + [28] * 11, 32),  # 17 tiles, or 14
        (32, [70] * 4 + [30] * 3, 64),
        (32, [130, 130, 60], 32),  # for even slots, six tiles of 64 would leave most of a GPU idle
        (16, [20, 12] * 16, 32),
        (16, [20] * 2 + [1] * 4, 16),  # 44 tokens: under 300
        (16, [17] * 4 + [60] * 5, 32),  # 28 tiles of 16, or 14 of 32
        (16, [16] * 32, 16),
        (64, [70, 58] * 8, 64),  # the widest
        (128, [130, 126] * 8, 128),  # of a csgmv segment
    ],
)
def test_tokens_that_fall_unevenly_on_slots_take_wider_tiles(tile, counts, wider):
    slots = [slot for slot, count in enumerate(counts) for _ in range(count)]
    for idle in (0, 512):  # tokens without an adapter
        counted = count_tokens(LoRABatch(slots + [-1] * idle, len(counts) + 1))
        assert wider_tile(tile, len(slots), counted) == wider


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_counts_the_tiles_of_its_slots(engine):
    sizes = TileConfig(ShrinkTiles(16, 64, 1), ExpandTiles(64, 16))
    even = torch.arange(512) % 16
    uneven = torch.where((even % 2 == 1) & (torch.arange(512) < 128), even - 1, even)
    tiles = {}
    for options in ({}, {"batch_invariant": True}, {"tiles": fixed_source(32, sizes)}):
        backend = ENGINES[engine]("cpu", **({"tiles": "rules"} | options))
        plans = [backend.prepare_batch(LoRABatch(slots, 16)) for slots in (even, uneven)]
        tiles[str(*options)] = [plan.tile_tokens for plan in plans]
    assert tiles[""] == [32, 64] and tiles["tiles"] == [32, 32]
    assert len(set(tiles["batch_invariant"])) == 1


def test_middling_batches_take_the_sizes_of_small_ones_in_small_tiles():
    """With 17 to 32 tokens per slot, prefill sizes took up to 1.4 times as long."""
    for tile, least in ((16, 512), (32, 2048), (64, 300)):
        assert is_prefill(BatchShape(least, 8, tile))
        assert not is_prefill(BatchShape(least - 1, 8, tile))
    layer = LayerShape(3, 64, 4096, 6144, 2)
    small = choose_tiles(BatchShape(2047, 80, 32), layer)
    assert small.shrink.warps_k == 4 and small.expand.num_stages == 1
    assert choose_tiles(BatchShape(2048, 80, 32), layer).shrink.warps_k == 1


@pytest.mark.parametrize("kind, merged", [(4, False), (4, True), (0, True)])
def test_blends_of_8_bits_and_of_unlike_tokens_take_a_matrix_product(kind, merged):
    """Only matrix products read scales or take unlike tokens."""
    options = Options("ieee", True, False, rules_for(H200), True, H200)
    storage = Storage(kind, (1, None), torch.bfloat16) if kind else PLAIN
    for tokens, sets, rank, outputs in itertools.product(
        (1, 2, 8, 16, 30, 32), (1, 8, 16, 30), (8, 16, 64), (4096, 17920)
    ):
        batch, layer = BatchShape(tokens, sets, 16), LayerShape(1, rank, 4096, outputs, 2)
        shape = BlendShape(2, 2, merged, not kind, BatchShape(2 * tokens, 8, 16))
        tiles = choose_blend_tiles(batch, layer, shape, storage, options)
        assert tiles.how not in ("row", "rows") and tiles.expand.num_stages


@pytest.mark.parametrize(
    "tokens, sets, layer, entries, shrink, expand",
    [  # the last two were not measured
        (4096, 8, ("down", 64), 4, (256, 64, 2, 1, 8, 5), (64, 64, 16, 4, 2)),
        (4096, 8, ("down", 64), 2, (128, 64, 2, 1, 4, 6), (64, 64, 16, 4, 3)),
        (4096, 8, ("qkv", 64), 4, (256, 64, 1, 1, 8, 5), (64, 64, 8, 4, 2)),
        (4096, 8, ("qkv", 64), 2, (128, 64, 1, 1, 4, 4), (64, 64, 8, 4, 3)),
        (4096, 8, ("down", 16), 4, (64, 128, 2, 1, 4, 4), (128, 16, 8, 4, 3)),
        (2048, 8, ("qkv", 64), 2, (128, 64, 1, 1, 4, 6), (64, 64, 8, 4, 3)),
        (1024, 8, ("down", 64), 4, (256, 64, 4, 1, 8, 5), (64, 64, 8, 4, 2)),
    ],
)
def test_sizes_of_like_tokens_of_a_prefill(tokens, sets, layer, entries, shrink, expand):
    slices, inputs, outputs = LAYERS[layer[0]]
    options = Options("ieee", True, False, rules_for(H200), True, H200)
    shape = BlendShape(entries, entries, False, True, None, True)
    shape = BatchShape(tokens, sets, 64), LayerShape(slices, layer[1], inputs, outputs, 2), shape
    tiles = choose_blend_tiles(*shape, PLAIN, options)
    assert (tiles.how, astuple(tiles.shrink), astuple(tiles.expand)) == ("tma", shrink, expand)


def test_shrinks_of_like_tokens_fit_on_smaller_gpus():
    """Rows count as on an H200, and sizes of 205 KB are cut to fit 192."""
    layer, shape = LayerShape(1, 64, 14336, 4096, 2), BlendShape(4, 4, False, True, None, True)
    for on, parts, stages in ((H200, 2, 5), (Gpu(66, TMA_BYTES), 1, 4)):
        options = Options("ieee", True, False, rules_for(on), True, on)
        shrink = choose_blend_tiles(BatchShape(4096, 8, 64), layer, shape, PLAIN, options).shrink
        assert (shrink.split_k, shrink.num_stages) == (parts, stages)
        assert shrink_bytes(shrink, 64, 2) <= on.shared_bytes


@pytest.mark.parametrize("widths", [(4096, 1024, 1024), (3584, 512, 512)])
def test_programs_through_tma_end_within_the_tensor_of_their_slice(widths):
    options = Options("ieee", True, False, rules_for(H200), True, H200)
    layer = LayerShape(3, 16, 4096, sum(widths), 2)
    shape = BlendShape(4, 4, False, True, None, True)
    given = BatchShape(8192, 8, 64), layer, widths, shape, False
    for aligns, columns in (((0, 0), 1024), ((8, 8), min(1024, widths[-1]))):
        expand = kernels_for(*given, aligns, PLAIN, options).expand
        assert expand.constants["HOW"] == "tma"
        assert expand.sizes.BLOCK_C * expand.sizes.CHUNKS == columns
    odd = *given[:2], (4096, 1024, 600), *given[3:]
    assert kernels_for(*odd, (8, 8), PLAIN, options).expand.constants["HOW"] != "tma"


LAYERS = {  # slices, inputs, outputs
    "o": (1, 4096, 4096),
    "qkv": (3, 4096, 6144),
    "gate_up": (2, 4096, 28672),
    "down": (1, 14336, 4096),
}


@pytest.mark.parametrize(
    "name, tokens, active, rank, shrink, expand",
    [
        ("o", 1, 1, 16, (16, 256, 16, 4), (128, 1, 4, 0)),
        ("qkv", 1, 1, 16, (16, 256, 16, 4), (256, 1, 2, 0)),
        ("o", 1, 1, 64, (16, 1024, 4, 0), (128, 1, 4, 0)),
        ("gate_up", 1, 1, 64, (16, 1024, 4, 0), (128, 1, 2, 0)),
        ("o", 16, 1, 16, (16, 256, 16, 4), (128, 1, 4, 1)),
        ("gate_up", 16, 1, 16, (16, 256, 16, 4), (128, 2, 4, 1)),
        ("o", 16, 1, 64, (16, 512, 8, 4), (128, 1, 4, 1)),
        ("qkv", 16, 1, 64, (32, 512, 8, 4), (128, 1, 4, 1)),
        ("down", 16, 1, 64, (16, 256, 14, 4), (128, 1, 4, 1)),
        ("gate_up", 16, 8, 16, (16, 512, 8, 4), (256, 1, 2, 0)),
        ("gate_up", 64, 8, 16, (16, 512, 8, 4), (256, 2, 4, 1)),
        ("qkv", 64, 8, 16, (16, 512, 4, 4), (256, 1, 4, 1)),
        ("o", 64, 8, 64, (16, 512, 4, 4), (128, 1, 4, 1)),
        ("qkv", 64, 8, 64, (16, 512, 4, 4), (128, 2, 4, 1)),
        ("gate_up", 64, 8, 64, (16, 512, 4, 4), (128, 4, 4, 1)),
        ("o", 64, 64, 16, (16, 1024, 4, 0), (256, 1, 2, 0)),
        ("qkv", 64, 64, 16, (16, 512, 4, 0), (256, 2, 2, 0)),
        ("o", 64, 64, 64, (16, 1024, 2, 0), (128, 4, 2, 0)),
        ("qkv", 64, 64, 64, (32, 256, 2, 0), (128, 4, 2, 0)),
        ("down", 64, 64, 64, (32, 256, 4, 0), (128, 4, 2, 0)),
        ("o", 64, 64, 24, (16, 512, 4, 4), (128, 4, 4, 1)),  # no whole rows of B
        ("gate_up", 256, 8, 16, (16, 512, 4, 4), (128, 4, 4, 1)),
        ("o", 256, 8, 64, (16, 512, 4, 4), (256, 1, 8, 1)),
        ("qkv", 256, 8, 64, (32, 512, 4, 4), (256, 1, 8, 1)),
        ("down", 256, 8, 64, (16, 512, 4, 4), (256, 1, 8, 1)),
        ("gate_up", 256, 8, 64, (32, 512, 4, 4), (64, 8, 4, 1)),
        ("o", 256, 64, 64, (16, 512, 2, 4), (128, 4, 4, 1)),
        ("qkv", 256, 64, 64, (32, 512, 1, 4), (64, 8, 4, 1)),
        ("down", 256, 64, 64, (16, 512, 2, 4), (128, 4, 4, 1)),
        ("gate_up", 256, 64, 64, (16, 512, 1, 4), (64, 8, 4, 1)),
    ],
)
def test_sizes_of_8_bits_in_small_batches(name, tokens, active, rank, shrink, expand):
    slices, inputs, outputs = LAYERS[name]
    batch = BatchShape(tokens, active, tile_tokens(tokens, active))
    tiles = choose_tiles(batch, LayerShape(slices, rank, inputs, outputs, 1))
    found = tiles.shrink
    assert (found.block_n, found.block_k, found.split_k, found.warps_k) == shrink
    found = tiles.expand
    assert (found.block_c, found.chunks, found.num_warps, found.num_stages) == expand


def test_long_layers_of_8_bits_have_two_parts_or_more():
    batch, layer = BatchShape(256, 64, 16), LayerShape(1, 64, 14336, 4096, 2)
    assert choose_tiles(batch, layer).shrink.split_k == 1
    assert choose_tiles(batch, replace(layer, item_bytes=1)).shrink.split_k == 2


def test_parts_of_the_inputs_are_nearly_equal():
    for inputs in (4096, 5120, 14336):
        for tokens, active in TOKENS[1:]:
            batch = BatchShape(tokens, active, tile_tokens(tokens, active))
            shrink = choose_tiles(batch, LayerShape(1, 16, inputs, 4096, 2)).shrink
            assert part_waste(inputs, shrink.block_k, shrink.split_k) <= 9 / 8


# by (rank, slices, inputs, outputs), then by tokens of 8 slots: block_n, split_k and num_stages of
# the shrink, then block_c, chunks, num_warps and num_stages of the expand
PREFILL = {
    (16, 1, 4096, 4096): {
        512: ((16, 8, 4), (128, 2, 4, 1)),
        1024: ((16, 8, 4), (128, 4, 4, 3)),
        2048: ((16, 4, 4), (64, 8, 8, 1)),
        4096: ((16, 2, 4), (128, 8, 4, 1)),
        8192: ((16, 2, 4), (128, 8, 8, 4)),
        16384: ((16, 1, 4), (128, 8, 8, 4)),
    },
    (64, 1, 4096, 4096): {
        512: ((16, 4, 4), (64, 4, 4, 1)),
        1024: ((32, 4, 4), (128, 4, 4, 3)),
        2048: ((64, 4, 4), (64, 8, 4, 3)),
        4096: ((64, 2, 6), (128, 8, 4, 3)),
        8192: ((64, 1, 6), (128, 16, 8, 3)),
        16384: ((64, 1, 6), (128, 8, 8, 3)),
    },
    (16, 1, 14336, 4096): {512: ((16, 14, 4), (64, 4, 4, 1)), 1024: ((16, 8, 4), (128, 4, 4, 3))},
    (64, 1, 14336, 4096): {512: ((32, 8, 4), (64, 4, 4, 1)), 2048: ((64, 4, 4), (64, 8, 4, 3))},
    (16, 3, 4096, 6144): {
        512: ((16, 4, 4), (64, 4, 4, 1)),
        1024: ((32, 4, 4), (64, 4, 4, 3)),
        2048: ((64, 4, 4), (64, 8, 8, 1)),
        8192: ((64, 1, 6), (128, 8, 8, 4)),
    },
    (64, 3, 4096, 6144): {
        512: ((64, 4, 4), (64, 4, 4, 1)),
        1024: ((128, 4, 5), (64, 4, 4, 3)),
        2048: ((256, 4, 4), (64, 8, 4, 3)),
        5120: ((256, 1, 5), (128, 8, 8, 3)),  # 2,048 columns would not divide the slices
        8192: ((256, 1, 5), (128, 8, 8, 3)),
    },
    (16, 2, 4096, 28672): {
        512: ((32, 4, 4), (128, 8, 4, 1)),
        1024: ((16, 4, 4), (128, 8, 8, 4)),
        2048: ((16, 2, 4), (128, 8, 8, 4)),
        8192: ((32, 1, 6), (128, 8, 8, 4)),
    },
    (64, 2, 4096, 28672): {
        512: ((64, 4, 4), (128, 8, 4, 3)),
        1024: ((32, 2, 4), (128, 8, 8, 3)),
        2048: ((64, 2, 4), (128, 8, 8, 3)),
        8192: ((128, 1, 6), (128, 8, 8, 3)),
    },
    (16, 1, 2048, 4096): {1024: ((16, 8, 2), (128, 4, 4, 3))},  # parts of two steps
}


def _sizes(tiles):
    shrink, expand = tiles.shrink, tiles.expand
    return (
        (shrink.block_n, shrink.split_k, shrink.num_stages),
        (expand.block_c, expand.chunks, expand.num_warps, expand.num_stages),
    )


@pytest.mark.parametrize("layer", PREFILL)
def test_shrinks_of_tiles_of_64_tokens_run_in_one_wave(layer):
    rank, slices, inputs, outputs = layer
    shape, found = LayerShape(slices, rank, inputs, outputs, 2), PREFILL[layer]
    for tokens in (512, 1024, 2048, 4096, 5120, 8192, 16384):
        batch = BatchShape(tokens, 8, 64)
        tiles = choose_tiles(batch, shape)
        if tokens in found:
            assert _sizes(tiles) == found[tokens], tokens
        programs = -(-shape.stacked // tiles.shrink.block_n) * batch.rows * tiles.shrink.split_k
        limit = 132 if rank > 16 or slices > 1 else 264
        assert programs <= limit or (batch.rows > 132 and tiles.shrink.split_k == 1)


@pytest.mark.parametrize(
    "layer, tokens, shrink, expand",
    [
        ((16, 1, 4096, 4096), 8192, (16, 2, 5), (128, 8, 8, 4)),
        ((64, 1, 4096, 4096), 2048, (64, 4, 3), (64, 8, 4, 1)),  # four parts of eight steps
        ((64, 1, 14336, 4096), 2048, (64, 8, 3), (64, 8, 4, 1)),
        ((64, 1, 4096, 4096), 8192, (64, 2, 3), (128, 16, 4, 3)),
        ((64, 3, 4096, 6144), 2048, (64, 4, 5), (64, 8, 4, 1)),
        ((16, 2, 4096, 28672), 8192, (32, 1, 5), (128, 8, 8, 4)),
        ((64, 2, 4096, 28672), 8192, (64, 1, 3), (128, 8, 4, 3)),
    ],
)
def test_sizes_of_8_bits_in_tiles_of_64_tokens(layer, tokens, shrink, expand):
    rank, slices, inputs, outputs = layer
    tiles = choose_tiles(BatchShape(tokens, 8, 64), LayerShape(slices, rank, inputs, outputs, 1))
    assert _sizes(tiles) == (shrink, expand)


def test_blocks_of_256_rows_of_a_are_for_gpus_with_room_for_tma():
    batch, layer = BatchShape(8192, 8, 64), LayerShape(3, 64, 4096, 6144, 2)
    without = Gpu(132, TMA_BYTES - 1)
    assert [choose_tiles(batch, layer, on).shrink.block_n for on in (H200, without)] == [256, 128]


def test_stacked_layers_of_blends_keep_the_sizes_that_they_were_measured_with():
    batch, layer = BatchShape(4096, 8, 64), LayerShape(6, 64, 4096, 6144, 2)
    shrink = rules_for(one_wave=False).choose_tiles(batch, layer).shrink
    assert shrink == ShrinkTiles(128, 64, 1, num_stages=4)
    assert rules_for().choose_tiles(batch, layer).shrink == ShrinkTiles(256, 64, 1, num_stages=5)


def test_sizes_of_8_bits_follow_from_any_sizes_of_16():
    """A user's table may hold any that pass `tile_faults`."""
    draw, found = random.Random(7), 0
    counts, blocks, steps = (1, 2, 4, 8, 16), (16, 32, 64, 128, 256), (64, 128, 256, 512, 1024)
    while found < 1000:
        tokens, tile = draw.choice((1, 3, 16, 64, 256, 600, 2048, 8192)), draw.choice((16, 32, 64))
        slices, rank = draw.choice((1, 3)), draw.choice((8, 16, 33, 64, 128))
        inputs, outputs = draw.choice((576, 4096, 5120, 14336)), draw.choice((4096, 6144, 28672))
        layer = LayerShape(slices, rank, inputs, outputs, 2)
        warps = draw.choice((0, *counts[:4])), draw.choice(counts)
        parts = draw.randint(1, 64)
        shrink = draw.choice(blocks), draw.choice(steps), parts, *warps, draw.randint(1, 8)
        expand = draw.choice(blocks), draw.choice(blocks[:3]), draw.choice(counts), 4
        tiles = TileConfig(ShrinkTiles(*shrink), ExpandTiles(*expand, draw.randint(0, 8)))
        if tile_faults(tiles, tile, layer):
            continue
        found += 1
        batch = BatchShape(tokens, draw.randint(1, min(tokens, 100)), tile)
        assert not tile_faults(of_8_bits(tiles, batch, layer), tile, replace(layer, item_bytes=1))


@pytest.mark.parametrize("rank, padded", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128)])
def test_padded_rank(rank, padded):
    assert padded_rank(rank) == padded


def test_worked_examples_of_sizes():
    for module in (alike, sizes, gpu, expert_rules, first_use):
        failed, attempted = doctest.testmod(module)
        assert attempted and not failed
