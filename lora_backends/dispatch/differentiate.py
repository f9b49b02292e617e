"""Gradients: calls that autograd records, and their backward, the same for every engine.

A call whose arguments require a gradient runs as one node of autograd's graph. Its forward is the
same call without a graph, so results and launches are those of inference. It keeps x, what the
engine gives as h, and the layer's tensors, none of them copied. The backward asks the engine for
what is needed: `run_lora_b_backward` from dL/dy to dh and dlora_b, then `run_lora_a_backward` from
dh to dx and dlora_a.

The gradients of a layer go to its whole stacks, or with `run_with_parameters` to tensors that hold
single slots, so that only those slots' gradients are computed and written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lora_backends.common.tensors import has_memory
from lora_backends.dispatch import checks
from lora_backends.dispatch.backward import run_backward, run_forward, tensors_to_keep
from lora_backends.dispatch.cached import accept, is_accepted
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.problems import Problems
from lora_backends.dispatch.recorded import Recorded, SlotParameter, Target
from lora_backends.dispatch.tracing import is_jit_traced
from lora_backends.dtypes import dtype_name
from lora_backends.eight_bit import is_eight_bit
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import Operation
from lora_backends.weights import LoRAWeights

_CONSTANTS = ("ranks", "scalings", "a_scales", "b_scales")
"""Tensors of a layer without a gradient."""


def requires_graph(engine: Engine, x: Any, weights: Any, y: Any = None) -> bool:
    """Return whether a call has to be recorded for autograd; arguments are unchecked.

    Transforms and traces of torch see through the calls of a `plain_torch` engine, and record them
    themselves.
    """
    if not torch.is_grad_enabled():
        return False
    tensors = [t for t in (x, y) if isinstance(t, torch.Tensor)]
    if isinstance(weights, LayerWeights):
        tensors += weights.tensors.values()
    if not any(tensor.requires_grad for tensor in tensors):
        return False
    return not (engine.plain_torch and (is_jit_traced() or not all(map(has_memory, tensors))))


def record(
    engine: Any,
    operation: Operation,
    x: torch.Tensor,
    weights: LayerWeights,
    plan: Any,
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run an operation as a node of autograd's graph; arguments are unchecked.

    Args:
        engine: that runs it.
        operation: of the interface, on a dense layer.
        x: the first argument.
        weights: the layer.
        plan: of the batch.
        y: base_output, or None.
    """
    _check(engine, operation, x, weights, plan, y)
    names = [name for name, tensor in weights.tensors.items() if tensor.requires_grad]
    leaves = [weights.tensors[name] for name in names]
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    recorded = Recorded(engine, operation, weights, plan, tuple(map(_target_of, names)), kinds)
    result: torch.Tensor = _Node.apply(recorded, x, y, *leaves)  # type: ignore[no-untyped-call]
    return result


def run_with_parameters(
    engine: Any,
    operation: Operation,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    y: torch.Tensor,
    parameters: Sequence[SlotParameter],
    *,
    base_weight: torch.Tensor | None = None,
    check: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Run an operation whose gradients go to tensors that stand for single slots.

    The backward reads the stacks as they are then. Autograd refuses it if one of `parameters` that
    the call used was changed in place meanwhile; changes of other slots do not matter.

    Args:
        engine: that runs it.
        operation: of the interface, on a dense layer.
        x: the first argument, or [..., in_features] with y [..., out_features].
        weights: the layer, whose stacks require no gradient.
        plan: of the batch.
        y: base_output, contiguous; it is changed in place and returned.
        parameters: those of slots in the batch.
        base_weight: [out_features, in_features] where y is ``x @ base_weight.T`` plus a constant
            and has no graph: the backward then computes the gradient of x through both, and adds
            the LoRA's part in place.
        check: called before the backward; raises where the stacks hold another adapter.

    Returns:
        y.

    Raises:
        InvalidInputError: as the operation.
        UnsupportedInputError: as the operation, or the engine computes no gradients.
    """
    _check(engine, operation, _flat(x), weights, plan, y.detach().view(-1, y.shape[-1]))
    leaves = [tensor for tensor, _ in parameters]
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    targets = tuple(target for _, target in parameters)
    recorded = Recorded(engine, operation, weights, plan, targets, kinds, check=check)
    result: torch.Tensor = _ParameterNode.apply(  # type: ignore[no-untyped-call]
        recorded, x, y, base_weight, *leaves
    )
    return result


def _target_of(name: str) -> Target:
    """Return the target of a tensor by its name in `LayerWeights.tensors`."""
    stack, bracket, index = name.partition("[")
    return Target(stack, None, int(index[:-1]) if bracket else None)


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
    """A recorded call in autograd's graph. base_output is changed in place, as without a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        x: torch.Tensor,
        y: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        wanted = recorded.wants(ctx.needs_input_grad[3:])
        kept = y
        if "output_scales" in wanted and y is not None:
            kept = y.clone()  # its gradient needs base_output, which is about to be overwritten
        result, h = run_forward(recorded, x, y)
        if y is not None:
            ctx.mark_dirty(y)
        ctx.recorded, ctx.like = recorded, (x.shape, x.dtype)
        keep = tensors_to_keep(recorded, wanted, ctx.needs_input_grad[1], x, h, kept)
        ctx.save_for_backward(*keep)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        x, h, base, *_ = ctx.saved_tensors  # raises where one was changed in place
        recorded.check_plan()
        needed = ctx.needs_input_grad[1:]
        return None, *run_backward(recorded, needed, grad, x, h, base, ctx.like)


class _ParameterNode(torch.autograd.Function):
    """A call whose gradients go to single slots, with the base product before it or without."""

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        x: torch.Tensor,
        y: torch.Tensor,
        base_weight: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad[4:]
        wanted, rows = recorded.wants(needed), _flat(x)
        _, h = run_forward(recorded, rows, y.view(-1, y.shape[-1]))
        ctx.mark_dirty(y)
        ctx.recorded, ctx.shape, ctx.like = recorded, x.shape, (rows.shape, rows.dtype)
        # Not the stacks: a version counts the changes of all slots.
        x_kept, h_kept, *_ = tensors_to_keep(
            recorded, wanted, ctx.needs_input_grad[1], rows, h, None
        )
        weight = base_weight if ctx.needs_input_grad[1] else None
        used = (leaf for leaf, is_needed in zip(leaves, needed, strict=True) if is_needed)
        ctx.save_for_backward(x_kept, h_kept, weight, *used)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        x, h, weight, *_ = ctx.saved_tensors  # raises where one was changed in place
        recorded.check_plan()
        needs_x, needs_y, _, *needed = ctx.needs_input_grad[1:]
        dx, dy, *parts = run_backward(
            recorded, (needs_x, needs_y, *needed), grad.reshape(-1, grad.shape[-1]), x, h, None,
            ctx.like, weight,
        )  # fmt: skip
        dx = None if dx is None else dx.view(ctx.shape)
        return None, dx, None if dy is None else dy.view_as(grad), None, *parts


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in_features] as rows; token ids have one axis already."""
    rows = x if x.ndim < 3 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
