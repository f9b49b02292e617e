"""Tensors of inference mode, outside of it, and tensors that are spread over processes."""

import pytest
import torch
import torch.distributed as dist
from helpers.small_layers import per_token, small_batch, small_weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from lora_backends import (
    InvalidInputError,
    LoRABatch,
    LoRAWeights,
    backend_names,
    get_backend,
    unavailable_reasons,
)

BACKENDS = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]
SLOTS = [1, 1, -1, 3, 2, 0, -1]
SCALED = LoRABatch(SLOTS, 4, token_scales=[0.5] * 7)


@pytest.mark.parametrize("first", [small_batch(), SCALED], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_plan_made_in_inference_mode_is_refilled_outside_of_it(name, first):
    backend, weights = get_backend(name, device="cpu"), small_weights(bias=True)
    x, base = torch.randn(7, 10), torch.randn(7, 14)
    with torch.inference_mode():
        plan = backend.prepare_batch(first, capacity=9)
        backend.prepare_batch(first, out=plan)
        assert torch.is_inference_mode_enabled()
    for batch in (SCALED, LoRABatch(SLOTS, 4), small_batch()):
        assert backend.prepare_batch(batch, out=plan) is plan
        y = backend.run_linear(x, weights, plan, base.clone())
        assert torch.allclose(y.double(), per_token(x, weights, batch, base), atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_routing_made_in_inference_mode_is_refilled_outside_of_it(name):
    backend = get_backend(name, device="cpu")
    ids, factors = torch.tensor([[0, 2]] * 7), torch.ones(7, 2)
    with torch.inference_mode():
        plan = backend.prepare_batch(small_batch())
        routing = backend.prepare_experts(plan, ids.clone(), factors.clone(), 3)
    backend.prepare_experts(plan, ids.flip(1), factors * 2, 3, out=routing)
    assert routing.topk_ids.tolist() == ids.flip(1).tolist()
    assert routing.topk_weights.tolist() == (factors * 2).tolist()


def test_gradients_flow_through_a_plan_made_in_inference_mode():
    backend, weights = get_backend("torch_ref", device="cpu"), small_weights()
    with torch.inference_mode():
        plan = backend.prepare_batch(SCALED)
    x = torch.randn(7, 10, requires_grad=True)
    backend.run_linear(x, weights, plan).sum().backward()
    assert x.grad is not None and x.grad[0].any() and not x.grad[2].any()


def test_an_output_of_inference_mode_is_refused_outside_of_it_before_anything_is_written():
    backend, weights, x = get_backend("torch_ref", device="cpu"), small_weights(), torch.ones(7, 10)
    plan = backend.prepare_batch(small_batch())
    backend.run_linear(x, weights, plan, torch.zeros(7, 14))  # a call of its kind has passed
    with torch.inference_mode():
        y, h = torch.zeros(7, 14), torch.zeros(3, 7, 3)
        backend.run_linear(x, weights, plan, torch.zeros(7, 14))
    with pytest.raises(InvalidInputError, match=r"base_output .*inference mode"):
        backend.run_linear(x, weights, plan, y)
    with pytest.raises(InvalidInputError, match=r"out .*inference mode"):
        backend.run_lora_a(x, weights, plan, out=h)
    assert not y.any() and not h.any()


@pytest.fixture
def spread():
    """Return a function that makes a DTensor over this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh("cpu", [0])
    yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])
    dist.destroy_process_group()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_tensor_spread_over_processes_is_refused_by_name(name, spread):
    backend, weights, x = get_backend(name, device="cpu"), small_weights(), torch.ones(7, 10)
    plan = backend.prepare_batch(small_batch())
    wholly = r"is a DTensor.*full_tensor\(\)"
    with pytest.raises(InvalidInputError, match=f"x {wholly}"):
        backend.run_linear(spread(x), weights, plan)
    with pytest.raises(InvalidInputError, match=f"base_output {wholly}"):
        backend.run_linear(x, weights, plan, spread(torch.zeros(7, 14)))
    with pytest.raises(InvalidInputError, match=f"h {wholly}"):
        backend.run_lora_b(spread(torch.zeros(3, 7, 3)), weights, plan)
    with pytest.raises(InvalidInputError, match=f"out {wholly}"):
        backend.run_lora_a(x, weights, plan, out=spread(torch.zeros(3, 7, 3)))
    with pytest.raises(InvalidInputError, match=f"topk_ids {wholly}"):
        backend.prepare_experts(plan, spread(torch.zeros(7, 2).long()), torch.ones(7, 2), 3)


def test_batches_and_layers_spread_over_processes_are_refused_by_name(spread):
    with pytest.raises(InvalidInputError, match=r"token_slots (.|\n)*DTensor"):
        LoRABatch(spread(torch.zeros(7).long()), 4)
    stacks = {"lora_a": torch.ones(1, 1, 2, 8), "lora_b": torch.ones(1, 8, 2)}
    numbers = {"ranks": torch.full((1, 1), 2), "scalings": torch.ones(1, 1)}
    for name, tensor in (stacks | numbers).items():
        with pytest.raises(InvalidInputError, match=f"{name} is a DTensor"):
            LoRAWeights(**stacks | numbers | {name: spread(tensor)}, output_slices=(8,))
