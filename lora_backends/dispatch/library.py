"""The interface under `torch.compile`: operations of torch's library.

While torch traces, a call of any backend becomes one operation of the library ``lora_backends``,
so tracing meets neither kernels nor plans. Such an operation is given the handles of backend,
weights and plan instead of their tensors:

- Weights are read where they lie. A captured CUDA graph does not copy them and sees a slot that
  is rewritten in place.
- A plan is refilled in place, ``prepare_batch(batch, out=plan)``, as under a CUDA graph.

An operation runs the public method, which checks its arguments. A call of a dense layer that needs
a gradient becomes an operation of `gradients.traced`. Calls whose plan is no `LoRAPlan` run
outside of the traced program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.gradients.autocast import for_autocast
from lora_backends.dispatch.gradients.traced import trace_recorded
from lora_backends.dispatch.handles import Handled, lookup
from lora_backends.dispatch.output import new_output
from lora_backends.dtypes import accumulator_dtype
from lora_backends.eight_bit import is_eight_bit
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import BY_NAME, NO_OPTIONS, Operation
from lora_backends.weights import LoRAWeights


def _shrink(
    x: Tensor, num_slices: int, max_rank: int, backend: int, weights: int, plan: int
) -> Tensor:
    h: Tensor = lookup(backend).run_lora_a(x, lookup(weights), lookup(plan))
    return h


def _shrink_fake(x: Tensor, num_slices: int, max_rank: int, *_: int) -> Tensor:
    return x.new_empty((num_slices, x.shape[0], max_rank), dtype=accumulator_dtype(x.dtype))


def _add(
    operation: str, x: Tensor, y: Tensor, backend: int, weights: int, plan: int, options: list[int]
) -> None:
    # a schema of torch's library has no place for arbitrary keywords
    pairs = zip(BY_NAME[operation].options, options, strict=True)
    keywords = {option.name: option.values[index] for option, index in pairs}
    getattr(lookup(backend), operation)(x, lookup(weights), lookup(plan), y, **keywords)


def _register(suffix: str, tags: tuple[torch.Tag, ...]) -> tuple[Any, Any]:
    shrink = torch.library.custom_op(
        f"lora_backends::run_lora_a{suffix}", _shrink, mutates_args=(), tags=tags
    )
    shrink.register_fake(_shrink_fake)
    add = torch.library.custom_op(
        f"lora_backends::add_lora{suffix}_", _add, mutates_args=("y",), tags=tags
    )
    add.register_fake(lambda *_: None)  # y is its only result
    return shrink, add


_CAPTURED = _register("", ())
_UNCAPTURED = _register("_uncaptured", (torch.Tag.cudagraph_unsafe,))
"""For backends that a CUDA graph must not capture."""


def call_outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, called outside of the program that torch traces."""
    from lora_backends.dispatch.outside_graph import call  # torch's compiler is there by now

    return call(function, *args, **kwargs)


def trace_shrink(
    call: Callable[..., Tensor], engine: Engine, x: Tensor, weights: LoRAWeights, plan: Any
) -> Tensor:
    """Return h of a traced call of `run_lora_a`; `call` is the method, which checks."""
    needs_gradient = _needs_gradient(x, weights, None)
    if not isinstance(plan, Handled) or (needs_gradient and not _can_record(engine, weights)):
        return call_outside(call, engine, x, weights, plan)  # type: ignore[no-any-return]
    x = for_autocast(BY_NAME["run_lora_a"], x, weights)
    if needs_gradient:
        return trace_recorded(BY_NAME["run_lora_a"], engine, x, weights, plan)
    # torch.compile may put captured operations into a CUDA graph of its own
    run, _ = _CAPTURED if engine.cuda_graphs else _UNCAPTURED
    sizes = weights.num_slices, weights.max_rank
    h: Tensor = run(x, *sizes, engine.handle, weights.handle, plan.handle)
    return h


def trace_add(
    operation: Operation,
    call: Callable[..., Tensor],  # the method, which checks
    engine: Engine,
    x: Tensor,
    weights: LayerWeights,
    plan: Any,
    base_output: Tensor | None,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> Tensor:
    """Return y of a traced call of `operation`."""
    needs_gradient = _needs_gradient(x, weights, base_output)
    if not isinstance(plan, Handled) or (
        needs_gradient and not (operation.is_dense and _can_record(engine, weights))
    ):
        return call_outside(call, engine, x, weights, plan, base_output, **options)  # type: ignore[no-any-return]
    x = for_autocast(operation, x, weights)
    if needs_gradient:
        return trace_recorded(operation, engine, x, weights, plan, base_output)  # type: ignore[arg-type]
    _, run = _CAPTURED if engine.cuda_graphs else _UNCAPTURED
    y = base_output
    if y is None:
        # traced with the program, so that its allocator plans this memory too
        y = new_output(operation, x, weights, plan, options)
    # options reach torch's library as the places of their values in the operation's lists
    places = [option.values.index(options[option.name]) for option in operation.options]
    run(operation.name, x, y, engine.handle, weights.handle, plan.handle, places)
    return y


def _can_record(engine: Engine, weights: LayerWeights) -> bool:
    """Return whether all gradients can be computed; else the call itself refuses, by name."""
    if not is_eight_bit(weights.dtype):
        return engine.differentiable
    return engine.differentiable and not weights.requires_gradient()


def _needs_gradient(x: Tensor, weights: LayerWeights, base_output: Tensor | None) -> bool:
    """Return whether a traced call has to be part of autograd's graph."""
    if not torch.is_grad_enabled():  # asked first: looking at weights makes them guarded inputs
        return False
    tensors = (x, *weights.tensors.values(), base_output)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
