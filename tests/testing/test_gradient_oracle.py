"""The oracle of gradients against torch's autograd in float64, and how tight its bounds are."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from lora_backends.testing import LoRACase, expected_gradients, lora_cases
from lora_backends.testing.oracles import rank_mask

QUICK = settings(max_examples=30, deadline=None)


def formula(inputs, leaves):
    """Return y of one adapter per token, by torch's own operators on float64 leaves."""
    weights, slots = inputs.weights, inputs.batch.token_slots
    has, picked = (slots >= 0)[:, None], slots.clamp(min=0)
    within = rank_mask(weights, slots)  # [T, S, R]
    a = torch.where(within[..., None], leaves["lora_a"][picked], 0)
    h = torch.einsum("ti,tsri->tsr", torch.where(has, leaves["x"], 0), a)
    factors = torch.where(weights.ranks > 0, weights.scalings, 0).double()[picked]
    if inputs.batch.token_scales is not None:
        factors = factors * inputs.batch.token_scales[:, None]
    deltas = []
    for s, (first, end) in enumerate(itertools.pairwise(weights.slice_offsets)):
        b = torch.where(within[:, s, None], leaves["lora_b"][picked, first:end], 0)
        deltas.append(factors[:, s, None] * torch.einsum("tr,tnr->tn", h[:, s], b))
    y = leaves["base_output"] + torch.cat(deltas, 1)
    if "output_scales" in leaves:
        y = torch.where(has, leaves["output_scales"][picked], 1) * y
    if "bias" in leaves:
        y = y + torch.where(has, leaves["bias"][picked], 0)
    return y


@QUICK
@given(lora_cases(base=True, features=("token_scales", "output_scales")))
def test_the_values_are_those_of_autograd_in_float64(case):
    inputs = case.build()
    weights = inputs.weights
    tensors = {"x": inputs.x, "lora_a": weights.lora_a, "lora_b": weights.lora_b}
    tensors |= {"base_output": inputs.base, "bias": weights.bias}
    tensors["output_scales"] = weights.output_scales
    leaves = {
        name: tensor.detach().double().requires_grad_()
        for name, tensor in tensors.items()
        if tensor is not None
    }
    y = formula(inputs, leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(case.seed))
    grad = grad.to(case.base)
    found = torch.autograd.grad(y, list(leaves.values()), grad.double(), allow_unused=True)
    wanted = expected_gradients("run_linear", inputs, grad)
    assert wanted.keys() == leaves.keys()
    has = (inputs.batch.token_slots >= 0)[:, None]
    for name, gradient in zip(leaves, found, strict=True):
        value = torch.zeros_like(leaves[name]) if gradient is None else gradient
        if name == "base_output":  # of rows without an adapter the oracle says nothing
            value = torch.where(has, value, 0)
        torch.testing.assert_close(wanted[name].value, value, rtol=1e-9, atol=1e-9)
        # what has no bound is exactly zero, or dL/dy itself
        if name != "base_output":
            assert not bool(wanted[name].value[wanted[name].bound == 0].any())


CASE = LoRACase(
    slots=(0,) * 20,
    ranks=((16,),),
    max_rank=16,
    in_features=64,
    output_slices=(33,),
    scalings=((2.0,),),
    base=torch.float32,
    bias=True,
    token_scales=True,
    output_scales=True,
)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(
    ("dtype", "error", "share"),
    [(torch.float32, 0.02, 0.95), (torch.float16, 0.05, 0.9), (torch.bfloat16, 0.1, 0.6)],
)
def test_the_bounds_are_tight_enough_to_see_errors_of_percents(dtype, error, share, narrow):
    inputs = replace(CASE, dtype=dtype, base=dtype).build()
    grad = torch.randn(20, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    for name, wanted in expected_gradients("run_linear", inputs, grad, narrow=narrow).items():
        value = wanted.value.abs()
        seen = (error * value > wanted.bound)[value > 0].double().mean()
        assert seen > share, name


def test_a_narrow_backend_has_wider_bounds_in_sixteen_bits_alone():
    grad = torch.randn(20, 33, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.bfloat16, torch.float32):
        inputs = replace(CASE, dtype=dtype).build()
        wide, narrow = (expected_gradients("run_linear", inputs, grad, narrow=n) for n in (0, 1))
        for name in ("x", "lora_a", "lora_b"):
            is_wider = bool((narrow[name].bound > wide[name].bound).any())
            assert is_wider == (dtype == torch.bfloat16)


def test_of_run_lora_a_and_run_lora_b_each_reads_its_own_stack():
    inputs = CASE.build()
    h, grad = torch.randn(1, 20, 16), torch.randn(20, 33)
    assert expected_gradients("run_lora_a", inputs, h).keys() == {"x", "lora_a"}
    of_b = expected_gradients("run_lora_b", inputs, grad, h)
    assert of_b.keys() == {"h", "lora_b", "bias", "output_scales", "base_output"}
    of_ids = expected_gradients("run_embedding", inputs, grad)
    assert of_ids.keys() == {"lora_a", "lora_b", "bias", "output_scales", "base_output"}
