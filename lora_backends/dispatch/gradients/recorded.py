"""`Recorded`: a call that autograd records, and which gradient each of its tensors gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import torch

from lora_backends.dispatch.many_adapters import ManyAdaptersPlan
from lora_backends.errors import InvalidInputError
from lora_backends.operations import Operation

Wanted: TypeAlias = Mapping[str, Sequence[int]]
"""By the name of a stack, the places of the recorded tensors that need a gradient."""


class GradientTarget(NamedTuple):
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
    target: GradientTarget


class SlotParameters:
    """The parameters of a batch's slots in one layer, and values derived once for many calls."""

    def __init__(self, parameters: Sequence[SlotParameter]) -> None:
        self.tensors = tuple(tensor for tensor, _ in parameters)
        self.targets = tuple(target for _, target in parameters)
        self.kinds = tuple((tensor.shape, tensor.dtype) for tensor in self.tensors)
        self.b_alone = b_alone(self.targets)
        self.cache: dict[Any, Any] = {}  # of each `Recorded`


def b_alone(targets: Sequence[GradientTarget]) -> bool:
    """Return whether lora_b has a gradient and lora_a none, so that a node may keep h and not x."""
    names = {target.name for target in targets}
    return "lora_b" in names and "lora_a" not in names


@dataclass(eq=False)
class Recorded:
    """A call that autograd records."""

    engine: Any  # the backend
    operation: Operation
    weights: Any
    plan: Any  # or a routing
    targets: tuple[GradientTarget, ...]  # of the tensors after x and base_output
    leaves: tuple[tuple[torch.Size, torch.dtype], ...]  # shape and dtype of each of them
    options: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[], None] | None = None  # raises where a backward would compute something else
    cache: dict[Any, Any] = field(default_factory=dict)  # derived from targets and leaves
    anchors: Sequence[torch.Tensor] = ()  # tensors that lead autograd to the call's tensors
    counters: tuple[Any, ...] = field(init=False)  # of the plan's refills: they live as long
    refills: tuple[int, ...] = field(init=False)  # at the forward

    def __post_init__(self) -> None:
        self.counters = _counters_of(self.plan)
        self.refills = refills_of(self.plan)

    def check_plan(self) -> None:
        """Raise InvalidInputError if the plan was refilled after the forward, or as `check`."""
        if self.check is not None:
            self.check()
        if self.refills != refills_of(self.plan):
            self.refuse_refilled()

    def refuse_refilled(self) -> NoReturn:
        """Refuse a backward: the plan was refilled after the forward."""
        raise InvalidInputError(
            f"the plan of {self.operation.name} was refilled between forward and backward\n"
            f"  given: a plan that holds another batch now\n"
            f"  to do: run the backward first, or prepare a plan for each forward"
        )

    def states(self, read: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the `_state_of` each stack and table in `read`, by name, for `check_layer`."""
        tensors = self.weights.tensors.items()
        return {name: _state_of(t) for name, t in tensors if name.partition("[")[0] in read}

    def check_layer(self, before: Mapping[str, tuple[int, int]]) -> None:
        """Raise InvalidInputError if a tensor in `before`, the forward's `states`, has changed."""
        # torch makes this check for tensors that a node saves. But hooks on saved tensors would
        # copy whole stacks, and torch does not check the copies.
        for name, state in before.items():
            now = _state_of(self.weights.tensors[name])
            if now != state:
                given = f"version {now[0]} of the tensor, the forward read {state[0]}"
                if now[1] != state[1]:
                    given = "other memory than the forward read"
                raise InvalidInputError(
                    f"{name} of {self.operation.name} was changed in place between forward and "
                    f"backward\n"
                    f"  given: {given}\n"
                    f"  to do: run the backward first, or change a copy"
                )

    def wants(self, needed: Sequence[bool]) -> Wanted:
        """Return the targets that need a gradient."""
        # the same in every step
        key = tuple(needed)
        wanted: dict[str, list[int]] | None = self.cache.get(key)
        if wanted is None:
            wanted = {}
            for at, (target, is_needed) in enumerate(zip(self.targets, needed, strict=True)):
                if is_needed:
                    wanted.setdefault(target.name, []).append(at)
            self.cache[key] = wanted
        return wanted

    def slots_of(self, wanted: Wanted) -> tuple[int, ...] | None:
        """Return the slots whose gradients are wanted, ascending; None: those of whole stacks."""
        key = "slots", *map(tuple, wanted.values())
        if key not in self.cache:
            slots = [self.targets[at].slot for places in wanted.values() for at in places]
            named = {slot for slot in slots if slot is not None}
            self.cache[key] = tuple(sorted(named)) or None
        slots_of: tuple[int, ...] | None = self.cache[key]
        return slots_of

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the widest dtype of the gradients of a stack: each is rounded to its own."""
        dtype: torch.dtype | None = self.cache.get(name)
        if dtype is None:
            dtypes = (
                leaf[1]
                for leaf, target in zip(self.leaves, self.targets, strict=True)
                if target.name == name
            )
            # one pass writes all of them: the widest loses nothing
            dtype = self.cache[name] = reduce(torch.promote_types, dtypes)
        return dtype

    def without_factors(self) -> Any:
        """Return the layer without bias and output_scales."""
        return replace(self.weights, bias=None, output_scales=None)

    def parts_of(
        self, out: torch.Tensor, places: Sequence[int], slots: tuple[int, ...] | None
    ) -> list[torch.Tensor]:
        """Return the gradients of some recorded tensors of a stack; arguments as of `part_of`."""
        whole = all(part == 0 for _, _, part in map(self.targets.__getitem__, places))
        if slots is None or not whole or self.weights.num_slices > 1:
            return [self.part_of(out, at, slots) for at in places]
        # One `unbind` for all adapters: this runs in every layer.
        by_slot = dict(zip(slots, out.flatten(0, -3).unbind(), strict=True))
        parts = []
        for at in places:
            part, (shape, dtype) = by_slot[self.targets[at].slot], self.leaves[at]  # type: ignore[index]
            if part.shape != shape:
                part = part[: shape[0], : shape[1]]
            parts.append(part if part.dtype == dtype else part.to(dtype))
        return parts

    def part_of(self, out: torch.Tensor, at: int, slots: tuple[int, ...] | None) -> torch.Tensor:
        """Return the gradient of recorded tensor `at`, from that of its stack for `slots`.

        `out` is [slots, num_slices, max_rank, in_features] for lora_a, [slots, out_features,
        max_rank] for lora_b; `slots` None: all.
        """
        name, slot, part = self.targets[at]
        shape, dtype = self.leaves[at]
        if slot is not None and slots is not None:
            out = out[slots.index(slot)]
        if part is not None and name == "lora_a":
            out = out.select(-3, part)
        elif part is not None:
            first, end = self.weights.slice_offsets[part : part + 2]
            out = out.narrow(-2, first, end - first)
        # As few views as can be: each adapter comes by here at each layer.
        if name == "lora_a" and out.shape[-2] != shape[-2]:
            out = out[..., : shape[-2], :]
        elif name == "lora_b" and out.shape[-1] != shape[-1]:
            out = out[..., : shape[-1]]
        return out if out.dtype == dtype else out.to(dtype)


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's version counter, 0 in inference mode, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


_ALL = frozenset({"lora_a", "lora_b", "bias", "output_scales"})
_SOME = {"run_lora_a": frozenset({"lora_a"}), "run_lora_b": _ALL - {"lora_a"}}
"""Stacks that an operation differentiates, where they are not all."""


def differentiates(operation: Operation, name: str) -> bool:
    """Return whether an operation on a dense layer has a gradient for a tensor of the layer."""
    return name.partition("[")[0] in _SOME.get(operation.name, _ALL)


@lru_cache(maxsize=1024)
def target_of(name: str) -> GradientTarget:
    """Return the target of a tensor by its name in `LayerWeights.tensors`."""
    stack, bracket, part = name.partition("[")
    return GradientTarget(stack, None, int(part[:-1]) if bracket else None)


def refills_of(plan: Any) -> tuple[int, ...]:
    """Return the counts of refills of a plan, or of a routing and its plan."""
    return tuple(counter.refills for counter in _counters_of(plan))


def _counters_of(plan: Any) -> tuple[Any, ...]:
    """Return the objects that count the refills of a plan, or of a routing and its plan."""
    inner = getattr(plan, "plan", None)
    return (_counter_of(plan),) if inner is None else (_counter_of(plan), _counter_of(inner))


class _Counter:
    """Counts the refills of a plan that takes no attribute, as one with ``__slots__``."""

    __slots__ = ("__weakref__", "plan", "refills")

    def __init__(self, plan: Any) -> None:
        self.plan, self.refills = plan, 0  # the plan lives as long, so nothing else has its id


_COUNTERS: WeakValueDictionary[int, _Counter] = WeakValueDictionary()
"""By the id of the plan; they live as long as a recorded call of the plan."""


def _counter_of(plan: Any) -> Any:
    """Return the object whose attribute `refills` counts those of a plan: itself where it can."""
    refills = getattr(plan, "refills", 0)
    if type(refills) is int:  # else the plan means something of its own by the name
        try:
            plan.refills = refills
        except (AttributeError, TypeError):
            pass
        else:
            return plan
    return _COUNTERS.setdefault(id(plan), _Counter(plan))


def count_refill(plan: Any) -> None:
    """Note that a plan or routing takes another batch: a backward of the last is refused."""
    if isinstance(plan, ManyAdaptersPlan):
        for part in plan.plans:
            count_refill(part)
    if type(refills := getattr(plan, "refills", None)) is int:
        try:
            plan.refills = refills + 1
            return
        except (AttributeError, TypeError):
            pass
    if (counter := _COUNTERS.get(id(plan))) is not None:  # else no call of it is recorded
        counter.refills += 1
