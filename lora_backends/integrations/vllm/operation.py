"""Runs a layer of vLLM, in compiled programs as one operation.

The operation takes the first stack of a layer in the layer's place. It is an input that vLLM's
compiler treats like any weight, so equal layers share one compiled program, and a program that is
loaded from disk finds the layers of its own process.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.integrations.vllm.layers import Layer, find
from lora_backends.integrations.vllm.plans import Plans
from lora_backends.sgmv.launching.streams import is_capturing

NAMESPACE = "lora_backends_vllm"

LINEAR = "linear"  # y += LoRA of x, for the batch's tokens
LOGITS = "logits"  # the same for the rows that are sampled
PROMPT = "prompt"  # the same for rows whose adapters vLLM does not announce, as of a prompt
SHRINK = "shrink"  # y = h of x
EXPAND = "expand"  # y[:, offset:] += LoRA of h, which is x
EMBEDDING = "embedding"  # the same for an embedding, which a drafter may share
FULL = "full"  # y = x times a whole matrix of the adapter, for the rows that are sampled


def run(
    y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, operation: str, offset: int = 0
) -> None:
    """Run a layer's operation on y, in place.

    Args:
        y: [rows, columns], or h [num_slices, rows, rank] of a shrink.
        x: [rows, in_features], or h of an expand.
        stack: the first A or B of the layer.
        operation: one of the names above.
        offset: the first column of y that an expand adds to.
    """
    if torch.compiler.is_compiling():
        torch.ops.lora_backends_vllm.run(y, x, stack, operation, offset)
    else:
        _run(y, x, stack, operation, offset)


def _run(
    y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, operation: str, offset: int
) -> None:
    layer = find(stack)
    wrapper = layer.wrapper
    plans = wrapper.sampled if operation in (LOGITS, FULL) else wrapper.tokens
    plans = wrapper.prompt if operation == PROMPT else plans
    if operation == EMBEDDING and x.shape[1] < plans.num_rows:
        return  # a drafter's own rows, which have no adapter; the model verifies what it drafts
    if operation in (SHRINK, FULL):
        _shrink(layer, y, x, plans)
    elif not plans.is_idle:
        _add(layer, y, x, plans, operation, offset)


def _shrink(layer: Layer, y: torch.Tensor, x: torch.Tensor, plans: Plans) -> None:
    if layer.a is None:
        raise InvalidInputError("vLLM shrinks with a layer that has no lora_a_stacked")
    if plans.is_idle:
        y.zero_()
    else:
        plans.backend.run_lora_a(x, layer.a, plans.of(x.shape[0]), out=y)


def _add(
    layer: Layer, y: torch.Tensor, x: torch.Tensor, plans: Plans, operation: str, offset: int
) -> None:
    if layer.b is None:
        raise InvalidInputError("vLLM expands with a layer that has no lora_b_stacked")
    part = y[:, offset : offset + layer.b.out_features]  # logits may be padded to a wider table
    backend = plans.backend
    if operation in (EXPAND, EMBEDDING):
        backend.run_lora_b(x, layer.b, plans.of(x.shape[1]), part)
    elif operation in (LOGITS, PROMPT):
        backend.run_logits(x, layer.b, plans.of(x.shape[0]), part)
    else:
        backend.run_linear(x, layer.b, plans.of(x.shape[0]), part)


def overlap(module: Any) -> None:
    """Start a layer's shrink before its base product, and finish its LoRA behind that.

    vLLM calls LoRA when the base product has been launched. The method is private; a layer without
    it, or of one half, runs one after the other. With vLLM's own second stream it is not called.
    """
    layer: Layer = module.lora_backends_layers[0]
    if layer.a is not layer.b or not hasattr(module, "_apply_sync"):
        return
    if _owner(module, "_apply_sync") is not _owner(module, "_apply_lora_to_output"):
        return  # it adds LoRA in a way of its own, as to the rows of requests
    stack = module.lora_a_stacked[0]

    def apply_overlapped(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.flatten(0, 1) if x.ndim == 3 else x  # as Transformers' models pass them
        token = start(rows, stack)
        y: torch.Tensor = module._get_quant_method().apply(module.base_layer, x, bias)
        finish(y.view(-1, y.shape[-1]), rows, stack, token)
        return y

    module._apply_sync = apply_overlapped


def _owner(module: Any, name: str) -> type | None:
    """Return the class that defines a method of a module."""
    return next((cls for cls in type(module).__mro__ if name in vars(cls)), None)


def start(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    """Start a linear layer's shrink on a second stream, where that gains time.

    Returns:
        An empty tensor to hand to `finish`, so that a compiler keeps the order.
    """
    if torch.compiler.is_compiling():
        token: torch.Tensor = torch.ops.lora_backends_vllm.start(x, stack)
        return token
    return _start(x, stack)


def finish(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, token: torch.Tensor) -> None:
    """Add a linear layer's LoRA to y, in place; x is as in `start`, and lives until here."""
    if torch.compiler.is_compiling():
        torch.ops.lora_backends_vllm.finish(y, x, stack, token)
    else:
        _finish(y, x, stack, token)


def _start(x: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    layer = find(stack)
    plans = layer.wrapper.tokens
    layer.started = None
    if not plans.is_idle and plans.overlaps(x.shape[0]):
        plan = plans.of(x.shape[0])
        layer.started = plans.backend.start_linear(x, layer.b, plan, plans.stream)
    return x.new_empty(0)


def _finish(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, token: torch.Tensor) -> None:
    layer = find(stack)
    plans, started, layer.started = layer.wrapper.tokens, layer.started, None
    if started is not None:
        plans.backend.finish_linear(started, x, y, plans.stream)
        return
    _run(y, x, stack, LINEAR, 0)
    if plans.can_overlap(x.shape[0]) and not plans.is_idle:
        plan = plans.of(x.shape[0])  # a capture may follow
        key = x.shape[0], plan.active_slots
        if key not in layer.prepared and not is_capturing(x.device):
            layer.prepared.add(key)
            plans.backend.prepare_overlap(x, layer.b, plan)


# vLLM compiles one program for many layers and drops guards, so tracing must meet neither Python
# state nor shapes: nothing but this operation.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "run(Tensor(a!) y, Tensor x, Tensor stack, str operation, int offset) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::run", lambda *_: None, lib=_LIBRARY)
_LIBRARY.define(
    "start(Tensor x, Tensor stack) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
_LIBRARY.impl("start", _start, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::start", lambda x, _: x.new_empty(0), lib=_LIBRARY)
_LIBRARY.define(
    "finish(Tensor(a!) y, Tensor x, Tensor stack, Tensor token) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("finish", _finish, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::finish", lambda *_: None, lib=_LIBRARY)
