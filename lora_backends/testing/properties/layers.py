"""Layers as engines keep them: a tensor per slice, one half of a layer, h in a given tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lora_backends.backend import LoRABackend
from lora_backends.dtypes import accumulator_dtype
from lora_backends.errors import InvalidInputError
from lora_backends.features import SLICE_TENSORS
from lora_backends.operations import BY_NAME, Input
from lora_backends.testing import oracles
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import guarded, same_bits
from lora_backends.testing.properties.core import ANY_LAYER, declares, either_prop
from lora_backends.testing.properties.runs import (
    assert_agree,
    assert_right,
    expected_of,
    operations_for,
    run,
    strided_h,
)
from lora_backends.weights import LoRAWeights


@either_prop(
    "One tensor per slice gives what the stack gives.",
    examples=15,
    requires=(declares(SLICE_TENSORS),),
    split="",
)
def tensors_per_slice_equal_the_stack(backend: LoRABackend, case: LoRACase) -> None:
    """Views of the stack; then tensors of their own, each with another row stride, of A, B, both.

    Bit for bit for the views, whose layout is the same, and for all where rows are invariant.
    """
    inputs = case.build(backend.device)
    plan, h = backend.prepare_batch(inputs.batch), strided_h(case, inputs)
    others = [op for op in operations_for(inputs.weights) if op.name != "run_linear"]
    for turn, operation in enumerate((BY_NAME["run_linear"], others[case.seed % len(others)])):
        y = run(backend, operation, inputs, plan, inputs.new_view(), h)
        bound = 2 * expected_of(backend, operation, inputs, h).bound
        spread = _spread(inputs.weights, ("ab", "a", "b")[(turn + case.seed) % 3])
        for weights, same_layout in ((_views(inputs.weights), True), (spread, False)):
            apart = inputs.replace(weights=weights)
            again = run(backend, operation, apart, plan, apart.new_view(), h)
            assert_agree(
                again,
                y,
                bound,
                apart,
                exact=case.is_integer,
                claimed=backend.deterministic and (same_layout or backend.batch_invariant),
            )


def _views(weights: LoRAWeights) -> LoRAWeights:
    """Return the layer with tuples of views into its stacks."""
    slices = range(weights.num_slices)
    a, b = (tuple(map(of, slices)) for of in (weights.a_of, weights.b_of))
    return replace(weights, lora_a=a, lora_b=b)


def _spread(weights: LoRAWeights, which: str) -> LoRAWeights:
    """Return the layer with tuples of tensors of their own, in reverse order in memory."""

    def of(part: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        # a backend that assumes equal distances between slices reads another one
        copies = [guarded(part(s), s, float("nan")) for s in reversed(range(weights.num_slices))]
        return tuple(reversed(copies))

    a = of(weights.a_of) if "a" in which else weights.lora_a
    b = of(weights.b_of) if "b" in which else weights.lora_b
    return replace(weights, lora_a=a, lora_b=b)


@either_prop(
    "A layer without lora_b runs run_lora_a alone, one without lora_a run_lora_b alone.",
    examples=15,
    features=ANY_LAYER,
)
def halves_of_a_layer_run_alone(backend: LoRABackend, case: LoRACase) -> None:
    """Operations that read the missing half are refused before anything is written."""
    inputs = case.build(backend.device)
    plan, h = backend.prepare_batch(inputs.batch), strided_h(case, inputs)
    only_a = replace(inputs.weights, lora_b=None, b_scales=None)
    only_b = replace(inputs.weights, lora_a=None, a_scales=None)
    shrunk = backend.run_lora_a(inputs.x, only_a, plan)
    wanted = oracles.expected_shrink(inputs.x, inputs.weights, inputs.batch)
    assert_right(shrunk, wanted, inputs, case.is_integer)
    for operation in operations_for(inputs.weights):
        if operation.input is Input.H:
            y = run(backend, operation, inputs.replace(weights=only_b), plan, inputs.new_view(), h)
            wanted = expected_of(backend, operation, inputs, h)
            assert_right(y, wanted, inputs, case.is_integer)
        for half in (only_a, only_b) if operation.input is not Input.H else (only_a,):
            view = inputs.new_view()
            try:
                run(backend, operation, inputs.replace(weights=half), plan, view, h)
            except InvalidInputError:
                if view is None or inputs.base is None or same_bits(view, inputs.base):
                    continue
                raise AssertionError(f"{operation.name} wrote before it refused half") from None
            raise AssertionError(f"{operation.name} took a layer without a half that it reads")


@either_prop("run_lora_a writes all of out and returns it.", examples=20, features=ANY_LAYER)
def out_is_written_whole_and_returned(backend: LoRABackend, case: LoRACase) -> None:
    """It holds NaN before the call and the result of a call without it afterwards."""
    inputs = case.build(backend.device)
    plan, weights = backend.prepare_batch(inputs.batch), inputs.weights
    shape = (weights.num_slices, case.num_tokens, weights.max_rank)
    room = torch.full((shape[0] + 2, *shape[1:]), torch.nan, device=backend.device)
    room = room.to(accumulator_dtype(case.dtype))
    out = room[1:-1]
    h = backend.run_lora_a(inputs.x, weights, plan, out=out)
    if h is not out:
        raise AssertionError("run_lora_a returned another tensor than out")
    if not bool(room[[0, -1]].isnan().all()):
        raise AssertionError("run_lora_a wrote beside out")
    wanted = oracles.expected_shrink(inputs.x, weights, inputs.batch)
    assert_right(out, wanted, inputs, case.is_integer)
    if backend.deterministic and not same_bits(backend.run_lora_a(inputs.x, weights, plan), out):
        raise AssertionError("run_lora_a gives other bits in out than without it")
