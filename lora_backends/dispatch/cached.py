"""Calls that were made before: recognised, so that they skip the guards or the engine's method.

The guards' verdict on a call depends on its kind, on the layer and on the engine, and on what may
differ from call to call: rows, addresses, lazy negations, gradients. A kind that has passed is kept
with the layer's footprint, and `is_accepted` compares it and looks at the rest.

An engine also stores, on the plan, a `CachedCall` that holds the compiled kernels and their
arguments, without the addresses of x and y. All plans of an engine may share a cache, if its calls
hold nothing of a plan. Calls of experts are kept in the engine's `RoutedCalls`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import forward_ad

from lora_backends.common.tensors import extent_of, of_left_inference_mode
from lora_backends.dispatch.engine import Engine
from lora_backends.experts import ExpertRouting
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import Input, Operation
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights

MOST_LAYERS = 4096
"""Layers and operations that a cache keeps calls of."""

MOST_KINDS = 16
"""Calls of one layer that differ in strides, dtypes or alignment; beyond, the oldest goes."""

_Tensor = torch.Tensor
_is_grad_enabled = torch.is_grad_enabled


def is_accepted(
    engine: Engine,
    operation: Operation,
    x: Any,
    weights: Any,
    plan: Any,
    y: Any = None,
    rows: tuple[int, int] | None = None,  # of x and y; None: any that the plan allows
    detail: Any = None,  # what else the guards depend on
) -> bool:
    """Return True only where the guards would find no problem; nothing is explained."""
    # no argument is checked yet
    if (
        type(x) is not _Tensor
        or not (y is None or type(y) is _Tensor)
        or not isinstance(weights, LayerWeights)
        or not isinstance(plan, LoRAPlan)
        or not isinstance(plan, engine.plan_type)
        or plan.num_slots != weights.num_slots
        or forward_ad._current_level >= 0  # the guards look for tangents
    ):
        return False
    if operation.input is Input.TOKEN_IDS and x.is_cpu:
        return False  # the guards read their values
    footprint = weights.footprint
    # with the footprint, so that moved tensors are checked again
    kinds = footprint.accepted.get((operation.name, engine.handle))
    if kinds is None:
        return False
    try:
        if _accepted_kind(operation, x, y, detail) not in kinds:
            return False
        x_rows = x.shape[1 if operation.input is Input.H else 0]
        x_wanted, y_wanted = (x_rows, x_rows) if rows is None else rows
        x_first, y_first = x.data_ptr(), 0 if y is None else y.data_ptr()
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        return False
    if (
        x_rows != x_wanted
        or not plan.num_tokens <= y_wanted <= plan.capacity
        or not x_first  # no memory, or no rows
        or x.is_neg()
    ):
        return False
    if y is not None:
        if y.shape[0] != y_wanted or not y_first or y.is_neg():
            return False
        if engine.plain_torch and of_left_inference_mode(y):
            return False  # torch's operators do not write to it
        y_end = y_first + (y.nbytes if y.is_contiguous() else extent_of(y))
        x_end = x_first + (x.nbytes if x.is_contiguous() else extent_of(x))
        # conservative: interleaved columns go to the guards, which look closer
        if (x_first < y_end and y_first < x_end) or footprint.meets(y_first, y_end):
            return False
    # a call that autograd records is checked as it runs, without a graph
    return not _is_grad_enabled() or not (
        (y is not None and y.requires_grad) or weights.requires_gradient(x)
    )


def accept(
    engine: Engine,
    operation: Operation,
    x: Any,
    weights: Any,
    y: Any = None,
    detail: Any = None,
) -> None:
    """Remember the kind of a call that has just passed the guards; arguments as `is_accepted`."""
    if type(x) is _Tensor and (y is None or type(y) is _Tensor):
        accepted, key = weights.footprint.accepted, (operation.name, engine.handle)
        kind = _accepted_kind(operation, x, y, detail)
        # a bound: entries of engines that no longer exist would stay
        if len(accepted) >= MOST_LAYERS:
            accepted.clear()
        others = [other for other in accepted.get(key, ()) if other != kind]
        accepted[key] = [kind, *others[: MOST_KINDS - 1]]  # the newest is compared first


def _accepted_kind(operation: Operation, x: _Tensor, y: _Tensor | None, detail: Any) -> Any:
    """Return all that the guards depend on besides engine, layer, plan, rows and addresses."""
    shape = x.shape
    return (
        (*shape[:1], *shape[2:]) if operation.input is Input.H else shape[1:],
        len(shape),
        x.is_contiguous() or x.stride(),  # strides take longer to read
        x.dtype,
        x.device,
        detail,
        y is not None
        and (
            y.shape[1:],
            # whether rows of more axes overlap depends on all sizes
            y.is_contiguous() or (y.stride(), y.ndim > 2 and y.shape),
            y.dtype,
            y.device,
        ),
    )


class CachedCall(Protocol):
    """One call of an engine, ready to be repeated with other values of x and y.

    With ``any_rows = True`` a call serves every number of rows that rounds up to the same power of
    two.
    """

    def run(self, x: _Tensor, weights: LoRAWeights, plan: Any, y: _Tensor) -> bool:
        """Add to y, or return False where nothing was written and the method has to run.

        The layer's tensors have the same addresses as when the call was stored; their values, and
        the plan's, may have changed. The engine checks whether its tile sizes still fit.
        """


class _Stored:
    """One stored call, and the kind that another call must share with it."""

    __slots__ = ("apart", "call", "footprint", "kind")

    def __init__(self, kind: Any, call: CachedCall, weights: LayerWeights) -> None:
        self.kind, self.call = shared(kind), call
        self.footprint = weights.footprint  # to notice that a tensor of the layer has moved
        # addresses and lengths of x and y that were last found apart
        self.apart: Any = None

    def is_apart(self, x: _Tensor, x_first: int, y: _Tensor, y_first: int, found: Any) -> bool:
        """Return whether y overlaps neither x nor the layer; if so, keep `found` as `apart`."""
        if not (x_first and y_first):
            return False  # no memory, or no rows
        y_end = y_first + extent_of(y)
        if x_first < y_end and y_first < x_first + extent_of(x):
            return False
        if self.footprint.meets(y_first, y_end):
            return False
        self.apart = found
        return True


class _StoredCall(_Stored):
    """One stored call of a dense layer, and the properties that another must share with it."""

    __slots__ = ("any_rows", "key", "lengths", "rows")

    def __init__(
        self, key: Any, call: CachedCall, x: _Tensor, weights: LayerWeights, y: _Tensor
    ) -> None:
        super().__init__(_kind_of(x, x.data_ptr(), y, y.data_ptr()), call, weights)
        self.key, self.lengths = key, (x.shape[0], y.shape[0])
        self.rows = y.numel() // weights.out_features
        self.any_rows = getattr(call, "any_rows", False) and _has_rows(x) and _has_rows(y)

    def takes(self, lengths: tuple[int, int], plan: LoRAPlan) -> bool:
        """Return whether the call serves x and y whose first axes have these lengths."""
        if lengths == self.lengths:
            return self.rows >= plan.num_tokens  # a refill may have brought more tokens
        rows = lengths[1]
        same = self.any_rows and lengths[0] == rows
        return same and plan.num_tokens <= rows <= plan.capacity

    def replaces(self, other: _StoredCall) -> bool:
        """Return whether this call serves every call that `other` serves."""
        same = self.key == other.key and self.kind == other.kind
        return same and (self.any_rows or self.lengths == other.lengths)


def _has_rows(tensor: _Tensor) -> bool:
    """Return whether all tensors of the same kind have the same strides, whatever their rows."""
    if tensor.ndim == 1:
        return tensor.is_contiguous()
    # a contiguous tensor of one row may have any stride between rows
    return tensor.ndim == 2 and (not tensor.is_contiguous() or tensor.stride(0) == tensor.shape[1])


def _kind_of(x: _Tensor, x_first: int, y: _Tensor, y_first: int) -> tuple[Any, ...]:
    """Return all that checks and compiled kernels depend on besides the layer and the rows."""
    x_length, *x_row = x.shape
    y_length, *y_row = y.shape
    return (
        tuple(x_row),
        x.is_contiguous() or x.stride(),
        x.dtype,
        x.device,
        (y_length - 1).bit_length(),  # plans choose tile sizes by this power of two
        tuple(y_row),
        y.is_contiguous() or y.stride(),
        y.dtype,
        y.device,
        # Triton compiles other code for addresses that are multiples of 16
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
        # by operation, backend and layer; a handle means one object while the process lives
        self._calls: dict[tuple[str, int, int], tuple[_StoredCall, ...]] = {}

    def find(
        self,
        operation: str,
        backend: Engine,
        x: _Tensor,
        weights: LoRAWeights,
        y: _Tensor,
        plan: LoRAPlan,
    ) -> CachedCall | None:
        """Return the call that these arguments repeat, or None; they need not be checked.

        Where one is found, every check would pass. Several plans may share the cache: `plan` is the
        call's.
        """
        if (
            type(x) is not _Tensor
            or type(y) is not _Tensor
            or not isinstance(weights, LayerWeights)
            or forward_ad._current_level >= 0
        ):
            return None
        entries = self._calls.get((operation, backend.handle, weights.handle))
        if entries is None:
            return None
        try:
            x_first, y_first = x.data_ptr(), y.data_ptr()
            key, kind = self.key, _kind_of(x, x_first, y, y_first)
            lengths = x.shape[0], y.shape[0]
        except (RuntimeError, ValueError):  # a sparse tensor has no strides, a scalar no rows
            return None
        for entry in entries:
            if entry.kind == kind and entry.key == key and entry.takes(lengths, plan):
                break
        else:
            return None
        found = x_first, y_first, lengths
        if (
            # the layer and the kind passed the checks when the call was stored; these may differ
            entry.footprint is not weights.footprint
            # an allocator repeats addresses
            or (entry.apart != found and not entry.is_apart(x, x_first, y, y_first, found))
            or x.is_neg()
            or y.is_neg()
            or (_is_grad_enabled() and weights.requires_gradient(x, y))
        ):
            return None
        return entry.call

    def store(
        self,
        operation: str,
        backend: Engine,
        x: _Tensor,
        weights: LoRAWeights,
        y: _Tensor,
        call: CachedCall,
    ) -> None:
        """Keep a call, whose arguments are checked, for arguments of this kind."""
        # entries of freed layers are never looked up again
        if len(self._calls) >= MOST_LAYERS:
            self._calls.clear()
        stored = _StoredCall(self.key, call, x, weights, y)
        key = operation, backend.handle, weights.handle
        others = self._calls.get(key, ())
        if others:
            others = tuple([entry for entry in others if not stored.replaces(entry)])
        # the newest first: `find` takes less time where the next call is like this one
        self._calls[key] = (stored, *others[: MOST_KINDS - 1])

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))


class RoutedCalls:
    """The cached calls of experts of one engine; they hold nothing of a plan or of a routing."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[_Stored, ...]] = {}  # by the handle of the weights

    def __reduce__(self) -> Any:
        return RoutedCalls, ()  # addresses die with a copy

    def find(
        self, engine: Engine, x: Any, weights: Any, routing: Any, y: Any, options: tuple[Any, ...]
    ) -> CachedCall | None:
        """Return the call that these arguments repeat, or None; they need not be checked.

        Where one is found, every check would pass. `options` are the values of the operation's
        options, `rows` first.
        """
        if (
            type(x) is not _Tensor
            or type(y) is not _Tensor
            or not isinstance(weights, LayerWeights)
            or not isinstance(routing, ExpertRouting)
            or type(routing) is not engine.routing_type
            or not isinstance(routing.plan, engine.plan_type)
            or forward_ad._current_level >= 0
        ):
            return None
        entries = self._calls.get(weights.handle)
        if entries is None:
            return None
        plan: Any = routing.plan
        try:
            x_first, y_first = x.data_ptr(), y.data_ptr()
            kind = _routed_kind(x, x_first, y, y_first, routing, options)
            lengths = x.shape[0], y.shape[0]
            tokens, top_k = routing.topk_ids.shape
        except (RuntimeError, IndexError):  # a sparse tensor has no strides, a scalar no rows
            return None
        for entry in entries:
            if entry.kind == kind:
                break
        else:
            return None
        found = x_first, y_first, lengths
        if (
            # the layer and the kind passed the checks when the call was stored; these may differ
            lengths != (tokens * top_k if options[0] == "pairs" else tokens, tokens)
            or not plan.num_tokens <= tokens <= plan.capacity
            or entry.footprint is not weights.footprint
            # an allocator repeats addresses
            or (entry.apart != found and not entry.is_apart(x, x_first, y, y_first, found))
            or x.is_neg()
            or y.is_neg()
            or (
                _is_grad_enabled()
                and (
                    weights.requires_gradient(x, y, routing.topk_weights)
                    or routing.differentiable_weights is not None
                )
            )
        ):
            return None
        return entry.call

    def keep(
        self,
        x: _Tensor,
        weights: LayerWeights,
        routing: Any,
        y: _Tensor,
        options: tuple[Any, ...],
        made: Any,
        new: Callable[[], CachedCall],
    ) -> None:
        """Keep the launches `made` by a call, whose arguments are checked, for calls of its kind.

        If a call of this kind is stored, its `add` takes them; otherwise `new()` is stored.
        """
        if not (_is_regular(x) and _is_regular(y)):
            return  # another call of the kind may have other strides
        kind = _routed_kind(x, x.data_ptr(), y, y.data_ptr(), routing, options)
        others = []
        for entry in self._calls.get(weights.handle, ()):
            if entry.kind != kind:
                others.append(entry)
            elif entry.footprint is weights.footprint:
                call: Any = entry.call
                call.add(made)
                return
        if len(self._calls) >= MOST_LAYERS:  # as in `CallCache`
            self._calls.clear()
        stored = _Stored(kind, new(), weights)
        self._calls[weights.handle] = (stored, *others[: MOST_KINDS - 1])

    def __len__(self) -> int:
        return sum(map(len, self._calls.values()))


def _routed_kind(
    x: _Tensor, x_first: int, y: _Tensor, y_first: int, routing: Any, options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return all that checks and the choice of kernels depend on besides layer, tokens and tiles.

    The engine chooses tile sizes when the call runs.
    """
    plan = routing.plan
    return (
        x.shape[1:],
        x.is_contiguous() or x.stride(),
        x.dtype,
        x.device,
        y.shape[1:],
        # whether rows of more axes overlap depends on all sizes
        y.is_contiguous() or (y.stride(), y.shape),
        y.dtype,
        y.device,
        # Triton compiles other code for addresses that are multiples of 16
        (x_first | y_first) & 15 and (x_first & 15 == 0, y_first & 15 == 0),
        routing.num_experts,
        routing.topk_ids.shape[1],
        plan.num_slots,
        plan.token_scales is None,
        options,
    )


def _is_regular(tensor: _Tensor) -> bool:
    """Return whether a tensor's routed kind determines its strides.

    It may not for a contiguous tensor: an axis of length 1 can have any stride.
    """
    steps = [math.prod(tensor.shape[axis + 1 :]) for axis in range(tensor.ndim)]
    return not tensor.is_contiguous() or list(tensor.stride()) == steps


@dataclass(eq=False)
class CachingPlan(LoRAPlan):
    """A plan whose engine stores calls."""

    call_cache: CallCache = field(default_factory=CallCache, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"call_cache": CallCache()}  # addresses die with a copy


_Method = TypeVar("_Method", bound=Callable[..., Any])


def stores_calls(method: _Method) -> _Method:
    """Mark an engine's method that stores calls, so that dispatch looks for them before it runs."""
    # The mark is the function itself, since `functools.wraps` copies attributes: an override that
    # adds to an inherited one is not marked, and always runs.
    method.stores_calls = method  # type: ignore[attr-defined]
    return method


def marked_to_store_calls(method: Callable[..., Any]) -> bool:
    """Return whether a method is marked by `stores_calls`."""
    return getattr(method, "stores_calls", None) is method
