"""The memory that is written and the tensor that is returned: its shape, dtype and identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.testing import oracles
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import GuardedOutput, LoRAInputs, bits, same_bits
from lora_backends.testing.properties.core import ANY_LAYER, prop
from lora_backends.testing.properties.runs import (
    every_result,
    linear,
    operations_for,
    run,
    strided_h,
)


@prop("The result is [num_tokens, out_features] of the promised dtype.", examples=20)
def results_have_the_promised_shape_and_dtype(backend: LoRABackend, case: LoRACase) -> None:
    """Without base_output: x.dtype, lora_b.dtype for run_lora_b and run_embedding."""
    inputs = case.build(backend.device)
    shape, dtype = (case.num_tokens, sum(case.output_slices)), case.base or case.dtype
    for operation, y, _ in every_result(backend, case, inputs):
        if tuple(y.shape) != shape or y.dtype != dtype or y.device != backend.device:
            raise AssertionError(
                f"{operation.name} returned {list(y.shape)} {y.dtype} on {y.device}, "
                f"not {list(shape)} {dtype} on {backend.device}"
            )
        if y.requires_grad:
            raise AssertionError(
                f"{operation.name} returned a y that requires a gradient, which no argument does"
            )


@prop("Operations add to base_output in place and return it.", examples=17, base=True)
def base_output_is_returned_itself(backend: LoRABackend, case: LoRACase) -> None:
    """The object given is the object returned."""
    for operation, y, base in every_result(backend, case, case.build(backend.device)):
        assert base is not None
        if y is not base.view:
            raise AssertionError(
                f"{operation.name} returned another tensor than the base_output given"
            )


@prop("Where base_output is a view, nothing outside of it is written.", examples=25, base=True)
def only_the_view_is_written(backend: LoRABackend, case: LoRACase) -> None:
    """Guard rows and columns around y keep their sentinels."""
    for _, _, base in every_result(backend, case, case.build(backend.device)):
        assert base is not None
        base.assert_untouched()


@prop(
    "Rows without an adapter, and slices of rank 0 to which nothing is added, keep their bits.",
    base=True,
    every_slot=True,
    examples=22,
    features=ANY_LAYER,
)
def untouched_elements_keep_their_bits(backend: LoRABackend, case: LoRACase) -> None:
    """They hold NaNs with any payload, infinities, -0.0 and denormals."""
    inputs = case.build(backend.device)
    plan, h = backend.prepare_batch(inputs.batch), strided_h(case, inputs)
    assert inputs.base is not None
    kept = ~oracles.touched(inputs.weights, inputs.batch)
    values = _odd_values(inputs.base.cpu(), kept).to(backend.device)
    before = bits(values)
    for operation in operations_for(inputs.weights):
        base = GuardedOutput(values, case.base_pad)
        run(backend, operation, inputs, plan, base.view, h)
        changed = (bits(base.view) != before) & kept
        if bool(changed.any()):
            token, column = (int(i) for i in changed.nonzero()[0])
            where = inputs.location(token, inputs.slice_of(column))
            after = bits(base.view)
            raise AssertionError(
                f"{operation.name} changed y[{token}, {column}], which keeps base_output:\n"
                f"  {where}\n"
                f"  before {values[token, column].item()!r}, as an int {before[token, column]}\n"
                f"  after  {base.view[token, column].item()!r}, as an int {after[token, column]}"
            )


def _odd_values(base: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Return `base` with -0.0, two NaN, infinities and a denormal in turn where `where` is true."""
    tiny = torch.finfo(base.dtype).smallest_normal / 4
    odd = torch.tensor(
        [-0.0, torch.nan, torch.inf, -torch.inf, tiny, torch.nan], dtype=base.dtype, device="cpu"
    )
    bits(odd)[-1] += 1  # bits of the same memory: a NaN of another payload
    turns = torch.arange(base.numel(), device="cpu").remainder(len(odd)).reshape(base.shape)
    return torch.where(where, odd[turns], base)


@prop(
    "Without base_output, rows without an adapter are zero.",
    examples=14,
    base=False,
    every_slot=True,
)
def rows_start_from_zero(backend: LoRABackend, case: LoRACase) -> None:
    """A new result is zero wherever nothing is added."""
    inputs = case.build(backend.device)
    kept = ~oracles.touched(inputs.weights, inputs.batch)
    for operation, y, _ in every_result(backend, case, inputs):
        if bool((y.detach().cpu()[kept] != 0).any()):
            raise AssertionError(f"{operation.name} returned other than 0 where nothing is added")


@prop(
    "x, the weights, token_ids, h and the batch are not modified.", examples=17, features=ANY_LAYER
)
def inputs_are_not_modified(backend: LoRABackend, case: LoRACase) -> None:
    """Every argument but base_output keeps its bits, also when the batch's plan is refilled.

    So do torch's settings and its random numbers.
    """
    inputs = case.build(backend.device)
    h = strided_h(case, inputs)
    # bits, as the inputs hold NaN
    before = {name: bits(tensor).clone() for name, tensor in _arguments(inputs, h).items()}
    with _default_settings(case.seed + 1):
        settings = _settings()
        plan = backend.prepare_batch(inputs.batch)
        backend.run_lora_a(inputs.x, inputs.weights, plan)
        for operation in operations_for(inputs.weights):
            run(backend, operation, inputs, plan, inputs.new_view(), h)
            for name, tensor in _arguments(inputs, h).items():
                if not torch.equal(bits(tensor), before[name]):
                    raise AssertionError(f"run_lora_a or {operation.name} modified {name}")
            for name, setting in _settings().items():
                if not torch.equal(setting, settings[name]):
                    raise AssertionError(f"run_lora_a or {operation.name} changed {name}")
    # a refill that wrote into its batch would show in the next one
    other = inputs.select(range(case.num_tokens - 1, -1, -1)).batch
    for batch in (other, inputs.batch):
        backend.prepare_batch(batch, out=plan)
        for name, tensor in _arguments(inputs, h).items():
            if not torch.equal(bits(tensor), before[name]):
                raise AssertionError(f"a refill of the plan with another batch modified {name}")


@contextmanager
def _default_settings(seed: int) -> Iterator[None]:
    """Give torch its defaults: an earlier call may have left its own settings."""
    # torch can set the flag but not read it
    flushed = not bool(_denormal())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(seed)
        torch.set_flush_denormal(False)
        try:
            yield
        finally:
            torch.set_flush_denormal(flushed)


def _settings() -> dict[str, torch.Tensor]:
    """Return settings of torch that apply to all of a process, or of a thread."""
    return {
        "torch's random numbers": torch.get_rng_state(),
        "whether torch keeps gradients": torch.tensor(torch.is_grad_enabled(), device="cpu"),
        "torch's default dtype": torch.tensor(torch.get_default_dtype().itemsize, device="cpu"),
        "torch's number of threads": torch.tensor(torch.get_num_threads(), device="cpu"),
        "whether the CPU flushes denormals": _denormal(),
    }


def _denormal() -> torch.Tensor:
    """Return 2^-139, or 0 where the CPU flushes denormals."""
    return 2 * torch.tensor(2.0**-140, device="cpu")


def _arguments(inputs: LoRAInputs, h: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {
        "x": inputs.x,
        "h": h,
        "token_ids": inputs.token_ids,
        "batch.token_slots": inputs.batch.token_slots,
    }
    if inputs.batch.token_scales is not None:
        named["batch.token_scales"] = inputs.batch.token_scales
    return named | {f"weights.{name}": t for name, t in inputs.weights.tensors.items()}


@prop(
    "A result is no view of an argument, of the plan or of an earlier result.",
    base=False,
    examples=15,
)
def results_are_independent(backend: LoRABackend, case: LoRACase) -> None:
    """A second run leaves the result of the first alone."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    first = linear(backend, inputs, plan)
    h = backend.run_lora_a(inputs.x, inputs.weights, plan)
    y_before, h_before = first.clone(), h.clone()
    other = inputs.replace(x=-inputs.x)
    linear(backend, other, plan)
    backend.run_lora_a(other.x, inputs.weights, plan)
    if not same_bits(first, y_before) or not same_bits(h, h_before):
        raise AssertionError("a later run on the same plan changed an earlier result")


@prop("Empty batches and batches without any adapter change nothing and return.", examples=10)
def batches_without_work_change_nothing(backend: LoRABackend, case: LoRACase) -> None:
    """No tokens at all, then the drawn tokens, none with an adapter."""
    inputs = case.build(backend.device)
    # rows without an adapter must not be multiplied at all
    nan_rows = torch.full_like(inputs.x, float("nan"))
    idle = inputs.replace(x=nan_rows, slots=[NO_ADAPTER] * case.num_tokens)
    for quiet in (inputs.select([]), idle):
        plan = backend.prepare_batch(quiet.batch)
        h = backend.run_lora_a(quiet.x, quiet.weights, plan)
        if bool((h != 0).any()):
            raise AssertionError("run_lora_a returned other than 0 without any adapter")
        for operation in operations_for(quiet.weights):
            y = run(backend, operation, quiet, plan, quiet.new_view(), h)
            wanted = torch.zeros_like(y) if quiet.base is None else quiet.base
            if not same_bits(y, wanted):
                raise AssertionError(f"{operation.name} changed y in a batch without any adapter")
