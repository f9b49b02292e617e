"""Relations between the gradients of several calls: isolation, repetition, sums."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.operations import Operation
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, same_bits
from lora_backends.testing.gradient_oracle import expected_gradients
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    BY_CLAIM,
    deterministic,
    differentiable,
    prop,
)
from lora_backends.testing.properties.gradients.runs import (
    Call,
    Gradients,
    assert_gradient,
    assert_same_gradients,
    differentiated,
    one_of,
    upstream,
)
from lora_backends.testing.properties.runs import strided_h

STACKS = ("lora_a", "lora_b", "bias", "output_scales")


@prop(
    "An adapter's gradients depend on its own tokens alone.",
    agreement=BY_CLAIM,
    values="real",
    examples=6,
    requires=(differentiable,),
    every_slot=True,
)
def gradients_of_an_adapter_ignore_the_others(backend: LoRABackend, case: LoRACase) -> None:
    """Other rows and adapters become NaN, then lie elsewhere in the batch, then leave it.

    The tokens of the adapter stay, in their order.
    """
    inputs = case.build(backend.device)
    slot = case.seed % case.num_slots
    own = [token for token, at in enumerate(case.slots) if at == slot]
    others = [token for token in range(case.num_tokens) if token not in own]
    _spoil_others(spoiled := case.build(backend.device), slot, others)
    everywhere = list(range(case.num_tokens))
    operation = one_of(differentiated(inputs), case.seed)
    call, first, grad = _of_adapter(backend, operation, case, inputs, slot, everywhere)
    narrow = backend.narrow_intermediate
    wanted = {}
    if not backend.batch_invariant:
        expected = expected_gradients(operation.name, call.inputs, grad, call.h, narrow=narrow)
        wanted = {name: _own(each, name, slot, own) for name, each in expected.items()}
    for how, rows in (
        ("where the others are NaN", everywhere),
        ("where the others lie elsewhere", _scattered(own, others, case.seed)),
        ("where the others have left the batch", own),
    ):
        _, actual, _ = _of_adapter(backend, operation, case, spoiled, slot, rows)
        for name, gradient in actual.items():
            if not backend.batch_invariant:
                assert_gradient(operation.name, name, gradient, wanted[name], exact=False)
            elif not same_bits(gradient, first[name]):
                raise AssertionError(
                    f"the gradient of {name} of {operation.name} of one adapter differs {how}"
                )


def _of_adapter(
    backend: LoRABackend,
    operation: Operation,
    case: LoRACase,
    inputs: LoRAInputs,
    slot: int,
    rows: list[int],
) -> tuple[Call, Gradients, torch.Tensor]:
    """Return a call on some tokens of a case, what a slot's stacks and rows get, and dL/dy.

    In other rows dL/dy is NaN if x is.
    """
    part = inputs.select(rows)
    call = Call.of(operation, case, part, h=strided_h(case, inputs)[:, rows])
    y = call.run(backend, backend.prepare_batch(part.batch))
    axis = y.ndim - 2
    shape = [*y.shape[:axis], case.num_tokens, y.shape[-1]]
    grad = upstream(case, inputs, y.new_empty(shape))
    grad = grad.index_select(axis, torch.tensor(rows, dtype=torch.int64, device=grad.device))
    others = [at for at, token in enumerate(rows) if case.slots[token] != slot]
    if bool(inputs.x[[at != slot for at in case.slots]].isnan().all()):
        grad.movedim(axis, 0)[others] = torch.nan
    actual = call.gradients_of(y, grad)
    own = [at for at in range(len(rows)) if at not in others]
    return call, {name: _own(each, name, slot, own) for name, each in actual.items()}, grad


def _own(value: Any, name: str, slot: int, rows: list[int]) -> Any:
    """Return a slot's part of a gradient of a stack, or its rows of another; of both for bounds."""
    if isinstance(value, Expected):
        parts = (_own(each, name, slot, rows) for each in (value.value, value.bound))
        return Expected(*parts)
    if name in STACKS:
        return value[slot]
    return value[:, rows] if name == "h" else value[rows]


def _scattered(own: list[int], others: list[int], seed: int) -> list[int]:
    """Return all tokens, the own ones in their order, the others anywhere."""
    generator = random.Random(seed)
    shuffled = generator.sample(others, len(others))
    rows = list(own)
    for token in shuffled:
        rows.insert(generator.randint(0, len(rows)), token)
    return rows


def _spoil_others(inputs: LoRAInputs, slot: int, others: list[int]) -> None:
    """Make x of other tokens and the stacks of other slots NaN, in place."""
    inputs.x[others] = torch.nan
    if inputs.base is not None:
        inputs.base[others] = torch.nan
    rest = [at for at in range(inputs.weights.num_slots) if at != slot]
    for name in STACKS:
        stack = getattr(inputs.weights, name)
        if stack is not None:
            stack[rest] = torch.nan


@prop(
    "Two backward runs on equal inputs are equal.",
    examples=6,
    requires=(differentiable, deterministic),
    features=ANY_LAYER,
)
def two_backward_runs_are_equal(backend: LoRABackend, case: LoRACase) -> None:
    """Bit for bit, on one plan and on another of the same batch."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    operation = one_of(differentiated(inputs), case.seed)
    first = _gradients(backend, operation, case, inputs, plan)
    for again in (plan, backend.prepare_batch(inputs.batch)):
        actual = _gradients(backend, operation, case, case.build(backend.device), again)
        assert_same_gradients(actual, first, "from run to run", bitwise=True)


def _gradients(
    backend: LoRABackend,
    operation: Operation,
    case: LoRACase,
    inputs: LoRAInputs,
    plan: Any,
) -> Gradients:
    call = Call.of(operation, case, inputs)
    return call.gradients(backend, plan, partial(upstream, case, inputs))


@prop(
    "Gradients of several uses and of several backward calls add up.",
    values="integer",
    examples=6,
    requires=(differentiable,),
    min_tokens=1,
)
def gradients_add_up(backend: LoRABackend, case: LoRACase) -> None:
    """One layer on two plans in one graph, two backward calls, and dL/dy whose rows are one row."""
    # sums of gradients are exact in it
    dtype = torch.float32 if torch.float32 in backend.dtypes else backend.dtypes[0]
    case = replace(case, dtype=dtype, base=None if case.base is None else dtype)
    inputs = case.build(backend.device)
    inputs.x.nan_to_num_(nan=1.0)  # in the other batch, tokens without an adapter have one
    batches = (inputs, inputs.replace(slots=_turned(case)))
    plans = [backend.prepare_batch(each.batch) for each in batches]
    operation = one_of(differentiated(inputs), case.seed)
    call = Call.of(operation, case, inputs, h=_any_h(case, inputs))
    apart = [
        call.gradients(backend, plan, partial(upstream, case, at))
        for at, plan in zip(batches, plans, strict=True)
    ]
    ys = [call.run(backend, plan) for plan in plans]  # both before a backward
    grads = [upstream(case, at, y) for at, y in zip(batches, ys, strict=True)]
    sums = {name: gradient + apart[1][name] for name, gradient in apart[0].items()}
    joined = call.gradients_of(ys, grads, retain_graph=True)
    assert_same_gradients(joined, sums, "where a layer is used twice", bitwise=False)
    for y, grad in zip(ys, grads, strict=True):
        torch.autograd.backward(y, grad, retain_graph=True)
    kept = call.named(tuple(leaf.grad for leaf in call.leaves.values()))
    assert_same_gradients(kept, sums, "after two backward calls", bitwise=False)
    dense = call.gradients_of(ys[0], torch.ones_like(ys[0]), retain_graph=True)
    for axes in ((-2,), (-2, -1)):
        total = ys[0].sum(axes)
        one_row = call.gradients_of(total, torch.ones_like(total), retain_graph=True)
        assert_same_gradients(one_row, dense, "where dL/dy is a sum's", bitwise=False)


def _turned(case: LoRACase) -> list[int]:
    """Return other slots for the tokens, each one further, -1 among them."""
    return [(slot + 2) % (case.num_slots + 1) - 1 for slot in case.slots]


def _any_h(case: LoRACase, inputs: LoRAInputs) -> torch.Tensor:
    """Return an h that fits any batch: where `strided_h` has NaN, others may have a rank."""
    return strided_h(case, inputs).nan_to_num(nan=1.0)
