"""Both kernels against the definition, with tiles other than those that would be chosen."""

import engines
import pytest
import torch
from engines import DTYPES, UNITS, on
from layers import per_token, small_batch, small_weights

from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles
from lora_backends.triton import TritonBackend, launch, tuning
from lora_backends.triton import plan as plans
from lora_backends.triton.plan import count_tokens

SHRINKS = [
    ShrinkTiles(block_n=16, block_k=16, split_k=1),
    ShrinkTiles(block_n=64, block_k=32, split_k=3),
    ShrinkTiles(block_n=16, block_k=64, split_k=2, warps_k=4),
]
EXPANDS = [ExpandTiles(16, 16), ExpandTiles(32, 16, chunks=4), ExpandTiles(64, 16, chunks=2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shrink, expand", list(zip(SHRINKS, EXPANDS, strict=True)))
def test_any_tiles_compute_the_formula(device, dtype, bias, shrink, expand):
    weights, batch = small_weights(dtype, bias), small_batch()
    x, base = torch.randn(7, 10).to(dtype), torch.randn(7, 14).to(dtype)
    expected = per_token(x, weights, batch, base)
    on_device, y = on(device, weights), base.clone().to(device)
    plan = plans.make_plan(batch, count_tokens(batch), 16, device)
    h = torch.full((shrink.split_k, 3, 7, 3), float("nan"), device=device)
    launch.shrink(x.to(device), on_device, plan, h, plan.num_tiles, shrink, "ieee", False)
    launch.expand(h, on_device, plan, y, plan.num_tiles, expand, "ieee", False, False, True)
    room = 20 * UNITS[dtype] + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[1].cpu(), base[1])


@pytest.mark.parametrize("max_rank", [1, 24, 130])
def test_ranks_beyond_one_block_and_beside_it(backend, max_rank):
    engines.check_rank(backend, max_rank)


def test_more_slices_than_a_fused_projection_has(backend):
    engines.check_five_slices(backend)


def test_a_batch_invariant_row_is_equal_in_any_batch(device):
    engines.check_batch_invariance(TritonBackend(device, batch_invariant=True))


@pytest.mark.gpu
def test_graph_replay_equals_eager_over_changing_compositions():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    engines.check_graph_replay(TritonBackend("cuda"))


@pytest.mark.parametrize("dtype, bias, layout", engines.BOXES)
def test_boxes_of_b_compute_the_formula(backend, monkeypatch, dtype, bias, layout):
    engines.check_boxes(backend, launch, monkeypatch, dtype, bias, layout)


def test_any_candidate_of_a_table_computes_the_formula(backend):
    engines.check_candidates(backend, tuning)
