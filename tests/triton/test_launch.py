"""Both kernels against the definition, with tiles other than those that would be chosen."""

import random

import pytest
import torch
from layers import per_token, small_batch, small_weights

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.gpu.choice import fixed_choice
from lora_backends.triton import TritonBackend, config, launch
from lora_backends.triton import plan as plans
from lora_backends.triton.config import ExpandTiles, ShrinkTiles
from lora_backends.triton.plan import count_active

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}
SHRINKS = [
    ShrinkTiles(block_n=16, block_k=16, split_k=1),
    ShrinkTiles(block_n=64, block_k=32, split_k=3),
    ShrinkTiles(block_n=16, block_k=64, split_k=2, warps_k=4),
]
EXPANDS = [ExpandTiles(16, 16), ExpandTiles(32, 16, chunks=4), ExpandTiles(64, 16, chunks=2)]


def _on(device, weights):
    moved = {
        name: getattr(weights, name).to(device)
        for name in ("lora_a", "lora_b", "ranks", "scalings")
    }
    bias = None if weights.bias is None else weights.bias.to(device)
    return LoRAWeights(**moved, output_slices=weights.output_slices, bias=bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shrink, expand", list(zip(SHRINKS, EXPANDS, strict=True)))
def test_any_tiles_compute_the_formula(device, dtype, bias, shrink, expand):
    weights, batch = small_weights(dtype, bias), small_batch()
    x, base = torch.randn(7, 10).to(dtype), torch.randn(7, 14).to(dtype)
    expected = per_token(x, weights, batch, base)
    on_device, y = _on(device, weights), base.clone().to(device)
    plan = plans.make_plan(batch, 16, count_active(batch), device)
    h = torch.full((shrink.split_k, 3, 7, 3), float("nan"), device=device)
    launch.shrink(x.to(device), on_device, plan, h, plan.num_tiles, shrink, "ieee", False)
    launch.expand(h, on_device, plan, y, plan.num_tiles, expand, "ieee", False, False)
    room = 20 * UNITS[dtype] + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[1].cpu(), base[1])


def test_any_candidate_of_a_table_computes_the_formula(device):
    weights, batch = small_weights(torch.float32), small_batch()
    layer = (weights.num_slices, 3, 10, 14, 4)
    x, base = torch.randn(7, 10), torch.randn(7, 14)
    expected, on_device = per_token(x, weights, batch, base), _on(device, weights)
    backend = TritonBackend(device, tiles="rules")
    for tile in config.TILE_TOKENS:
        found = config.candidates(7, 3, tile, *layer)
        for tiles in random.Random(tile).sample(found, 8):
            backend.tile_choice = fixed_choice(tile, tiles)
            y = base.clone().to(device)
            backend.run_linear(x.to(device), on_device, backend.prepare_batch(batch), y)
            assert ((y.cpu().double() - expected).abs() <= 1e-5).all(), tiles


def _ones(num_slots, slices, max_rank, inputs, device, dtype=torch.bfloat16):
    return LoRAWeights(
        lora_a=torch.ones(num_slots, len(slices), max_rank, inputs, dtype=dtype, device=device),
        lora_b=torch.ones(num_slots, sum(slices), max_rank, dtype=dtype, device=device),
        ranks=torch.full((num_slots, len(slices)), max_rank, dtype=torch.int32),
        scalings=torch.ones(num_slots, len(slices)),
        output_slices=slices,
    )


@pytest.mark.parametrize("max_rank", [1, 24, 130])
def test_ranks_beyond_one_block_and_beside_it(backend, device, max_rank):
    weights = _ones(2, (3, 40), max_rank, 4, device)
    batch = LoRABatch([1, 0, -1, 1], 2)
    x = torch.ones(4, 4, dtype=torch.bfloat16, device=device)
    y = backend.run_linear(x, weights, backend.prepare_batch(batch))
    assert y[:, 0].tolist() == pytest.approx([4 * max_rank, 4 * max_rank, 0, 4 * max_rank])
    assert (y[0] == y[0, 0]).all()


def test_more_slices_than_a_fused_projection_has(backend, device):
    weights = _ones(1, (5, 1, 7, 16, 33), 3, 8, device, torch.float32)
    x = torch.ones(1, 8, device=device)
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([0], 1)))
    assert y.unique().tolist() == [24.0]


def test_a_batch_invariant_row_is_equal_in_any_batch(device):
    backend = TritonBackend(device, batch_invariant=True)
    weights = _on(device, small_weights(torch.bfloat16))
    x = torch.randn(70, 10, device=device).to(torch.bfloat16)
    slots = [token % 4 for token in range(70)]
    together = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(slots, 4)))
    alone = [
        backend.run_linear(x[t : t + 1], weights, backend.prepare_batch(LoRABatch([slot], 4)))
        for t, slot in enumerate(slots[:8])
    ]
    assert torch.equal(together[:8], torch.cat(alone))


@pytest.mark.gpu
def test_graph_replay_equals_eager_over_changing_compositions():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    backend = TritonBackend("cuda")
    generator = torch.Generator().manual_seed(0)
    weights = _on("cuda", small_weights(torch.bfloat16))
    x = torch.randn(96, 10, generator=generator).cuda().to(torch.bfloat16)
    base = torch.randn(96, 14, generator=generator).cuda().to(torch.bfloat16)
    y = base.clone()
    plan = backend.prepare_batch(LoRABatch([0] * 96, 4))
    backend.run_linear(x, weights, plan, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run_linear(x, weights, plan, y)
    compositions = [[-1] * 96, [3] * 96, [t % 5 - 1 for t in range(96)], [0, 3] + [-1] * 94]
    compositions += [torch.randint(-1, 4, (96,), generator=generator).tolist() for _ in range(8)]
    for slots in compositions:
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        y.copy_(base)
        graph.replay()
        eager = backend.run_linear(x, weights, plan, base.clone())
        assert torch.equal(y, eager)
