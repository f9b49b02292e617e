"""Gradients against the oracle, for every operation and feature."""

from __future__ import annotations

from dataclasses import replace

import torch

from lora_backends.backend import LoRABackend
from lora_backends.features import CAPACITY
from lora_backends.operations import Input
from lora_backends.testing import oracles
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, same_bits
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    BOUNDED,
    declares,
    differentiable,
    prop,
)
from lora_backends.testing.properties.factors import several
from lora_backends.testing.properties.gradients.runs import (
    Call,
    check_against_oracle,
    check_gradients,
    differentiated,
    laid_out,
    two_of,
    upstream,
)
from lora_backends.testing.properties.room import Roomy


@prop(
    "On small integers gradients have one right value.",
    values="integer",
    examples=12,
    requires=(differentiable,),
    features=ANY_LAYER,
)
def gradients_are_exact_on_integers(backend: LoRABackend, case: LoRACase) -> None:
    """Of every tensor, by run_linear and another operation, for gradients of any layout."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    for operation in two_of(differentiated(inputs), case.seed):
        check_gradients(backend, case, Call.of(operation, case, inputs), plan, inputs)


@prop(
    "Gradients are within the bound of float64.",
    agreement=BOUNDED,
    values="inexact",
    examples=15,
    requires=(differentiable,),
    features=ANY_LAYER,
)
def gradients_are_within_the_bound(backend: LoRABackend, case: LoRACase) -> None:
    """Of every tensor, by run_linear and another operation, also with two adapters per token."""
    inputs = case.build(backend.device)
    operations = differentiated(inputs)
    if case.seed % 4 == 0 and not case.output_scales:
        inputs = several(case, inputs, 2)
        operations = [
            operation
            for operation in operations
            if operation.input is not Input.H and operation.result == "y"
        ]
    plan = backend.prepare_batch(inputs.batch)
    for operation in two_of(operations, case.seed // 4):
        check_gradients(backend, case, Call.of(operation, case, inputs), plan, inputs)


@prop(
    "Gradients are zero bit for bit beyond ranks, for slots without tokens and in rows without an "
    "adapter, whatever the stacks hold there.",
    values="real",
    examples=10,
    requires=(differentiable,),
)
def gradients_are_zero_where_nothing_is_read(backend: LoRABackend, case: LoRACase) -> None:
    """NaN or infinity lies there, and some rows of x and of dL/dy are zero."""
    inputs = case.build(backend.device)
    weights, used = inputs.weights, set(case.slots) - {-1}
    absent = [slot for slot in range(case.num_slots) if slot not in used]
    filler = (torch.inf, torch.nan)[case.seed % 2]
    for stack in (weights.lora_a, weights.lora_b, weights.bias, weights.output_scales):
        if stack is not None:
            stack[absent] = filler
    for stack in (weights.lora_a, weights.lora_b):
        stack.nan_to_num_(nan=filler, posinf=filler, neginf=-filler)
    inputs.x[:: 2 + case.seed % 3] = 0.0
    plan = backend.prepare_batch(inputs.batch)
    for operation in two_of(differentiated(inputs), case.seed):
        call = Call.of(operation, case, inputs)
        y = call.run(backend, plan)
        grad = upstream(case, inputs, y)
        # of dL/dh and of dL/dy, whose token axes differ
        grad[..., :: 1 + case.seed % 3, :].zero_()
        actual = call.gradients_of(y, grad)
        for name, gradient in actual.items():
            dead = _dead(inputs, name)
            if dead is not None:
                _assert_zero_bits(operation.name, name, gradient[dead.to(gradient.device)])
        check_against_oracle(backend, case, call, actual, grad)


def _dead(inputs: LoRAInputs, name: str) -> torch.Tensor | None:
    """Return where the gradient of a tensor is zero bit for bit."""
    weights, slots = inputs.weights, inputs.batch.token_slots
    ranks = weights.ranks.cpu()
    rank = torch.arange(weights.max_rank, device="cpu")
    has_tokens = torch.zeros(weights.num_slots, dtype=torch.bool, device="cpu")
    has_tokens[slots[slots >= 0]] = True
    beyond = (rank >= ranks[..., None]) | ~has_tokens[:, None, None]  # [slots, slices, ranks]
    if name == "lora_a":
        return beyond
    if name == "lora_b":
        widths = torch.tensor(weights.output_slices, device="cpu")
        return beyond.repeat_interleave(widths, 1)
    if name in ("bias", "output_scales"):
        return ~has_tokens
    if name == "x":
        return (slots < 0) | (ranks[slots.clamp(min=0)] == 0).all(1)
    if name == "h":
        return ~oracles.rank_mask(weights, slots).permute(1, 0, 2)
    return None


def _assert_zero_bits(operation: str, name: str, values: torch.Tensor) -> None:
    if not same_bits(values, torch.zeros_like(values)):
        raise AssertionError(
            f"the gradient of {name} of {operation} is not zero where no token reads the tensor: "
            f"beyond a rank, in a slot without tokens, or in a row without an adapter"
        )


@prop(
    "Rows after the batch get no gradient and reach none.",
    values="integer",
    examples=10,
    requires=(differentiable, declares(CAPACITY)),
    features=ANY_LAYER,
    min_tokens=1,
)
def rows_after_the_batch_reach_no_gradient(backend: LoRABackend, case: LoRACase) -> None:
    """NaN in x and in dL/dy of these rows; base_output passes theirs on, bit for bit."""
    inputs = case.build(backend.device)
    tokens, more = case.num_tokens, 1 + case.seed % 9
    plan = backend.prepare_batch(inputs.batch, capacity=tokens + more)
    roomy = Roomy(inputs, tokens + more)
    base = None if inputs.base is None else roomy.longer(inputs.base)
    longer = replace(
        inputs, x=roomy.longer(inputs.x), token_ids=roomy.longer(inputs.token_ids), base=base
    )
    for operation in two_of(differentiated(inputs), case.seed):
        short = Call.of(operation, case, inputs)
        h = None if short.h is None else roomy.longer(short.h.detach(), 1)
        call = Call.of(operation, case, longer, h=h)
        y = call.run(backend, plan)
        axis = y.ndim - 2
        whole = upstream(case, inputs, y.narrow(axis, 0, tokens))
        grad = laid_out(roomy.longer(whole, axis), case.seed)
        actual = dict(call.gradients_of(y, grad))
        for name in {"x", "h", "base_output"} & actual.keys():
            token_axis = 1 if name == "h" else 0
            gradient = actual[name]
            rest = gradient.narrow(token_axis, tokens, more)
            if name == "base_output":
                if not same_bits(rest, grad[tokens:]):
                    raise AssertionError(f"{operation.name} changed dL/dy of rows after the batch")
            else:
                _assert_zero_bits(operation.name, name, rest)
            actual[name] = gradient.narrow(token_axis, 0, tokens)
        check_against_oracle(backend, case, short, actual, grad.narrow(axis, 0, tokens))
