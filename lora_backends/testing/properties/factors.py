"""Scales of tokens and of output columns, and several adapters per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.features import CAPACITY, OUTPUT_SCALES, TOKEN_SCALES
from lora_backends.operations import BY_NAME, Input
from lora_backends.testing.assertions import assert_close
from lora_backends.testing.cases.dense import LoRACase, token_factors
from lora_backends.testing.cases.inputs import LoRAInputs
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.algebra import delta_of
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    BOUNDED,
    declares,
    either_prop,
    prop,
)
from lora_backends.testing.properties.plans import compositions
from lora_backends.testing.properties.relations import assert_doubled
from lora_backends.testing.properties.runs import (
    assert_agree,
    assert_right,
    expected,
    linear,
    operations_for,
    run,
)


@either_prop(
    "Doubling the scale of a token doubles its delta.",
    requires=(declares(TOKEN_SCALES),),
    token_scales=True,
    output_scales=False,
)
def doubling_a_token_scale_doubles_the_delta(backend: LoRABackend, case: LoRACase) -> None:
    """Every second token's; the others keep theirs."""
    inputs = case.build(backend.device).without_base_and_bias()
    factors = torch.ones(case.num_tokens, device="cpu")
    factors[::2] = 2
    assert inputs.batch.token_scales is not None
    doubled = inputs.scaled(factors * inputs.batch.token_scales)
    assert_doubled(backend, case, inputs, doubled, factors[:, None])


@either_prop(
    "A token of scale 0 keeps its row of base_output, up to the bias.",
    examples=15,
    requires=(declares(TOKEN_SCALES),),
    features=ANY_LAYER,
    base=True,
    output_scales=False,
)
def a_token_scale_of_zero_keeps_the_row(backend: LoRABackend, case: LoRACase) -> None:
    """Every second token has scale 0, all others 1; without a bias the row is equal by value."""
    inputs = case.build(backend.device)
    scales = torch.ones(case.num_tokens, device="cpu")
    scales[::2] = 0
    zeroed = inputs.scaled(scales)
    y = linear(backend, zeroed)
    assert_right(y, expected(backend, zeroed), zeroed, case.is_integer)
    assert zeroed.base is not None
    if not case.bias and not torch.equal(y[::2], zeroed.base[::2]):
        raise AssertionError("a row of scale 0 differs from base_output, though there is no bias")


@either_prop(
    "Scales of 1 change nothing.",
    examples=15,
    requires=(declares(TOKEN_SCALES),),
    features=ANY_LAYER,
    token_scales=False,
)
def token_scales_of_one_change_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """As a batch without scales; a product with 1 may be fused with another operation."""
    inputs = case.build(backend.device)
    y = linear(backend, inputs.scaled(torch.ones(case.num_tokens, device="cpu")))
    bound = 2 * expected(backend, inputs).bound
    assert_agree(y, linear(backend, inputs), bound, inputs, exact=case.is_integer, claimed=False)


@either_prop(
    "output_scales of 1 change nothing.",
    examples=15,
    requires=(declares(OUTPUT_SCALES),),
    features=ANY_LAYER,
    output_scales=False,
)
def output_scales_of_one_change_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """As a layer without output_scales, up to the rounding of another order."""
    inputs = case.build(backend.device)
    shape = (case.num_slots, inputs.weights.out_features)
    ones = torch.ones(shape, device=backend.device)
    scaled = inputs.replace(weights=replace(inputs.weights, output_scales=ones))
    bound = 2 * expected(backend, scaled).bound
    y, plain = linear(backend, scaled), linear(backend, inputs)
    assert_agree(y, plain, bound, scaled, exact=case.is_integer, claimed=False)


@prop(
    "DoRA equals the merged weight m (W + s B A) / ||W + s B A||, in float64.",
    agreement=BOUNDED,
    requires=(declares(OUTPUT_SCALES),),
    features=ANY_LAYER,
    base=True,
    token_scales=False,
    output_scales=False,
)
def dora_equals_the_merged_weight(backend: LoRABackend, case: LoRACase) -> None:
    """The norm is that of an output column's weights; base_output is x W^T, without a bias."""
    inputs = case.build(backend.device)
    weights = inputs.weights
    generator = torch.Generator().manual_seed(case.seed)
    w = torch.randn(weights.out_features, weights.in_features, generator=generator, device="cpu")
    m = torch.rand(case.num_slots, weights.out_features, generator=generator, device="cpu") + 0.5
    adapted = torch.stack([w.double() + delta_of(weights, s) for s in range(case.num_slots)])
    # output_scales are float32, the oracle's are not rounded
    exact = m.double() / adapted.norm(dim=-1)  # [num_slots, out_features]
    scales = exact.float().to(backend.device)
    x = inputs.x.cpu().double().nan_to_num(nan=0.0)
    base = (x @ w.double().T).to(case.base)
    dora = replace(
        inputs.replace(weights=replace(weights, output_scales=scales)), base=base.to(backend.device)
    )
    wanted = base.double().clone()
    lost = torch.zeros_like(wanted)
    for token, slot in enumerate(case.slots):
        if slot != NO_ADAPTER:
            product = x[token] @ adapted[slot].T
            wanted[token] = exact[slot] * product
            rounded = (base[token].double() - x[token] @ w.double().T).abs()
            magnitude = x[token].abs() @ (w.double().abs() + delta_of(weights, slot).abs()).T
            lost[token] = exact[slot] * (rounded + 2.0**-24 * product.abs() + 1e-12 * magnitude)
            if weights.bias is not None:
                wanted[token] += weights.bias[slot].cpu().double()
    bound = expected(backend, dora).bound + lost
    assert_close(linear(backend, dora), Expected(wanted, bound), dora)


def several(case: LoRACase, inputs: LoRAInputs, count: int) -> LoRAInputs:
    """Return inputs of `count` adapters per token, up to four, with scales if the case has them.

    The first column is the drawn one; x of a token that gains an adapter gets values.
    """
    columns = [compositions(case)[turn] for turn in (0, 4, 3, -1)][:count]
    slots = torch.tensor(columns, dtype=torch.int64, device="cpu").reshape(count, -1).T
    scales = None
    if case.token_scales:
        scales = token_factors(tuple(slots.shape), case.seed, case.is_integer)
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randint(-1, 2, inputs.x.shape, generator=generator, device="cpu").to(inputs.x)
    x[(slots == NO_ADAPTER).all(1)] = float("nan")
    return replace(inputs.replace(x=x), batch=LoRABatch(slots, case.num_slots, scales))


@either_prop(
    "Several adapters of a token add up as calls with one adapter each.",
    examples=12,
    output_scales=False,
    features=ANY_LAYER,
)
def several_adapters_are_the_sum_of_single_runs(backend: LoRABackend, case: LoRACase) -> None:
    """Two to four adapters per token, some missing or repeated; run_linear and another operation.

    Deltas are summed in float32 or wider and rounded once, so integers have only one right result.
    """
    inputs = several(case, case.build(backend.device), 2 + case.seed % 3)
    plan, wanted = backend.prepare_batch(inputs.batch), expected(backend, inputs)
    parts = inputs.batch.per_adapter(inputs.batch.adapters_per_token)
    plans = [backend.prepare_batch(part) for part in parts]
    others = [
        op
        for op in operations_for(inputs.weights)
        if op.input is not Input.H and op.name != "run_linear"
    ]
    # not `seed % 3`, which chose the number of adapters
    for operation in (BY_NAME["run_linear"], others[case.seed // 3 % len(others)]):
        y = run(backend, operation, inputs, plan, inputs.new_view())
        if operation.input is Input.ROWS:
            assert_right(y, wanted, inputs, case.is_integer)
        alone = torch.zeros_like(y) if inputs.base is None else inputs.base.clone()
        alone = alone.to(torch.promote_types(y.dtype, torch.float32))
        for each in plans:
            alone = run(backend, operation, inputs, each, alone)
        if operation.input is Input.ROWS or case.is_integer:
            alone, exact = alone.to(y.dtype), case.is_integer
            assert_agree(y, alone, 2 * wanted.bound, inputs, exact=exact, claimed=False)


@either_prop(
    "A refill may bring, change or drop the scales of tokens.",
    examples=10,
    requires=(declares(TOKEN_SCALES),),
    features=ANY_LAYER,
    token_scales=True,
)
def a_refill_may_bring_and_drop_scales(backend: LoRABackend, case: LoRACase) -> None:
    """With and without scales, one adapter per token and two, fewer tokens where there is room."""
    inputs = case.build(backend.device)
    plain = inputs.scaled(None)
    turned = inputs.scaled(token_factors((case.num_tokens,), case.seed + 1, case.is_integer))
    turns = [inputs, plain, turned, plain, inputs]
    if CAPACITY in backend.features:
        half = range(case.num_tokens // 2)
        turns[2:2] = [turned.select(half), plain.select(half), plain]
    plan = backend.prepare_batch((inputs, plain)[case.seed % 2].batch)
    for turn in turns:
        _check_refilled(backend, case, turn, plan)
    if not case.output_scales:
        two = several(case, inputs, 2)
        plan = backend.prepare_batch(two.batch)
        for turn in (inputs, two.scaled(None)):
            _check_refilled(backend, case, turn, plan)


def _check_refilled(backend: LoRABackend, case: LoRACase, inputs: LoRAInputs, plan: Any) -> None:
    if backend.prepare_batch(inputs.batch, out=plan) is not plan:
        raise AssertionError("prepare_batch(batch, out=plan) returned another plan")
    y = linear(backend, inputs, plan)
    assert_right(y, expected(backend, inputs), inputs, case.is_integer)
