"""`Recorded`: a call that autograd records, and which gradient each of its tensors gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch

from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.operations import Operation

Wanted: TypeAlias = Mapping[str, Sequence[int]]
"""By the name of a stack, the places of the recorded tensors that need a gradient."""


class Target(NamedTuple):
    """The part of a layer that a tensor's gradient belongs to."""

    name: str  # lora_a, lora_b, bias, output_scales or topk_weights
    slot: int | None = None  # None: all slots
    part: int | None = None  # the slice; None: all slices


class SlotParameter(NamedTuple):
    """A tensor that stands for one slot's part of a stack, for instance a view of it.

    The layer computes with the stack, and the part's gradient goes to the tensor. The tensor has
    the true rank, [rank, in_features] of lora_a or [width of the slice, rank] of lora_b, and may
    have a wider dtype than the stack.
    """

    tensor: torch.Tensor
    target: Target


@dataclass(eq=False)
class Recorded:
    """A call that autograd records."""

    engine: Any
    operation: Operation
    weights: Any
    plan: Any  # or a routing
    targets: tuple[Target, ...]  # of the tensors after x and base_output
    leaves: tuple[tuple[torch.Size, torch.dtype], ...]  # shape and dtype of each of them
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[], None] | None = None  # raises where a backward would compute something else
    refills: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not hasattr(self.plan, "refills"):
            count_refill(self.plan)
        self.refills = refills_of(self.plan)

    def check_plan(self) -> None:
        """Refuse a backward by tables of another batch.

        Raises:
            InvalidInputError: the plan, or the routing, was refilled after the forward; or as
                `check`.
        """
        if self.check is not None:
            self.check()
        if self.refills != refills_of(self.plan):
            raise InvalidInputError(
                f"the plan of {self.operation.name} was refilled between forward and backward\n"
                f"  given: a plan that holds another batch now\n"
                f"  to do: run the backward first, or prepare a plan for each forward"
            )

    def wants(self, needed: Sequence[bool]) -> Wanted:
        """Return the targets that need a gradient."""
        wanted: dict[str, list[int]] = {}
        for at, (target, is_needed) in enumerate(zip(self.targets, needed, strict=True)):
            if is_needed:
                wanted.setdefault(target.name, []).append(at)
        return wanted

    def slots_of(self, wanted: Wanted) -> tuple[int, ...] | None:
        """Return the slots whose gradients are wanted, ascending; None: those of whole stacks."""
        slots = [self.targets[at].slot for places in wanted.values() for at in places]
        named = {slot for slot in slots if slot is not None}
        return tuple(sorted(named)) or None

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the widest dtype of the gradients of a stack: each is rounded to its own."""
        dtypes = (
            leaf[1]
            for leaf, target in zip(self.leaves, self.targets, strict=True)
            if target.name == name
        )
        return reduce(torch.promote_types, dtypes)

    def without_factors(self) -> Any:
        """Return the layer without bias and output_scales."""
        return replace(self.weights, bias=None, output_scales=None)

    def part_of(self, out: torch.Tensor, at: int, slots: tuple[int, ...] | None) -> torch.Tensor:
        """Return the gradient of a recorded tensor.

        Args:
            out: [slots, ...] gradients of its stack; of lora_a [slots, num_slices, max_rank,
                in_features], of lora_b [slots, out_features, max_rank].
            at: which of the targets.
            slots: of `out`; None: all.
        """
        name, slot, part = self.targets[at]
        shape, dtype = self.leaves[at]
        if slot is not None and slots is not None:
            out = out[slots.index(slot)][None]
        if part is not None and name == "lora_a":
            out = out[:, part]
        elif part is not None:
            first, end = self.weights.slice_offsets[part : part + 2]
            out = out[:, first:end]
        if slot is not None:
            out = out[0]
        if name == "lora_a" and part is not None:
            out = out[..., : shape[-2], :]
        elif name == "lora_b":
            out = out[..., : shape[-1]]
        return out.to(dtype)


def refills_of(plan: Any) -> tuple[int, ...]:
    """Return the counts of refills of a plan, or of a routing and its plan."""
    inner = getattr(plan, "plan", None)
    own = getattr(plan, "refills", 0)
    return (own,) if inner is None else (own, *refills_of(inner))


def count_refill(plan: Any) -> None:
    """Note that a plan or routing holds another batch, so that a backward of the last is refused.

    Raises:
        UnsupportedInputError: the plan has no place for the count.
    """
    for part in getattr(plan, "plans", ()):  # of several adapters per token
        count_refill(part)
    try:
        plan.refills = getattr(plan, "refills", 0) + 1
    except AttributeError:
        raise UnsupportedInputError(
            f"a plan of type {type(plan).__name__} cannot count its refills\n"
            f"  to do: derive it from LoRAPlan, or give it an attribute `refills`"
        ) from None
