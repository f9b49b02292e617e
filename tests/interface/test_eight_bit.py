"""8-bit stacks: quantisation, shapes of scales, and torch_ref on the stored values."""

from dataclasses import replace

import pytest
import torch

from lora_backends import (
    ExpertWeights,
    InvalidInputError,
    LoRABackend,
    LoRABatch,
    LoRAWeights,
    UnsupportedInputError,
    get_backend,
    quantize_weights,
)
from lora_backends.eight_bit import LARGEST, groups_of
from lora_backends.torch_ref import TorchRefBackend

DTYPES = list(LARGEST)
BLOCKS = [(1, None), (None, None), (4, 16), (3, 5)]
SLOTS, RANK, INPUTS, WIDTHS = 3, 8, 40, (24, 7)


def layer(dtype=torch.float32):
    generator = torch.manual_seed(2)
    a = torch.randn(SLOTS, 2, RANK, INPUTS, generator=generator)
    b = torch.randn(SLOTS, sum(WIDTHS), RANK, generator=generator)
    ranks = torch.tensor([[8, 3], [0, 8], [5, 1]])
    a[0, 1, 3:], b[2, :24, 5:] = torch.nan, torch.inf  # beyond the ranks
    scalings = torch.rand(SLOTS, 2, generator=generator) + 0.5
    return LoRAWeights(a.to(dtype), b.to(dtype), ranks, scalings, output_slices=WIDTHS)


def widened(weights):
    """Return the layer of the stored values times their scales, by plain indexing."""
    a = torch.zeros(SLOTS, 2, RANK, INPUTS)
    b = torch.zeros(SLOTS, sum(WIDTHS), RANK)
    rows, columns = weights.scale_block
    for slot in range(SLOTS):
        for s, (first, end) in enumerate([(0, 24), (24, 31)]):
            rank = int(weights.ranks[slot, s])
            for r in range(rank):
                for k in range(INPUTS):
                    scale = weights.a_scales[slot, s, r // (rows or 99), k // (columns or 99)]
                    a[slot, s, r, k] = weights.lora_a[slot, s, r, k].float() * scale
                for c in range(end - first):
                    group = s * groups_of(24, rows) + c // (rows or 99)
                    scale = weights.b_scales[slot, group, r // (columns or 99)]
                    b[slot, first + c, r] = weights.lora_b[slot, first + c, r].float() * scale
    return LoRAWeights(a, b, weights.ranks, weights.scalings, output_slices=WIDTHS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_torch_ref_multiplies_stored_values_by_their_scales(dtype, block):
    weights = quantize_weights(layer(), dtype, block)
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0, 1, -1, 2, 0], SLOTS))
    x, base = torch.randn(5, INPUTS), torch.randn(5, sum(WIDTHS))
    expected = backend.run_linear(x, widened(weights), plan, base.clone())
    torch.testing.assert_close(backend.run_linear(x, weights, plan, base.clone()), expected)
    ids = torch.tensor([3, 0, 1, 39, 7])
    expected = backend.run_embedding(ids, widened(weights), plan, base.clone())
    torch.testing.assert_close(backend.run_embedding(ids, weights, plan, base.clone()), expected)


@pytest.mark.parametrize("dtype, most", [(torch.int8, 0.012), (torch.float8_e4m3fn, 0.038)])
def test_the_error_of_scales_per_row_is_that_of_the_format(dtype, most):
    generator = torch.manual_seed(0)
    weights = LoRAWeights(
        torch.randn(1, 1, 32, 1024, generator=generator),
        torch.randn(1, 1024, 32, generator=generator),
        torch.tensor([[32]]),
        torch.ones(1, 1),
        output_slices=(1024,),
    )
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0] * 64, 1))
    x = torch.randn(64, 1024, generator=generator)
    exact = backend.run_linear(x, weights, plan)
    quantised = quantize_weights(weights, dtype)
    found = backend.run_linear(x, quantised, plan)
    assert (found - exact).norm() / exact.norm() <= most


def test_int8_rounds_to_nearest_half_to_even_and_zeros_keep_a_scale_of_one():
    a = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0]])[None, None]
    b = torch.eye(2)[None]
    weights = LoRAWeights(a, b, torch.tensor([[2]]), torch.ones(1, 1), output_slices=(2,))
    found = quantize_weights(weights, torch.int8)
    assert found.lora_a[0, 0].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert found.a_scales[0, 0, :, 0].tolist() == [1.0, 1.0]
    assert found.compute_dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_beyond_a_rank_are_neither_looked_at_nor_kept(dtype):
    found = quantize_weights(layer(), dtype, (None, None))
    assert bool((found.lora_a[0, 1, 3:].float() == 0).all())
    assert bool(found.a_scales.isfinite().all() and found.b_scales.isfinite().all())
    broken = layer()
    broken.lora_a[0, 0, 7, 3] = torch.nan
    with pytest.raises(InvalidInputError, match="NaN or infinity within a rank"):
        quantize_weights(broken, dtype)


def test_a_result_without_base_output_has_the_compute_dtype():
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0, 1], SLOTS))
    weights = quantize_weights(layer(torch.float16), torch.int8)
    for x_dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, INPUTS).to(x_dtype)
        assert backend.run_linear(x, weights, plan).dtype == torch.float16
        plain = replace(weights, compute_dtype=None)
        assert backend.run_linear(x, plain, plan).dtype == torch.bfloat16
        assert backend.run_lora_a(x, weights, plan).dtype == torch.float32
    with pytest.raises(InvalidInputError, match="allowed: bfloat16, float16, float32"):
        backend.run_linear(torch.randn(2, INPUTS).double(), weights, plan)


def test_contradictions_of_scales_are_refused_by_name():
    weights = quantize_weights(layer(), torch.int8)
    for changes, told in [
        ({"a_scales": None}, "a_scales is missing"),
        ({"b_scales": weights.b_scales[:, 1:]}, "b_scales has the wrong shape"),
        ({"scale_block": (None, None)}, "a_scales has the wrong shape"),
        ({"scale_block": (0, None)}, "scale_block is not a pair of sizes"),
        ({"compute_dtype": torch.float64}, "compute_dtype cannot be used"),
    ]:
        with pytest.raises(InvalidInputError, match=told):
            replace(weights, **changes)
    with pytest.raises(InvalidInputError, match="a_scales is superfluous"):
        replace(layer(), a_scales=weights.a_scales)
    with pytest.raises(InvalidInputError, match="torch.int8 to torch.int8"):
        quantize_weights(weights, torch.int8)


def test_what_cannot_be_quantised_is_refused_by_name():
    for given in (None, "weights", layer().lora_a, {}):
        with pytest.raises(InvalidInputError, match="takes the weights of a layer"):
            quantize_weights(given, torch.int8)
    for dtype in ("int8", [torch.int8], None, torch.float16):
        with pytest.raises(InvalidInputError, match="makes 8-bit stacks of wider ones"):
            quantize_weights(layer(), dtype)


def test_a_backend_without_the_feature_refuses_by_name():
    class Plain(type(get_backend("torch_ref", device="cpu"))):
        features = frozenset()

    backend = Plain("cpu")
    plan = backend.prepare_batch(LoRABatch([0, 1], SLOTS))
    with pytest.raises(UnsupportedInputError, match="eight_bit"):
        backend.run_linear(torch.randn(2, INPUTS), quantize_weights(layer(), torch.int8), plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(1, None), (3, 5)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_multiply_stored_values_by_their_scales(dtype, block, interleaved):
    generator = torch.manual_seed(4)
    experts, widths = 4, (6, 6)
    weights = ExpertWeights(
        torch.randn(2, experts, 2, RANK, INPUTS, generator=generator),
        torch.randn(2, 1, sum(widths), RANK, generator=generator),
        torch.randint(0, RANK + 1, (2, experts, 2), generator=generator),
        torch.rand(2, experts, 2, generator=generator),
        output_slices=widths,
        num_experts=experts,
        interleaved=interleaved,
    )
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0, 1, -1, 1], 2))
    ids = torch.randint(0, experts, (4, 2), generator=generator)
    routing = backend.prepare_experts(plan, ids, torch.rand(4, 2), experts)
    x = torch.randn(4, INPUTS, generator=generator)
    exact = backend.run_experts(x, weights, routing)
    found = backend.run_experts(x, quantize_weights(weights, dtype, block), routing)
    most = {torch.int8: 0.03, torch.float8_e4m3fn: 0.1, torch.float8_e5m2: 0.2}[dtype]  # few values
    assert 0 < (found - exact).norm() / exact.norm() <= most


class WithoutEmbedding(TorchRefBackend):
    """torch_ref with the interface's own run_embedding."""

    run_embedding = LoRABackend.run_embedding


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_default_embedding_takes_eight_bits(dtype, block, tokens):
    weights = quantize_weights(layer(), dtype, block)
    batch = LoRABatch([0, 1, -1, 2, 0][:tokens], SLOTS)
    ids = torch.tensor([39, 2, 0, 17, 2])[:tokens]
    right, default = TorchRefBackend("cpu"), WithoutEmbedding("cpu")
    base = torch.randn(tokens, sum(WIDTHS))
    wanted = right.run_embedding(ids, weights, right.prepare_batch(batch), base.clone())
    y = default.run_embedding(ids, weights, default.prepare_batch(batch), base)
    torch.testing.assert_close(y, wanted)
