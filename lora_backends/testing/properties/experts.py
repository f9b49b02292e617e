"""Experts: pairs of a token and an expert, against the two oracles and each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import InvalidInputError
from lora_backends.features import CAPACITY, EIGHT_BIT
from lora_backends.testing import oracles
from lora_backends.testing.cases.experts import ExpertCase, ExpertInputs
from lora_backends.testing.cases.inputs import bits, same_bits
from lora_backends.testing.expert_oracle import (
    dense_layer,
    expected_experts,
    in_dense_order,
    touched_by_experts,
)
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.core import (
    ANY_EXPERTS,
    BOUNDED,
    BY_CLAIM,
    batch_invariant,
    cuda_graphs,
    declares,
    prop,
)

expert_prop = partial(prop, kind=ExpertCase, features=ANY_EXPERTS)


def routing_of(
    backend: LoRABackend, inputs: ExpertInputs, plan: Any | None = None, out: Any | None = None
) -> Any:
    """Return the routing of a case, on a fresh plan or on `plan`."""
    if plan is None:
        plan = backend.prepare_batch(inputs.batch)
    choice = (inputs.topk_ids, inputs.topk_weights, inputs.weights.num_experts, inputs.expert_map)
    return backend.prepare_experts(plan, *choice, out=out)


def experts(backend: LoRABackend, inputs: ExpertInputs, routing: Any | None = None) -> torch.Tensor:
    """Return y of run_experts over a fresh base_output, and check its guards."""
    if routing is None:
        routing = routing_of(backend, inputs)
    made = inputs.new_base()
    base = None if made is None else made[1]
    y = backend.run_experts(inputs.x, inputs.weights, routing, base, **inputs.options)
    if made is not None:
        made[0].assert_untouched()
        if y is not base:
            raise AssertionError("run_experts returned another tensor than the base_output given")
    return y


def expected(backend: LoRABackend, inputs: ExpertInputs) -> Expected:
    """Return the right result of `experts`, for the intermediate dtype of the backend."""
    narrow = inputs.weights.compute_dtype if backend.narrow_intermediate else None
    return expected_experts(inputs, intermediate=narrow or torch.float32)


def assert_right(actual: torch.Tensor, wanted: Expected, inputs: ExpertInputs, exact: bool) -> None:
    """Check a result against an oracle: its one value for integers, else within the bound."""
    dtype = inputs.x.dtype if inputs.base is None else inputs.base.dtype
    if tuple(actual.shape) != inputs.output_shape() or actual.dtype != dtype:
        raise AssertionError(
            f"run_experts returned {list(actual.shape)} {actual.dtype}, "
            f"not {list(inputs.output_shape())} {dtype}"
        )
    result = actual.detach().cpu()
    if exact:
        # NaN differs from everything, so it counts as wrong
        wrong = result != oracles.rounded_exactly(wanted, dtype)
    else:
        wrong = ~((result.double() - wanted.value).abs() <= wanted.bound)  # NaN is wrong
    assert_none(wrong, result, wanted, inputs)


def assert_none(
    wrong: torch.Tensor, result: torch.Tensor, wanted: Expected, inputs: ExpertInputs
) -> None:
    """Raise an AssertionError that names the first wrong element, its token, slot and expert."""
    if not bool(wrong.any()):
        return
    index = tuple(int(i) for i in wrong.nonzero()[0])
    token = index[0]
    ids = inputs.ids[token].tolist() if len(index) == 2 else int(inputs.ids[token, index[1]])
    raise AssertionError(
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong; the first:\n"
        f"  y{list(index)}: token {token}, slot {int(inputs.batch.token_slots[token])}, "
        f"expert {ids}\n"
        f"  actual   {result[index].item():.9g}\n"
        f"  expected {wanted.value[index].item():.9g}, bound {wanted.bound[index].item():.3g}"
    )


def check_experts(backend: LoRABackend, case: ExpertCase, inputs: ExpertInputs) -> torch.Tensor:
    """Run run_experts, check it against the oracle of the case's values, and return it."""
    y = experts(backend, inputs)
    assert_right(y, expected(backend, inputs), inputs, case.is_integer)
    return y


@expert_prop("On small integers run_experts has one right result.", values="integer", examples=50)
def experts_are_exact_on_integers(backend: LoRABackend, case: ExpertCase) -> None:
    """All sums are exact, so the one rounding into y leaves a single value."""
    check_experts(backend, case, case.build(backend.device))


@expert_prop(
    "run_experts is within the bound of float64.",
    agreement=BOUNDED,
    values="inexact",
    examples=80,
)
def run_experts_is_within_the_bound(backend: LoRABackend, case: ExpertCase) -> None:
    """The differential test, over everything that a case draws."""
    check_experts(backend, case, case.build(backend.device))


@expert_prop("Dead pairs keep the bits of base_output.", base=True, every_slot=True, examples=25)
def dead_pairs_keep_their_bits(backend: LoRABackend, case: ExpertCase) -> None:
    """Rows hold -0.0, NaN and infinities; on a device ids may also be too high."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    kept = ~touched_by_experts(inputs)
    odd = torch.tensor([-0.0, torch.nan, torch.inf], dtype=inputs.base.dtype, device="cpu")
    turns = torch.arange(inputs.base.numel(), device="cpu").remainder(3).reshape(kept.shape)
    base = torch.where(kept, odd[turns], inputs.base.cpu()).to(backend.device)
    ids = inputs.topk_ids
    if backend.device.type != "cpu":
        # the checks do not look at a device's values, so kernels must
        ids = torch.where(ids < 0, inputs.weights.num_experts + 3, ids)
    inputs = replace(inputs, base=base, topk_ids=ids)
    y = experts(backend, inputs)
    changed = (bits(y) != bits(base)) & kept
    before = base.cpu().double()
    assert_none(changed, y.cpu(), Expected(before, torch.zeros_like(before)), inputs)


@expert_prop(
    "Experts are the slots of a dense layer, and pairs its tokens.",
    examples=20,
    values="either",
    agreement=BY_CLAIM,
    weighted=False,
    reduce=False,
    features=frozenset({EIGHT_BIT}),
)
def experts_equal_dense_slots(backend: LoRABackend, case: ExpertCase) -> None:
    """run_linear of a layer with num_slots * num_experts slots."""
    inputs = case.build(backend.device)
    x, layer, batch = dense_layer(inputs)
    base = None
    if inputs.base is not None:
        base = inputs.base.flatten(0, 1)[:, in_dense_order(inputs)]
    dense = backend.run_linear(x, layer, backend.prepare_batch(batch), base)
    dense = dense[:, in_dense_order(inputs).argsort()].reshape(inputs.output_shape())
    y, wanted = experts(backend, inputs), expected(backend, inputs)
    if case.is_integer:
        assert_none(y.cpu() != dense.cpu(), y.cpu(), wanted, inputs)
    else:
        both = Expected(dense.cpu().double(), 2 * wanted.bound)
        assert_right(y, both, inputs, exact=False)


@expert_prop(
    "A reduced result is the sum over a token's pairs.",
    examples=20,
    agreement=BOUNDED,
    reduce=True,
    base=False,
)
def reduce_is_the_sum_over_pairs(backend: LoRABackend, case: ExpertCase) -> None:
    """Against the results of the pairs, summed in float64."""
    inputs = case.build(backend.device)
    apart = replace(inputs, options={**inputs.options, "reduce": False})
    pairs = experts(backend, apart).cpu().double().sum(1)
    bound = expected(backend, inputs).bound + expected(backend, apart).bound.sum(1)
    assert_right(experts(backend, inputs), Expected(pairs, bound), inputs, exact=False)


@expert_prop(
    "A routing refilled in place equals a fresh one.",
    examples=20,
    values="either",
    agreement=BY_CLAIM,
    every_slot=True,
)
def a_refilled_routing_equals_a_fresh_one(backend: LoRABackend, case: ExpertCase) -> None:
    """The plan is refilled too, or another one: other slots, and other experts."""
    inputs = case.build(backend.device)
    turned = replace(
        case,
        slots=(*case.slots[1:], case.slots[0]),
        ids=(*case.ids[1:], case.ids[0]),
        seed=case.seed + 2,
    ).build(backend.device)
    plan = backend.prepare_batch(turned.batch)
    routing = routing_of(backend, turned, plan)
    assert_right(
        experts(backend, turned, routing), expected(backend, turned), turned, case.is_integer
    )
    # a routing may be refilled for another plan
    plan = backend.prepare_batch(inputs.batch, out=plan if case.seed % 2 else None)
    if routing_of(backend, inputs, plan, out=routing) is not routing:
        raise AssertionError("prepare_experts(..., out=routing) returned another routing")
    y = experts(backend, inputs, routing)
    assert_right(y, expected(backend, inputs), inputs, case.is_integer)
    if backend.deterministic and not same_bits(y, experts(backend, inputs)):
        raise AssertionError("a refilled routing gives other bits than a fresh one")


@expert_prop(
    "Experts modify no argument; changed weights and a second routing are followed.",
    agreement=BY_CLAIM,
    examples=12,
    values="either",
)
def experts_keep_no_state(backend: LoRABackend, case: ExpertCase) -> None:
    """Two routings on one plan, the first used last; then slots exchange adapters."""
    inputs = case.build(backend.device)
    turned = replace(case, ids=tuple(ids[::-1] for ids in case.ids)).build(backend.device)
    other = replace(inputs, ids=turned.ids, topk_ids=turned.topk_ids, expert_map=turned.expert_map)
    plan, before = backend.prepare_batch(inputs.batch), _bits_of_arguments(inputs)
    routings = [routing_of(backend, part, plan) for part in (inputs, other)]
    for _ in range(2):
        y, wanted = experts(backend, inputs, routings[0]), expected(backend, inputs)
        assert_right(y, wanted, inputs, case.is_integer)
        for name, value in _bits_of_arguments(inputs).items():
            if not torch.equal(value, before[name]):
                raise AssertionError(f"prepare_experts or run_experts modified {name}")
        for tensor in inputs.weights.tensors.values():
            tensor.copy_(tensor.cpu().roll(1, 0))  # torch rolls no 8-bit float on a GPU
        before = _bits_of_arguments(inputs)


def _bits_of_arguments(inputs: ExpertInputs) -> dict[str, torch.Tensor]:
    named = {"x": inputs.x, "topk_ids": inputs.topk_ids, "topk_weights": inputs.topk_weights}
    named |= {f"weights.{name}": tensor for name, tensor in inputs.weights.tensors.items()}
    if inputs.expert_map is not None:
        named["expert_map"] = inputs.expert_map
    return {name: bits(tensor).clone() for name, tensor in named.items()}


@expert_prop(
    "A token's experts do not depend on the rest of the batch.",
    examples=20,
    requires=(batch_invariant,),
    every_slot=True,
)
def experts_do_not_depend_on_the_batch(backend: LoRABackend, case: ExpertCase) -> None:
    """One token alone, and 70 times, bit for bit as within the batch.

    With twice the pairs, as a sum of two has one order, and into float32 where that can be.
    """
    case = replace(case, top_k=2 * case.top_k, ids=tuple(_twice(case, ids) for ids in case.ids))
    case = replace(case, reduce=case.reduce or case.seed % 3 > 0)
    if torch.float32 in backend.dtypes:
        case = replace(case, base=torch.float32)  # 16 bits would round a difference away
    inputs = case.build(backend.device)
    y = experts(backend, inputs)
    for token in {0, case.num_tokens // 2, case.num_tokens - 1}:
        for count in (1, 70):
            again = experts(backend, tokens_of(inputs, [token] * count))
            if not same_bits(again[-1:], y[token : token + 1]):
                raise AssertionError(
                    f"token {token}, {count} times alone, has other bits than within the batch"
                )


@expert_prop(
    "Experts on a plan with room follow batches of any size, and leave later rows alone.",
    agreement=BY_CLAIM,
    examples=15,
    values="either",
    requires=(declares(CAPACITY),),
    base=True,
    every_slot=True,
)
def experts_follow_a_plan_with_room(backend: LoRABackend, case: ExpertCase) -> None:
    """The router has a row for each row of x; the plan is refilled with fewer tokens, then more."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    plan = backend.prepare_batch(inputs.batch, capacity=case.num_tokens)
    routing = routing_of(backend, inputs, plan)
    for count in (case.num_tokens // 2, case.num_tokens, 0):
        short = replace(inputs, batch=first_tokens(inputs.batch, count))
        backend.prepare_batch(short.batch, out=plan)
        x = inputs.x.clone()
        # rows of x after the batch must not be read
        x[len(x) // case.num_tokens * count :] = float("nan")
        idle = torch.full((case.num_tokens - count,), NO_ADAPTER, device="cpu")
        padded = LoRABatch(
            torch.cat([short.batch.token_slots, idle]),
            case.num_slots,
            inputs.batch.token_scales,
        )
        wanted = expected(backend, replace(inputs, batch=padded))
        for turn in range(2):  # the routing follows the plan, refilled or not
            if turn:
                routing_of(backend, inputs, plan, out=routing)
            y = experts(backend, replace(inputs, x=x), routing)
            if not same_bits(y[count:], inputs.base[count:]):
                raise AssertionError(f"rows after a batch of {count} tokens were changed")
            assert_right(y, wanted, inputs, case.is_integer)


@expert_prop(
    "Experts of several adapters per token add up as calls with one adapter each.",
    agreement=BY_CLAIM,
    examples=10,
    values="either",
    base=True,
)
def experts_of_several_adapters_are_a_sum(backend: LoRABackend, case: ExpertCase) -> None:
    """The second adapter of a token is the next slot's; y is rounded once for each."""
    inputs = case.build(backend.device)
    slots, scales = inputs.batch.token_slots, inputs.batch.token_scales
    both = LoRABatch(
        torch.stack([slots, torch.where(slots < 0, slots, (slots + 1) % case.num_slots)], 1),
        case.num_slots,
        None if scales is None else torch.stack([scales, -scales], 1),
    )
    y = experts(backend, inputs, routing_of(backend, inputs, backend.prepare_batch(both)))
    alone, bound = inputs, torch.zeros(y.shape, dtype=torch.float64, device="cpu")
    for part in both.per_adapter(2):
        alone = replace(alone, batch=part)
        bound = bound + expected(backend, alone).bound
        alone = replace(alone, base=experts(backend, alone).clone())
    assert alone.base is not None
    # the same roundings in the same order
    if case.is_integer or backend.deterministic:
        bound = torch.zeros_like(bound)
    wanted = Expected(alone.base.cpu().double(), 2 * bound)
    assert_right(y, wanted, inputs, exact=False)


def first_tokens(batch: LoRABatch, count: int) -> LoRABatch:
    """Return the first tokens of a batch."""
    scales = batch.token_scales
    return LoRABatch(
        batch.token_slots[:count], batch.num_slots, None if scales is None else scales[:count]
    )


def _twice(case: ExpertCase, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the experts of a token, then the next expert after each."""
    return (*ids, *((expert + 1) % case.num_experts if expert >= 0 else -1 for expert in ids))


def tokens_of(inputs: ExpertInputs, tokens: list[int]) -> ExpertInputs:
    """Return the inputs of some tokens, in the given order."""
    top_k = inputs.ids.shape[1] if inputs.options["rows"] == "pairs" else 1
    scales = inputs.batch.token_scales
    return replace(
        inputs,
        x=inputs.x.reshape(-1, top_k, inputs.x.shape[1])[tokens].flatten(0, 1),
        batch=LoRABatch(
            inputs.batch.token_slots[tokens],
            inputs.batch.num_slots,
            None if scales is None else scales[tokens],
        ),
        ids=inputs.ids[tokens],
        topk_ids=inputs.topk_ids[tokens],
        topk_weights=inputs.topk_weights[tokens],
        base=None if inputs.base is None else inputs.base[tokens],
    )


@expert_prop(
    "A captured graph of experts follows the plan and the router.",
    agreement=BY_CLAIM,
    examples=10,
    base=True,
    values="either",
    requires=(cuda_graphs,),
    min_tokens=1,
)
def graph_replay_of_experts_equals_eager(backend: LoRABackend, case: ExpertCase) -> None:
    """The graph makes the routing from values that the router writes before each replay."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    plan = backend.prepare_batch(inputs.batch)
    routing, y = routing_of(backend, inputs, plan), inputs.base.clone()
    # compiles the kernels, which a capture cannot
    backend.run_experts(inputs.x, inputs.weights, routing, y.clone(), **inputs.options)
    torch.cuda.synchronize(backend.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing_of(backend, inputs, plan, out=routing)
        backend.run_experts(inputs.x, inputs.weights, routing, y, **inputs.options)
    for turn in range(3):
        another = replace(case, slots=case.slots[::-1], seed=case.seed + 2 * turn)
        turned = replace(another.build(backend.device), weights=inputs.weights)
        assert turned.base is not None
        backend.prepare_batch(turned.batch, out=plan)
        for name in ("x", "topk_ids", "topk_weights", "expert_map"):
            if getattr(inputs, name) is not None:
                getattr(inputs, name).copy_(getattr(turned, name))
        y.copy_(turned.base)
        graph.replay()
        torch.cuda.synchronize(backend.device)
        assert_right(y, expected(backend, turned), turned, case.is_integer)


@expert_prop(
    "Bad experts are refused with a typed error before anything is written.",
    base=True,
    min_tokens=2,
    examples=8,
)
def bad_experts_are_refused_before_anything_is_written(
    backend: LoRABackend, case: ExpertCase
) -> None:
    """Shapes, dtypes and options that contradict each other."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    plan = backend.prepare_batch(inputs.batch)
    routing, before = routing_of(backend, inputs, plan), bits(inputs.base)
    for what, spoil in _SPOILED.items():
        bad = spoil(inputs)
        base = inputs.base.clone()
        bad_base = base[1:] if what == "a base_output with too few rows" else base
        try:
            # these are refused by prepare_experts already
            if what.startswith("a router"):
                routing_of(backend, bad, plan)
            backend.run_experts(bad.x, bad.weights, routing, bad_base, **bad.options)
        except InvalidInputError as error:
            if "given:" not in str(error):
                raise AssertionError(f"the error for {what} does not say what was given") from None
        else:
            raise AssertionError(f"{what} was accepted; it must raise InvalidInputError")
        if not torch.equal(bits(base), before):
            raise AssertionError(f"{what} was refused after base_output had been written")


_SPOILED: dict[str, Callable[[ExpertInputs], ExpertInputs]] = {
    "an x too wide": lambda i: replace(i, x=torch.cat([i.x, i.x[:, :1]], 1)),
    "an x with too few rows": lambda i: replace(i, x=i.x[1:]),
    "an unknown kind of rows": lambda i: replace(i, options={**i.options, "rows": "experts"}),
    "a base_output with too few rows": lambda i: i,
    "a router of too few tokens": lambda i: replace(i, topk_ids=i.topk_ids[1:]),
    "a router with weights of another shape": lambda i: replace(i, topk_weights=i.topk_weights[1:]),
}
