"""How gradients are asked for: for some tensors alone, too late, twice, by tools of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

from lora_backends.backend import LoRABackend
from lora_backends.batch import LoRABatch
from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError
from lora_backends.operations import BY_NAME, Operation
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, same_bits
from lora_backends.testing.properties.core import (
    ANY_LAYER,
    BY_CLAIM,
    differentiable,
    prop,
)
from lora_backends.testing.properties.gradients.runs import (
    Call,
    Gradients,
    assert_same_gradients,
    differentiated,
    one_of,
    upstream,
)


@prop(
    "A gradient that is asked for alone is the one among all, and a graph changes no result.",
    agreement=BY_CLAIM,
    values="integer",
    examples=6,
    requires=(differentiable,),
    features=ANY_LAYER,
)
def gradients_asked_for_alone_are_the_same(backend: LoRABackend, case: LoRACase) -> None:
    """Each tensor in turn, by run_linear or another operation."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    operation = one_of(differentiated(inputs), case.seed)
    call = Call.of(operation, case, inputs)
    with torch.no_grad():
        plain = call.run(backend, plan)
    with_graph = call.run(backend, plan).detach()
    same = same_bits if backend.deterministic else torch.equal
    if not same(with_graph, plain):
        raise AssertionError(f"{operation.name} gives another result where it has a graph")
    every = call.gradients(backend, plan, partial(upstream, case, inputs))
    for name in every:
        alone = Call.of(operation, case, inputs, only=name)
        actual = alone.gradients(backend, plan, partial(upstream, case, inputs))
        how = "where it is asked for alone"
        assert_same_gradients(actual, every, how, bitwise=False)


@prop(
    "A backward that would be wrong is refused: after a refill, after a tensor of the layer was "
    "changed, a second derivative.",
    values="real",
    examples=5,
    requires=(differentiable,),
    features=ANY_LAYER,
    min_tokens=1,
)
def late_and_second_backwards_are_refused(backend: LoRABackend, case: LoRACase) -> None:
    """Gradients of stored 8-bit tensors, ranks and scalings are refused by name."""
    case = replace(
        case, slots=(0, *case.slots[1:]), ranks=((1,) * len(case.output_slices),) * case.num_slots
    )
    inputs = case.build(backend.device)
    call = Call.of(BY_NAME["run_linear"], case, inputs)
    leaves = list(call.leaves.values())

    def backward(y: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y, leaves, torch.ones_like(y), **options)

    plan = backend.prepare_batch(inputs.batch)
    y = call.run(backend, plan)
    other = [case.num_slots - 1 - slot if slot >= 0 else 0 for slot in case.slots]
    scales = inputs.batch.token_scales
    backend.prepare_batch(LoRABatch(other, case.num_slots, scales), out=plan)
    _refused(partial(backward, y), InvalidInputError, "a backward after a refill of its plan")

    plan = backend.prepare_batch(inputs.batch)
    for name in ("lora_a[0]", "lora_b[0]", "scalings"):
        tensors = call.inputs.weights.tensors
        tensor = tensors.get(name, tensors.get(name.partition("[")[0]))
        assert tensor is not None
        y = call.run(backend, plan)
        with torch.no_grad():
            tensor.copy_(tensor.clone())
        kinds = (RuntimeError, LoRABackendError)  # torch's own error is one
        _refused(partial(backward, y), kinds, f"a backward after {name} was changed")

    y = call.run(backend, plan)
    gradients = backward(y, create_graph=True)
    total = sum(gradient.double().nan_to_num().sum() for gradient in gradients)
    assert isinstance(total, torch.Tensor)
    _refused(total.backward, (RuntimeError, LoRABackendError), "a second derivative")
    _refuse_constants(backend, inputs)


def _refuse_constants(backend: LoRABackend, inputs: LoRAInputs) -> None:
    """Check that tensors without a gradient are refused where one is asked for."""
    plan, weights = backend.prepare_batch(inputs.batch), inputs.weights
    names = ["scalings", "a_scales"] if weights.a_scales is not None else ["scalings"]
    if weights.dtype.is_floating_point and weights.a_scales is not None:
        names.append("lora_b")  # of float8; torch refuses gradients of integers itself
    for name in names:
        tensor = getattr(weights, name)
        parts = [part.detach() for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
        changes: dict[str, Any] = {name: tuple(parts) if isinstance(tensor, tuple) else parts[0]}
        layer = replace(weights, **changes)
        parts[0].requires_grad_()  # after the layer was made, which checks it too
        _refused(
            partial(backend.run_linear, inputs.x, layer, plan, inputs.new_view()),
            UnsupportedInputError,
            f"{name} that requires a gradient",
        )


def _refused(
    call: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...], given: str
) -> None:
    try:
        call()
    except kinds:
        return
    raise AssertionError(f"{given} was not refused")


@prop(
    "Checkpoints, hooks on saved tensors and autocast change no gradient.",
    agreement=BY_CLAIM,
    values="integer",
    examples=4,
    requires=(differentiable,),
    features=ANY_LAYER,
    min_tokens=1,
)
def tools_of_torch_change_no_gradient(backend: LoRABackend, case: LoRACase) -> None:
    """Both kinds of activation checkpointing, copies of saved tensors, autocast of float32 x."""
    inputs = case.build(backend.device)
    plan = backend.prepare_batch(inputs.batch)
    operation = one_of(differentiated(inputs), case.seed)
    call = Call.of(operation, case, inputs)
    if not call.leaves:
        return
    plain = call.gradients(backend, plan, partial(upstream, case, inputs))
    for how, run_call in _tools(call, backend, plan).items():
        y = run_call()
        # a reentrant checkpoint takes no torch.autograd.grad
        torch.autograd.backward(y, upstream(case, inputs, y))
        actual = call.named(tuple(leaf.grad for leaf in call.leaves.values()))
        for leaf in call.leaves.values():
            leaf.grad = None
        assert_same_gradients(actual, plain, f"under {how}", bitwise=False)
    _check_autocast(backend, operation, case, inputs, plan, plain)


def _tools(call: Call, backend: LoRABackend, plan: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """Return ways to run a call with a graph, by name."""

    def checkpointed(reentrant: bool) -> torch.Tensor:
        def again(*leaves: torch.Tensor) -> torch.Tensor:
            return call.run(backend, plan)

        y = checkpoint(again, *call.leaves.values(), use_reentrant=reentrant)
        assert isinstance(y, torch.Tensor)
        return y

    def saved_elsewhere() -> torch.Tensor:
        # as save_on_cpu, which copies nothing that is on the CPU
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor.cpu().clone(), lambda copy: copy.to(backend.device)
        ):
            return call.run(backend, plan)

    return {
        "checkpoint(use_reentrant=True)": lambda: checkpointed(True),
        "checkpoint(use_reentrant=False)": lambda: checkpointed(False),
        "hooks on saved tensors": saved_elsewhere,
    }


def _check_autocast(
    backend: LoRABackend,
    operation: Operation,
    case: LoRACase,
    inputs: LoRAInputs,
    plan: Any,
    plain: Gradients,
) -> None:
    """Check that x of float32 is cast to the layer's dtype, and its gradient back."""
    if "x" not in plain or not torch.amp.is_autocast_available(backend.device.type):
        return
    call = Call.of(operation, case, replace(inputs, x=inputs.x.float()))
    with torch.autocast(backend.device.type, torch.bfloat16):
        y = call.run(backend, plan)
    actual = call.gradients_of(y, upstream(case, inputs, y))
    wide = {**plain, "x": plain["x"].float()}
    assert_same_gradients(actual, wide, "under autocast", bitwise=False)


def _float64(backend: LoRABackend) -> str | None:
    has = torch.float64 in backend.dtypes
    return None if has else "gradcheck needs float64, which the backend does not run"


@prop(
    "torch.autograd.gradcheck passes in float64.",
    agreement=BY_CLAIM,
    examples=4,
    requires=(differentiable, _float64),
    min_tokens=1,
)
def gradcheck_passes(backend: LoRABackend, case: LoRACase) -> None:
    """On few tokens and columns, along one random direction."""
    # differences of float32 tensors are too coarse
    case = replace(
        case,
        dtype=torch.float64,
        base=torch.float64 if case.base else None,
        wide_bias=False,
        output_scales=False,
        in_features=min(case.in_features, 5),
        output_slices=tuple(min(width, 4) for width in case.output_slices),
        slots=case.slots[:6],
    )
    inputs = case.build(backend.device)
    # gradcheck changes every element, and reads beyond ranks
    for tensor in (inputs.x, inputs.weights.lora_a, inputs.weights.lora_b):
        tensor.nan_to_num_(nan=0.5)
    plan = backend.prepare_batch(inputs.batch)
    call = Call.of(BY_NAME["run_linear"], case, inputs)

    def function(*leaves: torch.Tensor) -> torch.Tensor:
        return call.run(backend, plan)

    try:
        torch.autograd.gradcheck(function, tuple(call.leaves.values()), fast_mode=True)
    except GradcheckError as error:
        raise AssertionError(f"gradcheck of run_linear fails: {error}") from error
