"""`moe_lora_align_block_size`: the pairs of token and expert, sorted for vLLM's expert kernels."""

from __future__ import annotations

import torch

from lora_backends.errors import InvalidInputError
from vllm_ops.metadata import is_integral


def moe_lora_align_block_size(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    adapter_enabled: torch.Tensor,
    lora_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Sort the pairs of each slot by expert, each expert's padded to whole blocks.

    Row l of the three results belongs to slot l. It is written if `lora_ids` names l and
    `adapter_enabled[l]` is not 0, else it keeps what it holds. Pair t * k + j is token t's j-th
    expert; an id that is negative, not below `num_experts`, or mapped to -1 is left out. It never
    waits for the device, so a CUDA graph can capture it.

    Args:
        topk_ids: [tokens, k] int32 or int64.
        token_lora_mapping: [tokens], the slot of each token, or -1.
        num_experts: ids of `topk_ids` are below it; with `expert_map` it is the map's length.
        block_size: pairs of a block.
        max_loras: slots.
        max_num_tokens_padded: width of a row of `sorted_token_ids`.
        max_num_m_blocks: width of a row of `experts_ids`.
        sorted_token_ids: [max_loras * max_num_tokens_padded] int32, written: pairs, padded with
            their number.
        experts_ids: [max_loras * max_num_m_blocks] int32, written: the expert of each block, this
            process's own id with `expert_map`; -1 behind the last block.
        num_tokens_post_pad: [max_loras] int32, written: pairs and padding of a row.
        adapter_enabled: [at least max_loras] ints.
        lora_ids: the slots of the batch; others than 0 to max_loras - 1 are skipped.
        expert_map: [num_experts] int32, the local id of each expert or -1.

    Raises:
        InvalidInputError: a row is too narrow for the worst routing, or shapes or dtypes differ.
    """
    if block_size < 1 or num_experts < 1:
        raise InvalidInputError(
            f"there are no blocks to sort into\n"
            f"  given: block_size={block_size}, num_experts={num_experts}\n"
            f"  allowed: both at least 1"
        )
    pairs = topk_ids.numel()
    worst = (pairs + min(num_experts, pairs) * (block_size - 1)) // block_size  # blocks of a row
    _check_ints(
        topk_ids=topk_ids,
        token_lora_mapping=token_lora_mapping,
        sorted_token_ids=sorted_token_ids,
        experts_ids=experts_ids,
        num_tokens_post_pad=num_tokens_post_pad,
    )
    _check_lengths(
        {
            "topk_ids": (topk_ids.shape, (*token_lora_mapping.shape, topk_ids.shape[-1])),
            "sorted_token_ids": (sorted_token_ids.shape, (max_loras * max_num_tokens_padded,)),
            "experts_ids": (experts_ids.shape, (max_loras * max_num_m_blocks,)),
            "num_tokens_post_pad": (num_tokens_post_pad.shape, (max_loras,)),
            "expert_map": (
                (num_experts,) if expert_map is None else expert_map.shape,
                (num_experts,),
            ),
        }
    )
    width = min(max_num_tokens_padded // block_size, max_num_m_blocks)
    if adapter_enabled.shape[0] < max_loras or width < worst:
        raise InvalidInputError(
            f"the tables are too small\n"
            f"  given: {adapter_enabled.shape[0]} entries of adapter_enabled, and room for {width} "
            f"blocks of {block_size} pairs\n"
            f"  allowed: {max_loras} entries at least, and {worst} blocks for {pairs} pairs of "
            f"{num_experts} experts"
        )
    slots = torch.arange(max_loras, device=topk_ids.device)
    active = (lora_ids[:, None] == slots).any(0) & (adapter_enabled[:max_loras] != 0)
    key = _group_of(topk_ids, token_lora_mapping, num_experts, active, expert_map)
    num_groups = max_loras * num_experts
    counts = torch.zeros(num_groups + 1, dtype=torch.int64, device=topk_ids.device)
    counts.index_add_(0, key, torch.ones_like(key))
    padded = (counts[:-1] + block_size - 1).div(block_size, rounding_mode="floor") * block_size
    ends = padded.view(max_loras, num_experts).cumsum(1)
    # group l * num_experts + e, and one of the pairs left out, which lands after the last row
    row_starts = slots[:, None] * max_num_tokens_padded
    starts = (row_starts + ends).view(-1) - padded
    starts = torch.cat([starts, starts.new_full((1,), max_loras * max_num_tokens_padded)])
    order = key.argsort(stable=True)
    behind = counts.cumsum(0) - counts  # pairs of the groups before
    grouped = key[order]
    place = starts[grouped] + torch.arange(pairs, device=key.device) - behind[grouped]
    room = max_loras * max_num_tokens_padded
    table = torch.full((room + pairs,), pairs, dtype=torch.int32, device=key.device)
    table[place] = order.to(torch.int32)
    blocks = torch.arange(max_num_m_blocks, device=key.device) * block_size
    expert = torch.searchsorted(ends, blocks.expand(max_loras, -1).contiguous(), right=True)
    if expert_map is not None:
        expert = expert_map.to(torch.int64)[expert.clamp(max=num_experts - 1)]
    total = ends[:, -1]
    expert = torch.where(blocks < total[:, None], expert, -1)
    for result, found in (
        (sorted_token_ids, table[:room]),
        (experts_ids, expert),
        (num_tokens_post_pad, total),
    ):
        kept = result.view(max_loras, -1)
        kept.copy_(torch.where(active[:, None], found.view(max_loras, -1).to(kept.dtype), kept))


def _group_of(
    topk_ids: torch.Tensor,
    token_lora_mapping: torch.Tensor,
    num_experts: int,
    active: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """Return slot * num_experts + expert of each pair, the number of groups for one left out."""
    max_loras = active.shape[0]
    ids = topk_ids.reshape(-1).to(torch.int64)
    slot = token_lora_mapping.to(torch.int64).repeat_interleave(topk_ids.shape[1])
    known = slot.clamp(0, max_loras - 1)
    live = (ids >= 0) & (ids < num_experts) & (slot == known) & active[known]
    if expert_map is not None:
        live &= expert_map[ids.clamp(0, num_experts - 1)] >= 0
    return torch.where(live, known * num_experts + ids, max_loras * num_experts)


def _check_ints(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not is_integral(tensor) or tensor.ndim == 0:
            raise InvalidInputError(
                f"{name} does not hold ints\n"
                f"  given: {list(tensor.shape)} {tensor.dtype}\n"
                f"  allowed: an integer dtype, and an axis at least"
            )


def _check_lengths(pairs: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    for name, (given, allowed) in pairs.items():
        if tuple(given) != tuple(allowed):
            raise InvalidInputError(
                f"{name} has the wrong shape\n  given: {list(given)}\n  allowed: {list(allowed)}"
            )
