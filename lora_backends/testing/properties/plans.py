"""Plans: refilled in place, several in flight, used by many layers; no state in the backend."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.features import OUTPUT_SCALES
from lora_backends.operations import Input
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_same_bits
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    either_prop,
    no_interpreter,
)
from lora_backends.testing.properties.runs import (
    assert_right,
    check_linear,
    expected,
    expected_of,
    gather_slots,
    linear,
    operations_for,
    run,
    strided_h,
)
from lora_backends.weights import LoRAWeights


def compositions(case: LoRACase) -> list[list[int]]:
    """Return compositions of equal length that differ as much as possible from each other.

    The drawn one; none with an adapter; one adapter owning all; every token the next slot; the
    drawn one shifted by a slot and shuffled; the drawn one again; the drawn one with another slot
    for the last token but one.
    """
    tokens, slots = case.num_tokens, case.num_slots
    shuffled = [(slot + 1) % slots if slot >= 0 else slot for slot in case.slots]
    random.Random(case.seed).shuffle(shuffled)
    almost = list(case.slots)
    for token in [max(0, tokens - 2)] if tokens else ():
        almost[token] = NO_ADAPTER if almost[token] == slots - 1 else almost[token] + 1
    return [
        list(case.slots),
        [NO_ADAPTER] * tokens,
        [slots - 1] * tokens,
        [token % slots for token in range(tokens)],
        shuffled,
        list(case.slots),
        almost,
    ]


def composed(inputs: LoRAInputs, slots: list[int], seed: int) -> LoRAInputs:
    """Return the inputs for another composition; every row that gains an adapter gets values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, inputs.x.shape, generator=generator, device="cpu").to(inputs.x)
    x[torch.tensor(slots, dtype=torch.int64, device="cpu") == NO_ADAPTER] = float("nan")
    return inputs.replace(x=x, slots=slots)


@either_prop("A plan refilled in place follows every new composition.", examples=13)
def a_refilled_plan_follows_the_batch(backend: LoRABackend, case: LoRACase) -> None:
    """The same plan comes back, its device tensors keep their addresses, y is right each time."""
    inputs = case.build(backend.device)
    plan = None
    for turn, slots in enumerate(compositions(case)):
        turned = composed(inputs, slots, case.seed + turn)
        if plan is None:
            plan = backend.prepare_batch(turned.batch)
            addresses = device_tensors(plan)
        elif backend.prepare_batch(turned.batch, out=plan) is not plan:
            raise AssertionError("prepare_batch(batch, out=plan) returned another plan")
        check_linear(backend, case, turned, plan)
        # a graph reads addresses, so a moved tensor would be read after it was freed
        if backend.cuda_graphs and device_tensors(plan) != addresses:
            raise AssertionError(
                "a refill moved tensors of the plan that a captured graph reads: "
                f"{addresses} became {device_tensors(plan)}"
            )


def device_tensors(plan: Any) -> dict[str, int]:
    """Return the address of every tensor of `plan` on an accelerator, by the path of its field."""
    addresses: dict[str, int] = {}
    _collect(plan, "plan", addresses)
    return addresses


def _collect(value: Any, path: str, addresses: dict[str, int]) -> None:
    if isinstance(value, torch.Tensor):
        # no graph reads host memory
        if value.device.type not in ("cpu", "meta"):
            addresses[path] = value.data_ptr()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), f"{path}.{field.name}", addresses)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}[{key!r}]", addresses)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(item, f"{path}[{index}]", addresses)


@either_prop("A refilled plan equals a fresh one.", examples=13)
def a_refilled_plan_equals_a_fresh_one(backend: LoRABackend, case: LoRACase) -> None:
    """A refilled plan keeps nothing of its former batch, whatever the new one."""
    inputs = case.build(backend.device)
    # none, one slot and all slots: the sizes of tables differ most
    for former in compositions(case)[1:4]:
        plan = backend.prepare_batch(inputs.replace(slots=former).batch)
        plan = backend.prepare_batch(inputs.batch, out=plan)
        y = check_linear(backend, case, inputs, plan)
        if backend.deterministic:
            assert_same_bits(y, linear(backend, inputs), inputs)


@either_prop("Two plans in flight do not disturb each other.", examples=15)
def two_plans_in_flight_are_independent(backend: LoRABackend, case: LoRACase) -> None:
    """Of the same size and of another, run in turns, one refilled in between."""
    inputs = case.build(backend.device)
    other, almost = (composed(inputs, compositions(case)[at], case.seed) for at in (4, -1))
    half = inputs.select(range(case.num_tokens // 2))
    flight = [(part, backend.prepare_batch(part.batch)) for part in (inputs, other, half, almost)]
    # another order than they were made in
    for part, plan in (flight[0], *flight[:0:-1]):
        check_linear(backend, case, part, plan)
    backend.prepare_batch(inputs.replace(slots=compositions(case)[3]).batch, out=flight[1][1])
    for part, plan in (flight[0], *flight[2:]):
        check_linear(backend, case, part, plan)


@either_prop("Steps of two plans may be interleaved.")
def steps_of_two_plans_interleave(backend: LoRABackend, case: LoRACase) -> None:
    """Both shrinks first, then both expands: h belongs to the caller."""
    inputs = case.build(backend.device)
    other = composed(inputs, compositions(case)[4], case.seed)
    pairs = [(part, backend.prepare_batch(part.batch)) for part in (inputs, other)]
    shrunk = [backend.run_lora_a(part.x, part.weights, plan) for part, plan in pairs]
    for (part, plan), h in zip(pairs, shrunk, strict=True):
        y = backend.run_lora_b(h, part.weights, plan, part.new_view())
        wanted = expected(backend, part)
        if part.base is None and y.dtype != part.x.dtype:
            raise AssertionError(f"run_lora_b returned {y.dtype}, not {part.x.dtype}")
        assert_right(y, wanted, part, case.is_integer)


@either_prop("One plan serves layers of any shape.", examples=12)
def one_plan_serves_layers_of_any_shape(backend: LoRABackend, case: LoRACase) -> None:
    """Of the same shape with other strides, dtypes and optional tensors; of other shapes.

    Then the first again, with another x.
    """
    plan = backend.prepare_batch(case.build(backend.device).batch)
    widths = case.output_slices
    layers = (
        dataclasses.replace(case, seed=case.seed + 1),
        dataclasses.replace(case, output_slices=tuple(w + 1 for w in widths)),
        dataclasses.replace(case, output_slices=tuple(3 * w + 16 for w in widths)),
        dataclasses.replace(case, in_features=case.in_features + 5, bias=not case.bias),
        dataclasses.replace(case, max_rank=case.max_rank + 3),
        _with_one_more_slice(case),
        *_of_the_same_shape(backend, case),
    )
    first = case.build(backend.device)
    check_linear(backend, case, first, plan)
    for layer in layers:
        inputs = dataclasses.replace(layer.build(backend.device), batch=first.batch)
        check_linear(backend, layer, inputs, plan)
    # a stored call of the first layer must not repeat its x
    check_linear(backend, case, first.replace(x=-first.x), plan)


def _of_the_same_shape(backend: LoRABackend, case: LoRACase) -> list[LoRACase]:
    """Return cases of the same shape that differ in strides, dtype, ranks or optional tensors."""
    others = [dtype for dtype in backend.dtypes if dtype not in (case.base, torch.float64)]
    with_base = dataclasses.replace(case, base=others[case.seed % len(others)]) if others else case
    changed = [
        dataclasses.replace(case, x_pad=case.x_pad + 2),
        dataclasses.replace(case, weights_pad=case.weights_pad + 2),
        dataclasses.replace(case, bias=not case.bias),
        dataclasses.replace(with_base, base_pad=case.base_pad + 2),
        dataclasses.replace(with_base, base_pad=0),
        dataclasses.replace(case, base=None),
        dataclasses.replace(case, ranks=case.ranks[1:] + case.ranks[:1]),
    ]
    if OUTPUT_SCALES in backend.features:
        changed.append(dataclasses.replace(case, output_scales=not case.output_scales))
    return changed


def _with_one_more_slice(case: LoRACase) -> LoRACase:
    return dataclasses.replace(
        case,
        output_slices=(*case.output_slices, 7),
        ranks=tuple((*ranks, case.max_rank) for ranks in case.ranks),
        scalings=tuple((*scalings, 0.5) for scalings in case.scalings),
    )


@either_prop("Layers that share an address are told apart.", examples=15)
def layers_sharing_an_address_are_told_apart(backend: LoRABackend, case: LoRACase) -> None:
    """Views of one storage: the same first byte with other shapes, then another offset."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    for weights in _views(inputs.weights):
        narrow = inputs.replace(x=inputs.x[:, : weights.in_features], weights=weights)
        base = None if narrow.base is None else narrow.base[:, : weights.out_features]
        check_linear(backend, case, dataclasses.replace(narrow, base=base), plan)


def _views(weights: LoRAWeights) -> list[LoRAWeights]:
    """Return the whole, fewer inputs, fewer outputs, and the slots in reverse from the second."""
    width = weights.output_slices[0]
    first = dataclasses.replace(
        weights,
        lora_a=weights.lora_a[:, :1],
        lora_b=weights.lora_b[:, : (width + 1) // 2],
        ranks=weights.ranks[:, :1],
        scalings=weights.scalings[:, :1],
        output_slices=((width + 1) // 2,),
        bias=None if weights.bias is None else weights.bias[:, : (width + 1) // 2],
        output_scales=(
            None if weights.output_scales is None else weights.output_scales[:, : (width + 1) // 2]
        ),
    )
    fewer = dataclasses.replace(
        weights, lora_a=weights.lora_a[..., : (weights.in_features + 1) // 2]
    )
    return [weights, fewer, first, weights]


@either_prop("Weights rewritten in place are followed.", features=ANY_LAYER, examples=8)
def weights_rewritten_in_place_are_followed(backend: LoRABackend, case: LoRACase) -> None:
    """A pool loads another adapter into a slot: A, B, ranks, scalings, bias and output_scales.

    Every operation then sees another x too.
    """
    inputs = case.build(backend.device)
    plan, h = backend.prepare_batch(inputs.batch), strided_h(case, inputs)
    for turn in range(2):
        rows = expected(backend, inputs)
        for operation in operations_for(inputs.weights):
            y = run(backend, operation, inputs, plan, inputs.new_view(), h)
            reads_rows = operation.input is Input.ROWS
            wanted = rows if reads_rows else expected_of(backend, operation, inputs, h)
            assert_right(y, wanted, inputs, case.is_integer)
        shrunk = backend.run_lora_a(inputs.x, inputs.weights, plan)
        wanted = oracles.expected_shrink(inputs.x, inputs.weights, inputs.batch)
        assert_right(shrunk, wanted, inputs, case.is_integer)
        if turn == 0:
            rotate_slots(inputs)
            ids = (inputs.token_ids + 1) % case.in_features
            inputs = dataclasses.replace(inputs.replace(x=-inputs.x), token_ids=ids)
            h = strided_h(case, inputs)  # NaN beyond the new ranks


def rotate_slots(inputs: LoRAInputs) -> None:
    """Give every slot the next one's adapter with another scaling, in place."""
    weights = inputs.weights
    loaded = gather_slots(inputs, _rotated(weights.num_slots))
    for name, tensor in weights.tensors.items():
        tensor.copy_(loaded.tensors[name].clone())
    weights.scalings.mul_(-2)


def _rotated(count: int) -> list[int]:
    return [(index + 1) % count for index in range(count)]


@either_prop(
    "Runs of several threads do not disturb each other.", examples=8, requires=(no_interpreter,)
)
def threads_do_not_disturb_each_other(backend: LoRABackend, case: LoRACase) -> None:
    """Three threads, each with plans of its own, run at the same time, and often take turns."""
    inputs = case.build(backend.device)
    works = [
        composed(inputs, slots, case.seed + turn)
        for turn, slots in enumerate(compositions(case)[2:5])
    ]
    # all at once: threads started in turn would run in turn
    start = threading.Barrier(len(works))

    def work(part: LoRAInputs) -> None:
        start.wait()
        results = [linear(backend, part) for _ in range(10)]
        wanted = expected(backend, part)
        for y in results:
            assert_right(y, wanted, part, case.is_integer)

    for failure in _run_together([_bound(work, part) for part in works]):
        raise AssertionError(f"with three threads at a time: {failure}") from failure


def _bound(work: Callable[[LoRAInputs], None], part: LoRAInputs) -> Callable[[], None]:
    return lambda: work(part)


def _run_together(works: list[Callable[[], None]]) -> list[BaseException]:
    """Run each function in its own thread and return the errors raised."""
    failures: list[BaseException] = []

    def guard(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=guard, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds; a call of a few rows is over within the usual 5 ms
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return failures
