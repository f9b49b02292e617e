"""Both launches of a call, kept with every argument that stays the same.

In a model every layer meets the same plan at every step, so most calls have been made before. A
repeated call finds its `CachedLaunches`, takes memory for h and passes to two compiled kernels the
addresses of x, h and y, and the rows of h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.sgmv.launching.kernel import (
    RECORD,
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

MOST_ROWS = 1 << 15
"""Most rows of h with which a call serves other numbers of rows."""

_H_SIZES = "h_rows", "h_stride_s"
"""Arguments that follow from the rows of h: their number, and the stride of its slices."""


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
    planes: int  # of h
    slices: int
    width: int  # values of a row of h
    any_rows: bool  # whether it serves all numbers of rows that round up to one power of two
    shrink: BoundKernel  # x and h change from call to call, and the sizes of h
    expand: BoundKernel  # h and y change from call to call, and the sizes of h
    counts_rows: bool  # whether the shrink takes the rows of h; the gather of an embedding does not

    @classmethod
    def of(cls, shrink: Launched, expand: Launched) -> Self:
        """Return a call just made: `shrink` takes x first, h last; `expand` h first, y third."""
        descriptors = tuple(map(without_tensor, expand.arguments.descriptors))
        h = expand.arguments.tensors[0]
        planes, slices, rows, width = h.shape
        # Triton compiles other code if the stride of h's slices is no multiple of 16 or takes 64
        # bits, and a grid of two axes may have too few rows for more tokens
        any_rows = width % 16 == 0 and rows <= MOST_ROWS
        names, last = shrink.kernel.kernel.arg_names, len(shrink.arguments.tensors) - 1
        sizes = [names.index(name) for name in _H_SIZES if name in names]
        changing = [0, 2, *map(expand.kernel.kernel.arg_names.index, _H_SIZES)]
        return cls(
            h.device,
            several_devices(),
            stream_of(),
            scratch_of(h.device),
            planes,
            slices,
            width,
            any_rows,
            shrink.kernel.bind(shrink.arguments, (0, last, *sizes)),
            expand.kernel.bind(expand.arguments._replace(descriptors=descriptors), changing),
            "h_rows" in names,
        )

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Launch both kernels.

        Returns False, with nothing run, if another device is current or launches are only noted.
        """
        device, scratch = self.device, self.scratch
        if (self.several and not is_current(device)) or RECORD.get() is not None:
            return False
        stream = self.stream_of(device.index)
        capturing = stream != 0 and is_capturing(device)  # no graph captures the default stream
        if capturing:
            plan.is_captured = True
        tokens = y.numel() // y.shape[-1]  # a model may pass x and y with more axes
        rows = plan.grid_rows(capturing, tokens)
        if rows:
            h_rows = plan.h_rows(tokens)
            values = self.planes * self.slices * h_rows * self.width
            h = scratch.new(values) if stream else scratch.take(values)
            self._launch(rows, stream, x, h.address, y, h_rows)
            if not stream:
                scratch.give_back(h)
        return True

    def run_with_h(
        self, x: torch.Tensor, y: torch.Tensor, plan: Any, rows: int
    ) -> torch.Tensor | None:
        """Launch `rows` rows of both kernels and return h; None where `run` would return False."""
        device = self.device
        if (self.several and not is_current(device)) or RECORD.get() is not None:
            return None
        h_rows = plan.h_rows(y.numel() // y.shape[-1])
        shape = self.planes, self.slices, h_rows, self.width
        h = torch.empty(shape, dtype=torch.float32, device=device)
        self._launch(rows, self.stream_of(device.index), x, h.data_ptr(), y, h_rows)
        return h

    def _launch(
        self, rows: int, stream: int, x: torch.Tensor, at_h: int, y: torch.Tensor, h_rows: int
    ) -> None:
        hooks, sizes = has_launch_hooks(), (h_rows, h_rows * self.width)
        first = sizes if self.counts_rows else sizes[1:]
        self.shrink.launch(rows, stream, (x.data_ptr(), at_h, *first), hooks)
        self.expand.launch(rows, stream, (at_h, y.data_ptr(), *sizes), hooks)
