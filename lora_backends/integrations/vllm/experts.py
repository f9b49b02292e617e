"""vLLM's LoRA of a mixture's experts, on `run_experts`."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from lora_backends.experts import ExpertWeights
from lora_backends.integrations.vllm.layers import as_stored, follow
from lora_backends.integrations.vllm.plans import Plans

_SITES: WeakValueDictionary[int, ExpertWeights] = WeakValueDictionary()
"""The weights of one slice of one product, by the address of its A."""


def is_experts(module: Any) -> bool:
    """Return whether a LoRA module of vLLM is a mixture of experts."""
    return getattr(module, "w13_lora_a_stacked", None) is not None


def find(stack: torch.Tensor) -> ExpertWeights | None:
    """Return the weights whose A a stack is; None if vLLM's own wrapper runs them."""
    return _SITES.get(stack.data_ptr())


def adopt(module: Any, wrapper: Any) -> None:
    """Make weights of a mixture's stacks, or leave the layer to vLLM's own wrapper."""
    reason = _not_taken_over(module)
    if reason:
        wrapper.own(reason)
        return
    pairs = [
        *zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True),
        *zip(module.w2_lora_a_stacked, module.w2_lora_b_stacked, strict=True),
    ]
    sites = [_weights(a, b, module.local_num_experts) for a, b in pairs]
    module.lora_backends_layers = sites
    for (a, _), site in zip(pairs, sites, strict=True):
        _SITES[a.data_ptr()] = site

    def set_ranks(slot: int, lora_a: Any) -> None:
        # all sites and experts take the highest rank: right because vLLM pads with zeros
        matrices = [each for each in lora_a if each is not None]
        rank = max((each.shape[-2] for each in matrices), default=0)
        for site in sites:
            site.ranks[slot].fill_(min(rank, site.max_rank))
            site.scalings[slot].fill_(1)  # see `layers`

    follow(module, set_ranks)


def add_first(
    plans: Plans,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Add the first product of the experts, slice by slice, to y [tokens * k, columns]."""
    if plans.is_idle:
        return
    sites = [_site(stack) for stack in lora_a_stacked]
    routing = _routing(plans, sites[0], topk_ids, topk_weights)
    y, x = y.view(*topk_ids.shape, y.shape[-1]), as_stored(x, sites[0])
    column = 0
    for site in sites:
        part = y[..., column : column + site.out_features]
        plans.backend.run_experts(x, site, routing, part)
        column += site.out_features


def add_second(
    plans: Plans,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Add the second product, weighted, to y [tokens, k, columns]; x has a row per pair."""
    if plans.is_idle:
        return
    site = _site(lora_a_stacked[0])
    routing = _routing(plans, site, topk_ids, topk_weights)
    y = y.view(*topk_ids.shape, y.shape[-1])
    x = as_stored(x.view(-1, x.shape[-1]), site)
    plans.backend.run_experts(x, site, routing, y, rows="pairs", weighted=True)


def _not_taken_over(module: Any) -> str:
    if module.use_ep:
        return "experts spread over processes (enable_expert_parallel)"
    if module.moe_config.moe_parallel_config.dp_size > 1:
        return "experts that several data-parallel processes share"
    if module.fully_sharded and module.tp_size > 1:
        return "fully sharded experts (fully_sharded_loras)"
    return ""


def _weights(a: torch.Tensor, b: torch.Tensor, num_experts: int) -> ExpertWeights:
    """Return views of one slice's stacks, [slots, experts or 1, ...], without adapters."""
    shape = (a.shape[0], 1, 1)
    return ExpertWeights(
        lora_a=a[:, :, None],
        lora_b=b,
        ranks=torch.zeros(shape, dtype=torch.int32, device=a.device),
        scalings=torch.ones(shape, dtype=torch.float32, device=a.device),
        output_slices=(b.shape[2],),
        num_experts=num_experts,
    )


def _site(stack: torch.Tensor) -> ExpertWeights:
    site = find(stack)
    assert site is not None, "vLLM mixes the stacks of layers"
    return site


def _routing(
    plans: Plans, site: ExpertWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> Any:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        topk_ids = topk_ids.to(torch.int64)
    plan = plans.of(topk_ids.shape[0])
    return plans.backend.prepare_experts(
        plan, topk_ids, topk_weights.to(torch.float32), site.num_experts
    )
