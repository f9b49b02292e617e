"""Gradients through autograd are those of torch_ref: equal, for small integers."""

from dataclasses import replace

import pytest
import torch
from helpers.gradients import NUM_SLOTS, case, layer, moved

from lora_backends import LoRABatch
from lora_backends.torch_ref import TorchRefBackend

OPERATIONS = ["run_linear", "run_qkv", "run_logits", "run_embedding", "run_lora_a", "run_lora_b"]


def integers(made, tuples):
    """Return a case of integers, whose sums are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(1)

    def like(values):
        drawn = torch.randint(-2, 3, values.shape, generator=generator).to(values.dtype)
        return torch.where(values.isnan(), values, drawn)

    weights = made.weights
    a, b = like(weights.lora_a), like(weights.lora_b)
    if tuples:
        starts = weights.slice_offsets
        a = tuple(a[:, s].clone() for s in range(weights.num_slices))
        b = tuple(b[:, starts[s] : starts[s + 1]].clone() for s in range(weights.num_slices))
    bias = torch.randint(-2, 3, (NUM_SLOTS, weights.out_features), generator=generator).float()
    scalings = torch.randint(0, 3, weights.scalings.shape, generator=generator).float().exp2()
    fields = {"lora_a": a, "lora_b": b, "scalings": scalings, "bias": bias}
    names = ("x", "grad", "h", "dh")
    values = {name: like(getattr(made, name)).nan_to_num(1) for name in names}
    return replace(made, weights=replace(weights, **fields), **values)


def gradients_of(engine, operation, made, output_scales):
    """Return the gradients of every tensor that an operation takes."""
    made = moved(made, engine.device)
    weights, plan = made.weights, engine.prepare_batch(made.batch)
    base = torch.ones(made.rows, weights.out_features, device=engine.device, requires_grad=True)
    bias = made.weights.bias.to(engine.device)
    scales = torch.full_like(bias, 2.0) if output_scales else None
    leaves = {"bias": bias, "output_scales": scales}
    if operation == "run_lora_a":
        leaves = {}
    first = {"run_embedding": made.token_ids, "run_lora_b": made.h}.get(operation, made.x)
    if operation == "run_embedding":
        leaves["lora_a"], leaves["lora_b"] = weights.lora_a, weights.lora_b
    else:
        first = first.clone().requires_grad_()
        if operation != "run_lora_b":
            leaves["lora_a"] = weights.lora_a
        if operation != "run_lora_a":
            leaves["lora_b"] = weights.lora_b
    leaves = {name: stack for name, stack in leaves.items() if stack is not None}
    tensors = []
    for name, stack in leaves.items():
        parts = stack if isinstance(stack, tuple) else (stack,)
        parts = tuple(part.clone().requires_grad_() for part in parts)
        leaves[name] = parts if isinstance(stack, tuple) else parts[0]
        tensors += parts
    weights = replace(weights, **({"bias": None} | leaves))
    run = getattr(engine, operation)
    if operation == "run_lora_a":
        result, seed = run(first, weights, plan), made.dh
    else:
        result, seed = run(first, weights, plan, base + 0), made.grad
        tensors.append(base)
    if first.requires_grad:
        tensors.append(first)
    return torch.autograd.grad(result, tensors, seed)


@pytest.mark.parametrize("tuples", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_equal_those_of_torch_ref(backend, operation, tuples):
    made = integers(case(layer(torch.float32, (16, 8, 5), 6, 24), tokens=50), tuples)
    scales = operation in ("run_linear", "run_embedding")
    wanted = gradients_of(TorchRefBackend(device="cpu"), operation, made, scales)
    for result, other in zip(gradients_of(backend, operation, made, scales), wanted, strict=True):
        assert torch.equal(result.cpu(), other)


def test_a_batch_of_several_adapters_per_token(backend):
    made = integers(case(layer(torch.float32, (16, 8), 6, 24), tokens=20), False)
    generator = torch.Generator().manual_seed(3)
    slots = torch.randint(-1, NUM_SLOTS, (20, 2), generator=generator)
    made.batch = LoRABatch(slots, NUM_SLOTS)
    wanted = gradients_of(TorchRefBackend(device="cpu"), "run_linear", made, False)
    for result, other in zip(gradients_of(backend, "run_linear", made, False), wanted, strict=True):
        assert torch.equal(result.cpu(), other)
