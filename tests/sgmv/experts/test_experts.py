"""Experts on the Triton engines: every way through the kernels, and the faults of others."""

import dataclasses
import importlib
import math

import pytest
import torch
from helpers.engines import DTYPES, ENGINES, ON_GPU, UNITS

from lora_backends import (
    ExpertWeights,
    LoRABackend,
    LoRABatch,
    get_backend,
    quantize_weights,
)
from lora_backends.eight_bit import LARGEST
from lora_backends.sgmv.experts import launch, routing, rules
from lora_backends.sgmv.experts.rules import PairShape, SiteShape
from lora_backends.sgmv.launching.driver import DriverKernel
from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.sgmv.tiles.sizes import TMA_BYTES, shrink_bytes
from lora_backends.testing import ExpertCase

kit = importlib.import_module("lora_backends.testing.properties.experts")

SLOTS, EXPERTS, TOP_K = 3, 4, 2
QWEN = SiteShape(2, 16, 2048, 1536, 768, 2, False)
DOWN = SiteShape(1, 16, 768, 2048, 2048, 2, False)
WIDE = SiteShape(1, 64, 14336, 4096, 4096, 2, False)
LONG = dataclasses.replace(WIDE, max_rank=16)
WIDE_UP = SiteShape(2, 16, 4096, 28672, 14336, 2, False)
ODD = SiteShape(3, 130, 77, 41, 33, 4, True)


@pytest.fixture
def make(device):
    """Return a function to one engine: the kernels of experts do not know of which."""
    return lambda **options: ENGINES["triton"](device, **options)


@pytest.fixture
def cut(monkeypatch):
    """Return a function that cuts pairs into tiles of a size; with 1 kernels run pair by pair.

    `alone`: each pair is a tile, whatever their size.
    """

    def cut_into(tile, alone=False):
        monkeypatch.setattr(rules, "tile_pairs", lambda *_: max(16, tile))
        monkeypatch.setattr(rules, "_MOST_ALONE", math.inf if alone else 0)
        monkeypatch.setattr(rules, "_ALONE", math.inf if tile == 1 else 0.0)
        monkeypatch.setattr(rules, "_SHARING", {})
        monkeypatch.setattr(rules, "_SHARING_OF_8", {})
        monkeypatch.setattr(rules, "_FEW_PAIRS", 0)
        forget()

    def forget():
        rules.choose_tiles.cache_clear()
        launch.kernels_of.cache_clear()

    yield cut_into
    monkeypatch.undo()
    forget()


@pytest.fixture
def launched(monkeypatch):
    """Return a list that gets the pairs per program of both kernels at each `run_experts`."""
    rows, launch_expand = [], launch.launch_expand

    def launch_and_note(call, found, h, to):
        rows.append(tuple(kernel.constants["SITE"].ROWS for kernel in (found.shrink, found.expand)))
        return launch_expand(call, found, h, to)

    monkeypatch.setattr(launch, "launch_expand", launch_and_note)
    return rows


def case(tokens=14, rank=5, **options):
    """Return a case in which some experts have many pairs, some one and some none."""
    num_a = options.pop("num_a", 2)
    ranks = [[[(s + e + a) % (rank + 1) for a in range(num_a)] for e in range(4)] for s in range(3)]
    ids = [(t % 4 if t > 2 else 3, (t // 3) % 3 if t % 5 else -1) for t in range(tokens)]
    fields = {
        "slots": tuple((-1, 0, 0, 0, 1, 2)[t % 6] for t in range(tokens)),
        "ids": tuple(ids),
        "num_experts": EXPERTS,
        "ranks": tuple(tuple(map(tuple, expert)) for expert in ranks),
        "max_rank": rank,
        "in_features": 40,
        "output_slices": (24, 24),
        "scalings": tuple(tuple((0.5,) * num_a for _ in range(4)) for _ in range(3)),
        "values": "integer",
        "base": torch.float32,
        "seed": 3,
    }
    return ExpertCase(**(fields | options))


CASES = {
    "plain": case(),
    "down": case(rows="pairs", weighted=True, num_a=1),
    "interleaved": case(interleaved=True),
    "summed": case(weighted=True, reduce=True),
    "summed, interleaved": case(interleaved=True, reduce=True),
    "long ranks": case(rank=60, base=torch.bfloat16),
    "one A for all experts": case(shared_a=True, num_a=1),
    "one A and B": case(shared_a=True, shared_b=True, weighted=True),
    "float16": case(dtype=torch.float16, base=torch.float16, max_rank=8),
}
EIGHT_BIT = {
    "int8": case(8, stored=torch.int8, rank=8, max_rank=8),
    "int8, interleaved": case(8, stored=torch.int8, dtype=torch.bfloat16, interleaved=True),
    "int8, interleaved, one A": case(
        8, stored=torch.int8, interleaved=True, num_a=1, weighted=True
    ),
    "int8, one A and B": case(8, stored=torch.int8, shared_a=True, shared_b=True, reduce=True),
    "e4m3, scale per matrix, one A": case(
        8, stored=torch.float8_e4m3fn, scale_block=(None, None), num_a=1, rows="pairs"
    ),
    "e4m3, long ranks": case(8, stored=torch.float8_e4m3fn, rank=70, dtype=torch.float16),
    "e5m2, blocks": case(8, stored=torch.float8_e5m2, scale_block=(3, 5), rank=20),
    "int8, blocks, interleaved": case(8, stored=torch.int8, scale_block=(5, 3), interleaved=True),
    "int8, blocks, interleaved, one A": case(
        8, stored=torch.int8, scale_block=(7, 32), interleaved=True, num_a=1, reduce=True
    ),
    "int8, blocks, long ranks": case(8, stored=torch.int8, scale_block=(4, 16), rank=40),
}


@pytest.mark.parametrize("tile", [1, 16, 128])
@pytest.mark.parametrize("name", CASES)
def test_tiles_of_every_size_give_the_one_right_result(backend, cut, launched, name, tile):
    cut(tile)
    chosen = CASES[name]
    kit.check_experts(backend, chosen, chosen.build(backend.device))
    assert launched and all((expand_rows == 1) == (tile == 1) for _, expand_rows in launched)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("plain", 1),
        ("down", 1),
        ("summed, interleaved", 1),
        ("one A for all experts", 1),
        ("one A and B", 16),
        ("down", 16),
    ],
)
def test_pairs_that_are_not_sorted_give_the_one_right_result(
    make, cut, launched, monkeypatch, name, rows
):
    """Kernels run pair by pair, or on tiles of a pair each; some pairs are dead."""
    backend, chosen = make(), CASES[name]
    cut(1, alone=True)
    made, shape_of = [], routing.pair_shape
    monkeypatch.setattr(
        routing, "pair_shape", lambda *given: made.append(shape_of(*given)) or made[-1]
    )
    if rows > 1:
        monkeypatch.setattr(rules, "_MOST_SINGLE_TILES", 0)
        monkeypatch.setattr(rules, "_MOST_SINGLE_RANKS", 0)
    kit.check_experts(backend, chosen, chosen.build(backend.device))
    assert made and all(shape.alone for shape in made)
    assert set(launched) == {(rows, rows)}


@pytest.mark.parametrize("most_compared", [0, 512])
@pytest.mark.parametrize("name", ["plain", "down", "summed", "float16"])
def test_a_shrink_of_tiles_feeds_an_expand_of_pairs(
    backend, cut, launched, monkeypatch, name, most_compared
):
    cut(1)
    monkeypatch.setattr(rules, "_MOST_SINGLE_TILES", 0)  # the shrink takes whole tiles
    monkeypatch.setattr(routing, "MOST_COMPARED", most_compared)
    chosen = CASES[name]
    kit.check_experts(backend, chosen, chosen.build(backend.device))
    assert set(launched) == {(16, 1)}


@pytest.mark.parametrize("name", ["plain", "summed", "float16"])
def test_a_pair_alone_may_have_several_blocks_of_columns(backend, cut, monkeypatch, name):
    """And a shrink that knows the rank before it reads A."""
    cut(1)
    original = rules.choose_tiles.__wrapped__

    def choose(*given):
        tiles = original(*given)
        assert tiles.shrink_rows == tiles.expand_rows == 1
        expand = dataclasses.replace(tiles.expand, block_c=16, chunks=2)
        return dataclasses.replace(tiles, expand=expand, eager_a=False)

    monkeypatch.setattr(rules, "choose_tiles", choose)
    chosen = CASES[name]
    kit.check_experts(backend, chosen, chosen.build(backend.device))


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_stacks_of_8_bits_give_the_one_right_result(backend, monkeypatch, cut, name, tile):
    cut(tile)
    monkeypatch.setattr(LoRABackend, "run_experts", None)  # not the default of every backend
    chosen = EIGHT_BIT[name]
    kit.check_experts(backend, chosen, chosen.build(backend.device))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity times 0, not kept
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", LARGEST)
def test_every_byte_has_its_value(make, cut, stored, dtype, tile):
    cut(tile)
    backend = make()
    every = torch.arange(256, dtype=torch.uint8).view(stored)
    one, x = torch.ones(1, 16).to(stored), torch.eye(16, dtype=dtype)
    y = run_stored(backend, x[:1], one, every[:, None])
    torch.testing.assert_close(y[0], every.to(dtype), rtol=0, atol=0, equal_nan=True)
    finite = torch.where(every.float().isfinite(), every.float(), 0).to(stored).reshape(16, 16)
    y = run_stored(backend, x, finite, torch.eye(16).to(stored))
    assert torch.equal(y, finite.to(dtype).T)


def run_stored(backend, x, a, b):
    """Return y of one expert with the stored values given, whose scales are 1, on the CPU."""
    weights = ExpertWeights(
        lora_a=a[None, None, None].to(backend.device),
        lora_b=b[None, None].to(backend.device),
        ranks=torch.full((1, 1, 1), len(a), dtype=torch.int32),
        scalings=torch.ones(1, 1, 1),
        output_slices=(len(b),),
        num_experts=1,
        a_scales=torch.ones(1, 1, 1, len(a), 1),
        b_scales=torch.ones(1, 1, len(b), 1),
        compute_dtype=x.dtype,
    )
    plan = backend.prepare_batch(LoRABatch([0] * len(x), 1))
    ids = torch.zeros(len(x), 1, dtype=torch.int64, device=backend.device)
    made = backend.prepare_experts(plan, ids, torch.ones(len(x), 1, device=backend.device), 1)
    return backend.run_experts(x.to(backend.device), weights, made)[:, 0].cpu()


def test_an_a_that_all_experts_share_may_have_scales_of_each(make):
    """And scales may be views with any strides."""
    backend = make()
    weights = layer(backend.device, rank=8, num_a=2)
    weights = dataclasses.replace(weights, lora_a=weights.lora_a[:, :1])
    weights = quantize_weights(weights, torch.int8, (3, 5))
    scales = weights.a_scales * torch.arange(1, EXPERTS + 1, device=backend.device).view(4, 1, 1, 1)
    spread = torch.stack([scales, scales * torch.nan], -1)[..., 0]
    weights = dataclasses.replace(weights, a_scales=spread)
    ids = torch.tensor([[0, 3], [1, 1], [2, -1], [0, 1]], device=backend.device)
    x, factors = torch.randn(4, 16, device=backend.device), torch.ones(4, 2, device=backend.device)
    results = []
    for engine in (backend, get_backend("torch_ref", device=backend.device)):
        plan = engine.prepare_batch(LoRABatch([0, 1, 2, -1], SLOTS))
        made = engine.prepare_experts(plan, ids, factors, EXPERTS)
        results.append(engine.run_experts(x, weights, made, torch.zeros(4, 2, 48).to(x)))
    size = float(results[1].abs().max())
    torch.testing.assert_close(*results, rtol=0, atol=size * 16 * UNITS[x.dtype])  # of 24 products
    assert results[0][:2].abs().min() > 0


@pytest.mark.parametrize("name", ["plain", "long ranks", "one A and B"])
def test_pairs_counted_by_key_give_the_one_right_result(backend, monkeypatch, name):
    monkeypatch.setattr(routing, "MOST_COMPARED", 0)
    chosen = CASES[name]
    kit.check_experts(backend, chosen, chosen.build(backend.device))


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("tma", [False, True])
def test_split_inputs_and_tma_give_the_one_right_result(make, monkeypatch, split_k, tma):
    monkeypatch.setattr(rules, "tile_pairs", lambda *_: 128)
    original = rules.choose_tiles

    def choose(pairs, site, gpu):
        tiles = original(pairs, site, gpu)
        shrink = dataclasses.replace(tiles.shrink, block_k=16, split_k=split_k)
        expand = dataclasses.replace(tiles.expand, num_stages=3 if tma else 1)
        return dataclasses.replace(tiles, shrink=shrink, expand=expand)

    monkeypatch.setattr(rules, "choose_tiles", choose)
    launch.kernels_of.cache_clear()
    chosen = case(tokens=30, rank=8, dtype=torch.float16, base=torch.float16)
    backend = make()
    try:
        kit.check_experts(backend, chosen, chosen.build(backend.device))
    finally:
        launch.kernels_of.cache_clear()


def test_ranks_and_scalings_changed_in_place_are_seen(backend):
    weights = layer(backend.device, rank=24)
    plan = backend.prepare_batch(LoRABatch([0, 1, 2, -1], SLOTS))
    ids = torch.tensor([[0, 3], [1, 1], [2, -1], [0, 1]], device=backend.device)
    made = backend.prepare_experts(plan, ids, torch.ones(4, 2, device=backend.device), EXPERTS)
    x = torch.randn(4, 16, device=backend.device)
    backend.run_experts(x, weights, made)
    weights.ranks.sub_(7)
    weights.scalings.mul_(3)
    y = backend.run_experts(x, weights, made)
    fresh = dataclasses.replace(weights, ranks=weights.ranks.clone())
    assert torch.equal(y, backend.run_experts(x, fresh, made))
    assert y[0].abs().sum() > 0 and not y[3].any()


def layer(device, rank, num_a=1, dtype=torch.float32):
    return ExpertWeights(
        lora_a=torch.randn(SLOTS, EXPERTS, num_a, rank, 16, device=device, dtype=dtype),
        lora_b=torch.randn(SLOTS, EXPERTS, 48, rank, device=device, dtype=dtype),
        ranks=torch.full((SLOTS, EXPERTS, num_a), rank, dtype=torch.int32, device=device),
        scalings=torch.ones(SLOTS, EXPERTS, num_a, device=device),
        output_slices=(24, 24),
        num_experts=EXPERTS,
    )


@pytest.mark.skipif(not ON_GPU, reason="needs 9 GiB of a GPU")
def test_offsets_of_a_large_stack_do_not_wrap(make):
    """Slot times stride exceeds int32; the memory between the experts is never touched."""
    backend, reach = make(), 2**31 + 2**20
    sizes = {"a": (2, 1, 1, 16, 16), "b": (2, 1, 16, 16)}
    views = {}
    for name, shape in sizes.items():
        flat = torch.zeros(reach, dtype=torch.float16, device=backend.device)
        rows = torch.ones(shape[-2:]).cumsum(0).flatten().to(flat)
        flat[: rows.numel()], flat[reach - rows.numel() :] = rows, -rows
        step = reach - rows.numel()
        strides = (step, step, *([16 * 16] if name == "a" else []), 16, 1)
        views[name] = flat.as_strided(shape, strides)
    weights = ExpertWeights(
        lora_a=views["a"],
        lora_b=views["b"],
        ranks=torch.full((2, 1, 1), 16, dtype=torch.int32, device=backend.device),
        scalings=torch.ones(2, 1, 1, device=backend.device),
        output_slices=(16,),
        num_experts=1,
    )
    plan = backend.prepare_batch(LoRABatch([0, 1], 2))
    ids = torch.zeros(2, 1, dtype=torch.int64, device=backend.device)
    made = backend.prepare_experts(plan, ids, torch.ones(2, 1, device=backend.device), 1)
    x = torch.ones(2, 16, dtype=torch.float16, device=backend.device) / 64
    y = backend.run_experts(x, weights, made)
    assert torch.equal(y[0], y[1]) and bool((y[0] != 0).all())


def test_sizes_are_fixed_for_a_batch_invariant_engine(make):
    backend, shapes = make(batch_invariant=True), set()
    for tokens in (1, 40):
        plan = backend.prepare_batch(LoRABatch([0] * tokens, 1))
        ids = torch.zeros(tokens, 3, dtype=torch.int64, device=backend.device)
        weights = torch.ones(tokens, 3, device=backend.device)
        made = backend.prepare_experts(plan, ids, weights, 9)
        shapes |= {made.shape, made.of_tokens}
    assert shapes == {PairShape(256, 64, 16)}


@pytest.mark.parametrize(
    ("pairs", "site", "rows"),
    [
        ((128, 82, 16), QWEN, 1),
        ((512, 413, 16), QWEN, 16),  # enough tiles to hide the loads
        ((64, 28, 16), QWEN, 16),  # pairs share their experts
        ((56, 28, 16), WIDE_UP, 16),  # too many planes of h
        ((128, 82, 16), dataclasses.replace(QWEN, max_rank=12), 16),
    ],
)
def test_few_tiles_of_short_inputs_are_shrunk_pair_by_pair(pairs, site, rows):
    assert rules.choose_tiles(PairShape(*pairs), site).shrink_rows == rows


@pytest.mark.parametrize(
    ("pairs", "site", "blocks"),
    [
        ((512, 413, 16), DOWN, (256, 2)),
        ((512, 413, 16), QWEN, (256, 1)),  # 3 blocks: two programs of 2 would waste a fourth
        ((128, 82, 16), DOWN, (512, 1)),  # too few programs
        ((128, 58, 16), WIDE_UP, (256, 4)),
        ((512, 252, 16), DOWN, (128, 4)),
        ((32, 27, 16), WIDE_UP, (512, 1)),  # slower in blocks, and so at ranks that need a mask:
        ((128, 58, 16), dataclasses.replace(WIDE_UP, max_rank=12), (128, 4)),
        ((128, 58, 16), dataclasses.replace(WIDE_UP, max_rank=8), (512, 1)),  # pair by pair
    ],
)
def test_many_columns_are_expanded_in_blocks_that_load_ahead(pairs, site, blocks):
    expand = rules.choose_tiles(PairShape(*pairs), site).expand
    assert (expand.block_c, expand.chunks) == blocks
    of_8_bits = rules.choose_tiles_of_8_bits(PairShape(512, 413, 16), site).expand
    assert of_8_bits.chunks == 1 and of_8_bits.block_c == 512, "half as many bytes a block"


@pytest.mark.parametrize(
    ("pairs", "num_a", "rank", "sizes"),
    [
        ((4096, 256, 32), 1, 16, (32, 16, 128, 2, 5)),
        ((4096, 256, 32), 1, 64, (32, 64, 64, 1, 5)),
        ((2048, 64, 64), 2, 16, (64, 32, 128, 4, 4)),  # few tiles
        ((2048, 64, 64), 2, 64, (64, 64, 128, 2, 3)),
        ((16384, 256, 64), 1, 16, (64, 16, 128, 1, 3)),
        ((32768, 1024, 64), 2, 16, (64, 32, 64, 1, 4)),
        ((32768, 128, 128), 1, 64, (64, 64, 64, 1, 4)),
        ((32768, 128, 128), 2, 64, (128, 64, 64, 1, 3)),  # one program per tile and block of A
        ((8192, 8, 128), 2, 64, (128, 64, 64, 2, 3)),
    ],
)
def test_shrinks_of_a_prefill(pairs, num_a, rank, sizes):
    site = dataclasses.replace(QWEN, num_a=num_a, max_rank=rank, in_features=4096)
    tiles = rules.choose_tiles(PairShape(*pairs), site)
    shrink = tiles.shrink
    assert shrink.warps_k == 1
    found = shrink.block_n, shrink.block_k, shrink.split_k, shrink.num_stages
    assert (tiles.shrink_rows, *found) == sizes


@pytest.mark.parametrize(
    ("widest", "rank", "chunks"),
    [
        (2880, 16, 15),  # 45 blocks divide by 5 and by 15
        (5760, 16, 15),
        (2048, 16, 8),
        (768, 16, 6),
        (5760, 64, 5),  # blocks of 128 columns
        (2880, 64, 15),  # blocks of 64
    ],
)
def test_programs_of_a_prefill_have_chunks_that_divide_the_columns(widest, rank, chunks):
    site = dataclasses.replace(DOWN, max_rank=rank, out_features=widest, widest=widest)
    pairs = PairShape(16384, 256, 64)
    expand = rules.choose_tiles(pairs, site).expand
    assert expand.chunks == chunks
    assert -(-widest // expand.block_c) % chunks == 0
    without_tma = rules.choose_tiles(pairs, site, Gpu(132, TMA_BYTES - 1)).expand
    assert without_tma.num_stages == 1 and without_tma.chunks <= 8


@pytest.mark.parametrize(
    ("pairs", "site", "shared_out", "eager"),
    [
        ((64, 28, 16), dataclasses.replace(DOWN, in_features=2880), True, True),
        ((32, 8, 16), LONG, True, True),
        ((32, 8, 16), dataclasses.replace(LONG, in_features=4096), True, True),
        ((32, 8, 16), dataclasses.replace(LONG, in_features=128), False, True),
        ((512, 168, 16), dataclasses.replace(DOWN, in_features=2880), True, False),
    ],
)
def test_shrinks_of_few_tiles_wait_for_fewer_loads(pairs, site, shared_out, eager):
    tiles = rules.choose_tiles(PairShape(*pairs), site)
    assert (tiles.shrink.warps_k > 1, tiles.eager_a) == (shared_out, eager)


@pytest.mark.parametrize(
    ("site", "tiles", "sizes"),
    [
        (QWEN, 8, (16, 8, 4)),  # planes give every multiprocessor a program
        (QWEN, 132, (16, 2, 4)),  # two planes at least, at rank 16
        (QWEN, 150, (16, 1, 4)),
        (QWEN, 300, (16, 1, 3)),  # 600 programs run at once with fewer stages
        (QWEN, 413, (16, 1, 2)),
        (QWEN, 600, (16, 1, 4)),  # 1,200 do not; with 4 stages the last wave is fuller
        (WIDE, 8, (16, 4, 4)),
        (WIDE, 132, (16, 1, 4)),
        (WIDE, 250, (32, 1, 4)),  # wider blocks
        (WIDE, 264, None),
    ],
)
def test_groups_of_warps_take_the_planes_and_stages_that_fill_waves(site, tiles, sizes):
    found = rules._shrink_in_groups(tiles, site)
    assert sizes == (found and (found.block_n, found.split_k, found.num_stages))
    assert found is None or (found.warps_k == 4) == (found.block_n == 16)


@pytest.mark.parametrize(
    ("pairs", "rank", "rows", "expand"),
    [
        ((8, 8, 16), 64, 1, (64, 1, 1, 4)),  # few tiles
        ((128, 120, 16), 64, 1, (128, 2, 1, 4)),  # a block is loaded while another is added
        ((128, 120, 16), 32, 1, (256, 1, 1, 4)),
        ((800, 790, 16), 64, 16, (128, 4, 2, 2)),  # so many that tiles win
        ((256, 120, 16), 32, 16, (128, 2, 2, 2)),  # TMA, by two warps
        ((64, 30, 16), 32, 16, (128, 1, 1, 4)),
        ((256, 120, 16), 128, 16, (128, 1, 1, 4)),  # ranks in two blocks
    ],
)
def test_long_ranks_are_expanded_by_tma_where_tiles_are_many(pairs, rank, rows, expand):
    site = dataclasses.replace(WIDE, max_rank=rank)
    tiles = rules.choose_tiles(PairShape(*pairs), site)
    found = tiles.expand
    sizes = found.block_c, found.chunks, found.num_stages, found.num_warps
    assert (tiles.expand_rows, sizes) == (rows, expand)
    small = rules.choose_tiles(PairShape(*pairs), site, Gpu(132, TMA_BYTES - 1))
    assert small.expand_rows == rows and small.expand.num_stages == 1
    assert small.expand.num_warps == 4


@pytest.mark.parametrize(("inputs", "sizes"), [(14336, (512, 8)), (4096, (256, 4))])
def test_long_ranks_pair_by_pair_are_shrunk_in_blocks_of_32_rows(inputs, sizes):
    site = dataclasses.replace(WIDE, in_features=inputs)
    shrink = rules.choose_tiles(PairShape(8, 8, 16), site).shrink
    assert (shrink.block_n, shrink.block_k, shrink.num_warps) == (32, *sizes)


@pytest.mark.parametrize("site", [QWEN, WIDE, ODD])
@pytest.mark.parametrize("keys", [2, 8, 100])
def test_a_gpu_of_half_the_size_takes_the_sizes_for_twice_the_tiles(site, keys):
    half = Gpu(H200.multiprocessors // 2, H200.shared_bytes)
    small, large = PairShape(keys, keys, 16), PairShape(2 * keys, 2 * keys, 16)
    tiles = rules.choose_tiles(small, site, half), rules.choose_tiles(large, site)
    assert tiles[0] == tiles[1]
    of_8_bits = rules.choose_tiles_of_8_bits
    assert of_8_bits(small, site, half) == of_8_bits(large, site)


@pytest.mark.parametrize("site", [QWEN, WIDE, ODD])
@pytest.mark.parametrize("tile", [16, 32, 64, 128])
@pytest.mark.parametrize("each", [1, 1.2, 4, 8])
@pytest.mark.parametrize("keys", [1, 8, 120, 4000])
@pytest.mark.parametrize("a_bytes", [None, 1])
@pytest.mark.parametrize("gpu", [H200, Gpu(58, 99 << 10), Gpu(304, 64 << 10)])
def test_sizes_fit_the_devices_and_the_kernels(site, tile, each, keys, a_bytes, gpu):
    pairs = PairShape(int(keys * each * tile // 16), keys, tile)
    choose = rules.choose_tiles_of_8_bits if a_bytes else rules.choose_tiles
    tiles = choose(pairs, site, gpu)
    if a_bytes:
        assert tiles.expand.num_stages == 1 or site.item_bytes == 4
    item_bytes = a_bytes if a_bytes and site.item_bytes == 2 else site.item_bytes
    shrink, expand = tiles.shrink, tiles.expand
    for size in (shrink.block_n, shrink.block_k, expand.block_c, expand.block_r):
        assert size >= 8 and size & (size - 1) == 0
    for rows, side in ((tiles.shrink_rows, shrink.block_n), (tiles.expand_rows, expand.block_c)):
        assert (rows == 1 and pairs.has_singles) or min(rows, side) >= 16
    assert tile % tiles.shrink_rows == tile % tiles.expand_rows == 0
    assert shrink.block_k >= 16 * shrink.warps_k
    if tiles.shrink_rows > 1:  # else A goes to registers
        assert shrink_bytes(shrink, tiles.shrink_rows, item_bytes) <= gpu.shared_bytes
    assert expand.num_stages == 1 or gpu.shared_bytes >= TMA_BYTES
    assert 1 <= shrink.split_k <= 32
    if tiles.expand_rows == 1:
        assert expand.block_r >= site.max_rank
    elif expand.block_r < site.max_rank or site.general:
        assert expand.chunks == 1


@pytest.mark.skipif(not ON_GPU, reason="needs compiled kernels")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [3, 300])
def test_repeated_calls_add_what_first_ones_do(make, monkeypatch, tokens, shared):
    """With other values, and a routing that is refilled."""
    made = make()
    weights = layer(made.device, rank=16, num_a=2, dtype=torch.bfloat16)
    if shared:
        weights = dataclasses.replace(weights, lora_a=weights.lora_a[:, :1].contiguous())
    routing_kept, seen, launch_kernel = None, [], DriverKernel.launch
    monkeypatch.setattr(
        DriverKernel, "launch", lambda *given: seen.append(1) or launch_kernel(*given)
    )
    slots = [t % SLOTS for t in range(tokens)]
    plan = made.prepare_batch(LoRABatch(slots, SLOTS))
    for step in range(5):
        ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), device=made.device)
        factors = torch.rand(tokens, TOP_K, device=made.device)
        x = torch.randn(tokens, 16, device=made.device, dtype=torch.bfloat16)
        y = torch.randn(tokens, TOP_K, 48, device=made.device, dtype=torch.bfloat16)
        other, expected = make(), y.clone()
        of_other = other.prepare_experts(
            other.prepare_batch(LoRABatch(slots, SLOTS)), ids, factors, EXPERTS
        )
        other.run_experts(x, weights, of_other, expected, weighted=True)
        seen.clear()
        routing_kept = made.prepare_experts(plan, ids, factors, EXPERTS, out=routing_kept)
        made.run_experts(x, weights, routing_kept, y, weighted=True)
        assert torch.equal(y, expected), step
    sorts = 1 if tokens * TOP_K <= routing.MOST_COMPARED else 2
    by_token = 1 if shared else 0
    assert len(seen) == sorts + by_token + 2 and len(made.routed_calls) == 1


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tokens", [3, 100])
def test_a_graph_of_later_sites_follows_refills(make, tokens, whole):
    """It captures the sort and both sites, or the later site alone, after one call of each."""
    made, reference = make(), get_backend("torch_ref", device=make().device)
    first, later = [layer(made.device, 16, num_a, torch.bfloat16) for num_a in (2, 1)]
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64, device=made.device)
    factors = torch.ones(tokens, TOP_K, device=made.device)
    x = torch.randn(tokens, 16, device=made.device, dtype=torch.bfloat16)
    of_pairs = torch.randn(tokens * TOP_K, 16, device=made.device, dtype=torch.bfloat16)
    ys = torch.zeros(2, tokens, TOP_K, 48, device=made.device, dtype=torch.bfloat16)
    plan = made.prepare_batch(LoRABatch([0] * tokens, SLOTS), capacity=tokens)
    kept = made.prepare_experts(plan, ids, factors, EXPERTS)

    def begin(backend, plan, routing, y):
        routing = backend.prepare_experts(plan, ids, factors, EXPERTS, out=routing)
        backend.run_experts(x, first, routing, y)
        return routing

    def end(backend, routing, y):
        backend.run_experts(of_pairs, later, routing, y, rows="pairs", weighted=True)

    begin(made, plan, kept, ys[0])
    end(made, kept, ys[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if whole:
            begin(made, plan, kept, ys[0])
        end(made, kept, ys[1])
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        batch = LoRABatch(torch.randint(-1, SLOTS, (tokens,), generator=generator), SLOTS)
        ids.copy_(torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=generator))
        factors.copy_(torch.rand(tokens, TOP_K, generator=generator))
        made.prepare_batch(batch, out=plan)
        ys.zero_()
        if not whole:
            begin(made, plan, kept, ys[0])
        graph.replay()
        expected = torch.zeros_like(ys)
        routed = begin(reference, reference.prepare_batch(batch), None, expected[0])
        end(reference, routed, expected[1])
        size = float(expected.abs().max())
        torch.testing.assert_close(ys, expected, rtol=0, atol=size * 16 * UNITS[x.dtype])
