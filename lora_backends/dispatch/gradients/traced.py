"""Recorded calls under `torch.compile`: an operation without side effects, and its backward.

torch's library derives only operations that write to none of their arguments. So this one returns
a new y, which the traced program copies into base_output; torch's compiler removes that copy. Both
operations are given the layer's tensors besides its handle, so that a program which changes them
in between is computed in order. Shape and dtype of the result are arguments, too: torch may
trace handles as symbols, from which no layer can be looked up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.gradients.backward import run_backward
from lora_backends.dispatch.gradients.recorded import (
    Recorded,
    differentiates,
    refills_of,
    target_of,
)
from lora_backends.dispatch.handles import lookup
from lora_backends.dispatch.many_adapters import ManyAdaptersPlan, add_each, refuse
from lora_backends.dispatch.output import new_output
from lora_backends.dtypes import accumulator_dtype
from lora_backends.operations import BY_NAME, Input, Operation
from lora_backends.weights import LoRAWeights


def trace_recorded(
    operation: Operation,
    engine: Engine,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of a traced call of a dense operation that needs a gradient."""
    if isinstance(plan, ManyAdaptersPlan):
        if operation.input is Input.H or operation.result == "h":
            refuse(operation.name, plan)
        y = new_output(operation, x, weights, plan) if base_output is None else base_output
        add = partial(trace_recorded, operation, engine, x, weights)
        return add_each(operation.name, add, engine, weights, plan, y)
    tensors = [
        tensor if differentiates(operation, name) else tensor.detach()
        for name, tensor in weights.tensors.items()
    ]
    handles = engine.handle, weights.handle, plan.handle
    start, scales = base_output, weights.output_scales
    dtype = weights.compute_dtype if start is None else start.dtype
    if operation.result == "h":
        shape = [weights.num_slices, x.shape[0], weights.max_rank]
        dtype = accumulator_dtype(x.dtype)
    else:
        shape = [*operation.output_shape(x, weights, plan)]
    if start is not None and scales is not None and scales.requires_grad:
        start = start.clone()  # the backward reads it, and base_output is written below
    result: torch.Tensor
    result, _ = _run(operation.name, x, start, tensors, *handles, shape, dtype, scales is not None)
    return result if base_output is None else base_output.copy_(result)


@torch.library.custom_op("lora_backends::recorded", mutates_args=())
def _run(
    operation: str,
    x: torch.Tensor,
    base_output: torch.Tensor | None,
    tensors: list[torch.Tensor],  # of the layer, as the program passes them
    backend: int,  # a handle, as the next two
    weights: int,
    plan: int,
    shape: list[int],  # of the result
    dtype: torch.dtype,
    has_scales: bool,  # the layer has output_scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of this shape and dtype, and how often the plan was refilled so far."""
    engine, of_batch = lookup(backend), lookup(plan)
    arguments = [x, _layer(weights, tensors), of_batch]
    if base_output is not None:
        arguments.append(base_output.clone())
    with torch.no_grad():
        result = getattr(engine, operation)(*arguments)
    return result, torch.tensor(sum(refills_of(of_batch)), device="cpu")


@_run.register_fake
def _(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _, x, *_, shape, dtype, _ = inputs
    return x.new_empty(shape, dtype=dtype), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("lora_backends::recorded_backward", mutates_args=())
def _run_backward(
    operation: str,
    grad: torch.Tensor,
    x: torch.Tensor,
    base_output: torch.Tensor | None,
    tensors: list[torch.Tensor],
    refills: torch.Tensor,
    needed: list[bool],
    backend: int,
    weights: int,
    plan: int,
) -> list[torch.Tensor]:
    """Return the gradients of those of x, base_output and the tensors that need one."""
    engine, layer = lookup(backend), _layer(weights, tensors)
    names = list(layer.tensors)
    kinds = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    targets = tuple(map(target_of, names))
    recorded = Recorded(engine, BY_NAME[operation], layer, lookup(plan), targets, kinds)
    if int(refills) != sum(recorded.refills):  # those of now
        recorded.refuse_refilled()
    like = x.shape, x.dtype
    results = run_backward(recorded, needed, grad, x, None, base_output, like)
    # an operation returns no argument, nor one tensor twice
    return [
        result.clone() if result is grad else result for result in results if result is not None
    ]


@_run_backward.register_fake
def _(*inputs: Any) -> list[torch.Tensor]:
    _, grad, x, _, tensors, _, needed, *_ = inputs
    likes = [x, grad, *tensors]
    wanted = [like for like, is_needed in zip(likes, needed, strict=True) if is_needed]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for like in wanted]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.operation, x, base_output, tensors, *ctx.handles, _, _, ctx.has_scales = inputs
    ctx.has_base = base_output is not None
    refills = output[1]
    ctx.mark_non_differentiable(refills)
    kept = (base_output,) if ctx.has_scales and ctx.has_base else ()
    ctx.save_for_backward(x, refills, *tensors, *kept)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, refills, *tensors = ctx.saved_tensors
    base = tensors.pop() if ctx.has_scales and ctx.has_base else None
    _, needs_x, needs_base, needs_tensors, *_ = ctx.needs_input_grad
    needs_tensors = list(needs_tensors) if needs_tensors else [False] * len(tensors)
    asked = [needs_x, bool(needs_base and ctx.has_scales), *needs_tensors]
    results = iter(
        _run_backward(ctx.operation, grad, x, base, tensors, refills, asked, *ctx.handles)
        if any(asked)
        else ()
    )
    dx, dbase, *rest = [next(results) if is_asked else None for is_asked in asked]
    if needs_base and not ctx.has_scales:
        dbase = grad
    return None, dx, dbase, rest, *[None] * 6


_run.register_autograd(_backward, setup_context=_keep)


def _layer(handle: int, tensors: list[torch.Tensor]) -> LoRAWeights:
    """Return a layer with the tensors that a program passes: the layer itself, if they are its."""
    layer: LoRAWeights = lookup(handle)
    names = list(layer.tensors)
    held = layer.tensors.values()
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(held, tensors, strict=True)):
        return layer
    # a program that changes a tensor in between passes copies
    changes: dict[str, Any] = {}
    for name, tensor in zip(names, tensors, strict=True):
        stack, bracket, _ = name.partition("[")
        changes[stack] = (*changes.get(stack, ()), tensor) if bracket else tensor
    return replace(layer, **changes)
