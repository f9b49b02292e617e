"""Both launches of a call, kept with every argument that stays the same.

In a model every layer meets the same plan at every step, so most calls have been made before. A
repeated call finds its `CachedLaunches`, allocates h and passes three addresses to two compiled
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from lora_backends.devices import is_capturing
from lora_backends.sgmv.launching.kernel import (
    Arguments,
    BoundKernel,
    SpecializedKernel,
    current_stream,
    has_launch_hooks,
    is_current,
)
from lora_backends.sgmv.launching.tma import without_tensor
from lora_backends.weights import LoRAWeights


class Launched(NamedTuple):
    """A launch that was made."""

    kernel: SpecializedKernel
    arguments: Arguments


@dataclass(eq=False, slots=True)
class CachedLaunches:
    """The two launches of one layer, plan and kind of arguments: a `CachedCall`.

    Dispatch finds it for a call of the same shapes, strides, dtypes and addresses of the layer.
    """

    device: torch.device
    no_values: torch.Tensor  # [0] float32: its `new_empty` takes half the time of `torch.empty`
    h_values: int  # of h, all planes
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
            h.new_empty(0),
            math.prod(h.shape),
            shrink.arguments.tensors[0].shape[0],
            shrink.kernel.bind(shrink.arguments, len(shrink.arguments.tensors) - 1),
            expand.kernel.bind(expand.arguments._replace(descriptors=descriptors), 2),
        )

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Launch both kernels; return False, with nothing run, if another device is current."""
        device = self.device
        if not is_current(device):
            return False
        if is_capturing(device):
            plan.is_captured = True
            rows = plan.grid_rows(True, self.tokens)
        else:
            rows = plan.grid_rows(False, 0)
        if rows:
            h = self.no_values.new_empty(self.h_values)
            at_h, stream, hooks = h.data_ptr(), current_stream(device.index), has_launch_hooks()
            self.shrink.launch(rows, stream, x.data_ptr(), at_h, hooks)
            self.expand.launch(rows, stream, at_h, y.data_ptr(), hooks)
        return True
