"""What a layer runs, and the one operation that stands for it in compiled programs.

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

NAMESPACE = "lora_backends_vllm"

LINEAR = "linear"  # y += LoRA of x, for the batch's tokens
LOGITS = "logits"  # the same for the rows that are sampled
PROMPT = "prompt"  # the same for tokens of a prompt whose logprobs are asked for
SHRINK = "shrink"  # y = h of x
EXPAND = "expand"  # y[:, offset:] += LoRA of h, which is x
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
    if operation == EXPAND:
        backend.run_lora_b(x, layer.b, plans.of(x.shape[1]), part)
    elif operation in (LOGITS, PROMPT):
        backend.run_logits(x, layer.b, plans.of(x.shape[0]), part)
    else:
        backend.run_linear(x, layer.b, plans.of(x.shape[0]), part)


# vLLM compiles one program for many layers and drops guards, so tracing must meet neither Python
# state nor shapes: nothing but this operation.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "run(Tensor(a!) y, Tensor x, Tensor stack, str operation, int offset) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::run", lambda *_: None, lib=_LIBRARY)
