"""Relations between the results of two calls, for any values.

On integer cases every relation holds bit for bit; on normal values it does where the backend
claims it, and within the bound otherwise.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from lora_backends.backend import LoRABackend
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_close, assert_same_bits
from lora_backends.testing.cases.dense import LARGEST_EXACT, LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, same_bits
from lora_backends.testing.properties.core import ANY_LAYER, EXACT, deterministic, either_prop, prop
from lora_backends.testing.properties.core import batch_invariant as claims_batch_invariance
from lora_backends.testing.properties.runs import (
    assert_agree,
    assert_right,
    expected,
    gather_slots,
    linear,
)


def _assert_gives(
    backend: LoRABackend, case: LoRACase, inputs: LoRAInputs, wanted: torch.Tensor, claimed: bool
) -> None:
    """Check that y of `inputs` equals `wanted` as far as the case and the claim promise."""
    y, bound = linear(backend, inputs), 2 * expected(backend, inputs).bound
    assert_agree(y, wanted, bound, inputs, exact=case.is_integer, claimed=claimed)


@prop("Two runs on equal inputs are equal.", requires=(deterministic,), examples=20)
def two_runs_are_equal(backend: LoRABackend, case: LoRACase) -> None:
    """Bit for bit, on one plan and on another of the same batch."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    first = linear(backend, inputs, plan)
    # the second run may repeat a stored call, a new plan cannot
    for again in (plan, backend.prepare_batch(inputs.batch)):
        assert_same_bits(linear(backend, case.build(backend.device), again), first, inputs)


@prop(
    "A row's result does not depend on the rest of the batch.",
    examples=60,
    requires=(claims_batch_invariance,),
    every_slot=True,
)
def rows_do_not_depend_on_the_batch(backend: LoRABackend, case: LoRACase) -> None:
    """Some rows alone, bit for bit as within the batch: y, and h, which is not rounded to y.

    One row also as 70 tokens of a batch that uses every slot. y is float32 where it can be.
    """
    if case.base is not None and torch.float32 in backend.dtypes:
        case = replace(case, base=torch.float32)  # 16 bits would round a difference away
    inputs = case.build(backend.device)
    y, h = _both(backend, inputs)
    rows = (0, case.num_tokens // 2, case.num_tokens - 1)
    for row in set(rows):
        alone = inputs.select([row])
        y_alone, h_alone = _both(backend, alone)
        assert_same_bits(y_alone, y[row : row + 1], alone)
        if not same_bits(h_alone, h[:, row : row + 1]):
            raise AssertionError(f"h of token {row} alone is not its h within the batch")
    for row in [row for row in rows if case.slots[row] >= 0][:1]:
        slots = [*range(case.num_slots), *[case.slots[row]] * 70]
        # a full tile, where one row alone has most of a tile empty
        crowd = inputs.select([row] * len(slots)).replace(slots=slots)
        y_crowd, h_crowd = _both(backend, crowd)
        assert_same_bits(y_crowd[-1:], y[row : row + 1], inputs.select([row]))
        if not same_bits(h_crowd[:, -1:], h[:, row : row + 1]):
            raise AssertionError(f"h of token {row} is another one among 70 tokens of its slot")


def _both(backend: LoRABackend, inputs: LoRAInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y of run_linear, and h."""
    plan = backend.prepare_batch(inputs.batch)
    return linear(backend, inputs, plan), backend.run_lora_a(inputs.x, inputs.weights, plan)


@either_prop("Permuting tokens permutes rows.", every_slot=True)
def permuting_tokens_permutes_rows(backend: LoRABackend, case: LoRACase) -> None:
    """Each row has the same result in a batch of another order."""
    inputs = case.build(backend.device)
    order = list(range(case.num_tokens))
    random.Random(case.seed).shuffle(order)
    permuted = inputs.select(order)
    y = linear(backend, inputs)[order]
    _assert_gives(backend, case, permuted, y, backend.batch_invariant)


@either_prop("Splitting a batch in two changes no row.", examples=20)
def splitting_a_batch_changes_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """At the start, in the middle, or anywhere."""
    inputs = case.build(backend.device)
    cut = random.Random(case.seed).randint(0, case.num_tokens)
    parts = (inputs.select(range(cut)), inputs.select(range(cut, case.num_tokens)))
    joined = torch.cat([linear(backend, part) for part in parts])
    _assert_gives(backend, case, inputs, joined, backend.batch_invariant)


@either_prop("Renumbering slots changes nothing.")
def renumbering_slots_changes_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """The adapters change their slots, and the tokens follow them."""
    inputs = case.build(backend.device)
    order = list(range(case.num_slots))
    random.Random(case.seed).shuffle(order)
    moved = {-1: -1} | {old: new for new, old in enumerate(order)}
    renumbered = inputs.replace(
        weights=gather_slots(inputs, order), slots=[moved[slot] for slot in case.slots]
    )
    y = linear(backend, renumbered)
    _assert_gives(backend, case, inputs, y, backend.deterministic and backend.batch_invariant)


@either_prop("Equal adapters are interchangeable.")
def equal_adapters_are_interchangeable(backend: LoRABackend, case: LoRACase) -> None:
    """A copy of every adapter in a slot of its own; every other token moves to the copy."""
    inputs = case.build(backend.device)
    doubled = gather_slots(inputs, list(range(case.num_slots)) * 2)
    moved = [
        slot + case.num_slots if slot >= 0 and token % 2 else slot
        for token, slot in enumerate(case.slots)
    ]
    y = linear(backend, inputs.replace(weights=doubled, slots=moved))
    _assert_gives(backend, case, inputs, y, backend.batch_invariant)


@either_prop("Rows of x may overlap in memory.", features=ANY_LAYER, examples=15, min_tokens=2)
def rows_of_x_may_overlap(backend: LoRABackend, case: LoRACase) -> None:
    """All tokens share one row (stride 0); then each row begins one element after the last."""
    inputs = case.build(backend.device)
    generator = torch.Generator().manual_seed(case.seed)
    width = case.in_features + case.num_tokens
    few = case.draw_x(1, width, generator)[0].to(inputs.x)
    if case.is_integer and case.stored is not None:
        few[LARGEST_EXACT // 2 :] = 0  # as in `LoRACase.build`
    size = (case.num_tokens, case.in_features)
    for stride in (0, 1):
        over = replace(inputs, x=few.as_strided(size, (stride, 1)))
        assert_right(linear(backend, over), expected(backend, over), over, case.is_integer)


@either_prop("Slots that no token uses change nothing.")
def unused_slots_change_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """Their weights and bias are NaN, and further slots of NaN are appended."""
    inputs = case.build(backend.device)
    spoiled = case.build(backend.device)
    unused = sorted(set(range(case.num_slots)) - set(case.slots))
    _spoil(spoiled, unused)
    y = linear(backend, inputs)
    _assert_gives(backend, case, spoiled, y, backend.deterministic)
    appended = inputs.replace(weights=gather_slots(inputs, [*range(case.num_slots), 0, 0]))
    _spoil(appended, [case.num_slots, case.num_slots + 1])
    _assert_gives(backend, case, appended, y, backend.deterministic and backend.batch_invariant)


def _spoil(inputs: LoRAInputs, slots: list[int]) -> None:
    """Fill everything of some slots with NaN, in place."""
    weights = inputs.weights
    for tensor in (weights.lora_a, weights.lora_b, weights.bias, weights.output_scales):
        if tensor is not None:
            tensor[slots] = float("nan")


@prop(
    "A zero A, a zero B or rank 0 keeps base_output.",
    agreement=EXACT,
    base=True,
    bias=False,
    output_scales=False,
    examples=20,
)
def zero_adapters_keep_base_output(backend: LoRABackend, case: LoRACase) -> None:
    """A sum with zero; rank 0 keeps the bits, -0.0 included."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    for field in ("lora_a", "lora_b", "ranks"):
        zeroed = case.build(backend.device)
        getattr(zeroed.weights, field).zero_()
        y = linear(backend, zeroed)
        if not torch.equal(y, inputs.base):
            raise AssertionError(f"y differs from base_output where {field} is all zero")


@either_prop("The content of the padding beyond a rank changes nothing.")
def padding_beyond_a_rank_is_never_read(backend: LoRABackend, case: LoRACase) -> None:
    """NaN there, or zero, or a large number: the same result."""
    inputs = case.build(backend.device)
    y = linear(backend, inputs)
    for filler in (0.0, 3e4):
        filled = case.build(backend.device)
        for tensor in (filled.weights.lora_a, filled.weights.lora_b):
            tensor.nan_to_num_(nan=filler)
        _assert_gives(backend, case, filled, y, backend.deterministic)


@either_prop("A wider stack of the same adapters gives the same result.")
def wider_padding_changes_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """max_rank grows, the ranks stay."""
    inputs = case.build(backend.device)
    weights, more = inputs.weights, 1 + case.seed % 17
    pad_a, pad_b = (0, 0, 0, more), (0, more)
    wider = replace(
        weights,
        lora_a=torch.nn.functional.pad(weights.lora_a, pad_a, value=float("nan")),
        lora_b=torch.nn.functional.pad(weights.lora_b, pad_b, value=float("nan")),
    )
    _assert_gives(backend, case, inputs, linear(backend, inputs.replace(weights=wider)), False)


@either_prop("Doubling the scaling doubles the delta.")
def doubling_the_scaling_doubles_the_delta(backend: LoRABackend, case: LoRACase) -> None:
    """A power of two moves exponents alone; denormal results are compared within the bound."""
    inputs = case.build(backend.device).without_base_and_bias()
    doubled = inputs.replace(weights=replace(inputs.weights, scalings=2 * inputs.weights.scalings))
    assert_doubled(backend, case, inputs, doubled, torch.tensor(2.0, device="cpu"))


def assert_doubled(
    backend: LoRABackend,
    case: LoRACase,
    inputs: LoRAInputs,
    doubled: LoRAInputs,
    factors: torch.Tensor,
) -> None:
    """Check that y of `doubled` is that of `inputs` times factors, each 1 or 2."""
    single, y = linear(backend, inputs), linear(backend, doubled)
    twice = factors.to(single) * single
    # twice a denormal is exact only if the single one was not rounded
    normal = single.abs() >= torch.finfo(y.dtype).smallest_normal
    wanted = torch.where(normal | case.is_integer, twice, y)
    bound = 2 * expected(backend, doubled).bound
    exact, claimed = case.is_integer, backend.deterministic
    assert_agree(y, wanted, bound, doubled, exact=exact, claimed=claimed)
    assert_close(y, oracles.Expected(twice.cpu().double(), bound), doubled)
