"""Runs operations of a backend on the inputs of a case, and checks their results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.dtypes import accumulator_dtype
from lora_backends.operations import BY_NAME, OPERATIONS, Input, Operation
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_close, assert_same_bits, assert_same_values
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import GuardedOutput, LoRAInputs, guarded, on_each
from lora_backends.testing.oracles import Expected
from lora_backends.weights import LoRAWeights


def operations_for(weights: LoRAWeights) -> list[Operation]:
    """Return the operations that return y and take this layer, by its number of slices."""
    return [
        operation
        for operation in OPERATIONS
        if operation.result == "y"
        and operation.is_dense
        and operation.num_slices in (None, weights.num_slices)
    ]


def run(
    backend: LoRABackend,
    operation: Operation,
    inputs: LoRAInputs,
    plan: Any,
    base_output: torch.Tensor | None,
    h: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y of an operation; `h` is read by operations that take one."""
    first = {Input.ROWS: inputs.x, Input.TOKEN_IDS: inputs.token_ids, Input.H: h}[operation.input]
    y: torch.Tensor = getattr(backend, operation.name)(first, inputs.weights, plan, base_output)
    return y


def intermediate(backend: LoRABackend, inputs: LoRAInputs) -> torch.dtype:
    """Return the dtype that `backend` keeps h in within run_linear."""
    narrow = inputs.weights.compute_dtype if backend.narrow_intermediate else None
    return narrow or torch.float32


def linear(
    backend: LoRABackend, inputs: LoRAInputs, plan: Any | None = None, name: str = "run_linear"
) -> torch.Tensor:
    """Return y of one operation on a fresh plan, or on `plan`, over a fresh base_output."""
    if plan is None:
        plan = backend.prepare_batch(inputs.batch)
    return run(backend, BY_NAME[name], inputs, plan, inputs.new_view())


def expected(backend: LoRABackend, inputs: LoRAInputs) -> Expected:
    """Return the right result of `linear`, for the intermediate dtype that the backend declares."""
    return oracles.expected_linear(
        inputs.x,
        inputs.weights,
        inputs.batch,
        inputs.base,
        intermediate=intermediate(backend, inputs),
    )


def expected_of(
    backend: LoRABackend, operation: Operation, inputs: LoRAInputs, h: torch.Tensor
) -> Expected:
    """Return the right result of any operation; `h` as in `run`."""
    if operation.input is Input.TOKEN_IDS:
        return oracles.expected_embedding(
            inputs.token_ids,
            inputs.weights,
            inputs.batch,
            inputs.base,
            intermediate=intermediate(backend, inputs),
        )
    if operation.input is Input.H:
        dtype = inputs.x.dtype if inputs.base is None else inputs.base.dtype
        exact = torch.zeros(h.shape, dtype=torch.float64, device="cpu")
        expected_h = Expected(h.detach().cpu().double(), exact)
        return oracles.expected_expand(expected_h, inputs.weights, inputs.batch, inputs.base, dtype)
    return expected(backend, inputs)


def assert_right(actual: torch.Tensor, wanted: Expected, inputs: LoRAInputs, exact: bool) -> None:
    """Check a result against an oracle: its one value for integers, else within the bound."""
    if exact:
        assert_same_values(actual, oracles.rounded_exactly(wanted, actual.dtype), inputs)
    else:
        assert_close(actual, wanted, inputs)


def check_linear(
    backend: LoRABackend, case: LoRACase, inputs: LoRAInputs, plan: Any | None = None
) -> torch.Tensor:
    """Run run_linear, check it against the oracle of the case's values, and return it."""
    y = linear(backend, inputs, plan)
    assert_right(y, expected(backend, inputs), inputs, case.is_integer)
    return y


def assert_agree(
    actual: torch.Tensor,
    wanted: torch.Tensor,
    bound: torch.Tensor,
    inputs: LoRAInputs,
    *,
    exact: bool,
    claimed: bool,
) -> None:
    """Check that two runs agree: by value if `exact`, by bits if `claimed`, else within `bound`."""
    if exact:
        assert_same_values(actual, wanted, inputs)
    elif claimed:
        assert_same_bits(actual, wanted, inputs)
    else:
        assert_close(actual, Expected(wanted.detach().cpu().double(), bound), inputs)


def every_result(
    backend: LoRABackend, case: LoRACase, inputs: LoRAInputs
) -> Iterator[tuple[Operation, torch.Tensor, GuardedOutput | None]]:
    """Yield every operation that takes the layer, its y and its base_output."""
    plan, h = backend.prepare_batch(inputs.batch), strided_h(case, inputs)
    for operation in operations_for(inputs.weights):
        base = inputs.new_base()
        yield (
            operation,
            run(backend, operation, inputs, plan, None if base is None else base.view, h),
            base,
        )


def strided_h(case: LoRACase, inputs: LoRAInputs) -> torch.Tensor:
    """Return an h for run_lora_b, a strided view, NaN beyond each rank and without adapter."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    weights = inputs.weights
    shape = (weights.num_slices, inputs.batch.num_tokens, weights.max_rank)
    if case.is_integer:
        h = torch.randint(-8, 9, shape, generator=generator, device="cpu").float()
    else:
        h = torch.randn(shape, generator=generator, device="cpu")
    within = oracles.rank_mask(weights, inputs.batch.token_slots).permute(1, 0, 2)
    h[~within] = float("nan")
    sums = accumulator_dtype(inputs.x.dtype)
    return guarded(h.to(weights.device, sums), inputs.x_pad, float("nan"))


def gather_slots(inputs: LoRAInputs, order: list[int]) -> LoRAWeights:
    """Return the weights with slot ``order[i]`` at place i."""
    weights = inputs.weights
    return replace(
        weights,
        lora_a=on_each(weights.lora_a, lambda a: a[order]),
        lora_b=on_each(weights.lora_b, lambda b: b[order]),
        ranks=weights.ranks[order],
        scalings=weights.scalings[order],
        bias=None if weights.bias is None else weights.bias[order],
        output_scales=None if weights.output_scales is None else weights.output_scales[order],
        a_scales=None if weights.a_scales is None else weights.a_scales[order],
        b_scales=None if weights.b_scales is None else weights.b_scales[order],
    )


def columns(weights: LoRAWeights, slice_index: int) -> slice:
    """Return the output columns of a slice."""
    offsets = weights.slice_offsets
    return slice(offsets[slice_index], offsets[slice_index + 1])
