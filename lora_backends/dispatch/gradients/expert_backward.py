"""The forward and the backward of recorded calls of experts: which tensors each step needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.dispatch.gradients.recorded import Recorded, Wanted

STACKS = ("lora_a", "lora_b")
ROUTER = "topk_weights"
"""Targets of a recorded call, in the order of `ExpertGradients`."""


def run_forward(recorded: Recorded, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """Run a checked call without a graph, and return its result."""
    run = getattr(recorded.engine, recorded.operation.name)
    with torch.autocast(x.device.type, enabled=False):  # engines choose the dtype of products
        result: torch.Tensor = run(x, recorded.weights, recorded.plan, y, **recorded.options)
        return result


def tensors_read(wanted: Wanted, needs_x: bool) -> tuple[str, ...]:
    """Return the names of the layer's tensors that a backward reads."""
    if not (needs_x or wanted):  # base_output alone needs a gradient
        return ()
    read = ["ranks", "scalings"]
    if needs_x or "lora_b" in wanted or ROUTER in wanted:  # for dx, or for h
        read += ["lora_a", "a_scales"]
    if needs_x or "lora_a" in wanted or ROUTER in wanted:
        read += ["lora_b", "b_scales"]
    return tuple(read)


def run_backward(
    recorded: Recorded,
    needed: Sequence[bool],
    grad: torch.Tensor,
    x: torch.Tensor | None,
    like: tuple[torch.Size, torch.dtype],
) -> tuple[torch.Tensor | None, ...]:
    """`backward.run_backward` of experts; the last axis of `grad` is contiguous."""
    needs_x, needs_base, *of_leaves = needed
    wanted = recorded.wants(of_leaves)
    parts: list[torch.Tensor | None] = [None] * len(of_leaves)
    dx = torch.empty(like[0], dtype=like[1], device=grad.device) if needs_x else None
    if needs_x or wanted:
        slots = recorded.slots_of(wanted)
        made = {name: _new(recorded, name, slots) for name in wanted}
        out = ExpertGradients(dx, *map(made.get, (*STACKS, ROUTER)))
        recorded.engine.run_experts_backward(
            grad, x, recorded.weights, recorded.plan, out, **recorded.options, slots=slots
        )
        for name, places in wanted.items():
            for at in places:
                parts[at] = recorded.part_of(made[name], at, slots)
    return dx, grad if needs_base else None, *parts


def _new(recorded: Recorded, name: str, slots: tuple[int, ...] | None) -> torch.Tensor:
    """Return memory for the gradients of the router's weights, or of a stack's wanted slots."""
    if name == ROUTER:
        shape = recorded.plan.topk_weights.shape
    else:
        shape = getattr(recorded.weights, name).shape
        shape = shape if slots is None else (len(slots), *shape[1:])
    dtype = recorded.dtype_of(name)
    return torch.empty(shape, dtype=dtype, device=recorded.weights.device)
