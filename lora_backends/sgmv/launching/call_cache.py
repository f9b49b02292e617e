"""Both launches of a call, kept with every argument that stays the same.

In a model every layer meets the same plan at every step, so most calls have been made before. A
repeated call finds its `CachedLaunches`, takes memory for h and passes three addresses to two
compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.sgmv.launching.kernel import (
    Arguments,
    BoundKernel,
    SpecializedKernel,
    has_launch_hooks,
    is_current,
    several_devices,
    stream_of,
)
from lora_backends.sgmv.launching.tma import without_tensor
from lora_backends.weights import LoRAWeights

MOST_KEPT_VALUES = 1 << 20
"""Float32 values of h, 4 MB, that are kept for the next call; more are allocated for each call."""


class Launched(NamedTuple):
    """A launch that was made."""

    kernel: SpecializedKernel
    arguments: Arguments


class Memory(NamedTuple):
    """Memory for h."""

    tensor: torch.Tensor  # [values] float32
    address: int
    values: int


class Scratch:
    """Memory for h on one device, kept between calls on the default stream.

    A call takes it away until both of its kernels are launched. So the next call that takes it, in
    any thread, launches after them.

    Calls on other streams allocate memory of their own, because torch may allocate from the pool of
    a CUDA graph there: while it captures one, and while `torch.compile` warms a program up to
    capture it. torch refuses that program if memory of the pool stays in use after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._none = torch.empty(0, dtype=torch.float32, device=device)
        self._spare: list[Memory] = []

    def take(self, values: int) -> Memory:
        """Return memory for `values` float32 or more, for kernels on the default stream."""
        try:
            kept = self._spare.pop()  # one step: no other thread gets it, too
            if kept.values >= values:
                return kept
        except IndexError:
            pass
        return self.new(values)

    def new(self, values: int) -> Memory:
        """Return new memory for `values` float32, for kernels on the current stream."""
        tensor = self._none.new_empty(values)  # takes half the time of `torch.empty`
        return Memory(tensor, tensor.data_ptr(), values)

    def give_back(self, memory: Memory) -> None:
        """Keep memory for the next call; the kernels that use it are launched."""
        if memory.values <= MOST_KEPT_VALUES:
            self._spare.append(memory)


@lru_cache(maxsize=64)
def scratch_of(device: torch.device) -> Scratch:
    """Return the memory that all calls on a device share."""
    return Scratch(device)


@dataclass(eq=False, slots=True)
class CachedLaunches:
    """The two launches of one layer, plan and kind of arguments: a `CachedCall`.

    Dispatch finds it for a call of the same shapes, strides, dtypes and addresses of the layer.
    """

    device: torch.device
    several: bool  # whether torch finds other devices, of which one may be current
    stream_of: Callable[[int], int]  # from a device's index to the address of its current stream
    scratch: Scratch  # for h
    h_values: int  # of h, all planes
    h_shape: tuple[int, ...]  # planes, slices, rows, ranks
    tokens: int  # rows of x, which a model passes with more axes
    shrink: BoundKernel  # x and h change from call to call
    expand: BoundKernel  # h and y change from call to call

    @classmethod
    def of(cls, shrink: Launched, expand: Launched) -> Self:
        """Return a call just made: `shrink` takes x first, h last; `expand` h first, y third."""
        descriptors = tuple(map(without_tensor, expand.arguments.descriptors))
        h = expand.arguments.tensors[0]
        return cls(
            h.device,
            several_devices(),
            stream_of(),
            scratch_of(h.device),
            math.prod(h.shape),
            tuple(h.shape),
            shrink.arguments.tensors[0].shape[0],
            shrink.kernel.bind(shrink.arguments, len(shrink.arguments.tensors) - 1),
            expand.kernel.bind(expand.arguments._replace(descriptors=descriptors), 2),
        )

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Launch both kernels; return False, with nothing run, if another device is current."""
        device, scratch = self.device, self.scratch
        if self.several and not is_current(device):
            return False
        stream = self.stream_of(device.index)
        capturing = stream != 0 and is_capturing(device)  # no graph captures the default stream
        if capturing:
            plan.is_captured = True
        rows = plan.grid_rows(capturing, self.tokens)
        if rows:
            h = scratch.new(self.h_values) if stream else scratch.take(self.h_values)
            at_h, hooks = h.address, has_launch_hooks()
            self.shrink.launch(rows, stream, x.data_ptr(), at_h, hooks)
            self.expand.launch(rows, stream, at_h, y.data_ptr(), hooks)
            if not stream:
                scratch.give_back(h)
        return True

    def run_with_h(self, x: torch.Tensor, y: torch.Tensor, rows: int) -> torch.Tensor | None:
        """Launch both kernels on `rows` rows of the grid; return h, or None as `run` does False."""
        device = self.device
        if self.several and not is_current(device):
            return None
        stream, hooks = self.stream_of(device.index), has_launch_hooks()
        h = torch.empty(self.h_shape, dtype=torch.float32, device=device)
        at_h = h.data_ptr()
        self.shrink.launch(rows, stream, x.data_ptr(), at_h, hooks)
        self.expand.launch(rows, stream, at_h, y.data_ptr(), hooks)
        return h
