"""Bad input: a typed error that says what was given, and nothing written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from lora_backends import features
from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.dtypes import dtype_name
from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.operations import OPERATIONS, Input, Operation
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, bits
from lora_backends.testing.properties.core import EXACT, prop
from lora_backends.testing.properties.runs import operations_for, run
from lora_backends.weights import LoRAWeights


class BadCall(NamedTuple):
    """A call that has to be refused."""

    what: str  # what is wrong
    call: Callable[[torch.Tensor], object]  # of a base_output
    error: type[LoRABackendError] = InvalidInputError


@prop(
    "Bad input is refused with a typed error before anything is written.",
    agreement=EXACT,
    examples=8,
    base=True,
    min_tokens=2,
)
def bad_input_is_refused_before_anything_is_written(backend: LoRABackend, case: LoRACase) -> None:
    """Contradictory arguments and unsupported dtypes; the error says what was given."""
    inputs = case.build(backend.device)
    assert inputs.base is not None
    for what, call, error in _bad_calls(backend, inputs):
        base = inputs.base.clone()
        try:
            call(base)
        except error as raised:
            if "given:" not in str(raised):
                raise AssertionError(f"the error for {what} does not say what was given") from None
        except Exception as raised:
            raise AssertionError(
                f"{what} raised {type(raised).__name__}, not {error.__name__}: {raised}"
            ) from raised
        else:
            raise AssertionError(f"{what} was accepted; it must raise {error.__name__}")
        if not torch.equal(bits(base), bits(inputs.base)):
            raise AssertionError(f"{what} was refused after base_output had been written")


def _bad_calls(backend: LoRABackend, inputs: LoRAInputs) -> Iterator[BadCall]:
    """Yield every bad call on a batch of the backend."""
    weights, plan = inputs.weights, backend.prepare_batch(inputs.batch)
    tokens, width = inputs.x.shape
    x = torch.ones(tokens, width, dtype=inputs.x.dtype, device=inputs.x.device)
    yield from _bad_rows(backend, weights, plan, x)
    for operation in operations_for(weights):
        yield from _bad_bases(backend, operation, inputs, plan)
    if isinstance(getattr(plan, "num_tokens", None), int):  # a plan that tells its size
        yield from _bad_plans(backend, inputs, plan, x)
    ids = torch.full((tokens,), width, device=x.device)
    if x.device.type == "cpu":
        yield BadCall(
            "a token id beyond the vocabulary", partial(backend.run_embedding, ids, weights, plan)
        )
    h = torch.zeros(weights.num_slices, tokens, weights.max_rank + 1, device=x.device)
    yield BadCall("an h of another max_rank", partial(backend.run_lora_b, h, weights, plan))
    yield from _bad_slices(backend, inputs, plan)
    yield from _bad_outs(backend, weights, plan, x)
    yield from bad_several(backend, inputs, x)
    yield from missing_features(backend, inputs, plan, x)
    foreign = next((d for d in _ALL_DTYPES if d not in backend.dtypes), None)
    if foreign is not None:
        other = dataclasses.replace(
            weights, lora_a=weights.lora_a.to(foreign), lora_b=weights.lora_b.to(foreign)
        )
        yield BadCall(
            f"weights in {dtype_name(foreign)}",
            lambda base: backend.run_linear(x.to(foreign), other, plan, base),
            UnsupportedInputError,
        )


def _bad_plans(
    backend: LoRABackend, inputs: LoRAInputs, plan: object, x: torch.Tensor
) -> Iterator[BadCall]:
    """Yield calls with a plan, or a refill, of another size."""
    weights = inputs.weights
    longer = LoRABatch([*inputs.slots, 0], weights.num_slots)
    shorter = inputs.select(range(len(inputs.slots) - 1)).batch
    yield BadCall(
        "a plan of another number of tokens",
        lambda base: backend.run_linear(x, weights, backend.prepare_batch(longer), base),
    )
    roomier = LoRABatch(inputs.slots, weights.num_slots + 1)
    yield BadCall(
        "a plan of another number of slots",
        lambda base: backend.run_linear(x, weights, backend.prepare_batch(roomier), base),
    )
    yield BadCall(
        "a refill with another number of tokens",
        lambda base: backend.prepare_batch(longer, out=plan),
    )
    yield from _bad_capacities(backend, inputs, plan)
    if features.CAPACITY not in backend.features:
        yield BadCall(
            "a refill with fewer tokens, which needs room",
            lambda base: backend.prepare_batch(shorter, out=plan),
        )
        return
    room = backend.prepare_batch(shorter, capacity=len(x))
    yield BadCall(
        "an x of more rows than the capacity",
        lambda base: backend.run_linear(torch.cat([x, x[:1]]), weights, room, None),
    )
    yield BadCall(
        "a refill beyond the capacity", lambda base: backend.prepare_batch(longer, out=room)
    )


def _bad_capacities(backend: LoRABackend, inputs: LoRAInputs, plan: object) -> Iterator[BadCall]:
    """Yield plans with a capacity that is none, or that the backend does not have."""
    batch, tokens = inputs.batch, inputs.batch.num_tokens
    for capacity in (tokens - 1, True, float(tokens), str(tokens)):
        yield BadCall(
            f"a capacity of {capacity!r} for {tokens} tokens",
            lambda base, capacity=capacity: backend.prepare_batch(batch, capacity=capacity),  # type: ignore[misc]
        )
    has = features.CAPACITY in backend.features
    yield BadCall(
        "a refill with another capacity" if has else "a capacity, which the backend lacks,",
        lambda base: backend.prepare_batch(batch, out=plan if has else None, capacity=tokens + 1),
        InvalidInputError if has else UnsupportedInputError,
    )


def _bad_outs(
    backend: LoRABackend, weights: LoRAWeights, plan: object, x: torch.Tensor
) -> Iterator[BadCall]:
    """Yield calls of run_lora_a with a wrong out."""
    good = backend.run_lora_a(x, weights, plan)
    memory = torch.zeros(good.numel() + x.numel(), dtype=good.dtype, device=x.device)
    wrong = {
        "an out of another max_rank": torch.cat([good, good], 2),
        "an out of fewer rows": good[:, 1:].contiguous(),
        "an out of another dtype": good.to(torch.bfloat16),
        "an out that is not contiguous": torch.cat([good, good], 2)[..., : good.shape[2]],
    }
    for what, out in wrong.items():
        yield BadCall(
            what,
            lambda base, out=out: backend.run_lora_a(x, weights, plan, out=out),  # type: ignore[misc]
        )
    if x.dtype == good.dtype:
        over = memory[: x.numel()].view(x.shape)
        yield BadCall(
            "an out that overlaps x",
            lambda base: backend.run_lora_a(
                over, weights, plan, out=memory[: good.numel()].view(good.shape)
            ),
        )


def bad_several(backend: LoRABackend, inputs: LoRAInputs, x: torch.Tensor) -> Iterator[BadCall]:
    """Yield calls that a batch of several adapters per token does not allow."""
    weights = inputs.weights
    slots = torch.stack([inputs.batch.token_slots, inputs.batch.token_slots], 1)
    many = LoRABatch(slots, weights.num_slots)
    plan, single = backend.prepare_batch(many), backend.prepare_batch(inputs.scaled(None).batch)
    h = torch.zeros(weights.num_slices, len(x), weights.max_rank, device=x.device)
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "run_lora_a": lambda base: backend.run_lora_a(x, weights, plan),
        "run_lora_b": partial(backend.run_lora_b, h, weights, plan),
    }
    for name, call in calls.items():
        yield BadCall(f"{name} with several adapters per token", call, UnsupportedInputError)
    if features.OUTPUT_SCALES in backend.features:
        shape = (weights.num_slots, weights.out_features)
        ones = torch.ones(shape, device=x.device)
        dora = dataclasses.replace(weights, output_scales=ones)
        for operation in operations_for(weights):
            if operation.input is not Input.H:
                what = f"{operation.name} with several adapters and output_scales"
                call = partial(run, backend, operation, inputs.replace(x=x, weights=dora), plan)
                yield BadCall(what, call, UnsupportedInputError)
    yield BadCall(
        "a refill of a plan of one adapter per token with several",
        lambda base: backend.prepare_batch(many, out=single),
    )


def missing_features(
    backend: LoRABackend, inputs: LoRAInputs, plan: object, x: torch.Tensor
) -> Iterator[BadCall]:
    """Yield calls that need a feature which the backend does not declare."""
    weights = inputs.weights
    if features.TOKEN_SCALES not in backend.features:
        scaled = inputs.scaled(torch.ones(len(x), device="cpu")).batch
        yield BadCall(
            "a batch with token_scales, which the backend lacks,",
            lambda base: backend.prepare_batch(scaled),
            UnsupportedInputError,
        )
    a, b = ([of(s) for s in range(weights.num_slices)] for of in (weights.a_of, weights.b_of))
    ones = torch.ones(weights.num_slots, weights.out_features, device=x.device)
    layers = {
        features.OUTPUT_SCALES: {"output_scales": ones},
        features.SLICE_TENSORS: {"lora_a": tuple(a), "lora_b": tuple(b)},
    }
    for feature, change in layers.items():
        if feature not in backend.features:
            layer: LoRAWeights = dataclasses.replace(weights, **change)  # type: ignore[arg-type]
            yield BadCall(
                f"a layer with {feature}, which the backend lacks,",
                partial(backend.run_linear, x, layer, plan),
                UnsupportedInputError,
            )


def _bad_slices(backend: LoRABackend, inputs: LoRAInputs, plan: object) -> Iterator[BadCall]:
    """Yield operations that demand another number of slices."""
    for operation in OPERATIONS:
        if operation.num_slices not in (None, inputs.weights.num_slices):
            yield BadCall(
                f"{operation.name} of {inputs.weights.num_slices} slices",
                partial(run, backend, operation, inputs, plan),
            )


_ALL_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _bad_rows(
    backend: LoRABackend, weights: LoRAWeights, plan: object, x: torch.Tensor
) -> Iterator[BadCall]:
    """Yield calls with a wrong x."""
    other = torch.float16 if x.dtype != torch.float16 else torch.float32
    wrong = {
        "an x too wide": torch.cat([x, x[:, :1]], 1),
        "an x with too few tokens": x[1:],
        "an x of three axes": x[None],
        "an x of another dtype than the weights": x.to(other),
    }
    if x.shape[1] > 1:
        wrong["an x whose last axis is not contiguous"] = x.repeat(1, 2)[:, ::2]
    for what, bad in wrong.items():
        yield BadCall(what, partial(backend.run_linear, bad, weights, plan))


def _bad_bases(
    backend: LoRABackend, operation: Operation, inputs: LoRAInputs, plan: object
) -> Iterator[BadCall]:
    """Yield calls of an operation with a wrong base_output."""
    wrong: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a base_output with too few rows": lambda base: base[1:],
        "a base_output too narrow": lambda base: base[:, 1:],
        "a base_output whose rows overlap": lambda base: base[:1].expand(base.shape),
        "a base_output of integers' dtype": lambda base: base.to(torch.int32),
    }
    weights = inputs.weights
    h = torch.zeros(weights.num_slices, len(inputs.x), weights.max_rank, device=inputs.x.device)
    for what, spoil in wrong.items():
        yield BadCall(
            f"{what}, given to {operation.name}",
            lambda base, spoil=spoil: run(backend, operation, inputs, plan, spoil(base), h),  # type: ignore[misc]
            UnsupportedInputError if "dtype" in what else InvalidInputError,
        )
