"""Gradients of experts: a recorded call of `run_experts` and its backward, for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.dispatch.differentiate import check_differentiable, leaves_of
from lora_backends.dispatch.recorded import Recorded, SlotParameter, Target
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.operations import Operation

WEIGHTS = "topk_weights"
"""The name of the router's weights among the targets of a recorded call."""


def record_experts(
    engine: Any,
    operation: Operation,
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: ExpertRouting,
    y: torch.Tensor | None,
    options: Mapping[str, Any],
    parameters: Sequence[SlotParameter] | None = None,
) -> torch.Tensor:
    """Run an operation on routed rows as a node of autograd's graph.

    Args:
        engine: that runs it.
        operation: of the interface, on experts.
        run: the engine's method for it, without guards.
        x: the first argument; it has passed the guards, as all others.
        weights: the experts.
        routing: of the batch.
        y: base_output, or None.
        options: keyword arguments of the operation.
        parameters: tensors that stand for single slots, in place of the stacks' own gradients:
            [experts or 1, num_a, rank, in_features] of lora_a, [experts or 1, out_features, rank]
            of lora_b. None: the gradients go to the stacks.

    Raises:
        InvalidInputError: base_output is a leaf, which autograd does not let change in place.
        UnsupportedInputError: a stored 8-bit tensor, or the engine computes no gradients.
    """
    check_differentiable(engine, operation, x, weights, y)
    if parameters is None:
        parameters = leaves_of(operation, weights)
    leaves, targets = [leaf for leaf, _ in parameters], [target for _, target in parameters]
    if options["weighted"] and routing.differentiable_weights is not None:
        leaves.append(routing.differentiable_weights)
        targets.append(Target(WEIGHTS))
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    recorded = Recorded(engine, operation, weights, routing, tuple(targets), kinds, options)
    result: torch.Tensor = _Node.apply(recorded, run, x, y, *leaves)  # type: ignore[no-untyped-call]
    return result


class _Node(torch.autograd.Function):
    """A recorded call in autograd's graph. base_output is changed in place, as without a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        recorded: Recorded,
        run: Callable[..., torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor | None,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):  # engines choose the dtype of products
            result = run(x, recorded.weights, recorded.plan, y, **recorded.options)
        if y is not None:
            ctx.mark_dirty(y)
        ctx.recorded, ctx.like = recorded, (x.shape, x.dtype)
        needs_x, _, *needs_leaves = ctx.needs_input_grad[2:]
        ctx.save_for_backward(*_to_keep(recorded, x, needs_x, needs_leaves))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorded: Recorded = ctx.recorded
        x, *_ = ctx.saved_tensors  # raises where one was changed in place
        recorded.check_plan()
        needs_x, needs_y, *needs_leaves = ctx.needs_input_grad[2:]
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            dx, parts = _run_backward(recorded, grad, x, ctx.like, needs_x, needs_leaves)
        return None, None, dx, grad if needs_y else None, *parts


def _to_keep(
    recorded: Recorded, x: torch.Tensor, needs_x: bool, needs_leaves: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return x where the backward reads it, then tensors of the layer.

    The layer's are kept for autograd's check that nobody changed them before the backward.
    """
    wanted = recorded.wants(needs_leaves)
    if not (needs_x or wanted):  # the gradient of base_output alone depends on nothing
        return (None,)
    needs_h = "lora_b" in wanted or WEIGHTS in wanted
    read = {"ranks": True, "scalings": True}
    read |= dict.fromkeys(("lora_a", "a_scales"), needs_x or needs_h)
    read |= dict.fromkeys(("lora_b", "b_scales"), needs_x or {*wanted} != {"lora_b"})
    tensors = recorded.weights.tensors.items()
    return (
        x if wanted else None,
        *[tensor for name, tensor in tensors if read[name]],
    )


def _run_backward(
    recorded: Recorded,
    grad: torch.Tensor,
    x: torch.Tensor | None,
    like: tuple[torch.Size, torch.dtype],
    needs_x: bool,
    needs_leaves: Sequence[bool],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradients of x, in the shape and dtype `like`, and of the recorded tensors."""
    wanted = recorded.wants(needs_leaves)
    parts: list[torch.Tensor | None] = [None] * len(needs_leaves)
    if not (needs_x or wanted):
        return None, parts
    weights: ExpertWeights = recorded.weights
    slots = recorded.slots_of(wanted)
    stacks: dict[str, torch.Tensor | None] = {}
    for name in ("lora_a", "lora_b", WEIGHTS):
        stacks[name] = None
        if name in wanted:
            if name == WEIGHTS:
                shape = recorded.plan.topk_weights.shape
            else:
                shape = getattr(weights, name).shape
                if slots is not None:
                    shape = (len(slots), *shape[1:])
            dtype = recorded.dtype_of(name)
            stacks[name] = torch.empty(shape, dtype=dtype, device=weights.device)
    dx = grad.new_empty(like[0], dtype=like[1]) if needs_x else None
    if grad.stride(-1) != 1 and grad.shape[-1] > 1:
        grad = grad.contiguous()  # kernels read neighbours along the last axis
    out = ExpertGradients(dx, *stacks.values())
    recorded.engine.run_experts_backward(
        grad, x, weights, recorded.plan, out, **recorded.options, slots=slots
    )
    for name, places in wanted.items():
        for at in places:
            made = stacks[name]
            assert made is not None
            parts[at] = recorded.part_of(made, at, slots)
    return dx, parts
