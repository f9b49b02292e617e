"""`TrainedAdapter`: the parameters of one adapter that is trained in its slot."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_backends.adapters import AdapterPool, Checkpoint
from lora_backends.dispatch.gradients.recorded import GradientTarget, SlotParameter, SlotParameters
from lora_backends.errors import InvalidInputError, shown

_version = operator.attrgetter("_version")
_data_ptr = torch.Tensor.data_ptr

_PREFIX = "base_model.model."
_NAMES = {
    "linear": ("lora_A.weight", "lora_B.weight"),
    "embedding": ("lora_embedding_A", "lora_embedding_B"),
}
"""Ends of PEFT's names of A and B, by the kind of a module."""


@dataclass(frozen=True, eq=False)
class _Place:
    """A parameter and the part of a stack that the layers compute with."""

    parameter: nn.Parameter
    part: torch.Tensor  # the parameter's own memory, unless it is a master


class TrainedAdapter:
    """The parameters of an adapter, the settings of its training, and where they lie.

    A parameter of the stacks' dtype is a view of its slot at the true rank. One of a wider dtype is
    a master, which `flush` rounds into the slot.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        pool: AdapterPool,
        checkpoint: Checkpoint,  # with which masters start
        values: Mapping[str, Any],  # of its `adapter_config.json`
        groups: Mapping[str, int],  # the index among the slices, by path
        dtype: torch.dtype | None,  # None: the stacks'
    ) -> None:
        self.name, self.slot, self.values = name, slot, dict(values)
        self.dropout = float(values.get("lora_dropout") or 0.0)
        self.parameters: dict[str, nn.Parameter] = {}
        """By PEFT's name in a saved file, in the order of the base model's modules."""
        self.alone: dict[str, tuple[SlotParameter, ...]] = {}
        """By path, for the stack of the module alone."""
        self.joined: dict[str, tuple[SlotParameter, ...]] = {}
        """By path, for the stack that the module shares with its siblings."""
        self.of_batches: dict[Any, tuple[list[TrainedAdapter], SlotParameters]] = {}
        """By stack: the adapters of a batch that this one is the first of, and their parameters."""
        self._places: list[_Place] = []
        for path, spec in pool.modules.items():
            delta = checkpoint.modules.get(path)
            if delta is None:
                continue
            stack, rank = pool.active.weights[path], delta.rank
            assert isinstance(stack.lora_a, torch.Tensor) and isinstance(stack.lora_b, torch.Tensor)
            parts = stack.lora_a[slot, 0, :rank], stack.lora_b[slot, :, :rank]
            pairs = zip(parts, (delta.lora_a, delta.lora_b), strict=True)
            a, b = (_parameter(part, value, dtype or part.dtype) for part, value in pairs)
            self._places += [_Place(a, parts[0]), _Place(b, parts[1])]
            for end, parameter in zip(_NAMES[spec.kind], (a, b), strict=True):
                self.parameters[f"{_PREFIX}{path}.{end}"] = parameter
            self.alone[path] = _targets(a, b, slot, 0)
            self.joined[path] = _targets(a, b, slot, groups.get(path, 0))
        parameters = [place.parameter for place in self._places]
        masters = [place for place in self._places if place.parameter.dtype != place.part.dtype]
        # two lists: with one strided tensor in a list, torch copies all of them one by one
        dense = [place for place in masters if place.part.is_contiguous()]
        strided = [place for place in masters if not place.part.is_contiguous()]
        self._masters = [places for places in (dense, strided) if places]
        # addresses: layers read the slot, so a parameter with other memory would train for nothing
        self._all, self._addresses = parameters, list(map(_data_ptr, parameters))

    @torch.no_grad()
    def flush(self) -> None:
        """Round masters into the slot; streams and locks are the caller's."""
        if list(map(_data_ptr, self._all)) != self._addresses:
            self._refuse_moved()
        # on every call: an update through `.data` changes no version
        for places in self._masters:
            torch._foreach_copy_([p.part for p in places], [p.parameter for p in places])

    @property
    def has_masters(self) -> bool:
        """Whether the parameters are wider than the stacks."""
        return bool(self._masters)

    def versions(self) -> list[int]:
        """Return a count of the changes of each parameter."""
        return list(map(_version, self._all))

    @torch.no_grad()
    def leave_slot(self) -> None:
        """Give every parameter memory of its own: the slot belongs to another adapter from now."""
        self.of_batches.clear()
        masters = {id(place.parameter) for places in self._masters for place in places}
        for parameter in self._all:
            # a master has memory of its own already
            if id(parameter) not in masters:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    def _refuse_moved(self) -> None:
        now = map(_data_ptr, self._all)
        pairs = zip(self.parameters, now, self._addresses, strict=True)
        moved = [key for key, address, before in pairs if address != before]
        raise InvalidInputError(
            f"parameters of {self.name!r} were given other memory, which the model does not read\n"
            f"  given: {', '.join(moved[:3])}{', ...' * (len(moved) > 3)}\n"
            f"  allowed: changes in place, e.g. parameter.copy_(values) under torch.no_grad()\n"
            f"  to do: copy the values back into the parameters of a new adapter"
        )


def saved_tensors(pool: AdapterPool, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the matrices of a checkpoint by the names under which PEFT saves them today."""
    tensors = {}
    # older names of PEFT are read, and never written
    for path, delta in checkpoint.modules.items():
        a, b = _NAMES[pool.modules[path].kind]
        tensors[f"{_PREFIX}{path}.{a}"] = delta.lora_a
        tensors[f"{_PREFIX}{path}.{b}"] = delta.lora_b
    return tensors


def check_dtype(dtype: object, stack: torch.dtype) -> None:
    """Raise InvalidInputError unless `dtype` is None, the stacks', or float32 over 16 bits."""
    allowed = {None, stack} | ({torch.float32} if stack.itemsize == 2 else set())
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in allowed):
        names = ", ".join(sorted(map(str, allowed)))
        raise InvalidInputError(
            f"parameters cannot have dtype {shown(dtype)} over adapters of {stack}\n"
            f"  allowed: {names}"
        )


@torch.inference_mode(False)
def _parameter(part: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
    if dtype != part.dtype:
        return nn.Parameter(value.to(part.device, dtype, copy=True))
    # `.data`: the versions of a view would count the changes of every slot of the stack.
    return nn.Parameter(part.data)


def _targets(a: nn.Parameter, b: nn.Parameter, slot: int, index: int) -> tuple[SlotParameter, ...]:
    return (
        SlotParameter(a, GradientTarget("lora_a", slot, index)),
        SlotParameter(b, GradientTarget("lora_b", slot, index)),
    )
