"""The kernels against the definition, with sizes other than those that would be chosen."""

import engines
import pytest
import torch
from engines import DTYPES, UNITS, on
from layers import per_token, small_batch, small_weights

from lora_backends import InvalidInputError, LoRABatch, get_backend
from lora_backends.csgmv import CsgmvBackend, launch, tuning
from lora_backends.csgmv import plan as plans
from lora_backends.gpu.choice import fixed_choice
from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles, TileConfig

TILES = [
    TileConfig(ShrinkTiles(16, 16, split_k=1), ExpandTiles(16, 16)),
    TileConfig(ShrinkTiles(64, 32, split_k=3), ExpandTiles(32, 16, chunks=4)),
    TileConfig(ShrinkTiles(16, 64, split_k=2, warps_k=4), ExpandTiles(64, 16, chunks=2)),
]
ROWS = [(16, 1), (16, 4), (32, 2)]  # segment_size, group_size
SIZES = [16, 64, "auto"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiles, row", list(zip(TILES, ROWS, strict=True)))
def test_any_sizes_compute_the_formula(device, monkeypatch, dtype, bias, tiles, row):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    weights, small = small_weights(dtype, bias), small_batch()
    batch = LoRABatch([*small.token_slots.tolist(), *[3] * 70, *[1] * 17], num_slots=4)
    x, base = torch.randn(94, 10).to(dtype), torch.randn(94, 14).to(dtype)
    backend = CsgmvBackend(device)
    backend.tile_choice = fixed_choice(row[0] * row[1], tiles)
    plan = plans.make_plan(batch, *row, 4, device)
    y = backend.run_linear(x.to(device), on(device, weights), plan, base.clone().to(device))
    expected = per_token(x, weights, batch, base)
    room = 20 * UNITS[dtype] + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[1].cpu(), base[1])


def poisoned(empty):
    """Return `torch.empty` that gives NaN: what no kernel wrote must not reach a result."""

    def make(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    return make


@pytest.mark.parametrize("max_rank", [1, 24, 130])
def test_ranks_beyond_one_block_and_beside_it(backend, max_rank):
    engines.check_rank(backend, max_rank)


def test_more_slices_than_a_fused_projection_has(backend):
    engines.check_five_slices(backend)


@pytest.mark.parametrize("size", SIZES)
def test_a_batch_invariant_row_is_equal_in_any_batch(device, size):
    engines.check_batch_invariance(CsgmvBackend(device, segment_size=size, batch_invariant=True))


def test_rows_of_h_follow_the_permutation(device):
    """The shrink writes the token at place p to row p, and nothing where there is no token."""
    weights, batch = on(device, small_weights()), small_batch()
    plan = plans.make_plan(batch, 16, 1, 4, device)
    choice = CsgmvBackend(device, tiles="rules").tile_choice
    kernels = launch.kernels_of(weights, plan, launch.Options("ieee", False, False, choice, False))
    x = torch.randn(7, 10, device=device)
    rows, places = launch.grid_of(plan, False)
    assert (rows, places) == (4, 64)
    h = torch.full((kernels.split_k, 3, places, 3), float("nan"), device=device)
    launch.shrink(x, weights, plan, h, rows, kernels.shrink)
    by_token = CsgmvBackend(device).run_lora_a(x, weights, plan)
    tokens = plan.segment_tokens.flatten()[:places].long()
    rank_of_slice_0 = {0: 3, 1: 1, 2: 0, 3: 2}
    for place, token in enumerate(tokens.tolist()):
        rank = rank_of_slice_0[int(batch.token_slots[token])] if token >= 0 else 0
        assert torch.equal(h.sum(0)[0, place, :rank], by_token[0, token, :rank])
        assert h[:, 0, place, rank:].isnan().all()


@pytest.mark.parametrize("given", [0, 17, 48, 256, True, "16", "automatic", None, 16.0])
def test_other_segment_sizes_are_refused(given):
    with pytest.raises(InvalidInputError, match=r"segment_size=.*\n  allowed: 16, 32, 64, 128"):
        CsgmvBackend("cpu", segment_size=given)


@pytest.mark.parametrize("size", [16, 128, "auto"])
def test_the_option_is_taken_by_name(device, size):
    assert get_backend("csgmv", device, segment_size=size).segment_size == size


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_graph_replay_equals_eager_over_changing_compositions(size):
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    engines.check_graph_replay(CsgmvBackend("cuda", segment_size=size))


@pytest.mark.parametrize("dtype, bias, layout", engines.BOXES)
def test_boxes_of_b_compute_the_formula(backend, monkeypatch, dtype, bias, layout):
    engines.check_boxes(backend, launch, monkeypatch, dtype, bias, layout)


def test_any_candidate_of_a_table_computes_the_formula(backend):
    engines.check_candidates(backend, tuning)
