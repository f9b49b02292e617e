"""Cached calls: what an engine keeps on its plans to repeat a call with little host time.

In a model every layer meets the same plan in every step. After its first run an engine stores, on
the plan, a `CachedCall` that holds the compiled kernels and their arguments, without the addresses
of x and y. All plans of an engine may share a cache, if its calls hold nothing of a plan. Dispatch
finds it for a call of the same kind, which has then passed every check: what the checks depend on
is part of the key, or is compared in `CallCache.find`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch

from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.ordinary import addresses_of, lies_on, requires_gradient
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights, extent_of

MOST_LAYERS = 4096
"""Layers and operations that a cache keeps calls of."""

MOST_KINDS = 16
"""Calls of one layer that differ in strides, dtypes or alignment; beyond, the oldest goes."""


class CachedCall(Protocol):
    """One call of an engine, ready to be repeated with other values of x and y."""

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Add to y, or return False where nothing was written and the method has to run.

        The layer's tensors have the same addresses as when the call was stored; their values, and
        the plan's, may have changed. The engine checks whether its tile sizes still fit.
        """


class _Entry:
    """One stored call, and the properties that another call must share with it."""

    __slots__ = ("addresses", "apart", "call", "key", "kind", "rows", "x_extent", "y_extent")

    def __init__(
        self, key: Any, call: CachedCall, x: torch.Tensor, weights: LoRAWeights, y: torch.Tensor
    ) -> None:
        self.call = call
        self.key, self.kind = key, shared(_kind_of(x, x.data_ptr(), y, y.data_ptr()))
        self.rows = y.numel() // weights.out_features
        self.x_extent, self.y_extent = extent_of(x), extent_of(y)  # bytes, first to last element
        self.addresses = addresses_of(weights)  # to notice that a tensor of the layer has moved
        # addresses of x and y that were last found apart
        self.apart: tuple[int, int] | None = None

    def is_apart(self, weights: LoRAWeights, x_first: int, y_first: int) -> bool:
        """Return whether y overlaps neither x nor the layer; if so, remember the addresses."""
        if not (x_first and y_first):
            return False  # no memory, or no rows
        y_end = y_first + self.y_extent
        if x_first < y_end and y_first < x_first + self.x_extent:
            return False
        if lies_on(self.addresses, weights.extents, y_first, y_end):
            return False
        self.apart = (x_first, y_first)
        return True


def _kind_of(x: torch.Tensor, x_first: int, y: torch.Tensor, y_first: int) -> tuple[Any, ...]:
    """Return all that checks and compiled kernels depend on besides the layer."""
    return (
        x.shape,
        x.is_contiguous() or x.stride(),  # strides take longer to read
        x.dtype,
        x.device,
        y.shape,
        y.is_contiguous() or y.stride(),
        y.dtype,
        y.device,
        (x_first | y_first) & 15 and (x_first & 15 == 0, y_first & 15 == 0),
    )


@lru_cache(maxsize=1024)
def shared(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return one object for equal kinds: layers of one shape find it in the processor's cache."""
    return kind


class CallCache:
    """The cached calls of one plan, or of all plans of an engine."""

    def __init__(self) -> None:
        # stored calls depend on it besides their arguments; an engine sets it when it refills
        self.key: Any = None
        # by operation, backend and layer; a handle stands for one object while the process lives
        self._calls: dict[tuple[str, int, int], tuple[_Entry, ...]] = {}

    def find(
        self,
        operation: str,
        backend: Engine,
        x: torch.Tensor,
        weights: LoRAWeights,
        y: torch.Tensor,
        num_tokens: int,
    ) -> CachedCall | None:
        """Return the call that these arguments repeat, or None; they need not be checked.

        `num_tokens` is the plan's.

        Where one is found, every check would pass. Checks of the layer and of the kind have passed
        before; addresses, lazy negations and gradients may differ from call to call.
        """
        if (
            type(x) is not torch.Tensor
            or type(y) is not torch.Tensor
            or type(weights) is not LoRAWeights
        ):
            return None
        entries = self._calls.get((operation, backend.handle, weights.handle))
        if entries is None:
            return None
        try:
            x_first, y_first = x.data_ptr(), y.data_ptr()
            key, kind = self.key, _kind_of(x, x_first, y, y_first)
        except RuntimeError:  # a sparse tensor has no strides
            return None
        for entry in entries:
            if entry.kind == kind and entry.key == key:
                break
        else:
            return None
        if (
            entry.rows < num_tokens  # a refill may have brought more
            or entry.addresses != addresses_of(weights)
            # an allocator repeats addresses
            or (entry.apart != (x_first, y_first) and not entry.is_apart(weights, x_first, y_first))
            or x.is_neg()
            or y.is_neg()
            or (torch.is_grad_enabled() and requires_gradient(weights, x, y))
        ):
            return None
        return entry.call

    def store(
        self,
        operation: str,
        backend: Engine,
        x: torch.Tensor,
        weights: LoRAWeights,
        y: torch.Tensor,
        call: CachedCall,
    ) -> None:
        """Keep a call for arguments of this kind; a full cache is emptied first.

        Call it from a method of the interface, whose arguments are checked.
        """
        if len(self._calls) >= MOST_LAYERS:
            self._calls.clear()
        stored = _Entry(self.key, call, x, weights, y)
        key = operation, backend.handle, weights.handle
        others = [
            entry
            for entry in self._calls.get(key, ())
            if (entry.key, entry.kind) != (stored.key, stored.kind)
        ]
        # the newest first: `find` takes less time where the next call is like this one
        self._calls[key] = (stored, *others[: MOST_KINDS - 1])

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))


@dataclass(eq=False)
class CachingPlan(LoRAPlan):
    """A plan whose engine stores calls."""

    call_cache: CallCache = field(default_factory=CallCache, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"call_cache": CallCache()}  # addresses die with a copy


_Method = TypeVar("_Method", bound=Callable[..., Any])


def stores_calls(method: _Method) -> _Method:
    """Mark an engine's method that stores calls, so that dispatch looks for them before it runs.

    The mark is the function itself, since `functools.wraps` copies attributes: an override that
    adds to what it inherits is not marked, and always runs.
    """
    method.stores_calls = method  # type: ignore[attr-defined]
    return method


def marked_to_store_calls(method: Callable[..., Any]) -> bool:
    """Return whether a method is marked by `stores_calls`."""
    return getattr(method, "stores_calls", None) is method
