"""Gradients of experts: their values, whose they are, and how they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.errors import InvalidInputError
from lora_backends.testing import oracles
from lora_backends.testing.cases.dense import sparse_normals
from lora_backends.testing.cases.experts import ExpertCase, ExpertInputs
from lora_backends.testing.cases.inputs import bits, same_bits
from lora_backends.testing.expert_gradient_oracle import expected_expert_gradients
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.core import (
    ANY_EXPERTS,
    BOUNDED,
    BY_CLAIM,
    cuda_graphs,
    deterministic,
    differentiable,
    no_interpreter,
    prop,
)
from lora_backends.testing.properties.experts import routing_of, tokens_of
from lora_backends.testing.properties.gradients.runs import (
    Gradients,
    assert_gradient,
    check_kind,
    laid_out,
)

MOST_IN_A_ROW = 5
"""Elements of a row of an integer dL/dy that are not 0. So |u| times the router's weight stays
exact in 16 bits: at most 3 * 5 * 15 of lora_b, in halves."""

MOST_OF_X = 64
"""Columns of an integer x that are not 0: |h| times the router's weight is at most 3 * 64."""

MANY_PAIRS = 600
"""Pairs that kernels sort with counters that all programs share."""

gradient_prop = partial(prop, kind=ExpertCase)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of experts on tensors of their own that require gradients."""

    inputs: ExpertInputs
    leaves: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, case: ExpertCase, inputs: ExpertInputs, only: str | None = None) -> Call:
        """Return a call whose tensors require gradients, all that can or one of them."""
        leaves: dict[str, torch.Tensor] = {}

        def leaf(name: str, tensor: torch.Tensor) -> torch.Tensor:
            own = tensor.detach()  # the same memory, so that strides and guards stay
            if only in (None, name):
                leaves[name] = own.requires_grad_()
            return own

        if case.is_integer:
            columns = torch.arange(inputs.x.shape[1], device=inputs.x.device)
            dropped = (columns >= MOST_OF_X // 2) & (columns < len(columns) - MOST_OF_X // 2)
            inputs.x.masked_fill_(dropped & ~inputs.x.isnan(), 0)
        weights = inputs.weights
        if weights.a_scales is None:
            lora_a, lora_b = leaf("lora_a", weights.lora_a), leaf("lora_b", weights.lora_b)
            weights = replace(weights, lora_a=lora_a, lora_b=lora_b)
        used = replace(inputs, x=leaf("x", inputs.x), weights=weights)
        if inputs.base is not None:
            used = replace(used, base=leaf("base_output", inputs.base))
        if inputs.options["weighted"]:
            used = replace(used, topk_weights=leaf("topk_weights", inputs.topk_weights))
        return cls(used, leaves)

    def run(self, backend: LoRABackend, routing: Any | None = None) -> torch.Tensor:
        """Return the result, with a graph."""
        inputs = self.inputs
        if routing is None:
            routing = routing_of(backend, inputs)
        base = None if inputs.base is None else inputs.base.clone()
        return backend.run_experts(inputs.x, inputs.weights, routing, base, **inputs.options)

    def gradients(
        self, backend: LoRABackend, grad: torch.Tensor, routing: Any | None = None
    ) -> Gradients:
        """Return the gradient of each leaf; check shapes and dtypes."""
        y = self.run(backend, routing)
        leaves = list(self.leaves.values())
        actual = dict(zip(self.leaves, torch.autograd.grad(y, leaves, grad), strict=True))
        for name, gradient in actual.items():
            check_kind("run_experts", name, gradient, self.leaves[name])
        return actual


def upstream(case: ExpertCase, inputs: ExpertInputs) -> torch.Tensor:
    """Return dL/dy in one of three layouts, NaN where no pair reads; integers are few in a row."""
    generator = torch.Generator().manual_seed(case.seed + 7)
    shape = inputs.output_shape()
    if case.is_integer:
        values = torch.randint(-1, 2, shape, generator=generator, device="cpu").float()
        order = torch.rand(shape, generator=generator, device="cpu").argsort(-1).argsort(-1)
        values[order >= MOST_IN_A_ROW] = 0
    elif case.values == "sparse":
        values = sparse_normals(shape, generator)
    else:
        values = torch.randn(shape, generator=generator, device="cpu")
    read = inputs.live.any(1) if inputs.options["reduce"] else inputs.live
    values[~read] = torch.nan
    values = values.to(
        inputs.x.device, inputs.x.dtype if inputs.base is None else inputs.base.dtype
    )
    return laid_out(values, case.seed)


def check_against_oracle(
    backend: LoRABackend, case: ExpertCase, call: Call, actual: Gradients, grad: torch.Tensor
) -> None:
    """Compare gradients with the oracle; `grad` is dL/dy."""
    wanted = expected_expert_gradients(call.inputs, grad, narrow=backend.narrow_intermediate)
    assert_right(actual, wanted, grad, case.is_integer)


def assert_right(
    actual: Gradients, wanted: Mapping[str, Expected], grad: torch.Tensor, exact: bool
) -> None:
    """Compare gradients by value or within the bound; that of base_output is dL/dy."""
    for name, gradient in actual.items():
        if name != "base_output":
            assert_gradient("run_experts", name, gradient, wanted[name], exact)
        elif not same_bits(gradient, grad):
            raise AssertionError("the gradient of base_output of run_experts is not g")


def check_gradients(backend: LoRABackend, case: ExpertCase, inputs: ExpertInputs) -> None:
    """Compute every gradient of a call, and compare them with the oracle."""
    call, grad = Call.of(case, inputs), upstream(case, inputs)
    check_against_oracle(backend, case, call, call.gradients(backend, grad), grad)


@gradient_prop(
    "On small integers gradients of experts have one right value.",
    values="integer",
    examples=20,
    requires=(differentiable,),
    features=ANY_EXPERTS,
)
def expert_gradients_are_exact_on_integers(backend: LoRABackend, case: ExpertCase) -> None:
    """All sums are exact, so the one rounding into each gradient leaves a single value."""
    check_gradients(backend, case, case.build(backend.device))


@gradient_prop(
    "Gradients of experts are within the bound of float64.",
    agreement=BOUNDED,
    values="inexact",
    examples=20,
    requires=(differentiable,),
    features=ANY_EXPERTS,
)
def expert_gradients_are_within_the_bound(backend: LoRABackend, case: ExpertCase) -> None:
    """To x, both stacks, the router's weights and base_output."""
    check_gradients(backend, case, case.build(backend.device))


@gradient_prop(
    "Gradients of experts are zero bit for bit beyond ranks, for experts without pairs and for "
    "dead pairs.",
    examples=15,
    requires=(differentiable,),
    every_slot=True,
)
def expert_gradients_are_zero_where_nothing_is_read(backend: LoRABackend, case: ExpertCase) -> None:
    """NaN or infinity fills what no pair reads, and dL/dy of dead pairs is NaN."""
    inputs = case.build(backend.device)
    filler = (torch.inf, torch.nan)[case.seed % 2]
    for stack in (inputs.weights.lora_a, inputs.weights.lora_b):
        stack.nan_to_num_(nan=filler)
    actual = dict(Call.of(case, inputs).gradients(backend, upstream(case, inputs)))
    actual.pop("base_output", None)
    ones = torch.ones(inputs.output_shape(), dtype=torch.float64, device="cpu")
    wanted = expected_expert_gradients(inputs, ones)
    for name, gradient in actual.items():
        dead = wanted[name].bound == 0
        if bool(bits(gradient)[dead].any()):
            raise AssertionError(f"the gradient of {name} is not zero where nothing is read")


@gradient_prop(
    "An adapter's gradients of experts depend on its own tokens alone.",
    agreement=BY_CLAIM,
    examples=8,
    requires=(differentiable,),
    every_slot=True,
    values="real",
)
def expert_gradients_ignore_other_adapters(backend: LoRABackend, case: ExpertCase) -> None:
    """All that belongs to other tokens and adapters becomes NaN, then leaves the batch."""
    inputs, spoiled = case.build(backend.device), case.build(backend.device)
    slot = case.seed % case.num_slots
    own = [token for token, at in enumerate(case.slots) if at == slot]
    others = [token for token, at in enumerate(case.slots) if at != slot]
    grad = upstream(case, inputs)
    for stack in (spoiled.weights.lora_a, spoiled.weights.lora_b):
        stack[[other for other in range(case.num_slots) if other != slot]] = torch.nan
    spoiled.x[_rows_of(case, others)] = torch.nan
    spoiled.topk_weights[others] = torch.nan
    spoiled_grad = grad.clone()
    spoiled_grad[others] = torch.nan
    first = Call.of(case, inputs).gradients(backend, grad)
    right = expected_expert_gradients(inputs, grad, narrow=backend.narrow_intermediate)
    wanted = {
        name: Expected(*(_own(case, name, part, slot, own) for part in (e.value, e.bound)))
        for name, e in right.items()
    }
    for part, part_grad, kept in (
        (spoiled, spoiled_grad, own),
        (tokens_of(spoiled, own), grad[own], list(range(len(own)))),
    ):
        actual = Call.of(case, part).gradients(backend, part_grad)
        actual = {name: _own(case, name, actual[name], slot, kept) for name in actual}
        for name in actual.keys() & {"lora_a", "lora_b"}:
            if backend.batch_invariant and not same_bits(actual[name], first[name][slot]):
                raise AssertionError(f"the gradient of {name} depends on other adapters")
        assert_right(actual, wanted, grad[own], exact=False)


def _own(
    case: ExpertCase, name: str, gradient: torch.Tensor, slot: int, tokens: list[int]
) -> torch.Tensor:
    """Return what the matrices of a slot, or its tokens, get."""
    if name.startswith("lora_"):
        return gradient[slot]
    return gradient[_rows_of(case, tokens) if name == "x" else tokens]


def _rows_of(case: ExpertCase, tokens: list[int]) -> list[int]:
    """Return the rows of x of some tokens."""
    if case.rows == "tokens":
        return tokens
    return [token * case.top_k + j for token in tokens for j in range(case.top_k)]


@gradient_prop(
    "Two runs give gradients of experts with the same bits.",
    examples=8,
    requires=(differentiable, deterministic),
    every_slot=True,
    values="real",
    min_tokens=1,
)
def expert_gradients_are_deterministic(backend: LoRABackend, case: ExpertCase) -> None:
    """Of so many pairs that kernels sort them in any order, into float32 where that can be."""
    if torch.float32 in backend.dtypes:
        case = replace(case, dtype=torch.float32, base=torch.float32)
    few = case.build(backend.device)
    # the interpreter runs programs in one order, slowly
    count = 1 if no_interpreter(backend) else -(-MANY_PAIRS // (case.num_tokens * case.top_k))
    many = tokens_of(few, list(range(case.num_tokens)) * count)
    grad = upstream(case, few)
    generator = torch.Generator().manual_seed(case.seed)
    factors = torch.rand(count, generator=generator, device="cpu").tolist()
    grad = torch.cat([factor * grad for factor in factors])
    runs = [Call.of(case, many).gradients(backend, grad) for _ in range(3)]
    for name, first in runs[0].items():
        if not all(same_bits(first, other[name]) for other in runs[1:]):
            raise AssertionError(f"the gradient of {name} has other bits in another run")


@gradient_prop(
    "A gradient of experts that is asked for alone is the one among all.",
    agreement=BY_CLAIM,
    examples=8,
    requires=(differentiable,),
    features=ANY_EXPERTS,
    values="either",
)
def an_expert_gradient_alone_is_the_one_among_all(backend: LoRABackend, case: ExpertCase) -> None:
    """Of each tensor in turn."""
    inputs = case.build(backend.device)
    every, grad = Call.of(case, inputs), upstream(case, inputs)
    among = every.gradients(backend, grad)
    wanted = expected_expert_gradients(every.inputs, grad, narrow=backend.narrow_intermediate)
    for name in among:
        alone = Call.of(case, inputs, only=name).gradients(backend, grad)
        if backend.deterministic and not same_bits(alone[name], among[name]):
            raise AssertionError(f"the gradient of {name} alone has other bits than among all")
        assert_right(alone, wanted, grad, case.is_integer)


@gradient_prop(
    "A refill between forward and backward of experts is refused; one before is followed.",
    agreement=BY_CLAIM,
    examples=6,
    requires=(differentiable,),
    every_slot=True,
    values="either",
)
def a_refilled_routing_has_its_own_gradients(backend: LoRABackend, case: ExpertCase) -> None:
    """Of the routing, and of its plan. A routing serves two calls, whose gradients add up."""
    inputs = case.build(backend.device)
    turned = replace(case, ids=case.ids[::-1], weighted=True, seed=case.seed + 3)
    other = turned.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    routing = routing_of(backend, Call.of(case, inputs).inputs, plan)
    for refilled in ("routing", "plan"):
        call, grad = Call.of(case, inputs), upstream(case, inputs)
        y = call.run(backend, routing_of(backend, call.inputs, plan, out=routing))
        if refilled == "routing":
            routing_of(backend, other, plan, out=routing)
        else:
            backend.prepare_batch(inputs.batch, out=plan)
        try:
            torch.autograd.grad(y, list(call.leaves.values()), grad)
        except InvalidInputError as error:
            if "refilled" not in str(error):
                raise
        else:
            raise AssertionError(f"a backward after a refill of the {refilled} was not refused")
    call, grad = Call.of(turned, other), upstream(turned, other)
    backend.prepare_batch(other.batch, out=plan)
    routing_of(backend, call.inputs, plan, out=routing)
    actual = call.gradients(backend, grad, routing)
    check_against_oracle(backend, turned, call, actual, grad)
    twice = [call.run(backend, routing) for _ in range(2)]
    (both,) = torch.autograd.grad(twice, [call.leaves["topk_weights"]], [grad, grad])
    if not torch.equal(both, 2 * actual["topk_weights"]):
        raise AssertionError("the router's weights lack the gradient of one of two calls")


@gradient_prop(
    "Gradients of experts of several adapters per token are those of calls with one adapter each.",
    agreement=BY_CLAIM,
    examples=8,
    requires=(differentiable,),
    values="either",
)
def expert_gradients_of_several_adapters_add_up(backend: LoRABackend, case: ExpertCase) -> None:
    """The second adapter of a token is the next slot's; a sum is rounded once more."""
    inputs = case.build(backend.device)
    slots, scales = inputs.batch.token_slots, inputs.batch.token_scales
    both = LoRABatch(
        torch.stack([slots, torch.where(slots < 0, slots, (slots + 1) % case.num_slots)], 1),
        case.num_slots,
        None if scales is None else torch.stack([scales, -scales], 1),
    )
    call, grad = Call.of(case, inputs), upstream(case, inputs)
    routing = routing_of(backend, call.inputs, backend.prepare_batch(both))
    actual = dict(call.gradients(backend, grad, routing))
    total: dict[str, Expected] = {}
    for part in both.per_adapter(2):
        alone = replace(call.inputs, batch=part)
        right = expected_expert_gradients(alone, grad, narrow=backend.narrow_intermediate)
        for name, gradient in right.items():
            total[name] = total[name] + gradient if name in total else gradient
    actual.pop("base_output", None)
    for name, expected in total.items():
        if name in actual:
            used = expected.bound > 0
            more = oracles.rounding_bound(expected.value, expected.bound, actual[name].dtype)
            total[name] = Expected(expected.value, expected.bound + more * used)
    assert_right(actual, total, grad, exact=False)


@gradient_prop(
    "A captured graph of forward and backward of experts follows the plan and the router.",
    agreement=BY_CLAIM,
    examples=8,
    requires=(differentiable, cuda_graphs),
    values="either",
    min_tokens=1,
    every_slot=True,
)
def graph_replay_of_expert_gradients_equals_eager(backend: LoRABackend, case: ExpertCase) -> None:
    """The graph makes the routing, too, from values that the router writes before each replay."""
    call = Call.of(case, case.build(backend.device))
    inputs, grad = call.inputs, upstream(case, call.inputs)
    plan = backend.prepare_batch(inputs.batch)
    routing = routing_of(backend, inputs, plan)
    # compiles the kernels, which a capture cannot
    call.gradients(backend, grad, routing_of(backend, inputs, plan, out=routing))
    torch.cuda.synchronize(backend.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call.gradients(backend, grad, routing_of(backend, inputs, plan, out=routing))
    for turn in range(3):
        seed = case.seed + 3 * turn
        another = replace(case, slots=case.slots[::-1], ids=case.ids[::-1], seed=seed)
        turned = Call.of(another, replace(another.build(backend.device), weights=inputs.weights))
        backend.prepare_batch(turned.inputs.batch, out=plan)
        with torch.no_grad():
            for name in ("x", "topk_ids", "topk_weights", "expert_map", "base"):
                if getattr(inputs, name) is not None:
                    getattr(inputs, name).copy_(getattr(turned.inputs, name))
            grad.copy_(upstream(another, turned.inputs))
        graph.replay()
        torch.cuda.synchronize(backend.device)
        check_against_oracle(backend, case, turned, actual, grad)
