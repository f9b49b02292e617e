"""vLLM's LoRA of a mixture's experts, on `run_experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from lora_backends.errors import UnsupportedInputError
from lora_backends.experts import ExpertWeights
from lora_backends.integrations.plans import Plans, Routed
from lora_backends.integrations.vllm.layers import as_stored, follow

_FIRST: WeakValueDictionary[int, FirstProduct] = WeakValueDictionary()
"""The first product of a layer, by the address of the A of any of its slices."""

_SECOND: WeakValueDictionary[int, ExpertWeights] = WeakValueDictionary()
"""The second product of a layer, by the address of its A."""


@dataclass(eq=False)
class FirstProduct:
    """Gate and up of a layer, or the only slice of a layer without gate."""

    whole: ExpertWeights  # both slices in the order of y's columns, so that x is read once
    slices: tuple[ExpertWeights, ...]  # one each, for a caller with another order of columns
    order: tuple[int, ...]  # addresses of A, in the order of `whole`

    def parts(self, stacks: Sequence[torch.Tensor]) -> Sequence[ExpertWeights]:
        """Return weights whose columns of y follow each other in the order of the stacks of A."""
        given = tuple([stack.data_ptr() for stack in stacks])
        if given == self.order:
            return (self.whole,)
        places = dict(zip(self.order, self.slices, strict=True))
        assert set(given) == set(self.order), "vLLM mixes the stacks of layers"
        return [places[address] for address in given]


def is_experts(module: Any) -> bool:
    """Return whether a LoRA module of vLLM is a mixture of experts."""
    return getattr(module, "w13_lora_a_stacked", None) is not None


def is_adopted(stack: torch.Tensor) -> bool:
    """Return whether a stack is an A of a layer that `adopt` took; else vLLM's wrapper runs it."""
    address = stack.data_ptr()
    return address in _FIRST or address in _SECOND


def adopt(module: Any, wrapper: Any) -> None:
    """Make weights of a mixture's stacks, or leave the layer to vLLM's own wrapper."""
    module.lora_backends_refuses = _refused(module.moe_config, wrapper.parallel)
    reason = _not_taken_over(module)
    if reason:
        wrapper.own(reason)
        return
    first = _first_product(module)
    (a,), (b,) = module.w2_lora_a_stacked, module.w2_lora_b_stacked
    sites = [first.whole, _weights(a[:, :, None], b, (b.shape[2],), module.local_num_experts)]
    module.lora_backends_layers = sites
    module.lora_backends_first = first
    for address in first.order:
        _FIRST[address] = first
    _SECOND[a.data_ptr()] = sites[1]

    def set_ranks(slot: int, lora_a: Any) -> None:
        # all sites and experts take the highest rank: right because vLLM pads with zeros
        matrices = [each for each in lora_a if each is not None]
        rank = max((each.shape[-2] for each in matrices), default=0)
        for site in sites:
            site.ranks[slot].fill_(min(rank, site.max_rank))
            site.scalings[slot].fill_(1)  # see `layers`

    follow(module, set_ranks)


def _first_product(module: Any) -> FirstProduct:
    stacks_a, stacks_b = module.w13_lora_a_stacked, module.w13_lora_b_stacked
    views_a, views_b = (getattr(module, f"lora_{x}_stacked", None) or () for x in "ab")
    count, widths = module.local_num_experts, tuple([b.shape[2] for b in stacks_b])
    a, b = _joined(stacks_a, views_a), _joined(stacks_b, views_b)
    by_slice = a.view(*a.shape[:2], len(stacks_a), -1, a.shape[3])
    whole = _weights(by_slice, b, widths, count)
    slices = [
        replace(
            whole,
            lora_a=stacks_a[s][:, :, None],
            lora_b=stacks_b[s],
            ranks=whole.ranks[..., s : s + 1],
            scalings=whole.scalings[..., s : s + 1],
            output_slices=(width,),
        )
        for s, width in enumerate(widths)
    ]
    return FirstProduct(whole, tuple(slices), tuple([a.data_ptr() for a in stacks_a]))


def _joined(stacks: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the stacks of all slices as one, [slots, experts or 1, rows of all slices, columns].

    The stacks and their views stay the same objects but become views of the result: vLLM has handed
    them to the contexts of its layers, and writes adapters into them. This frees the old memory
    before vLLM makes the stacks of the next layer.

    Args:
        stacks: [slots, experts or 1, rows, columns] of each slice.
        views: single matrices of these or other stacks; vLLM reads their shapes.
    """
    if len(stacks) == 1:
        return stacks[0]
    # vLLM writes adapters in inference mode and outside of it; only plain tensors take both
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat(list(stacks), 2)
    parts = torch.split(whole, [stack.shape[2] for stack in stacks], 2)
    for stack, part in zip(stacks, parts, strict=True):
        expert_stride = stack.stride(1)
        for view in views:
            distance = int(view.storage_offset() - stack.storage_offset())
            same = view.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()
            if same and distance % expert_stride == 0:
                slot, expert = divmod(distance // expert_stride, stack.shape[1])
                _move(view, part[slot, expert])
        _move(stack, part)
    return whole


def _move(tensor: torch.Tensor, to: torch.Tensor) -> None:
    """Make a tensor a view of the memory of another, which holds equal values."""
    with torch.inference_mode():  # it may change tensors made inside or outside of it
        tensor.set_(to.untyped_storage(), to.storage_offset(), to.shape, to.stride())


def add_first(
    plans: Plans,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> Routed | None:
    """Add the first product of the experts to y [tokens * k, columns].

    `expert_map` [experts of all processes] has an expert's place here, or -1; it is None where
    every expert is here.

    Returns:
        The routing, which serves the second product too; None where nothing is added.
    """
    if plans.is_idle:
        return None
    first = _FIRST.get(lora_a_stacked[0].data_ptr())
    assert first is not None, "vLLM mixes the stacks of layers"
    routed = plans.route(topk_ids, topk_weights, first.whole.num_experts, expert_map)
    parts = first.parts(lora_a_stacked)
    _run_first(plans, parts, routed.routing, y.view(*topk_ids.shape, y.shape[-1]), x)
    return routed


def add_second(
    plans: Plans,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    topk_weights: torch.Tensor,
    routed: Routed | None,
) -> None:
    """Add the second product, weighted, to y [tokens, k, columns]; x has a row per pair.

    `routed` is from `add_first` for the same layer.

    Raises:
        UnsupportedInputError: another layer has been routed since.
    """
    if routed is not None:
        if not routed.is_current:
            raise UnsupportedInputError(
                "vLLM runs the second product of experts after the first one of another layer\n"
                "  to do: leave out --enable-dbo, so that no two batches overlap"
            )
        site = _SECOND.get(lora_a_stacked[0].data_ptr())
        assert site is not None, "vLLM mixes the stacks of layers"
        y = y.view(*topk_weights.shape, y.shape[-1])
        _run_second(plans, site, routed.routing, y, x.view(-1, x.shape[-1]))


def _run_first(
    plans: Plans, parts: Sequence[ExpertWeights], routing: Any, y: torch.Tensor, x: torch.Tensor
) -> None:
    x, column = as_stored(x, parts[0]), 0
    for site in parts:
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
    first, second = sites
    device, given = second.lora_b.device, dtype or second.dtype

    def run_empty(tokens: int) -> None:
        pairs = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        weights = torch.zeros(tokens, top_k, dtype=torch.float32, device=device)
        ids = (pairs % second.num_experts).to(torch.int32)
        routing = plans.route(ids, weights, second.num_experts).routing
        x = torch.empty(tokens, first.in_features, dtype=given, device=device)
        y = torch.empty(tokens, top_k, first.out_features, dtype=given, device=device)
        _run_first(plans, (first,), routing, y, x)
        x = torch.empty(tokens * top_k, second.in_features, dtype=given, device=device)
        y = torch.empty(tokens, top_k, second.out_features, dtype=given, device=device)
        _run_second(plans, second, routing, y, x)

    return run_empty


def _not_taken_over(module: Any) -> str:
    if module.moe_config.moe_parallel_config.dp_size > 1:
        return "experts under data parallelism"  # vLLM reads its own wrapper's tables
    stacks = module.w13_lora_a_stacked
    if len({(stack.shape, stack.dtype) for stack in stacks}) > 1:
        return "experts whose A of gate and up differ in shape"
    return ""


def _refused(moe: Any, parallel: Any) -> str:
    """Return why vLLM would run these experts with LoRA of other experts or adapters; "": not.

    Args:
        moe: vLLM's `FusedMoEConfig` of the layer.
        parallel: vLLM's `ParallelConfig`, or None.
    """
    if moe.moe_parallel_config.dp_size > 1:
        # each process fills its slots with the adapters of its own requests
        return "data parallelism: vLLM sends slots, which hold other adapters in other processes"
    if not moe.moe_parallel_config.use_ep:
        return ""
    # vLLM cuts the LoRA of experts into equal blocks, in order
    if moe.num_experts != moe.num_local_experts * moe.moe_parallel_config.ep_size:
        return (
            f"expert parallelism of {moe.num_experts} experts over "
            f"{moe.moe_parallel_config.ep_size} processes: vLLM cuts their LoRA into equal parts"
        )
    if getattr(parallel, "enable_eplb", False):
        return "enable_eplb: vLLM moves experts without their LoRA"
    if getattr(parallel, "expert_placement_strategy", "linear") != "linear":
        return "expert_placement_strategy: vLLM places the LoRA of experts as in 'linear'"
    return ""


def _weights(
    a: torch.Tensor, b: torch.Tensor, widths: tuple[int, ...], num_experts: int
) -> ExpertWeights:
    """Return stacks of A and B of all slices as weights of rank 0 in every slot."""
    shape = (a.shape[0], 1, a.shape[2])
    return ExpertWeights(
        lora_a=a,
        lora_b=b,
        ranks=torch.zeros(shape, dtype=torch.int32, device=a.device),
        scalings=torch.ones(shape, dtype=torch.float32, device=a.device),
        output_slices=widths,
        num_experts=num_experts,
    )
