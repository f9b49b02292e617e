"""`run_linear` again: both launches of a layer and a plan, kept with all that does not change.

In a model every layer meets the same plan at every step. What is left to do for a call that was
made before is to look it up, to take memory for h and to hand the addresses of x, h and y to two
kernels that are compiled and whose other arguments are known.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lora_backends.backend import LoRAPlan
from lora_backends.gpu.launching import (
    INTERPRETED,
    Arguments,
    ReadyLaunch,
    Variant,
    current_stream,
    is_current,
)
from lora_backends.weights import LoRAWeights

EMPTY_ROW = 0 if INTERPRETED else 1
"""Rows that are launched for a batch without adapters, which does nothing but compile what a CUDA
graph may need that is captured next: nothing can be compiled in a capture."""

MOST_KEPT = 4096
"""Calls that a plan remembers: layers, times the kinds of x and y that they are called with."""


class Launched(NamedTuple):
    """What a kernel was launched with."""

    variant: Variant
    programs: int  # for a row of the grid
    arguments: Arguments


class ReadyLinear(NamedTuple):
    """Both launches of one `run_linear`."""

    weights: tuple[int, ...]  # addresses of the layer's tensors, to notice that one has moved
    h_shape: tuple[int, ...]  # of the float32 planes between the kernels
    shrink: ReadyLaunch  # moving: x and h
    expand: ReadyLaunch  # moving: h and y, then y in place of a bias
    programs: tuple[int, int]  # of both kernels for a row of the grid
    flat: bool  # rows and programs share the first axis of the grid

    def launch(self, device: torch.device, rows: int, x: int, y: int) -> None:
        """Launch both kernels over `rows` rows of the grid; x and y are addresses."""
        h = torch.empty(self.h_shape, dtype=torch.float32, device=device)
        stream, h_address = current_stream(device.index), h.data_ptr()
        shrink, expand = self.programs
        if self.flat:
            shrink, expand, rows = shrink * rows, expand * rows, 1
        self.shrink.launch((shrink, rows), stream, x, h_address)
        self.expand.launch((expand, rows), stream, h_address, y, y)


@dataclass(eq=False)
class RememberingPlan(LoRAPlan):
    """A plan that remembers the launches of the layers that it was used with."""

    _ready: dict[Any, ReadyLinear] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_ready": {}}  # a copy has tables of its own

    def ready(self, key: Any, weights: LoRAWeights, device: torch.device) -> ReadyLinear | None:
        """Return what `remember` was given, unless the layer's tensors have moved."""
        found = self._ready.get(key)
        if found is None or found.weights != addresses_of(weights) or not is_current(device):
            return None
        return found

    def remember(
        self, key: Any, weights: LoRAWeights, shrink: Launched, expand: Launched, flat: bool = False
    ) -> None:
        """Keep the launches of a call that was just made, where they may be repeated.

        Args:
            key: from `key_of`, and whatever else the shape of h depends on.
            weights: the layer.
            shrink: x is its first pointer, h the last one.
            expand: h is its first pointer, y the third, the bias, or y again, the fourth.
            flat: whether rows and programs share the first axis of the grid.
        """
        if INTERPRETED or not _tables_are_contiguous(weights):  # else copies were passed on
            return
        if len(self._ready) >= MOST_KEPT:
            self._ready.clear()
        h = expand.arguments.tensors[0]
        moving = (0, len(shrink.arguments.tensors) - 1)
        y_twice = (0, 2, 3) if weights.bias is None else (0, 2, 2)
        self._ready[key] = ReadyLinear(
            addresses_of(weights),
            tuple(h.shape),
            shrink.variant.ready(shrink.arguments, moving),
            expand.variant.ready(expand.arguments, y_twice),
            (shrink.programs, expand.programs),
            flat,
        )


def with_contiguous_tables(weights: LoRAWeights) -> LoRAWeights:
    """Return the layer with contiguous ranks and scalings, as kernels take them.

    Copies are made here, before the first launch: between two kernels of which the second may
    start early, a third must not come.
    """
    if _tables_are_contiguous(weights):
        return weights
    found = copy.copy(weights)
    object.__setattr__(found, "ranks", weights.ranks.contiguous())
    object.__setattr__(found, "scalings", weights.scalings.contiguous())
    return found


def _tables_are_contiguous(weights: LoRAWeights) -> bool:
    return weights.ranks.is_contiguous() and weights.scalings.is_contiguous()


def key_of(
    backend: int, choice: object, weights: LoRAWeights, x: torch.Tensor, y: torch.Tensor
) -> Any:
    """Return what the launches of a call depend on, besides the plan and the rows of h."""
    aligned = x.data_ptr() & 15 == 0, y.data_ptr() & 15 == 0
    return backend, choice, weights.handle, x.stride(0), y.stride(0), y.dtype, *aligned


def addresses_of(weights: LoRAWeights) -> tuple[int, ...]:
    """Return where the tensors of a layer lie."""
    bias = weights.bias
    return (
        weights.lora_a.data_ptr(),
        weights.lora_b.data_ptr(),
        weights.ranks.data_ptr(),
        weights.scalings.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
