"""The one way into an engine: the steps of a call before the engine's method.

torch traces:  an operation of torch's library
else:          check, then a cached call or the engine's method
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeAlias

import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.cached import CachingPlan, accept, is_accepted, marked_to_store_calls
from lora_backends.dispatch.checks import check_operation, check_prepare_batch
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.experts import wrap_prepare_experts, wrap_routed
from lora_backends.dispatch.gradients.autocast import for_autocast, is_any_autocast, run_outside
from lora_backends.dispatch.gradients.differentiate import record, requires_graph
from lora_backends.dispatch.gradients.recorded import count_refill
from lora_backends.dispatch.library import call_outside, trace_add, trace_shrink
from lora_backends.dispatch.many_adapters import (
    ManyAdaptersPlan,
    add_each,
    prepare_each,
    refuse,
    refuse_output_scales,
)
from lora_backends.dispatch.output import new_output
from lora_backends.dispatch.tracing import is_jit_traced, is_traced, refuse_jit_trace
from lora_backends.errors import LoRABackendError
from lora_backends.features import CAPACITY
from lora_backends.operations import BY_NAME, OPERATIONS, Input, Operation
from lora_backends.weights import LoRAWeights

Method: TypeAlias = Callable[..., torch.Tensor]
_is_compiling = torch.compiler.is_compiling


class Dispatched(Engine):
    """Wraps, once, each method of the interface that a class defines or has from a mixin."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for operation in OPERATIONS:
            # getattr, not __dict__: a mixin that is no backend defines methods too
            method = getattr(cls, operation.name, None)
            if method is not None and _wrapped(method) is None:
                # e.g. the interface's `run_qkv`, which calls `run_linear`
                is_default = Dispatched in cls.__bases__ and operation.same_as is not None
                setattr(cls, operation.name, _wrap(operation, method, is_default))
        for name, wrap in PREPARATIONS.items():
            method = getattr(cls, name, None)
            if method is not None and _wrapped(method) is None:
                call = functools.update_wrapper(wrap(_outside_inference(method)), method)
                call.wrapped = _Wrapper(call, method)  # type: ignore[attr-defined]
                setattr(cls, name, call)
        # an override without `capacity` cannot keep the claim
        if not _takes(cls, "prepare_batch", "capacity"):
            cls.features = cls.features - {CAPACITY}
        cls.storing = frozenset(op.name for op in OPERATIONS if _stores(cls, op))


def _takes(cls: type, method: str, argument: str) -> bool:
    """Return whether a class's method, without its wrapper, takes an argument."""
    wrapper = _wrapped(getattr(cls, method, None))
    return wrapper is not None and argument in inspect.signature(wrapper.method).parameters


class _Wrapper(NamedTuple):
    call: Callable[..., Any]  # the wrapper itself: functools.wraps copies attributes further on
    method: Callable[..., Any]
    stores: bool = False  # whether the method stores calls
    is_default: bool = False  # whether it is the interface's, which calls another operation


def _wrapped(method: Any) -> _Wrapper | None:
    """Return the `_Wrapper` of a wrapper; None for another function."""
    wrapper: _Wrapper | None = getattr(method, "wrapped", None)
    return wrapper if wrapper is not None and wrapper.call is method else None


def unchecked(engine: Engine, name: str) -> Method:
    """Return an operation of an engine without its checks, for a caller that has checked."""
    method: Method = getattr(engine, name)
    wrapper = _wrapped(getattr(method, "__func__", None))
    if wrapper is None:
        return method  # replaced after the class was made
    return MethodType(wrapper.method, engine)


def stored_as(engine: Engine, name: str) -> str | None:
    """Return the operation under which an engine stores calls of another; None: it stores none."""
    wrapper = _wrapped(getattr(getattr(engine, name), "__func__", None))
    if wrapper is None or not (wrapper.stores or name in engine.storing):
        return None
    return _stored_as(BY_NAME[name], wrapper.is_default)


def _stored_as(operation: Operation, is_default: bool) -> str:
    return operation.same_as if is_default and operation.same_as else operation.name


def _wrap(operation: Operation, method: Method, is_default: bool) -> Method:
    """Return the wrapper that takes the place of a class's method for an operation."""
    if operation.input is Input.ROUTED_ROWS:
        call = wrap_routed(operation, method)
    elif operation.result == "h":
        call = _wrap_h(operation, method)
    else:
        call = _wrap_y(operation, method, is_default)
    if operation.argument != "x":
        call = _with_argument(operation, call)
    functools.update_wrapper(call, method)
    call.wrapped = _Wrapper(call, method, marked_to_store_calls(method), is_default)  # type: ignore[attr-defined]
    return call


def _wrap_h(operation: Operation, method: Method) -> Method:
    # asked once per class: a signature takes microseconds
    takes_out = "out" in inspect.signature(method).parameters

    def call(
        self: Engine, x: Any, weights: LoRAWeights, plan: Any, out: Any = None
    ) -> torch.Tensor:
        if is_traced():
            if out is not None:  # a copy of the traced result would convert and broadcast
                return call_outside(call, self, x, weights, plan, out)  # type: ignore[no-any-return]
            return trace_shrink(call, self, x, weights, plan)
        if is_jit_traced() and not self.plain_torch:
            refuse_jit_trace(operation.name, self)
        if isinstance(plan, ManyAdaptersPlan):
            refuse(operation.name, plan)
        if out is None:
            if not is_accepted(self, operation, x, weights, plan):
                x, recorded = _admit(self, operation, x, weights, plan)
                if recorded is not None:
                    return recorded
            if is_any_autocast():
                return run_outside(method, self, x, weights, plan)
            return method(self, x, weights, plan)
        x = for_autocast(operation, x, weights)
        check_operation(self, operation, x, weights, plan, out=out)
        options = {"out": out} if takes_out else {}
        if is_any_autocast():
            h = run_outside(method, self, x, weights, plan, **options)
        else:
            h = method(self, x, weights, plan, **options)
        # an engine that does not take out returns another tensor, which the interface copies
        written: torch.Tensor = h if takes_out else out.copy_(h)
        return written

    return call


def _wrap_y(operation: Operation, method: Method, is_default: bool) -> Method:
    name, slices, stores = operation.name, operation.num_slices, marked_to_store_calls(method)
    stored_name = _stored_as(operation, is_default)

    def call(
        self: Engine, x: Any, weights: LoRAWeights, plan: Any, base_output: Any = None
    ) -> torch.Tensor:
        if _is_compiling() and is_traced():
            return trace_add(operation, call, self, x, weights, plan, base_output)
        if is_jit_traced() and not self.plain_torch:
            refuse_jit_trace(name, self)
        y: torch.Tensor | None = base_output
        caches = isinstance(plan, CachingPlan) and (stores or name in self.storing)
        if not caches and isinstance(plan, ManyAdaptersPlan):
            if y is not None and slices in (None, getattr(weights, "num_slices", None)):
                cached = plan.call_cache.find(stored_name, self, x, weights, y, plan)
                if cached is not None and cached.run(x, weights, plan.joint, y):
                    return y
            return _add_each(operation, call, self, x, weights, plan, y)
        # the values of token ids are checked in every call
        checks_first = (
            not caches
            or operation.input is Input.TOKEN_IDS
            or (y is None and not _has_rows(x, weights, plan))
        )
        if checks_first and not is_accepted(self, operation, x, weights, plan, y):
            x, recorded = _admit(self, operation, x, weights, plan, y)
            if recorded is not None:
                return recorded
        if caches:
            if y is None:
                if requires_graph(self, x, weights):
                    x = for_autocast(operation, x, weights)
                    return record(self, operation, x, weights, plan)
                y = new_output(operation, x, weights, plan)
            # a stored call has passed all checks, so a hit needs none
            cached = plan.call_cache.find(stored_name, self, x, weights, y, plan)
            if cached is not None and (slices is None or slices == weights.num_slices):
                if cached.run(x, weights, plan, y):
                    return y
            if not (checks_first or is_accepted(self, operation, x, weights, plan, base_output)):
                x, recorded = _admit(self, operation, x, weights, plan, base_output)
                if recorded is not None:
                    return recorded
        if is_any_autocast():
            return run_outside(method, self, x, weights, plan, y)
        return method(self, x, weights, plan, y)

    return call


def _has_rows(x: Any, weights: Any, plan: CachingPlan) -> bool:
    """Return whether y may be allocated before the checks: x is a matrix that fits the plan."""
    if type(x) is not torch.Tensor or type(weights) is not LoRAWeights:
        return False
    if x.layout is not torch.strided or x.is_nested or x.ndim != 2:
        return False
    return x.shape[0] <= plan.capacity


def _add_each(
    operation: Operation,
    call: Method,
    engine: Engine,
    first: Any,
    weights: LoRAWeights,
    plan: ManyAdaptersPlan,
    base_output: torch.Tensor | None,
) -> torch.Tensor:
    """Add all adapters of the tokens to y; `call` is the method, which checks its arguments."""
    if operation.input is Input.H:
        refuse(operation.name, plan)
    y = base_output
    first = for_autocast(operation, first, weights)
    # before the first adapter is added: a later refusal would leave y half done
    if not is_accepted(engine, operation, first, weights, plan.plans[0], y):
        check_operation(engine, operation, first, weights, plan.plans[0], y)
        accept(engine, operation, first, weights, y)
    if y is None:
        y = new_output(operation, first, weights, plan)
    name = operation.name
    if plan.joint is not None and not requires_graph(engine, first, weights, y):
        refuse_output_scales(name, weights, plan)
        if stands_for(engine, "add_together", {name, operation.same_as or name}):
            done = engine.add_together(name, first, weights, plan.joint, y)
            if done:
                if done is not True:
                    as_name = operation.same_as or name
                    plan.call_cache.store(as_name, engine, first, weights, y, done)
                return y
    add = partial(_add_one, call, engine, first, weights)
    return add_each(name, add, engine, weights, plan, y)


def _add_one(
    call: Method, engine: Engine, first: Any, weights: LoRAWeights, plan: Any, y: torch.Tensor
) -> torch.Tensor:
    return call(engine, first, weights, plan, y)


def stands_for(engine: Engine, name: str, operations: set[str]) -> bool:
    """Return whether nothing below the class of method `name` overrides one of `operations`."""
    if vars(engine).keys() & operations:
        return False
    classes = type(engine).__mro__
    owner = next(cls for cls in classes if name in vars(cls))
    below = classes[: classes.index(owner)]
    return not any(operation in vars(cls) for cls in below for operation in operations)


def _stores(cls: type, operation: Operation) -> bool:
    """Return whether a method for an operation, or the one its default calls, stores calls."""
    wrapper = _wrapped(getattr(cls, operation.name, None))
    if wrapper is None:
        return False
    # e.g. run_qkv of an engine that stores calls of run_linear
    by_default = wrapper.is_default and operation.same_as is not None
    return wrapper.stores or (by_default and _stores(cls, BY_NAME[operation.same_as or ""]))


def _admit(
    engine: Engine, operation: Operation, x: Any, weights: Any, plan: Any, y: Any = None
) -> tuple[Any, torch.Tensor | None]:
    """Check a call of a kind that is not accepted yet.

    Returns:
        x as the engine takes it, and the result if autograd has recorded the call.
    """
    x = for_autocast(operation, x, weights)
    if requires_graph(engine, x, weights, y):
        return x, record(engine, operation, x, weights, plan, y)
    guard(engine, operation, x, weights, plan, y)
    return x, None


def guard(
    engine: Engine, operation: Operation, first: Any, weights: Any, plan: Any, y: Any = None
) -> None:
    """Explain the problems of a call, or accept its kind from now on."""
    check_operation(engine, operation, first, weights, plan, y)
    accept(engine, operation, first, weights, y)


def runs(engine: Engine, name: str, first: Any, weights: Any, plan: Any, y: Any) -> bool:
    """Return whether an operation would run, for another method that takes its place."""
    operation = BY_NAME[name]
    if is_accepted(engine, operation, first, weights, plan, y):
        return True
    try:
        guard(engine, operation, first, weights, plan, y)
    except LoRABackendError:
        return False
    return True


def _with_argument(operation: Operation, call: Method) -> Method:
    """Return a function that takes the first argument by the name it has in the interface."""

    def renamed(self: Engine, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "x" in kwargs:
            raise TypeError(f"{operation.name}() got an unexpected keyword argument 'x'")
        if operation.argument in kwargs:
            kwargs["x"] = kwargs.pop(operation.argument)
        return call(self, *args, **kwargs)

    return renamed


def _wrap_prepare_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Engine, batch: LoRABatch, out: Any = None, capacity: int | None = None) -> Any:
        if _is_compiling() and is_traced():
            return call_outside(call, self, batch, out, capacity)
        check_prepare_batch(self, batch, out, capacity)
        if out is not None:
            count_refill(out)
        is_many = batch.token_slots.ndim > 1 or type(out) is ManyAdaptersPlan
        if capacity is None and not is_many:
            return method(self, batch, out=out)
        # a refill keeps the capacity; a backend without that feature does not know the argument
        options = {} if capacity is None or out is not None else {"capacity": capacity}
        if is_many:
            return prepare_each(self, MethodType(method, self), batch, out, **options)
        return method(self, batch, out=out, **options)

    return call


def _outside_inference(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return a preparation whose tensors can be refilled in inference mode and outside of it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return prepare(*args, **kwargs)
        # leaving inference mode turns gradients on
        with torch.inference_mode(False), torch.no_grad():
            return prepare(*args, **kwargs)

    return call


PREPARATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "prepare_batch": _wrap_prepare_batch,
    "prepare_experts": wrap_prepare_experts,
}
"""Methods of the interface that make plans and routings, and the function that wraps each."""
