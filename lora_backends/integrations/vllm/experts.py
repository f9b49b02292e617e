"""vLLM's LoRA of a mixture's experts, on `run_experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from lora_backends.experts import ExpertWeights
from lora_backends.integrations.plans import Plans
from lora_backends.integrations.vllm.layers import as_stored, follow

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
    expert_map: torch.Tensor | None,
) -> Any:
    """Add the first product of the experts, slice by slice, to y [tokens * k, columns].

    `expert_map` [experts of all processes] has an expert's place here, or -1; it is None where
    every expert is here.

    Returns:
        The routing, which serves the second product too; None where nothing is added.
    """
    if plans.is_idle:
        return None
    sites = [_site(stack) for stack in lora_a_stacked]
    routing = _routing(plans, sites[0], topk_ids, topk_weights, expert_map)
    _run_first(plans, sites, routing, y.view(*topk_ids.shape, y.shape[-1]), x)
    return routing


def add_second(
    plans: Plans,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    topk_weights: torch.Tensor,
    routing: Any,
) -> None:
    """Add the second product, weighted, to y [tokens, k, columns]; x has a row per pair.

    `add_first` has returned the routing for the layer.
    """
    if routing is not None:
        y = y.view(*topk_weights.shape, y.shape[-1])
        _run_second(plans, _site(lora_a_stacked[0]), routing, y, x.view(-1, x.shape[-1]))


def _run_first(
    plans: Plans, sites: Sequence[ExpertWeights], routing: Any, y: torch.Tensor, x: torch.Tensor
) -> None:
    x, column = as_stored(x, sites[0]), 0
    for site in sites:
        part = y[..., column : column + site.out_features]
        plans.backend.run_experts(x, site, routing, part)
        column += site.out_features


def _run_second(
    plans: Plans, site: ExpertWeights, routing: Any, y: torch.Tensor, x: torch.Tensor
) -> None:
    x = as_stored(x, site)
    plans.backend.run_experts(x, site, routing, y, rows="pairs", weighted=True)


def trial(
    plans: Plans, sites: Sequence[ExpertWeights], top_k: int, dtype: torch.dtype | None
) -> Callable[[int], None]:
    """Return a function that runs both products on memory of any values, for the tokens given.

    Args:
        plans: their batch must have as many tokens.
        sites: of a layer of experts, first product, then second.
        top_k: experts of a token.
        dtype: of the model; None: that of the sites.
    """
    *first, second = sites
    device, given = second.lora_b.device, dtype or second.dtype

    def run_empty(tokens: int) -> None:
        pairs = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        weights = torch.zeros(tokens, top_k, dtype=torch.float32, device=device)
        ids = (pairs % second.num_experts).to(torch.int32)
        routing = _routing(plans, second, ids, weights, None)
        x = torch.empty(tokens, first[0].in_features, dtype=given, device=device)
        wide = sum(site.out_features for site in first)
        y = torch.empty(tokens, top_k, wide, dtype=given, device=device)
        _run_first(plans, first, routing, y, x)
        x = torch.empty(tokens * top_k, second.in_features, dtype=given, device=device)
        y = torch.empty(tokens, top_k, second.out_features, dtype=given, device=device)
        _run_second(plans, second, routing, y, x)

    return run_empty


def _not_taken_over(module: Any) -> str:
    if module.moe_config.moe_parallel_config.dp_size > 1:
        return (
            "experts of several data-parallel processes: the slots of tokens from others are on "
            "the device alone"
        )
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
    plans: Plans,
    site: ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> Any:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        topk_ids = topk_ids.to(torch.int64)
    if expert_map is not None and expert_map.dtype != torch.int32:
        expert_map = expert_map.to(torch.int32)
    plan = plans.of(topk_ids.shape[0])
    weights = topk_weights.to(torch.float32)
    return plans.backend.prepare_experts(plan, topk_ids, weights, site.num_experts, expert_map)
