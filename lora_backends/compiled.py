"""The interface under `torch.compile`: calls of every backend as operations of torch's library.

While torch traces, a call of a backend becomes one operation of the library ``lora_backends``,
whatever the backend, so tracing meets neither kernels nor plans. An operation is given the handles
of backend, weights and plan instead of their tensors:

- Weights are read where they lie. A captured CUDA graph does not copy them and sees a slot that
  is rewritten in place.
- A plan is refilled in place, ``prepare_batch(batch, out=plan)``, as under a CUDA graph.

An operation runs the public method, which checks its arguments. Calls that need a gradient, or
whose plan is no `LoRAPlan`, run outside of the traced program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lora_backends.handles import Handled, lookup
from lora_backends.weights import LoRAWeights

if TYPE_CHECKING:
    from lora_backends.backend import LoRABackend


def _shrink(
    x: torch.Tensor, num_slices: int, max_rank: int, backend: int, weights: int, plan: int
) -> torch.Tensor:
    h: torch.Tensor = lookup(backend).run_lora_a(x, lookup(weights), lookup(plan))
    return h


def _shrink_fake(
    x: torch.Tensor, num_slices: int, max_rank: int, backend: int, weights: int, plan: int
) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((num_slices, x.shape[0], max_rank), dtype=dtype)


def _add(
    operation: str, x: torch.Tensor, y: torch.Tensor, backend: int, weights: int, plan: int
) -> None:
    getattr(lookup(backend), operation)(x, lookup(weights), lookup(plan), y)


def _add_fake(
    operation: str, x: torch.Tensor, y: torch.Tensor, backend: int, weights: int, plan: int
) -> None:
    return None


def _register(suffix: str, tags: tuple[torch.Tag, ...]) -> tuple[Any, Any]:
    shrink = torch.library.custom_op(
        f"lora_backends::run_lora_a{suffix}", _shrink, mutates_args=(), tags=tags
    )
    shrink.register_fake(_shrink_fake)
    add = torch.library.custom_op(
        f"lora_backends::add_lora{suffix}_", _add, mutates_args=("y",), tags=tags
    )
    add.register_fake(_add_fake)
    return shrink, add


_CAPTURED = _register("", ())
_UNCAPTURED = _register("_uncaptured", (torch.Tag.cudagraph_unsafe,))
"""For backends that a CUDA graph must not capture."""


def traced(operation: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a call of `operation` is while torch traces.

    Args:
        operation: a method of the interface.
        method: the method, arguments checked.

    Returns:
        A function of the same arguments.
    """

    def outside(*args: Any, **kwargs: Any) -> Any:
        from lora_backends.untraced import call  # brings torch's compiler, which is there by now

        return call(method, *args, **kwargs)

    if operation == "prepare_batch":
        return outside
    body = _shrink_call if operation == "run_lora_a" else _add_call
    first = FIRST_ARGUMENT.get(operation, "x")

    def operate(self: LoRABackend, *args: Any, **kwargs: Any) -> torch.Tensor:
        if first in kwargs:
            kwargs["x"] = kwargs.pop(first)
        return body(operation, outside, self, *args, **kwargs)

    return operate


FIRST_ARGUMENT = {"run_lora_b": "h", "run_embedding": "token_ids", "run_logits": "hidden"}
"""What methods call the argument that others call x."""


def _shrink_call(
    operation: str,
    outside: Callable[..., torch.Tensor],
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
) -> torch.Tensor:
    if _needs_python(x, weights, plan, None):
        return outside(backend, x, weights, plan)
    run, _ = _CAPTURED if backend.cuda_graphs else _UNCAPTURED
    sizes = weights.num_slices, weights.max_rank
    h: torch.Tensor = run(x, *sizes, backend.handle, weights.handle, plan.handle)
    return h


def _add_call(
    operation: str,
    outside: Callable[..., torch.Tensor],
    backend: LoRABackend,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    base_output: torch.Tensor | None = None,
) -> torch.Tensor:
    if _needs_python(x, weights, plan, base_output):
        return outside(backend, x, weights, plan, base_output)
    _, run = _CAPTURED if backend.cuda_graphs else _UNCAPTURED
    y = base_output
    if y is None:
        tokens = x.shape[1] if operation == "run_lora_b" else x.shape[0]
        y = x.new_zeros((tokens, sum(weights.output_slices)), dtype=weights.dtype)
    run(operation, x, y, backend.handle, weights.handle, plan.handle)
    return y


def _needs_python(
    x: torch.Tensor, weights: LoRAWeights, plan: Any, base_output: torch.Tensor | None
) -> bool:
    """Return whether a call cannot be an operation: a foreign plan, or a gradient is wanted."""
    if not isinstance(plan, Handled):
        return True
    if not torch.is_grad_enabled():  # asked first: looking at weights makes them guarded inputs
        return False
    tensors = (x, weights.lora_a, weights.lora_b, weights.bias, base_output)
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
