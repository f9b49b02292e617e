"""Plans with room, tensors per slice and factors on the Triton engines, against torch_ref."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.engines import UNITS, VARIANTS, device_or_skip, make_engine

from lora_backends import InvalidInputError, LoRABatch, LoRAWeights, get_backend, quantize_weights
from lora_backends.dispatch.many_adapters import sorted_tokens
from lora_backends.sgmv import launch
from lora_backends.sgmv.blends.launch import kernels_of
from lora_backends.sgmv.blends.plan import choose_cut, cut_tiles, room_of
from lora_backends.sgmv.launching.kernel import SpecializedKernel
from lora_backends.sgmv.tiles.rules import tile_tokens
from lora_backends.sgmv.tiles.sizes import (
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
)
from lora_backends.sgmv.tiles.source import fixed_source

SLOTS, RANK, INPUTS, WIDTHS = 3, 8, 48, (32, 17, 40)
OUT = sum(WIDTHS)


@pytest.fixture
def device():
    return device_or_skip()


ROW_BY_ROW = TileConfig(ShrinkTiles(16, 16, 2, warps_k=0), ExpandTiles(16, 16, 2, num_stages=0))


@pytest.fixture(params=[*VARIANTS, "row by row"])
def engine(request, device):
    if request.param in VARIANTS:
        return make_engine(request.param, device)
    return make_engine("triton", device, tiles=fixed_source(16, ROW_BY_ROW))


def layer(device, dtype=torch.float32, **extra):
    torch.manual_seed(5)
    weights = LoRAWeights(
        lora_a=torch.randn(SLOTS, 3, RANK, INPUTS).to(device, dtype),
        lora_b=torch.randn(SLOTS, OUT, RANK).to(device, dtype),
        ranks=torch.tensor([[8, 3, 5], [0, 8, 1], [8, 8, 0]]),
        scalings=torch.rand(SLOTS, 3) + 0.5,
        output_slices=WIDTHS,
    )
    return replace(weights, **extra)


def per_slice(weights, *, spread):
    """Return the same layer with one tensor per slice; spread: with NaN between rows and slots."""

    def own(part):
        if not spread:
            return part.clone()
        shape = (part.shape[0], part.shape[1] + 1, part.shape[2] + 3)
        gaps = torch.full(shape, 99 if part.dtype == torch.int8 else torch.nan, device=part.device)
        gaps = gaps.to(part.dtype)
        return gaps[:, : part.shape[1], : part.shape[2]].copy_(part)

    return replace(
        weights,
        lora_a=tuple(own(weights.a_of(s)) for s in range(3)),
        lora_b=tuple(own(weights.b_of(s)) for s in range(3)),
    )


def rows(count, width, device, dtype=torch.float32, seed=1):
    return torch.randn(count, width, generator=torch.manual_seed(seed)).to(device, dtype)


def agree(y, expected, base, dtype=torch.float32):
    if not expected.numel():
        assert y.shape == expected.shape
        return
    size = (expected - base).norm(torch.inf) + expected.norm(torch.inf) + 1
    torch.testing.assert_close(y, expected, rtol=0, atol=float(size) * 16 * UNITS[dtype])


def reference(device):
    return get_backend("torch_ref", device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_factors_follow_the_formula(engine, device, dtype, has_bias):
    extra = {"output_scales": torch.rand(SLOTS, OUT, device=device) + 0.5}
    if has_bias:
        extra["bias"] = rows(SLOTS, OUT, device, dtype, seed=3)
    weights = layer(device, dtype, **extra)
    batch = LoRABatch([0, 1, -1, 2, 0, 1], SLOTS, token_scales=[1.5, -0.25, 7, 0, 2, 1])
    x, base = rows(6, INPUTS, device, dtype), rows(6, OUT, device, dtype, seed=2)
    expected = reference(device).run_linear(
        x, weights, reference(device).prepare_batch(batch), base.clone()
    )
    plan = engine.prepare_batch(batch)
    y = engine.run_linear(x, weights, plan, base.clone())
    agree(y, expected, base, dtype)
    assert torch.equal(y[2], base[2])
    h = engine.run_lora_a(x, weights, plan)
    agree(engine.run_lora_b(h, weights, plan, base.clone()), expected, base, dtype)


@pytest.mark.parametrize("name", ["triton", "csgmv"])
def test_one_tile_of_a_high_rank_follows_the_formula(name, device):
    """Groups of warps share out a step of 256 inputs; a program takes 1,024 of 2,048."""
    slots, inputs, outputs = 3, 2048, (40, 24)
    a, b = rows(slots * 2 * 64, inputs, device), rows(slots * 64, 64, device, seed=3)
    weights = LoRAWeights(
        lora_a=(a / inputs**0.5).bfloat16().reshape(slots, 2, 64, inputs),
        lora_b=b.bfloat16().reshape(slots, 64, 64),
        ranks=torch.tensor([[64, 64], [64, 33], [0, 64]], dtype=torch.int32),
        scalings=torch.tensor([[0.5, 2], [0.25, 1], [1, 1]]),
        output_slices=outputs,
    )
    batch = LoRABatch([1] * 5 + [-1] + [1] * 8, slots)
    x, base = rows(14, inputs, device, torch.bfloat16), rows(14, 64, device, torch.bfloat16, seed=2)
    engine = get_backend(name, device=device)
    plan = engine.prepare_batch(batch)
    chosen = engine.tile_source.choose_tiles(
        BatchShape(14, 1, plan.tile_tokens), LayerShape(2, 64, inputs, 64, 2)
    )
    assert (chosen.shrink.block_k, chosen.shrink.warps_k) == (256, 4)
    y = engine.run_linear(x, weights, plan, base.clone())
    expected = reference(device).run_linear(
        x, weights, reference(device).prepare_batch(batch), base.clone()
    )
    agree(y, expected, base, torch.bfloat16)
    assert torch.equal(y[5], base[5])


@pytest.mark.parametrize("spread", [False, True])
def test_tensors_per_slice_give_the_bits_of_one_stack(engine, device, spread, request):
    weights = layer(device)
    parts = per_slice(weights, spread=spread)
    batch = LoRABatch([0, 1, 2, 2, -1, 0, 1], SLOTS)
    plan = engine.prepare_batch(batch)
    x, base = rows(7, INPUTS, device), rows(7, OUT, device, seed=2)
    for first in (x, torch.arange(7, device=device)):
        run = engine.run_linear if first is x else engine.run_embedding
        one, other = (run(first, layout, plan, base.clone()) for layout in (weights, parts))
        agree(other, one, base)
        # without a matrix product, the layout of the loads decides the order of sums
        assert torch.equal(other, one) or request.node.callspec.params["engine"] == "row by row"
    one, other = (engine.run_lora_a(x, layout, plan) for layout in (weights, parts))
    torch.testing.assert_close(
        other, one, rtol=0, atol=float(one.abs().max()) * 16 * UNITS[x.dtype]
    )
    assert torch.equal(other, one) or request.node.callspec.params["engine"] == "row by row"


def test_scales_of_an_adapter_without_ranks_are_not_read(engine, device):
    scales = torch.rand(SLOTS, OUT, device=device) + 0.5
    weights = quantize_weights(layer(device, output_scales=scales), torch.int8)
    base, x = rows(4, OUT, device), rows(4, INPUTS, device)
    batch = LoRABatch([1, 0, 1, 2], SLOTS)
    reference = get_backend("torch_ref", device=device)
    expected = reference.run_linear(x, weights, reference.prepare_batch(batch), base.clone())
    weights.b_scales[1, : WIDTHS[0]] = torch.nan  # of slot 1, whose first slice has rank 0
    weights.b_scales[2, -WIDTHS[2] :] = torch.nan
    y = engine.run_linear(x, weights, engine.prepare_batch(batch), base.clone())
    agree(y, expected, base)


@pytest.mark.parametrize(
    "stored, block",
    [
        (torch.int8, (1, None)),
        (torch.int8, (4, 16)),
        (torch.float8_e4m3fn, (None, None)),
        (torch.float8_e5m2, (3, None)),
    ],
)
def test_8_bit_stacks_are_widened_and_scaled(engine, device, stored, block):
    weights = quantize_weights(layer(device), stored, block)
    weights.a_scales[1, 0] = torch.nan  # of rank 0
    batch = LoRABatch([0, 1, -1, 2, 0, 1], SLOTS, token_scales=[1.5, -0.25, 7, 0, 2, 1])
    plan, reference_plan = engine.prepare_batch(batch), reference(device).prepare_batch(batch)
    for dtype in (torch.float32, torch.bfloat16):
        x, base = rows(6, INPUTS, device, dtype), rows(6, OUT, device, dtype, seed=2)
        for of_layer in (weights, per_slice(weights, spread=True)):
            expected = reference(device).run_linear(x, of_layer, reference_plan, base.clone())
            agree(engine.run_linear(x, of_layer, plan, base.clone()), expected, base, dtype)
    ids, base = torch.arange(6, device=device), rows(6, OUT, device, seed=2)
    expected = reference(device).run_embedding(ids, weights, reference_plan, base.clone())
    agree(engine.run_embedding(ids, weights, plan, base.clone()), expected, base)
    h = engine.run_lora_a(rows(6, INPUTS, device), weights, plan)
    expected = reference(device).run_lora_b(h, weights, reference_plan, base.clone())
    agree(engine.run_lora_b(h, weights, plan, base.clone()), expected, base)


def test_a_wide_product_of_8_bits_is_right(device):
    """Tiles of 64 tokens and blocks of 64 rows of A multiply by wgmma on a GPU."""
    tiles = TileConfig(ShrinkTiles(64, 64, 4), ExpandTiles(16, 64, 1))
    backend = make_engine("triton", device, tiles=fixed_source(64, tiles))
    reference_of = reference(device)
    tokens, inputs, rank = 513, 1100, 64
    full = LoRAWeights(
        lora_a=rows(rank, inputs, device)[None, None],
        lora_b=rows(16, rank, device, seed=2)[None],
        ranks=torch.tensor([[rank - 5]]),
        scalings=torch.ones(1, 1),
        output_slices=(16,),
    )
    batch = LoRABatch([0] * tokens, 1)
    plan, reference_plan = backend.prepare_batch(batch), reference_of.prepare_batch(batch)
    weights = quantize_weights(full, torch.int8)
    x = rows(tokens, inputs, device, torch.bfloat16)
    kernel = launch.kernels_of(
        weights, launch.stacks_of(weights), plan, tokens, x.dtype, backend._options
    ).shrink
    assert kernel.sizes.BLOCK_N == kernel.constants["ROW"].SEGMENT == 64
    assert kernel.sizes.WARPS_K == 1
    wanted = reference_of.run_linear(x, weights, reference_plan)
    agree(backend.run_linear(x, weights, plan), wanted, torch.zeros_like(wanted), torch.bfloat16)


def test_halves_run_alone_and_out_is_overwritten(engine, device):
    weights = layer(device)
    batch = LoRABatch([0, -1, 2], SLOTS)
    plan, x = engine.prepare_batch(batch), rows(3, INPUTS, device)
    h = engine.run_lora_a(x, weights, plan)
    out = torch.full_like(h, torch.nan)
    assert engine.run_lora_a(x, replace(weights, lora_b=None), plan, out=out) is out
    assert torch.equal(out, h)
    y = engine.run_lora_b(h, replace(weights, lora_a=None), plan)
    assert torch.equal(y, engine.run_lora_b(h, weights, plan))


def test_one_plan_with_room_serves_batches_of_every_size(engine, device):
    weights = layer(device)
    plan = engine.prepare_batch(LoRABatch([0], SLOTS), capacity=200)
    for step, (tokens, more) in enumerate([(0, 5), (3, 0), (200, 0), (70, 30), (1, 199), (33, 1)]):
        generator = torch.manual_seed(step)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator)
        scales = torch.rand(tokens, generator=generator) if step % 2 else None
        batch = LoRABatch(slots, SLOTS, token_scales=scales)
        assert engine.prepare_batch(batch, out=plan) is plan
        x, base = rows(tokens + more, INPUTS, device), rows(tokens + more, OUT, device, seed=2)
        y = engine.run_linear(x, weights, plan, base.clone())
        expected = reference(device).run_linear(
            x[:tokens], weights, reference(device).prepare_batch(batch), base[:tokens].clone()
        )
        agree(y[:tokens], expected, base[:tokens])
        assert torch.equal(y[tokens:], base[tokens:])
    with pytest.raises(InvalidInputError, match="room for 200 tokens"):
        engine.prepare_batch(LoRABatch([0] * 201, SLOTS), out=plan)


def test_a_refill_changes_between_one_adapter_and_scales_without_a_trace(engine, device):
    weights = layer(device)
    x, base = rows(4, INPUTS, device), rows(4, OUT, device, seed=2)
    plan = engine.prepare_batch(LoRABatch([0, 1, 2, 0], SLOTS))
    plain = engine.run_linear(x, weights, plan, base.clone())
    engine.prepare_batch(LoRABatch([0, 1, 2, 0], SLOTS, [2.0] * 4), out=plan)
    assert not torch.equal(engine.run_linear(x, weights, plan, base.clone()), plain)
    engine.prepare_batch(LoRABatch([0, 1, 2, 0], SLOTS), out=plan)
    assert torch.equal(engine.run_linear(x, weights, plan, base.clone()), plain)


def test_a_graph_follows_refills_of_fewer_tokens_scales_and_ranks(engine, device):
    if device.type != "cuda":
        pytest.skip("graphs need a GPU")
    weights = per_slice(layer(device, torch.bfloat16), spread=False)
    x = rows(64, INPUTS, device, torch.bfloat16)
    base = rows(64, OUT, device, torch.bfloat16, seed=2)
    start = LoRABatch([0] * 64, SLOTS, token_scales=[1.0] * 64)
    plan = engine.prepare_batch(start, capacity=100)
    y = base.clone()
    engine.run_linear(x, weights, plan, y)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(base)
        engine.run_linear(x, weights, plan, y)
    for step, tokens in enumerate([64, 1, 0, 40, 64]):
        generator = torch.manual_seed(step)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator)
        scales = torch.rand(tokens, generator=generator) if step % 2 else None
        batch = LoRABatch(slots, SLOTS, token_scales=scales)
        weights.ranks.copy_(torch.randint(0, RANK + 1, (SLOTS, 3), generator=generator))
        weights.scalings.copy_(torch.rand(SLOTS, 3, generator=generator))
        engine.prepare_batch(batch, out=plan)
        graph.replay()
        expected = reference(device).run_linear(
            x[:tokens], weights, reference(device).prepare_batch(batch), base[:tokens].clone()
        )
        agree(y[:tokens], expected, base[:tokens], torch.bfloat16)
        assert torch.equal(y[tokens:], base[tokens:])


def test_a_captured_plan_without_scales_refuses_a_batch_with_scales(engine, device):
    if device.type != "cuda":
        pytest.skip("graphs need a GPU")
    weights = layer(device)
    plan, x = engine.prepare_batch(LoRABatch([0] * 4, SLOTS)), rows(4, INPUTS, device)
    y = engine.run_linear(x, weights, plan)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        engine.run_linear(x, weights, plan, y)
    with pytest.raises(InvalidInputError, match="captured the plan without token_scales"):
        engine.prepare_batch(LoRABatch([0] * 4, SLOTS, [1.0] * 4), out=plan)


BLENDS = [[0, 2], [2, -1], [-1, -1], [1, 1], [2, 0], [0, 1]]


@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
def test_all_adapters_of_a_token_are_added_in_one_pass_and_rounded_once(
    device, stored, monkeypatch
):
    backend = make_engine("triton", device)
    weights = layer(device, torch.bfloat16, bias=torch.randn(SLOTS, OUT).to(device))
    weights.scalings[weights.ranks == 0] = torch.nan
    weights = weights if stored is None else quantize_weights(weights, stored)
    batch = LoRABatch(BLENDS * 4, SLOTS, torch.rand(24, 2))
    plan, x = backend.prepare_batch(batch), rows(24, INPUTS, device, torch.bfloat16)
    base = torch.randn(24, OUT, device=device)
    # in float32, rounded here
    wanted = reference(device).prepare_batch(batch)
    wanted = reference(device).run_linear(x, weights, wanted, base.bfloat16().float())
    # a captured grid may have fewer rows than a batch has tiles
    assert plan.joint.num_tiles > 1
    monkeypatch.setattr(type(plan.joint), "grid_rows", lambda self, capturing, rows: 1)
    plan.plans = plan.plans[:1]  # passes of one adapter would leave some out
    y = backend.run_linear(x, weights, plan, base.bfloat16())
    agree(y.float(), wanted, base, torch.bfloat16)
    assert torch.equal(y[2::6], base.bfloat16()[2::6])  # without an adapter


@pytest.mark.parametrize("tokens, rank", [(24, 8), (12, 8), (24, 130), (2, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinite_values_of_an_adapter_reach_only_its_tokens(device, tokens, rank, dtype):
    """12 and 24 tokens of unlike adapters share tiles; two tokens run row by row."""
    backend, slots, inputs = make_engine("triton", device), 5, 2048 if tokens == 2 else 48
    weights = LoRAWeights(
        lora_a=rows(slots * rank, inputs, device, dtype).reshape(slots, 1, rank, inputs) / 16,
        lora_b=rows(slots * 40, rank, device, dtype).reshape(slots, 40, rank),
        ranks=torch.full((slots, 1), rank),
        scalings=torch.full((slots, 1), 0.5),
        output_slices=(40,),
    )
    weights.lora_b[1, 3, 2] = torch.inf
    chosen = torch.tensor([[t % 5, (t + 1 + t // 5) % 5] for t in range(tokens)])
    batch = LoRABatch(chosen, slots, torch.rand(tokens, 2))
    plan, x = backend.prepare_batch(batch), rows(tokens, inputs, device, dtype)
    assert plan.joint.merged == (tokens > 2)
    y = backend.run_linear(x, weights, plan).float()
    wanted = reference(device).prepare_batch(batch)
    wanted = reference(device).run_linear(x, weights, wanted).float()
    has = (chosen == 1).any(1)
    assert not y[has, 3].isfinite().any()
    y[has, 3] = wanted[has, 3] = 0
    agree(y, wanted, torch.zeros_like(y), dtype)


@pytest.mark.parametrize(
    "how, tokens, rank, dtype",
    [
        ("together", 48, 16, torch.bfloat16),
        ("together", 48, 130, torch.bfloat16),  # a rank in steps
        ("entries", 48, 16, torch.float16),  # factors do not multiply h
        ("tma", 516, 16, torch.bfloat16),
        ("tma", 516, 24, torch.bfloat16),  # the rank ends inside a block
        ("entries", 516, 16, torch.float16),
    ],
    ids=str,
)
def test_like_tokens_get_the_sum_of_their_adapters(device, how, tokens, rank, dtype, monkeypatch):
    backend, slots, ranks = make_engine("triton", device), 4, torch.tensor([rank, 5, 0, rank])
    weights = LoRAWeights(
        lora_a=rows(slots * rank, 48, device, dtype).reshape(slots, 1, rank, 48) / 16,
        lora_b=rows(slots * 40, rank, device, dtype).reshape(slots, 40, rank),
        ranks=ranks[:, None],
        scalings=torch.rand(slots, 1) + 0.5,
        output_slices=(40,),
    )
    weights.lora_b[1, :, 5:] = torch.nan  # beyond the rank
    weights.scalings[2] = torch.nan  # of rank 0
    chosen = torch.arange(tokens) * slots // tokens
    chosen = torch.stack([chosen, (chosen + 1) % slots, (chosen + 2) % slots], 1)
    batch = LoRABatch(chosen, slots, torch.rand(tokens, 3))
    plan, x = backend.prepare_batch(batch), rows(tokens, 48, device, dtype)
    launched, launch = [], SpecializedKernel.launch

    def record(kernel, *arguments):
        launched.append(kernel.constants.get("HOW"))
        return launch(kernel, *arguments)

    monkeypatch.setattr(SpecializedKernel, "launch", record)
    y = backend.run_linear(x, weights, plan).float()
    if device.type == "cpu" or how != "tma":  # a GPU may lack it
        assert launched == [None, how]
    wanted = reference(device).prepare_batch(batch)
    wanted = reference(device).run_linear(x, weights, wanted).float()
    agree(y, wanted, torch.zeros_like(y), dtype)


@pytest.mark.parametrize(
    "n, rank, dtype",
    [(2, 8, torch.bfloat16), (3, 64, torch.bfloat16), (4, 16, torch.float16)],
)
@pytest.mark.parametrize("biased, apart", [(False, False), (True, False), (True, True)])
def test_one_token_gets_the_sum_of_its_adapters(device, n, rank, dtype, biased, apart, monkeypatch):
    backend, slots, inputs = make_engine("triton", device), 6, 2048
    ranks = torch.tensor([rank, 5, 0, rank, 1, rank])
    weights = LoRAWeights(
        lora_a=rows(slots * 2 * rank, inputs, device, dtype).reshape(slots, 2, rank, -1) / 64,
        lora_b=rows(slots * 88, rank, device, dtype).reshape(slots, 88, rank),
        ranks=torch.stack([ranks, ranks.flip(0)], 1),
        scalings=torch.rand(slots, 2) + 0.5,
        output_slices=(48, 40),
        bias=rows(slots, 88, device, dtype) if biased else None,
    )
    weights.scalings[2, 0] = torch.nan  # of rank 0
    weights.lora_b[1, :48, 5:] = torch.nan  # beyond the rank
    if apart:  # a tensor per slice
        a = tuple(each.contiguous() for each in weights.lora_a.unbind(1))
        b = tuple(each.contiguous() for each in weights.lora_b.split([48, 40], 1))
        weights = replace(weights, lora_a=a, lora_b=b)
    launched, launch = [], SpecializedKernel.launch

    def record(kernel, *arguments):
        launched.append(kernel.constants.get("HOW"))
        return launch(kernel, *arguments)

    monkeypatch.setattr(SpecializedKernel, "launch", record)
    plan = backend.prepare_batch(LoRABatch([[-1] * n], slots), capacity=1)
    some = [3, -1, 4, -1][:n], [0, 5, -1, 2][:n], [5, -1, -1, -1][:n]
    for chosen in ([1, 2, 3, 5][:n], *some, [-1] * n):
        batch = LoRABatch([chosen], slots, torch.rand(1, n))
        x, base = rows(1, inputs, device, dtype), torch.randn(1, 88, device=device)
        launched.clear()
        plan = backend.prepare_batch(batch, out=plan)
        y = backend.run_linear(x, weights, plan, base.to(dtype)).float()
        assert max(chosen) < 0 or launched[-1] == "row"
        wanted = reference(device).prepare_batch(batch)
        wanted = reference(device).run_linear(x, weights, wanted, base.to(dtype).float())
        agree(y, wanted, base, dtype)


def test_one_token_asks_for_the_sizes_of_one_shrink(device):
    """Tuning at first use takes up to 20 seconds for each request for sizes."""
    asked, source = [], fixed_source(16, ROW_BY_ROW)

    def choose(batch, layer):
        asked.append((batch.num_tokens, batch.active_slots))
        return source.choose_tiles(batch, layer)

    backend = make_engine("triton", device, tiles=replace(source, choose_tiles=choose))
    weights = LoRAWeights(
        lora_a=rows(2 * 16, 2048, device, torch.bfloat16).reshape(2, 1, 16, 2048) / 64,
        lora_b=rows(2 * 40, 16, device, torch.bfloat16).reshape(2, 40, 16),
        ranks=torch.full((2, 1), 16),
        scalings=torch.ones(2, 1),
        output_slices=(40,),
    )
    x = rows(1, 2048, device, torch.bfloat16)
    backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([[0, 1]], 2)))
    assert asked == [(1, 1)]


def test_planes_of_a_long_shrink_of_many_ranks_are_added_up_before_the_expand(device, monkeypatch):
    backend, slots, inputs, tokens = make_engine("triton", device), 4, 8224, 16
    weights = LoRAWeights(
        lora_a=rows(slots * 33, inputs, device, torch.bfloat16).reshape(slots, 1, 33, inputs) / 64,
        lora_b=rows(slots * 40, 33, device, torch.bfloat16).reshape(slots, 40, 33),
        ranks=torch.tensor([[33], [5], [0], [33]]),
        scalings=torch.rand(slots, 1) + 0.5,
        output_slices=(40,),
    )
    first = torch.arange(tokens) % slots
    second, third = torch.where(first % 2 > 0, (first + 3) % slots, -1), (first + 1) % slots
    chosen = torch.stack([first, second, third], 1)
    chosen[3] = -1
    batch = LoRABatch(chosen, slots, torch.rand(tokens, 3))
    plan, x = backend.prepare_batch(batch), rows(tokens, inputs, device, torch.bfloat16)
    launched, launch = [], SpecializedKernel.launch

    def record(kernel, *arguments):
        launched.append(getattr(kernel.sizes, "PLANES", 0))
        return launch(kernel, *arguments)

    monkeypatch.setattr(SpecializedKernel, "launch", record)
    y = backend.run_linear(x, weights, plan).float()
    assert [planes > 4 for planes in launched] == [False, True, False]
    wanted = reference(device).prepare_batch(batch)
    wanted = reference(device).run_linear(x, weights, wanted).float()
    agree(y, wanted, torch.zeros_like(y), torch.bfloat16)


def test_a_capture_finds_the_kernels_of_the_eager_call_before_it(device):
    """Tokens have one of four possible adapters, so their pairs are far fewer than there may be."""
    backend, weights, tokens = make_engine("triton", device), layer(device, torch.bfloat16), 200
    chosen = torch.full((tokens, 4), -1)
    chosen[:, 0] = torch.arange(tokens) % SLOTS
    blend = backend.prepare_batch(LoRABatch(chosen, SLOTS)).joint
    wide = replace(weights, lora_a=torch.empty(SLOTS, 3, RANK, 4096).to(weights.lora_a))
    given = wide, launch.stacks_of(wide), blend, tokens, torch.bfloat16, backend._options
    eager = kernels_of(*given)
    blend.is_captured = True
    assert blend.by_pair and kernels_of(*given) == eager


@pytest.mark.parametrize(
    "tokens, slots, n, unlike, cut",
    [
        (64, 8, 2, False, (16, 2, False, True)),  # 8 sets
        (64, 8, 4, False, (16, 8, True, True)),  # each adapter has 4 sets
        (16, 8, 2, True, (16, 8, True, True)),
        (64, 64, 2, True, (16, 2, False, True)),  # few tokens would share a tile
        (64, 12, 4, True, (16, 8, True, True)),
        (4096, 8, 4, True, (64, 4, False, False)),
    ],
    ids=str,
)
def test_tiles_take_unlike_tokens_if_they_would_read_adapters_often(tokens, slots, n, unlike, cut):
    chosen = torch.stack([torch.arange(tokens) + j for j in range(n)], 1) % slots
    if unlike:
        chosen = torch.rand(tokens, slots, generator=torch.Generator().manual_seed(3))
        chosen = chosen.argsort(1)[:, :n]
    batch = LoRABatch(chosen, slots)
    assert choose_cut(batch, sorted_tokens(batch), tile_tokens) == cut


def test_rows_of_a_captured_grid_beyond_the_tiles_have_no_tokens():
    joint = make_engine("triton", "cpu").prepare_batch(LoRABatch([[0, 1]] * 20, SLOTS)).joint
    starts = joint.tables[1][: joint.room + 1]
    assert joint.num_tiles == 2 < joint.room
    assert starts[2:].tolist() == [20] * (joint.room - 1)


def test_tiles_name_few_slots_and_every_token_once():
    slots = torch.randint(-1, 20, (200, 3), generator=torch.Generator().manual_seed(4))
    found = sorted_tokens(LoRABatch(slots, 20))
    keys = np.where(found.live, found.slots * 3 + found.repeats, -1)
    starts, tiles = cut_tiles(keys, 16, 8)
    assert starts[0] == 0 and starts[-1] == len(found.tokens) == int((slots >= 0).any(1).sum())
    for first, end, entries in zip(starts, starts[1:], tiles, strict=False):
        assert 0 < end - first <= 16 and len(entries) <= 8 and entries == sorted(set(entries))
        assert set(keys[first:end].ravel().tolist()) - {-1} == set(entries)
    assert len(tiles) <= room_of(200, 3, 8, merged=True)
