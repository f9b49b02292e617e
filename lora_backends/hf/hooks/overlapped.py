"""A linear layer with its LoRA, as one call of the backend in CUDA graphs of few rows.

There `run_with_base` overlaps the base product with the LoRA. Elsewhere torch computes the base
product, and the backend adds the LoRA to it. A program of `torch.compile` is traced before its
graphs are captured. So it calls one operation for the layer and its LoRA, which chooses between
these ways each time it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from lora_backends.backend import LoRABackend
from lora_backends.common.devices import is_capturing
from lora_backends.dispatch.any_axes import as_rows
from lora_backends.dispatch.handles import lookup
from lora_backends.dispatch.many_adapters import ManyAdaptersPlan
from lora_backends.hf.calls.running import ModelCall
from lora_backends.hf.hooks.linear import adder
from lora_backends.plan import LoRAPlan
from lora_backends.weights import LoRAWeights

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors whose product is torch's: another class may have its own `linear`."""

_COMPILED = "_compiled_beside"
"""Attribute of a plan: the calls whose kernels are compiled, each as the layer's handle, the shape
of x and the number of active slots."""


def multiplies_bases(backend: LoRABackend, rows: int) -> bool:
    """Return whether graphs of this number of rows may leave base products to the backend."""
    engine: Any = backend
    multiplies = engine.cuda_graphs and getattr(engine, "multiplies_bases", False)
    return bool(multiplies and rows <= engine.most_base_rows)


def linear_with_lora(backend: LoRABackend, operation: str) -> Callable[..., torch.Tensor]:
    """Return a function that computes a linear layer and adds its LoRA by an operation.

    It takes the call, whether torch traces it, x [..., in_features], the LoRA's weights, the plan,
    the base weight [out_features, in_features] and its bias or None, and returns y [...,
    out_features].
    """
    add = adder(backend, operation)

    def run(
        call: ModelCall,
        is_traced: bool,
        x: torch.Tensor,
        weights: LoRAWeights,
        plan: Any,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        if not is_traced and call.widened is not None:
            y = call.widened(x, weights, plan, weight, bias)
            if y is not None:
                return y
        multiplies = call.multiplies_bases if is_traced else call.asks_backend
        if not (multiplies and _may_multiply(x, plan, weight, bias)):
            return add(x, weights, plan, functional.linear(x, weight, bias))
        if is_traced:
            handles = backend.handle, weights.handle, plan.handle
            traced: torch.Tensor = _linear(x, weight, bias, operation, *handles)
            return traced
        return _overlapped(
            backend, x, weight, bias, weights, plan,
            lambda: add(x, weights, plan, functional.linear(x, weight, bias)),
        )  # fmt: skip

    return run


def _may_multiply(
    x: torch.Tensor, plan: Any, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Return whether a graph may call `run_with_base` for the layer, and a program `_linear`."""
    return (
        all(tensor is None or type(tensor) in _PLAIN for tensor in (x, weight, bias))
        and weight.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype
        and isinstance(plan, LoRAPlan)
        and not isinstance(plan, ManyAdaptersPlan)
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)  # the product might have another dtype
    )


def _overlapped(
    backend: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weights: LoRAWeights,
    plan: Any,
    in_turn: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Return y by `run_with_base` if a graph captures the call and it takes it, or `in_turn`."""
    if is_capturing(x.device):
        y = backend.run_with_base(as_rows(x), weight, bias, weights, plan)
        return in_turn() if y is None else y.view(*x.shape[:-1], y.shape[-1])
    y = in_turn()
    # Kept on the plan, so that it is freed with it.
    compiled = vars(plan).setdefault(_COMPILED, set())
    key = weights.handle, x.shape, getattr(plan, "active_slots", 0)  # the kernels depend on these
    # a capture cannot compile: the first call outside of one compiles what a graph launches
    if key not in compiled:
        compiled.add(key)
        backend.run_with_base(as_rows(x), weight, bias, weights, plan)
    return y


@torch.library.custom_op(
    "lora_backends::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, str operation, int backend, int weights, "
    "int plan) -> Tensor",
)
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    operation: str,
    backend: int,
    weights: int,
    plan: int,
) -> torch.Tensor:
    engine, layer, batch = lookup(backend), lookup(weights), lookup(plan)

    def in_turn() -> torch.Tensor:
        y = functional.linear(x, weight, bias).contiguous()
        getattr(engine, operation)(as_rows(x), layer, batch, y.view(-1, y.shape[-1]))
        return y

    return _overlapped(engine, x, weight, bias, layer, batch, in_turn)


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
    # not merely an empty tensor of the shape: it refuses devices and sizes as torch does
    return functional.linear(x, weight, bias).contiguous()
