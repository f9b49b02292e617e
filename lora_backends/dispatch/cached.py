"""Cached calls: what an engine keeps on a plan to repeat a call with little host time.

In a model every layer meets the same plan in every step. An engine that launches kernels stores,
after its first run, a `CachedCall` that holds the compiled kernels and all of their arguments but
the addresses of x and y. Dispatch finds it for a call of the same kind, which has then passed
every check: what the checks depend on is part of the key, or is compared in `CallCache.find`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.ordinary import addresses_of, lies_on, requires_gradient
from lora_backends.operations import Input, Operation
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights, extent_of

MOST_CALLS = 4096
"""Calls that a plan keeps: one per layer and kind of x and y."""


class CachedCall(Protocol):
    """One call of an engine, ready to be repeated with other values of x and y."""

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Add to y, or return False where nothing was written and the method has to run.

        The layer's tensors lie where they lay when the call was stored; their values, and the
        plan's, may have changed. It is the engine that knows whether its tile sizes have.
        """


class _Entry(NamedTuple):
    call: CachedCall
    x_extent: int  # bytes from the first to behind the last element of x
    y_extent: int
    addresses: tuple[int, ...]  # of the layer's tensors, to notice that one has moved


class CallCache:
    """The cached calls of one plan."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], _Entry] = {}

    def find(
        self,
        operation: str,
        backend: Engine,
        x: torch.Tensor,
        weights: LoRAWeights,
        y: torch.Tensor,
    ) -> CachedCall | None:
        """Return the call that these arguments repeat, or None; they need not be checked.

        Where one is found, every check would pass. Those that depend on the key alone have passed
        before; addresses, lazy negations and gradients differ from call to call.
        """
        if (
            type(x) is not torch.Tensor
            or type(y) is not torch.Tensor
            or type(weights) is not LoRAWeights
        ):
            return None
        try:
            x_first, y_first = x.data_ptr(), y.data_ptr()
            entry = self._calls.get(_key_of(operation, backend, x, x_first, weights, y, y_first))
        except RuntimeError:  # a sparse tensor has no strides
            return None
        if entry is None or x.is_neg() or y.is_neg():
            return None
        call, x_extent, y_extent, addresses = entry
        y_end = y_first + y_extent
        if (
            addresses != addresses_of(weights)
            or (x_first < y_end and y_first < x_first + x_extent)
            or lies_on(addresses, weights.extents, y_first, y_end)
        ):
            return None
        if torch.is_grad_enabled() and requires_gradient(weights, x, y):
            return None
        return call

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

        To be called from a method of the interface, whose arguments are checked.
        """
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        key = _key_of(operation, backend, x, x.data_ptr(), weights, y, y.data_ptr())
        self._calls[key] = _Entry(call, extent_of(x), extent_of(y), addresses_of(weights))

    def __len__(self) -> int:
        return len(self._calls)


def _key_of(
    operation: str,
    backend: Engine,
    x: torch.Tensor,
    x_first: int,
    weights: LoRAWeights,
    y: torch.Tensor,
    y_first: int,
) -> tuple[Any, ...]:
    """Return what the checks, compiled kernels and their fixed arguments depend on.

    A handle stands for one object as long as the process lives.
    """
    return (
        operation,
        backend.handle,
        weights.handle,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x_first & 15 == 0,
        y.shape,
        y.stride(),
        y.dtype,
        y.device,
        y_first & 15 == 0,
    )


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


def new_output(operation: Operation, first: torch.Tensor, weights: LoRAWeights) -> torch.Tensor:
    """Return the zeros that a call without base_output adds to.

    They have the dtype of x where there is one, else the dtype of lora_b.
    """
    tokens = first.shape[1] if operation.input is Input.H else first.shape[0]
    dtype = first.dtype if operation.input is Input.ROWS else weights.dtype
    return first.new_zeros((tokens, weights.out_features), dtype=dtype)
