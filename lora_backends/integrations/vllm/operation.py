"""Runs a layer of vLLM, in compiled programs as one operation.

An operation takes the first stack of a layer in the layer's place. It is an input that vLLM's
compiler treats like any weight, so equal layers share one compiled program, and a program that is
loaded from disk finds the layers of its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.dispatch.tracing import is_traced
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm import inputs
from lora_backends.integrations.vllm.layers import AdoptedLayer, as_stored, find

NAMESPACE = "lora_backends_vllm"

LINEAR = "linear"  # y += LoRA of x, for the batch's tokens
LOGITS = "logits"  # the same for the rows that are sampled
PROMPT = "prompt"  # the same for rows whose adapters vLLM does not announce, as of a prompt
TOKENS = "tokens"  # y += LoRA of an embedding, whose token ids are x; an encoder may use it
SHRINK = "shrink"  # y = x times a whole matrix of the adapter, for the batch's tokens
FULL = "full"  # the same for the rows that are sampled

UNQUANTIZED = "UnquantizedLinearMethod"
TORCH_LINEAR = "default_unquantized_gemm"
"""vLLM's names for weights that are not quantized, and for their product by torch."""


def run(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, operation: str) -> None:
    """Run a layer's operation on y, in place.

    Args:
        y: [rows, columns], or [1, rows, out_features] for a whole matrix.
        x: [rows, in_features], or token ids [rows].
        stack: the first A or B of the layer.
        operation: one of the names above.
    """
    if is_traced():
        torch.ops.lora_backends_vllm.run(y, x, stack, operation)
    else:
        _run(y, x, stack, operation)


def _run(y: torch.Tensor, x: torch.Tensor, stack: torch.Tensor, operation: str) -> None:
    _run_layer(find(stack), y, x, operation)


def _run_layer(layer: AdoptedLayer, y: torch.Tensor, x: torch.Tensor, operation: str) -> None:
    wrapper = layer.wrapper
    layer.is_called = wrapper.was_run = True
    plans = wrapper.sampled if operation in (LOGITS, FULL) else wrapper.tokens
    plans = wrapper.prompt if operation == PROMPT else plans
    if not layer.ranked and _is_by_itself(operation, x, plans):
        return
    if operation == TOKENS and inputs.is_encoding():
        return  # a token that an encoder adds, as between images, belongs to no row of the batch
    if not plans.is_idle:
        _compute(layer, y, x, plans, operation)


def adds_no_logits(stack: torch.Tensor) -> bool:
    """Return whether a head's call can be skipped: no adapter has a part for it."""
    if is_traced():
        return False
    layer = find(stack)
    layer.is_called = layer.wrapper.was_run = True
    return not layer.ranked and not is_capturing(stack.device)


def _is_by_itself(operation: str, x: torch.Tensor, plans: Plans) -> bool:
    """Return whether no CUDA graph can replay the call for other adapters."""
    if is_capturing(x.device):
        return False
    is_linear = operation in (LINEAR, TOKENS) and not plans.may_be_captured(x.shape[0])
    return is_linear or operation in (LOGITS, PROMPT)


def _compute(
    layer: AdoptedLayer, y: torch.Tensor, x: torch.Tensor, plans: Plans, operation: str
) -> None:
    weights, backend, plan = layer.weights, plans.backend, plans.of(x.shape[0])
    x = as_stored(x, weights)
    if y.shape[-1] != weights.out_features:  # logits may be padded to a wider table
        y = y[..., : weights.out_features]
    if operation == TOKENS:
        backend.run_lora_b(_gathered(layer, x, plans), weights, plan, y)
    elif operation in (SHRINK, FULL):
        backend.run_lora_a(x, weights, plan, out=y)
    elif operation in (LOGITS, PROMPT):
        backend.run_logits(x, weights, plan, y)
    else:
        backend.run_linear(x, weights, plan, y)


def trial(
    layer: AdoptedLayer, plans: Plans, operation: str, dtype: torch.dtype | None
) -> Callable[[int], None]:
    """Return a function that runs an operation on memory of any values and of the rows given.

    Args:
        layer: to run.
        plans: their batch must have as many rows.
        operation: `LINEAR`, `LOGITS` or `TOKENS`.
        dtype: of the model; None: that of the layer.
    """
    weights = layer.weights
    memory: dict[str, Any] = {"dtype": dtype or weights.dtype, "device": weights.device}

    def run_empty(rows: int) -> None:
        y = torch.empty(rows, weights.out_features, **memory)
        if operation == TOKENS:
            x = torch.zeros(rows, dtype=torch.int64, device=weights.device)
        else:
            x = torch.empty(rows, weights.in_features, **memory)
        _compute(layer, y, x, plans, operation)

    return run_empty


def _gathered(layer: AdoptedLayer, token_ids: torch.Tensor, plans: Plans) -> torch.Tensor:
    """Return the row of A of each token's adapter, [1, tokens, max_rank] float32."""
    assert layer.table is not None
    num_slots = layer.weights.num_slots
    slots = plans.token_slots(token_ids.shape[0]).clamp(min=0)  # any row where there is no adapter
    rows = slots * (layer.table.shape[0] // num_slots) + token_ids
    return torch.nn.functional.embedding(rows, layer.table).unsqueeze(0).float()


def embed_by_token(module: Any) -> None:
    """Let an embedding add its LoRA token by token; it costs nothing where no row has an adapter.

    vLLM gathers A for every batch, and takes the first axis of token ids for the tokens:
    Models of Transformers pass ids [1, tokens]; vLLM would use the first token's adapter for all.
    """
    stack = module.lora_b_stacked

    def forward(token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = module.base_layer.forward(token_ids)
        run(embedded.view(-1, embedded.shape[-1]), token_ids.flatten(), stack, TOKENS)
        return embedded

    module.forward = forward


def fuse(module: Any) -> None:
    """Run a layer's base product and its LoRA as one operation, where they can run side by side.

    In a graph of few rows the backend multiplies by the base weight itself, with the first kernel
    of the LoRA beside it. Weights that are quantized, or that vLLM does not multiply by torch's
    linear, keep their product.

    The method replaced is private; a layer without it keeps what it has. With vLLM's own second
    stream it is not called.
    """
    layer: AdoptedLayer = module.lora_backends_layers[0]
    if not hasattr(module, "_apply_sync"):
        return
    if _owner(module, "_apply_sync") is not _owner(module, "_apply_lora_to_output"):
        return  # it adds LoRA in a way of its own, as to the rows of requests
    if not (layer.wrapper.tokens.multiplies_bases and _multiplies_by_torch(module.base_layer)):
        return
    stack = module.lora_a_stacked[0]

    def apply_fused(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, module.base_layer.weight, bias, stack)

    module._apply_sync = apply_fused


def _owner(module: Any, name: str) -> type | None:
    """Return the class that defines a method of a module."""
    return next((cls for cls in type(module).__mro__ if name in vars(cls)), None)


def _multiplies_by_torch(base_layer: Any) -> bool:
    """Return whether vLLM computes a base layer by `torch.nn.functional.linear`."""
    from vllm import envs
    from vllm.model_executor.layers import utils

    method = getattr(base_layer, "quant_method", None)
    if type(method).__name__ != UNQUANTIZED or getattr(envs, "VLLM_BATCH_INVARIANT", True):
        return False
    product = getattr(method, "_gemm_impl", None)
    if product is None:  # versions without the attribute choose in each call
        product = getattr(utils, "dispatch_unquantized_gemm", lambda: None)()
    return getattr(product, "__name__", "") == TORCH_LINEAR


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stack: torch.Tensor
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` with the LoRA of the batch's tokens added.

    Args:
        x: [..., in_features]; its rows are the batch's tokens.
        weight: [out_features, in_features].
        bias: [out_features].
        stack: the first A of the layer.
    """
    # vLLM's parameter classes serve only to load weights, and torch dispatches them more slowly. In
    # a compiled program a view of a weight is a plain tensor, made without dispatch.
    if is_traced():
        y: torch.Tensor = torch.ops.lora_backends_vllm.linear(x, weight.t(), bias, stack)
        return y
    return _linear(x, weight.data.t(), bias, stack)


def _linear(
    x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None, stack: torch.Tensor
) -> torch.Tensor:
    rows = x if x.ndim == 2 else x.flatten(0, -2)  # as Transformers' models pass them
    layer, bias = find(stack), None if bias is None else bias.data
    y = _run_with_base(layer, rows, transposed, bias) if is_capturing(x.device) else None
    if y is None:
        # `linear` would dispatch three more operators and end in the same one
        y = torch.mm(rows, transposed) if bias is None else torch.addmm(bias, rows, transposed)
        _run_layer(layer, y, rows, LINEAR)
        _prepare(layer, rows, transposed, bias)
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _run_with_base(
    layer: AdoptedLayer, x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    plans = layer.wrapper.tokens
    if plans.is_idle:
        return None
    plan, weight = plans.of(x.shape[0]), transposed.t()
    y: torch.Tensor | None = plans.backend.run_with_base(x, weight, bias, layer.weights, plan)
    return y


def _prepare(
    layer: AdoptedLayer, x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Compile the kernels for a graph of these rows; a later capture cannot compile."""
    plans, rows = layer.wrapper.tokens, x.shape[0]
    if rows > getattr(plans.backend, "most_base_rows", rows):
        return  # prefills: vLLM's list of captured sizes takes microseconds to search
    if not plans.may_be_captured(rows) or is_capturing(x.device) or plans.is_idle:
        return
    key = rows, getattr(plans.of(rows), "active_slots", 0)  # kernels depend on both
    if key not in layer.prepared:
        layer.prepared.add(key)
        _run_with_base(layer, x, transposed, bias)


# vLLM compiles one program for many layers and drops guards, so tracing must meet neither Python
# state nor shapes: nothing but these operations.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "run(Tensor(a!) y, Tensor x, Tensor stack, str operation) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("run", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::run", lambda *_: None, lib=_LIBRARY)
_LIBRARY.define(
    "linear(Tensor x, Tensor transposed, Tensor? bias, Tensor stack) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"{NAMESPACE}::linear",
    lambda x, transposed, *_: x.new_empty((*x.shape[:-1], transposed.shape[1])),
    lib=_LIBRARY,
)
