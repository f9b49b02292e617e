"""Gradients: calls that autograd records, and their backward, the same for every engine.

A call whose arguments require a gradient runs as one node of autograd's graph. Its forward is the
same call without a graph, so results and launches are those of inference. It keeps x and what the
engine gives as h, and reads the layer's tensors where they are; none is copied. The backward asks
the engine for what is needed: `run_lora_b_backward` from dL/dy to dh and dlora_b, then
`run_lora_a_backward` from dh to dx and dlora_a.

The gradients of a layer go to its whole stacks, or with `run_with_parameters` to tensors that hold
single slots, so that only those slots' gradients are computed and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lora_backends.common.tensors import has_memory
from lora_backends.dispatch import checks
from lora_backends.dispatch.cached import accept, is_accepted
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.gradients.backward import Gradients, kept_for, run_backward, run_forward
from lora_backends.dispatch.gradients.recorded import (
    GradientTarget,
    Recorded,
    SlotParameter,
    SlotParameters,
    b_alone,
    differentiates,
    target_of,
)
from lora_backends.dispatch.problems import Problems
from lora_backends.dispatch.tracing import is_jit_traced
from lora_backends.dtypes import dtype_name
from lora_backends.eight_bit import is_eight_bit
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import Operation
from lora_backends.weights import LoRAWeights

_CONSTANTS = ("ranks", "scalings", "a_scales", "b_scales")
"""Tensors of a layer without a gradient."""


def requires_graph(engine: Engine, x: Any, weights: Any, *others: Any) -> bool:
    """Return whether a call has to be recorded for autograd; arguments are unchecked.

    `others` are base_output and the router's weights, where there are any.
    """
    if not torch.is_grad_enabled():
        return False
    tensors = [t for t in (x, *others) if isinstance(t, Tensor)]
    if isinstance(weights, LayerWeights):
        tensors += weights.tensors.values()
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    # other engines write by address, which autograd does not see
    if not engine.plain_torch:
        return True
    # these see through the calls of a `plain_torch` engine, and record them themselves
    is_transformed = forward_ad._current_level >= 0 or not all(map(has_memory, tensors))
    return not (is_transformed or is_jit_traced())


def record(
    engine: Any,
    operation: Operation,
    x: Tensor,
    weights: LayerWeights,
    plan: Any,
    y: Tensor | None = None,
) -> Tensor:
    """Run an operation on a dense layer as a node of autograd's graph; arguments are unchecked."""
    _check(engine, operation, x, weights, plan, y)
    names = [
        name
        for name, tensor in weights.tensors.items()
        if tensor.requires_grad and differentiates(operation, name)
    ]
    leaves = [weights.tensors[name] for name in names]
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    recorded = Recorded(engine, operation, weights, plan, tuple(map(target_of, names)), kinds)
    return _apply(recorded, y, x, leaves)


def run_with_parameters(
    engine: Any,
    operation: Operation,
    x: Tensor,  # or [..., in_features], with y [..., out_features]
    weights: LoRAWeights,
    plan: Any,
    y: Tensor,  # base_output, contiguous; changed in place
    parameters: SlotParameters | Sequence[SlotParameter],
    *,
    base_weight: Tensor | None = None,  # [out_features, in_features]
    check: Callable[[], None] | None = None,  # called before the backward
) -> Tensor:
    """Run an operation whose gradients go to tensors that stand for single slots; return y.

    The backward reads the stacks as they are then. Autograd refuses it if one of `parameters` that
    the call used was changed in place meanwhile; changes of other slots do not matter.

    `base_weight` is given where y is ``x @ base_weight.T`` plus a constant and has no graph: the
    backward then computes the gradient of x through both, and adds the LoRA's part in place.
    `check` raises where the stacks hold another adapter.

    Raises:
        InvalidInputError: as the operation.
        UnsupportedInputError: as the operation, or the engine computes no gradients.
    """
    _check(engine, operation, _flat(x), weights, plan, y.detach().view(-1, y.shape[-1]))
    of = parameters if isinstance(parameters, SlotParameters) else SlotParameters(parameters)
    recorded = Recorded(
        engine, operation, weights, plan, of.targets, of.kinds, check=check, cache=of.cache
    )
    recorded.anchors = _links(x, of.b_alone)
    result: Tensor = _ParameterNode.apply(  # type: ignore[no-untyped-call]
        recorded, y, x, base_weight, *of.tensors
    )
    return result


def record_routed(
    engine: Any,
    operation: Operation,
    x: Tensor,
    weights: ExpertWeights,
    routing: ExpertRouting,
    y: Tensor | None,
    options: Mapping[str, Any],  # keyword arguments of the operation
    parameters: Sequence[SlotParameter] | None = None,
) -> Tensor:
    """Run an operation on experts as a node of autograd's graph; it has passed the guards.

    `parameters` stand for single slots, in place of the stacks: [experts or 1, num_a, rank,
    in_features] of lora_a, [experts or 1, out_features, rank] of lora_b.
    """
    _check_gradients(engine, operation, x, weights, y)
    if parameters is None:
        parameters = [
            SlotParameter(tensor, target_of(name))
            for name, tensor in weights.tensors.items()
            if tensor.requires_grad
        ]
    leaves, targets = [leaf for leaf, _ in parameters], [target for _, target in parameters]
    factors = routing.differentiable_weights
    if options["weighted"] and factors is not None:
        leaves.append(factors)
        targets.append(GradientTarget("topk_weights"))
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    recorded = Recorded(engine, operation, weights, routing, tuple(targets), kinds, options)
    return _apply(recorded, y, x, leaves)


def _apply(recorded: Recorded, y: Tensor | None, x: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    if x.is_inference() and any(target.name != "bias" for target in recorded.targets):
        operation = recorded.operation
        raise InvalidInputError(
            f"{operation.argument} of {operation.name} was made in inference mode, and autograd "
            f"does not keep such a tensor for the backward\n"
            f"  to do: pass {operation.argument}.clone()"
        )
    names = {target.name for target in recorded.targets}
    recorded.anchors = [
        *leaves,
        *_links(x, b_alone(recorded.targets)),
        *_links(y, "output_scales" in names),  # not y itself, which is about to be overwritten
    ]
    result: Tensor = _Node.apply(recorded, y, x, *leaves)  # type: ignore[no-untyped-call]
    return result


def _links(tensor: Tensor | None, is_needed: bool) -> list[Tensor]:
    """Return an empty tensor that autograd derives from `tensor`, without keeping its memory."""
    if tensor is None or not is_needed or not tensor.requires_grad:
        return []
    return [tensor[:0].clone()]


def _check(engine: Engine, operation: Operation, x: Any, weights: Any, plan: Any, y: Any) -> None:
    """Guard a call as without a graph, then refuse tensors that can have no gradient, by name.

    Raises:
        InvalidInputError: base_output is a leaf, which autograd does not let change in place.
        UnsupportedInputError: a stored 8-bit tensor, or the engine computes no gradients.
    """
    with torch.no_grad():
        if not is_accepted(engine, operation, x, weights, plan, y):
            checks.check_operation(engine, operation, x, weights, plan, y)
            accept(engine, operation, x, weights, y)
    _check_gradients(engine, operation, x, weights, y)


def _check_gradients(engine: Engine, operation: Operation, x: Any, weights: Any, y: Any) -> None:
    """Refuse tensors that can have no gradient; errors as in `_check`."""
    problems = Problems(engine)
    checks.check_gradients(problems, [x, *weights.tensors.values()], y)
    for name, tensor in weights.tensors.items():
        if tensor.requires_grad and (is_eight_bit(weights.dtype) and name.startswith("lora_")):
            problems.lack(
                f"{name} of {dtype_name(weights.dtype)} requires a gradient; 8-bit stacks have "
                f"none, x and base_output do; pass {name}.detach()"
            )
        elif tensor.requires_grad and name in _CONSTANTS:
            problems.lack(f"{name} requires a gradient, but is a constant; pass {name}.detach()")
    problems.raise_if_any(operation.name, weights=weights, base_output=y)


class _Node(torch.autograd.Function):
    """A recorded call in autograd's graph. base_output is changed in place, as without a graph.

    base_output is the first tensor: where it is a view, autograd takes the gradient of a node's
    first tensor for that of the view.
    """

    @staticmethod
    def forward(
        ctx: Any, recorded: Recorded, y: Tensor | None, x: Tensor, *leaves: Tensor
    ) -> Tensor:
        wanted = recorded.wants(ctx.needs_input_grad[3:])
        start = y
        if "output_scales" in wanted and y is not None:
            start = y.clone()  # its gradient needs base_output, which is about to be overwritten
        result, h = run_forward(recorded, x, y)
        if y is not None:
            ctx.mark_dirty(y)
        kept = kept_for(recorded, wanted, ctx.needs_input_grad[2], h is not None)
        ctx.recorded, ctx.like = recorded, (x.shape, x.dtype)
        ctx.states = recorded.states(kept.layer)
        ctx.save_for_backward(
            x if kept.x else None, h if kept.h else None, start if kept.base else None
        )
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        x, h, base = ctx.saved_tensors  # raises where one was changed in place
        recorded.check_plan()
        recorded.check_layer(ctx.states)
        needs_base, needs_x, *needed = ctx.needs_input_grad[1:]
        needs = (needs_x, needs_base, *needed)
        gradients = run_backward(recorded, needs, grad, x, h, base, ctx.like)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _refusing_second(recorded, gradients, grad, x)
        dx, dbase, *others = gradients
        return None, dbase, dx, *others


class _Once(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated.

    `once_differentiable` of torch lets a second derivative pass as zero where the gradient of the
    result is a constant. The anchors are the tensors that the gradients depend on: if autograd
    finds no path to a tensor, functions such as `torch.autograd.functional.jvp` take its gradient
    for zero.
    """

    @staticmethod
    def forward(ctx: Any, name: str, anchors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(gradient.view_as(gradient) for gradient in tensors[anchors:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise UnsupportedInputError(
            f"{ctx.name} has no second derivatives\n"
            f"  given: a gradient of it, made with create_graph=True, that is differentiated\n"
            f"  to do: detach the gradient"
        )


def _refusing_second(
    recorded: Recorded, gradients: Gradients, *of_node: Tensor | None
) -> Gradients:
    """Return gradients that refuse to be differentiated; None stays.

    `of_node` are the gradient of the result and the tensors that the node has saved.
    """
    always = torch.zeros((), requires_grad=True)  # so that autograd records the node
    anchors = [always, *recorded.anchors, *(t for t in of_node if t is not None)]
    given = [gradient for gradient in gradients if gradient is not None]
    marked = iter(
        _Once.apply(recorded.operation.name, len(anchors), *anchors, *given)  # type: ignore[no-untyped-call]
    )
    return tuple(None if gradient is None else next(marked) for gradient in gradients)


class _ParameterNode(torch.autograd.Function):
    """A call whose gradients go to single slots, with the base product before it or without.

    base_output is the first tensor, as in `_Node`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        y: Tensor,
        x: Tensor,
        base_weight: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        needed = ctx.needs_input_grad[4:]
        wanted, rows = recorded.wants(needed), _flat(x)
        _, h = run_forward(recorded, rows, y.view(-1, y.shape[-1]))
        ctx.mark_dirty(y)
        ctx.recorded, ctx.shape, ctx.like = recorded, x.shape, (rows.shape, rows.dtype)
        kept = kept_for(recorded, wanted, ctx.needs_input_grad[2], h is not None)
        weight = base_weight if ctx.needs_input_grad[2] else None
        # Not the stacks: a version counts the changes of all slots.
        used = (leaf for leaf, is_needed in zip(leaves, needed, strict=True) if is_needed)
        ctx.save_for_backward(x if kept.x else None, h if kept.h else None, weight, *used)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        x, h, weight, *used = ctx.saved_tensors  # raises where one was changed in place
        recorded.check_plan()
        needs_y, needs_x, _, *needed = ctx.needs_input_grad[1:]
        rows, x_rows = grad.reshape(-1, grad.shape[-1]), None if x is None else _flat(x)
        needs = (needs_x, needs_y, *needed)
        gradients = run_backward(recorded, needs, rows, x_rows, h, None, ctx.like, weight)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _refusing_second(recorded, gradients, grad, x, *used)
        dx, dy, *parts = gradients
        dx = None if dx is None else dx.view(ctx.shape)
        return None, None if dy is None else dy.view_as(grad), dx, None, *parts


def _flat(x: Tensor) -> Tensor:
    """Return x [..., in_features] as rows; token ids have one axis already."""
    rows = x if x.ndim < 3 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
