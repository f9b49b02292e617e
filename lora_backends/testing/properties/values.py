"""Every operation against the two oracles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_backends.backend import LoRABackend
from lora_backends.dtypes import accumulator_dtype
from lora_backends.eight_bit import b_row_groups
from lora_backends.operations import BY_NAME, OPERATIONS, Operation
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_close, assert_same_values
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, on_each
from lora_backends.testing.properties.core import ANY_LAYER, BOUNDED, BY_CLAIM, either_prop, prop
from lora_backends.testing.properties.runs import (
    assert_right,
    check_linear,
    columns,
    expected,
    expected_of,
    intermediate,
    linear,
    run,
    strided_h,
)
from lora_backends.weights import LoRAWeights


@prop(
    "On small integers run_linear has one right result.",
    examples=70,
    values="integer",
    features=ANY_LAYER,
)
def integers_are_exact(backend: LoRABackend, case: LoRACase) -> None:
    """All sums are exact, so the one rounding into y leaves a single value."""
    check_linear(backend, case, case.build(backend.device))


@prop(
    "run_linear is within the bound of float64.",
    agreement=BOUNDED,
    values="inexact",
    examples=120,
    features=ANY_LAYER,
)
def run_linear_is_within_the_bound(backend: LoRABackend, case: LoRACase) -> None:
    """The differential test, over everything that a case draws."""
    check_linear(backend, case, case.build(backend.device))


@either_prop(
    "Decode and prefill of many tokens are right.", examples=15, min_tokens=65, features=ANY_LAYER
)
def many_tokens_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """A batch that fills more than one tile of any size."""
    check_linear(backend, case, case.build(backend.device))


@either_prop(
    "run_lora_a returns float32 h, zero beyond a rank and without adapter.",
    features=ANY_LAYER,
    examples=60,
)
def shrink_is_right(backend: LoRABackend, case: LoRACase) -> None:
    """Shape, dtype, the zeros, and the values within the bound."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    h = backend.run_lora_a(inputs.x, inputs.weights, plan)
    sums = accumulator_dtype(case.dtype)
    if h.dtype != sums:
        raise AssertionError(f"run_lora_a returned {h.dtype}, not {sums}")
    assert_right(
        h,
        oracles.expected_shrink(inputs.x, inputs.weights, inputs.batch),
        inputs,
        case.is_integer,
    )


@either_prop(
    "run_lora_b makes no use of h or lora_b beyond a rank.", features=ANY_LAYER, examples=60
)
def expand_is_right(backend: LoRABackend, case: LoRACase) -> None:
    """Alone, on an h that is NaN beyond each rank and in rows without an adapter."""
    inputs = case.build(backend.device)
    h = strided_h(case, inputs)
    plan = backend.prepare_batch(inputs.batch)
    y = backend.run_lora_b(h, inputs.weights, plan, inputs.new_view())
    wanted = expected_of(backend, BY_NAME["run_lora_b"], inputs, h)
    assert_right(y, wanted, inputs, case.is_integer)


@either_prop("run_lora_b of run_lora_a is run_linear.", features=ANY_LAYER)
def two_steps_equal_run_linear(backend: LoRABackend, case: LoRACase) -> None:
    """Fused or not, it is the same arithmetic."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    h = backend.run_lora_a(inputs.x, inputs.weights, plan)
    y = backend.run_lora_b(h, inputs.weights, plan, inputs.new_view())
    if case.is_integer:
        assert_same_values(y, linear(backend, inputs, plan), inputs)
    else:
        wanted = oracles.expected_linear(inputs.x, inputs.weights, inputs.batch, inputs.base)
        assert_close(y, wanted, inputs)


def _register_case_of(operation: Operation) -> None:
    """Add the property that a case of an operation, e.g. run_qkv, computes the same as it."""

    def check(backend: LoRABackend, case: LoRACase) -> None:
        inputs = case.build(backend.device)
        base, plan = inputs.new_base(), backend.prepare_batch(inputs.batch)
        y = run(backend, operation, inputs, plan, None if base is None else base.view)
        assert_right(y, expected(backend, inputs), inputs, case.is_integer)
        if base is not None:
            base.assert_untouched()
            if y is not base.view:
                raise AssertionError(f"{operation.name} returned another tensor than base_output")

    check.__name__ = f"{operation.name}_is_right"
    slices = f" of {operation.num_slices} slices" if operation.num_slices else ""
    rule = f"{operation.name} is {operation.same_as}{slices}."
    register = prop(
        rule,
        values="either",
        num_slices=operation.num_slices,
        agreement=BY_CLAIM,
        features=ANY_LAYER,
    )
    register(check)


for _operation in OPERATIONS:
    if _operation.same_as:
        _register_case_of(_operation)


@either_prop(
    "run_embedding is run_linear of one-hot rows, for int32 and int64 ids.",
    features=ANY_LAYER,
    examples=40,
)
def run_embedding_is_right(backend: LoRABackend, case: LoRACase) -> None:
    """in_features is the vocabulary; ids may repeat."""
    inputs = case.build(backend.device)
    ids = inputs.token_ids.to(torch.int32 if case.seed % 2 else torch.int64)
    plan = backend.prepare_batch(inputs.batch)
    y = backend.run_embedding(ids, inputs.weights, plan, inputs.new_view())
    wanted = oracles.expected_embedding(
        ids, inputs.weights, inputs.batch, inputs.base, intermediate=intermediate(backend, inputs)
    )
    assert_right(y, wanted, inputs, case.is_integer)


@prop(
    "Deltas of thousands, and of thousandths, are right.",
    agreement=BOUNDED,
    examples=12,
    output_scales=False,
    features=ANY_LAYER,
)
def large_and_small_deltas_are_right(backend: LoRABackend, case: LoRACase) -> None:
    """Times 2^12 and 2^-12, into a y of zeros that has room for them; h may not fit in float16.

    Small values are in x, then in the weights: in float16 many are denormal. A float16 y then holds
    denormals, and values near its largest.
    """
    inputs = case.build(backend.device).without_base_and_bias()
    wide = torch.float32 in backend.dtypes
    shape = case.num_tokens, inputs.weights.out_features
    if wide and case.dtype != torch.float64:
        inputs = replace(inputs, base=torch.zeros(shape, device=backend.device))
    # 2^12 overflows a float16 y or h
    powers = [-12]
    if wide and intermediate(backend, inputs) != torch.float16:
        powers.append(12)
    for power in powers:
        check_linear(backend, case, inputs.replace(x=inputs.x * 2.0**power))
    if torch.float16 in backend.dtypes:
        case = replace(case, dtype=torch.float16, base=None, bias=False, stored=None)
        inputs = case.build(backend.device)
        inputs = replace(inputs, weights=_times(inputs.weights, 2.0**-12))
        if wide:
            inputs = replace(inputs, base=torch.zeros(shape, device=backend.device))
        check_linear(backend, case, inputs)
        _check_ends_of_float16(backend, case)


def _check_ends_of_float16(backend: LoRABackend, case: LoRACase) -> None:
    """Check a float16 y whose values are all denormal, and one that almost overflows."""
    inputs = case.build(backend.device)
    largest = float(expected(backend, inputs).value.abs().max()) if case.num_tokens else 0.0
    ends = [2.0**-15, 60_000.0]
    if intermediate(backend, inputs) == torch.float16:
        ends.pop()  # h may overflow
    for end in ends if largest else ():
        power = math.floor(math.log2(end / largest))
        of_weights = max(-6, min(power // 4, 3))  # of A and of B, most of which stay normal
        of_x = max(-10, min(power - 2 * of_weights, 8))
        weights = _times(inputs.weights, 2.0**of_weights)
        check_linear(backend, case, inputs.replace(x=inputs.x * 2.0**of_x, weights=weights))


def _times(weights: LoRAWeights, factor: float) -> LoRAWeights:
    """Return the layer with A and B times a factor."""
    a, b = (on_each(stack, lambda t: t * factor) for stack in (weights.lora_a, weights.lora_b))
    return replace(weights, lora_a=a, lora_b=b)


@prop(
    "NaN and infinity show in their row or element, and nowhere else.",
    agreement=BOUNDED,
    examples=15,
    base=True,
    min_tokens=2,
    features=ANY_LAYER,
)
def nan_and_infinity_stay_where_they_belong(backend: LoRABackend, case: LoRACase) -> None:
    """One element of x makes its token's delta NaN or infinite, whatever it is multiplied by."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    token, other = case.seed % case.num_tokens, case.num_tokens - 1 - case.seed % case.num_tokens
    # both kinds, chosen by the seed so that a case repeats
    odd = (torch.nan, torch.inf)[case.seed % 3 % 2]
    x, base = inputs.x.clone(), inputs.base.clone()
    x[token, case.seed % case.in_features] = odd
    base[other, -1] = odd
    y = linear(backend, replace(inputs.replace(x=x), base=base))
    # without these, elements of rank 0 keep base_output and stay finite
    bare = replace(inputs.weights, bias=None, output_scales=None)
    spoiled = torch.zeros(y.shape, dtype=torch.bool, device="cpu")
    spoiled[token] = oracles.touched(bare, inputs.batch)[token]
    spoiled[other, -1] = True
    about = f"x[{token}, {case.seed % case.in_features}] and base_output[{other}, -1] are {odd}"
    _check_spoiled(backend, inputs, y, spoiled, about)


@prop(
    "NaN and infinity of A or B show in all tokens of their slot, also where x or h is 0.",
    agreement=BOUNDED,
    examples=12,
    features=ANY_LAYER,
)
def zeros_hide_no_nan_of_the_weights(backend: LoRABackend, case: LoRACase) -> None:
    """0 times NaN or infinity is NaN, so no zero may be left out of a sum."""
    adapted = sorted((t, s) for t in {*case.slots} - {-1} for s, r in enumerate(case.ranks[t]) if r)
    if not adapted:
        return
    slot, s = adapted[case.seed % len(adapted)]
    of_a, odd = case.seed // 2 % 2 == 0, (torch.nan, torch.inf)[case.seed % 2]
    inputs, weights = case.build(backend.device), case.build(backend.device).weights
    width = case.in_features if of_a else case.output_slices[s]
    odd_at = _set_one(weights, slot, s, of_a, case.seed % width, odd)
    x, tokens = inputs.x.clone(), torch.tensor(case.slots, device="cpu") == slot
    spoiled = torch.zeros(case.num_tokens, weights.out_features, dtype=torch.bool, device="cpu")
    if of_a:
        x[:, odd_at] = 0
        spoiled[:, columns(weights, s)] = tokens[:, None]
    else:
        x[tokens.to(x.device)] = 0
        spoiled[:, columns(weights, s)][:, odd_at] = tokens[:, None]
    inputs = inputs.replace(x=x)
    y = linear(backend, inputs.replace(weights=weights))
    about = f"{'lora_a' if of_a else 'lora_b'} of slot {slot}, slice {s} holds {odd}, times zeros"
    _check_spoiled(backend, inputs, y, spoiled, about)


def _set_one(
    weights: LoRAWeights, slot: int, s: int, of_a: bool, index: int, value: float
) -> slice:
    """Set a value of A or B, or its scale; return the columns of A or rows of B that it reaches."""
    width = weights.in_features if of_a else weights.output_slices[s]
    if weights.a_scales is None or weights.b_scales is None:
        stack = weights.a_of(s)[slot] if of_a else weights.b_of(s)[slot].T
        stack[0, index] = value  # within every rank but 0
        return slice(index, index + 1)
    size = weights.scale_block[1 if of_a else 0] or width
    groups = b_row_groups(weights.output_slices, weights.scale_block)
    scales = weights.a_scales[slot, s] if of_a else weights.b_scales[slot, sum(groups[:s]) :].T
    scales[0, index // size] = value
    return slice(index // size * size, min(index // size * size + size, width))


def _check_spoiled(
    backend: LoRABackend, inputs: LoRAInputs, y: torch.Tensor, spoiled: torch.Tensor, about: str
) -> None:
    """Check that y is not finite exactly where `spoiled`, else right; `inputs` are finite."""
    wrong = y.cpu().isfinite() == spoiled
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{about}; y[{row}, {column}] is {y[row, column].item()!r}\n"
            f"  {inputs.location(row, inputs.slice_of(column))}"
        )
    wanted = expected(backend, inputs)
    assert_close(torch.where(spoiled, wanted.value.to(y.dtype), y.cpu()), wanted, inputs)


class _PoisonedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills the tensors that `torch.empty` and its kin return with NaN, or with a large integer."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # meta tensors have no memory
        if func.overloadpacket in _EMPTY and result.device.type != "meta":
            result.fill_(float("nan") if result.is_floating_point() else 100)
        return result


_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


@either_prop(
    "Memory from torch.empty is written before it is read.", features=ANY_LAYER, examples=20
)
def memory_is_written_before_it_is_read(backend: LoRABackend, case: LoRACase) -> None:
    """The run meets NaN in every tensor that it allocates without a value."""
    inputs = case.build(backend.device)
    wanted = expected(backend, inputs)
    with _PoisonedMemory():  # type: ignore[no-untyped-call]
        y = linear(backend, inputs)
        plan = backend.prepare_batch(inputs.batch)
        h = backend.run_lora_a(inputs.x, inputs.weights, plan)
    assert_right(y, wanted, inputs, case.is_integer)
    shrunk = oracles.expected_shrink(inputs.x, inputs.weights, inputs.batch)
    assert_right(h, shrunk, inputs, case.is_integer)
