"""SGLang's LoRA of a mixture's experts, on `run_experts`.

SGLang's runners call two hooks per layer: one on the output of gate and up, before the activation,
and one on the output of down, before the sum over a token's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.experts import ExpertWeights
from lora_backends.integrations.sglang.backend import BackendForSGLang


@dataclass(eq=False)
class ExpertLoRA:
    """Both sites of a layer of experts; SGLang passes it from the layer to `build_lora_hooks`."""

    backend: BackendForSGLang
    first: ExpertWeights  # gate and up, or one slice in a model without gates
    second: ExpertWeights


def not_supported_reason(module: Any) -> str:
    """Return why a `FusedMoEWithLoRA` cannot run on this library; "" if it can."""
    runner = getattr(module, "_lora_runner_backend", None)
    known = runner is not None and (runner.is_triton() or runner.is_marlin())
    config = getattr(module, "moe_runner_config", None)
    if getattr(config, "apply_router_weight_on_input", False):
        return "the router weights the experts' input"
    if getattr(config, "no_combine", False):
        return "its experts are not summed, so SGLang would lose the LoRA of down"
    interleaved = getattr(module, "_uses_interleaved_gate_up", False)
    if interleaved and not getattr(config, "gate_up_interleaved", True):
        return "SGLang would interleave B of gate and up, whose outputs are not"
    if known and hasattr(module, "_lora_runner"):
        return ""
    return f"experts of the runner {getattr(runner, 'value', runner)} have no hooks for LoRA"


def lora_info(original: Callable[..., Any], module: Any) -> Any:
    """Return a layer's weights in place of SGLang's description of them and of the batch."""
    backend = module.lora_backend
    if not isinstance(backend, BackendForSGLang):
        return original(module)
    adopted = getattr(module, "lora_backends_experts", None)
    if adopted is None or adopted.first.lora_b is not module.gate_up_lora_b_weights:
        adopted = module.lora_backends_experts = _adopted(module, backend)
    return adopted


def build_hooks(original: Callable[..., Any], hidden_states: Any, info: Any, topk_ids: Any) -> Any:
    """Return the hooks of a layer for the batch that SGLang has announced."""
    if not isinstance(info, ExpertLoRA):
        return original(hidden_states, info, topk_ids)
    from sglang.srt.lora.lora_moe_runners import LoRAHooks

    plans = info.backend.tokens
    if info.backend.adds_nothing():
        return LoRAHooks()
    routed: list[Any] = []  # topk_ids and `Routed` of the first product; the second reuses it

    def routing_of(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> Any:
        if not routed or routed[0] is not topk_ids or not routed[1].is_current:
            routed[:] = topk_ids, plans.route(topk_ids, topk_weights, info.first.num_experts)
        return routed[1].routing

    def after_gate_up(
        x: torch.Tensor, y: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> None:
        info.backend.check_rows(topk_ids.shape[0])
        routing, y = routing_of(topk_ids, topk_weights), y.view(*topk_ids.shape, y.shape[-1])
        plans.backend.run_experts(x, info.first, routing, y)

    def after_down(
        x: torch.Tensor, y: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> None:
        routing, y = routing_of(topk_ids, topk_weights), y.view(*topk_ids.shape, y.shape[-1])
        x = x.view(-1, x.shape[-1])
        plans.backend.run_experts(x, info.second, routing, y, rows="pairs", weighted=True)

    return LoRAHooks(after_gate_up=after_gate_up, after_down=after_down)


def _adopted(module: Any, backend: BackendForSGLang) -> ExpertLoRA:
    first_a, first_b = module.gate_up_lora_a_weights, module.gate_up_lora_b_weights
    second_a, second_b = module.down_lora_a_weights, module.down_lora_b_weights
    # shared outer matrices have one entry, the others one per expert of this process
    num_experts = max(first_a.shape[1], first_b.shape[1])
    interleaved = bool(getattr(module, "_uses_interleaved_gate_up", False))
    return ExpertLoRA(
        backend,
        _weights(backend, first_a, first_b, num_experts, interleaved),
        _weights(backend, second_a, second_b, num_experts, False),
    )


def _weights(
    backend: BackendForSGLang,
    a: torch.Tensor,
    b: torch.Tensor,
    num_experts: int,
    interleaved: bool,
) -> ExpertWeights:
    """Return views of the stacks of one site; SGLang has folded the scaling into B.

    Args:
        backend: holds the ranks.
        a: [slots, experts or 1, num_slices * max_rank, in_features].
        b: [slots, experts or 1, out_features, max_rank].
        num_experts: of this process.
        interleaved: whether columns of gate and up alternate.
    """
    max_rank = b.shape[-1]
    num_slices = a.shape[2] // max_rank
    ranks, ones = backend.numbers.of_experts(num_slices)
    return ExpertWeights(
        lora_a=a.view(*a.shape[:2], num_slices, max_rank, a.shape[3]),
        lora_b=b,
        ranks=ranks,
        scalings=ones,
        output_slices=(b.shape[2] // num_slices,) * num_slices,
        num_experts=num_experts,
        interleaved=interleaved and num_slices > 1,
    )
