"""Stored LoRA calls that modules repeat right after torch's base product.

Between two calls of a module a model runs so much other code that the CPU's caches hold little of
the data of the call. So each module has one object with all values that its next call compares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from lora_backends.dispatch.cached import CachedCall, CachingPlan, shared
from lora_backends.dispatch.engine import Engine
from lora_backends.weights import LoRAWeights

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


class Repeat:
    """A stored call to run after torch's base product, and the properties x and y must match.

    It compares the same values as `CallCache.find`, with two exceptions. A product that torch has
    just made overlaps nothing, requires no gradient and is no lazy negation. The addresses of the
    layer stay: the pool of adapters never moves its tensors.
    """

    __slots__ = (
        *("_cache", "_call", "_device", "_key", "_plan", "_rows"),
        *("_weights", "_x_dtype", "_x_shape", "_y_dtype", "_y_shape"),
    )

    def __init__(
        self, call: CachedCall, x: torch.Tensor, weights: LoRAWeights, plan: CachingPlan, y: _Tensor
    ) -> None:
        self._call, self._weights, self._plan = call, weights, plan
        self._cache, self._key = plan.call_cache, plan.call_cache.key
        self._rows = y.numel() // weights.out_features
        self._x_shape, self._x_dtype, self._device = shared(x.shape), x.dtype, x.get_device()
        self._y_shape, self._y_dtype = shared(y.shape), y.dtype

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return ``functional.linear(x, weight, bias)`` with the LoRA of x added.

        Returns None if the call does not fit, and the caller has to run it in full: x or the
        product is of another kind (of another dtype under autocast, for instance), gradients are
        on, or the plan was refilled with other tiles or with more tokens.
        """
        try:
            if not (
                type(x) is _Tensor
                and x.shape == self._x_shape
                and x.dtype is self._x_dtype
                and x.is_contiguous()
                and x.get_device() == self._device
                and (x_at := x.data_ptr())  # 0: no memory, or of a transform
                and not x_at & 15
                and not x.is_neg()
                and not _is_grad_enabled()
                and forward_ad._current_level < 0
                # an equal key that is another object only costs a full call
                and self._cache.key is self._key
                and self._plan.num_tokens <= self._rows
            ):
                return None
        except RuntimeError:  # a sparse tensor has no strides
            return None
        y = functional.linear(x, weight, bias)
        try:
            fits = (
                type(y) is _Tensor
                and y.shape == self._y_shape
                and y.dtype is self._y_dtype
                and y.is_contiguous()
                and (y_at := y.data_ptr())
                and not y_at & 15
            )
        except RuntimeError:  # `vmap` has made products of many weights
            return None
        return y if fits and self._call.run(x, self._weights, self._plan, y) else None


class Repeats(dict[Any, Repeat]):
    """Calls that modules may repeat in forward passes of one size, by a key of the module.

    Not for several threads at once.
    """

    def __init__(self) -> None:
        super().__init__()
        # Only calls with this plan are kept: in all of these passes the layout and the shape of an
        # input select it. Other plans may depend on more, as those of images do, or may no longer
        # be refilled.
        self.plan: Any = None

    def of_pass(self, device: torch.device) -> Repeats:
        """Return the calls that the next pass may repeat."""
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            # stored calls refuse another current GPU, and torch's product would be wasted
            return NO_REPEATS
        return self

    def keep(
        self,
        key: Any,
        engine: Engine,
        operation: str | None,  # under which it stores such calls, or None
        x: torch.Tensor,
        weights: LoRAWeights,  # whose tensors must stay where they are
        plan: Any,
        y: torch.Tensor,
    ) -> None:
        """Keep a call that an engine has just made, if it stored it."""
        if operation is None or plan is not self.plan or not isinstance(plan, CachingPlan):
            return
        if not (_is_aligned(x) and _is_aligned(y)):
            return
        call = plan.call_cache.find(operation, engine, x, weights, y, plan)
        if call is not None:
            self[key] = Repeat(call, x, weights, plan, y)


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() & 15 == 0


NO_REPEATS = Repeats()
"""For code that may repeat nothing; it stays empty."""
