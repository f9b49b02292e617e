import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers.small_layers import per_token, small_batch, small_weights

from lora_backends import LoRABackend, LoRABatch, get_backend

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def backend():
    return get_backend("torch_ref", device="cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_computes_the_formula(backend, dtype, bias):
    weights, batch = small_weights(dtype, bias), small_batch()
    x = torch.randn(7, 10).to(dtype)
    base = torch.randn(7, 14).to(dtype)
    expected = per_token(x, weights, batch, base)
    result = backend.run_linear(x, weights, backend.prepare_batch(batch), base)
    assert result is base
    unit = torch.finfo(dtype).eps / 2
    # one rounding into y; float32 sums of 13 products of values below 4 add at most 1e-4
    room = unit * expected.abs() + (1e-12 if dtype == torch.float64 else 1e-4)
    assert ((result.double() - expected).abs() <= room).all()


TOKEN_SCALES = [0.5, 2.0, -1.0, 0.0, 1.0, 3.0, 0.25]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("scales", [None, TOKEN_SCALES])
def test_it_computes_the_formula_with_factors(backend, scales, dora, bias):
    weights = small_weights(torch.float64, bias)
    if dora:
        factors = torch.rand(4, 14, generator=torch.Generator().manual_seed(5)) + 0.5
        weights = dataclasses.replace(weights, output_scales=factors)
    batch = LoRABatch(small_batch().token_slots, 4, scales)
    x, base = torch.randn(7, 10).double(), torch.randn(7, 14).double()
    expected = per_token(x, weights, batch, base)
    result = backend.run_linear(x, weights, backend.prepare_batch(batch), base)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scaled", [False, True])
def test_several_adapters_of_a_token_are_added(backend, scaled):
    weights = small_weights(torch.float64, bias=True)
    slots = [[3, 0], [-1, 1], [0, 0], [-1, -1], [1, 3], [2, 0], [3, -1]]
    scales = [[0.7, 0.3]] * 7 if scaled else None
    batch = LoRABatch(slots, 4, scales)
    x, base = torch.randn(7, 10).double(), torch.randn(7, 14).double()
    expected = per_token(x, weights, batch, base)
    result = backend.run_linear(x, weights, backend.prepare_batch(batch), base)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def test_h_is_zero_beyond_the_rank_and_without_adapter(backend):
    weights, batch = small_weights(), small_batch()
    h = backend.run_lora_a(torch.randn(7, 10), weights, backend.prepare_batch(batch))
    assert h.dtype == torch.float32 and h.shape == (3, 7, 3)
    for t, slot in enumerate(batch.token_slots.tolist()):
        for s in range(3):
            rank = 0 if slot == -1 else int(weights.ranks[slot, s])
            assert (h[s, t, :rank] != 0).all() and (h[s, t, rank:] == 0).all()


def test_h_beyond_the_rank_is_never_read(backend):
    weights = small_weights()
    plan = backend.prepare_batch(small_batch())
    h = backend.run_lora_a(torch.randn(7, 10), weights, plan)
    expected = backend.run_lora_b(h, weights, plan)
    assert torch.equal(
        backend.run_lora_b(h.masked_fill(h == 0, torch.nan), weights, plan), expected
    )


def test_rows_without_adapter_and_slices_of_rank_0_are_untouched(backend):
    base = torch.full((7, 14), -0.0)
    backend.run_linear(
        torch.randn(7, 10), small_weights(), backend.prepare_batch(small_batch()), base
    )
    untouched = torch.full((14,), -0.0).view(torch.int32)
    assert torch.equal(base[1].view(torch.int32), untouched)  # no adapter
    assert torch.equal(base[5].view(torch.int32), untouched)  # slot 2: rank 0 everywhere
    assert torch.equal(base[2, 9:].view(torch.int32), untouched[9:])  # slot 0: rank 0 in slice 2


@pytest.mark.parametrize("method", ["run_embedding", "default"])
def test_an_embedding_is_a_linear_layer_on_one_hot_rows(backend, method):
    weights, plan = small_weights(bias=True), backend.prepare_batch(small_batch())
    ids = torch.tensor([0, 9, 3, 3, 1, 2, 5], dtype=torch.int32)
    run = backend.run_embedding if method == "run_embedding" else default_embedding(backend)
    expected = backend.run_linear(F.one_hot(ids.long(), 10).float(), weights, plan)
    torch.testing.assert_close(run(ids, weights, plan), expected, rtol=0, atol=0)


def default_embedding(backend):
    return lambda *args: LoRABackend.run_embedding(backend, *args)


def test_without_base_output_the_result_has_the_dtype_of_the_weights(backend):
    weights, plan = small_weights(torch.bfloat16), backend.prepare_batch(small_batch())
    x = torch.randn(7, 10, dtype=torch.bfloat16)
    assert backend.run_linear(x, weights, plan).dtype == torch.bfloat16
    assert backend.run_lora_b(backend.run_lora_a(x, weights, plan), weights, plan).dtype == x.dtype
    assert backend.run_linear(x, weights, plan, torch.zeros(7, 14)).dtype == torch.float32


@pytest.mark.parametrize("slots", [[], [-1, -1], [1], [0] * 5])
def test_empty_baseless_and_single_batches_work(backend, slots):
    weights, batch = small_weights(bias=True), LoRABatch(slots, 4)
    x, base = torch.randn(len(slots), 10), torch.randn(len(slots), 14)
    expected = per_token(x, weights, batch, base)
    result = backend.run_linear(x, weights, backend.prepare_batch(batch), base.clone())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


def test_a_refilled_plan_follows_the_new_batch(backend):
    weights, x = small_weights(), torch.randn(7, 10)
    plan = backend.prepare_batch(small_batch())
    other = LoRABatch([1, 1, -1, -1, 3, 3, 0], 4)
    assert backend.prepare_batch(other, out=plan) is plan
    expected = backend.run_linear(x, weights, backend.prepare_batch(other))
    assert torch.equal(backend.run_linear(x, weights, plan), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_flow_to_x_and_both_matrices(backend, bias):
    plan = backend.prepare_batch(small_batch())
    weights = small_weights(torch.float64, bias)
    finite = {n: getattr(weights, n).nan_to_num().requires_grad_() for n in ("lora_a", "lora_b")}
    x = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)

    def run(x, lora_a, lora_b, base):
        layer = type(weights)(
            lora_a, lora_b, weights.ranks, weights.scalings, weights.output_slices, weights.bias
        )
        return backend.run_linear(x, layer, plan, base * 1.0)

    base = torch.randn(7, 14, dtype=torch.float64, requires_grad=True)
    inputs = (x, finite["lora_a"], finite["lora_b"], base)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_a_scaling_of_rank_0_is_never_read(backend):
    weights, plan = small_weights(bias=True), backend.prepare_batch(small_batch())
    x = torch.randn(7, 10)
    expected = backend.run_linear(x, weights, plan)
    weights.scalings[weights.ranks == 0] = torch.nan
    assert torch.equal(backend.run_linear(x, weights, plan), expected)


def test_a_float64_base_output_keeps_its_digits(backend):
    base = torch.full((7, 14), 1 + 1e-12, dtype=torch.float64)
    y = backend.run_linear(
        torch.zeros(7, 10), small_weights(), backend.prepare_batch(small_batch()), base.clone()
    )
    assert torch.equal(y, base)
