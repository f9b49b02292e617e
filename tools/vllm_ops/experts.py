"""`fused_moe_lora`: vLLM's operator for experts, on `run_experts`."""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.experts import ExpertWeights
from vllm_ops.metadata import (
    backend_for,
    check_output,
    columns,
    plan_of,
    refuse_capture,
)

DEAD = -1  # the expert of a pair that nothing is added to


def fused_moe_lora(
    output: torch.Tensor,
    qcurr_hidden_states: torch.Tensor,
    lora_a_stacked: list[torch.Tensor],
    lora_b_stacked: list[torch.Tensor],
    topk_weights: torch.Tensor,
    sorted_token_ids: torch.Tensor | None,
    expert_ids: torch.Tensor,
    num_tokens_post_padded: torch.Tensor | None,
    token_lora_mapping: torch.Tensor,
    max_lora_rank: int,
    top_k_num: int,
    lora_ids: torch.Tensor,
    num_active_loras: torch.Tensor | int,
    adapter_enabled: torch.Tensor,
    shrink_block_size_m: int,
    shrink_block_size_n: int,
    shrink_block_size_k: int,
    shrink_group_size_m: int,
    shrink_num_warps: int,
    shrink_num_stages: int,
    shrink_split_k: int,
    expand_block_size_m: int,
    expand_block_size_n: int,
    expand_block_size_k: int,
    expand_group_size_m: int,
    expand_num_warps: int,
    expand_num_stages: int,
    expand_split_k: int,
    mul_routed_weight: bool = False,
    fully_sharded: bool = False,
    offset: int = 0,
    add_inputs: bool = True,
    *,
    backend: LoRABackend | None = None,
) -> None:
    """Add ``x @ A.T @ B.T`` of each pair of token and expert to the slices' columns.

    Pairs without adapter or expert keep their bits, with or without `add_inputs`. Sums stay in
    float32 and are rounded once, so the sizes of blocks below change nothing, except that
    `shrink_block_size_m` tells how `sorted_token_ids` is cut.

    Args:
        output: [tokens, k, columns].
        qcurr_hidden_states: x, a row per token; a row per pair with `mul_routed_weight`.
        lora_a_stacked: A per slice, [slots, experts or 1, rank, in_features].
        lora_b_stacked: B per slice, [slots, experts or 1, width, rank].
        topk_weights: [tokens, k], the router's weights.
        sorted_token_ids: [slots, pairs], as `moe_lora_align_block_size` sorts them; None: the
            expert of pair p is ``expert_ids[p]``.
        expert_ids: [slots, blocks], or [tokens * k].
        num_tokens_post_padded: [slots], with sorted_token_ids.
        token_lora_mapping: [tokens], read without sorted_token_ids.
        max_lora_rank: the rank of the stacks.
        top_k_num: k.
        lora_ids: slots of the batch, read with sorted_token_ids.
        num_active_loras: entries of lora_ids that count.
        adapter_enabled: [at least slots]; 0: nothing is added for that slot.
        shrink_block_size_m: pairs of a block of sorted_token_ids.
        shrink_block_size_n: not read, and neither are the next twelve.
        shrink_block_size_k: see above.
        shrink_group_size_m: see above.
        shrink_num_warps: see above.
        shrink_num_stages: see above.
        shrink_split_k: see above.
        expand_block_size_m: see above.
        expand_block_size_n: see above.
        expand_block_size_k: see above.
        expand_group_size_m: see above.
        expand_num_warps: see above.
        expand_num_stages: see above.
        expand_split_k: see above.
        mul_routed_weight: x has a row per pair, and the delta is weighted.
        fully_sharded: refused: it exchanges h between processes.
        offset: the first column of the first slice.
        add_inputs: add to what the output holds; else overwrite it.
        backend: as in `lora_shrink`.

    Raises:
        InvalidInputError: the arguments contradict each other; nothing has been written.
        UnsupportedInputError: fully_sharded, or a CUDA graph is captured.
    """
    if fully_sharded:
        raise UnsupportedInputError(
            "fused_moe_lora cannot run fully sharded experts\n  given: fully_sharded=True\n"
            "  allowed: fully_sharded=False"
        )
    x = qcurr_hidden_states
    sites = _sites(lora_a_stacked, lora_b_stacked, max_lora_rank)
    tokens, k = _check_shapes(output, x, topk_weights, top_k_num, mul_routed_weight)
    part = columns(output, offset, sum(site.out_features for site in sites))
    backend = backend_for(x.device, backend)
    refuse_capture(x.device)
    pairs = _Pairs(tokens, k, sites[0].num_slots, adapter_enabled.tolist())
    if sorted_token_ids is None:
        pairs.take_ids(expert_ids, token_lora_mapping)
    else:
        active = lora_ids[: int(num_active_loras)].tolist()
        tables = sorted_token_ids, expert_ids, num_tokens_post_padded
        pairs.take_sorted(*tables, active, shrink_block_size_m)
    if not any(expert >= 0 for expert in pairs.experts):
        return
    ids = torch.tensor(pairs.experts, device="cpu").view(tokens, k).to(x.device)
    plan = plan_of(backend, pairs.slots, sites[0].num_slots)
    # one routing serves all slices, which differ in their stacks alone
    weights = topk_weights.to(torch.float32)
    routing = backend.prepare_experts(plan, ids, weights, sites[0].num_experts)
    target = part if add_inputs else torch.zeros_like(part)
    column, rows = 0, "pairs" if mul_routed_weight else "tokens"
    for site in sites:
        own = target[..., column : column + site.out_features]
        backend.run_experts(x, site, routing, own, rows=rows, weighted=mul_routed_weight)
        column += site.out_features
    if not add_inputs:
        live = (ids >= 0)[..., None]
        part.copy_(torch.where(live, target, part))


class _Pairs:
    """The expert of each pair and the slot of each token, on the host."""

    def __init__(self, tokens: int, k: int, num_slots: int, enabled: list[int]) -> None:
        if len(enabled) < num_slots:
            raise InvalidInputError(
                f"adapter_enabled is too short\n  given: {len(enabled)} entries\n"
                f"  allowed: at least {num_slots}, one per slot"
            )
        self.k, self.num_slots, self.enabled = k, num_slots, enabled
        self.slots = [NO_ADAPTER] * tokens
        self.experts = [DEAD] * (tokens * k)

    def _runs(self, slot: int) -> bool:
        return 0 <= slot < self.num_slots and bool(self.enabled[slot])

    def take_ids(self, expert_ids: torch.Tensor, mapping: torch.Tensor) -> None:
        """Take the expert of each pair as it is."""
        if expert_ids.shape != (len(self.experts),) or mapping.shape != (len(self.slots),):
            raise InvalidInputError(
                f"the pairs do not fit topk_weights\n"
                f"  given: expert_ids {list(expert_ids.shape)}, token_lora_mapping "
                f"{list(mapping.shape)}\n"
                f"  allowed: [{len(self.experts)}] and [{len(self.slots)}]"
            )
        self.slots = [slot if self._runs(slot) else NO_ADAPTER for slot in mapping.tolist()]
        for pair, expert in enumerate(expert_ids.tolist()):
            if self.slots[pair // self.k] != NO_ADAPTER:
                self.experts[pair] = expert

    def take_sorted(
        self,
        sorted_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        lengths: torch.Tensor | None,
        active: list[int],
        block: int,
    ) -> None:
        """Take pairs in blocks of one expert, a row per slot."""
        rows = self.num_slots
        blocks = -(-sorted_ids.shape[-1] // max(block, 1))
        fits = lengths is not None and lengths.shape == (rows,) and sorted_ids.ndim == 2
        if not fits or block < 1 or expert_ids.shape != (rows, blocks) or len(sorted_ids) != rows:
            raise InvalidInputError(
                f"the sorted pairs do not fit\n"
                f"  given: sorted_token_ids {list(sorted_ids.shape)}, expert_ids "
                f"{list(expert_ids.shape)}, shrink_block_size_m={block}, num_tokens_post_padded "
                f"{None if lengths is None else list(lengths.shape)}\n"
                f"  allowed: a row per slot, {rows}, and a block of expert_ids per "
                f"shrink_block_size_m pairs"
            )
        assert lengths is not None
        all_ids, all_experts, ends = sorted_ids.tolist(), expert_ids.tolist(), lengths.tolist()
        for slot in filter(self._runs, active):
            for place, pair in enumerate(all_ids[slot][: max(ends[slot], 0)]):
                expert = all_experts[slot][place // block]
                if expert >= 0 and 0 <= pair < len(self.experts):  # the others are padding
                    self._place(pair, slot, expert)

    def _place(self, pair: int, slot: int, expert: int) -> None:
        token = pair // self.k
        if self.experts[pair] != DEAD or self.slots[token] not in (NO_ADAPTER, slot):
            raise InvalidInputError(
                f"sorted_token_ids holds a pair twice, or a token under two slots\n"
                f"  given: pair {pair} of token {token}, slots {self.slots[token]} and {slot}\n"
                f"  allowed: each pair once, all pairs of a token under one slot"
            )
        self.experts[pair], self.slots[token] = expert, slot


def _sites(a_stacked: Any, b_stacked: Any, rank: int) -> list[ExpertWeights]:
    """Return the weights of each slice, at full rank."""
    if len(a_stacked) != len(b_stacked) or not a_stacked:
        raise InvalidInputError(
            f"lora_a_stacked and lora_b_stacked differ\n"
            f"  given: {len(a_stacked)} and {len(b_stacked)} slices\n  allowed: one of each a slice"
        )
    sites = [_site(a, b) for a, b in zip(a_stacked, b_stacked, strict=True)]
    sizes = {(site.num_slots, site.num_experts, site.in_features) for site in sites}
    if len(sizes) > 1 or any(site.max_rank != rank for site in sites):
        raise InvalidInputError(
            f"the slices do not fit together\n"
            f"  given: {[list(a.shape) for a in a_stacked]}, max_lora_rank={rank}\n"
            f"  allowed: slots, experts and in_features alike, of rank max_lora_rank"
        )
    return sites


def _site(a: torch.Tensor, b: torch.Tensor) -> ExpertWeights:
    if a.ndim != 4 or b.ndim != 4:
        raise InvalidInputError(
            f"the stacks of experts have the wrong axes\n"
            f"  given: {list(a.shape)} and {list(b.shape)}\n"
            f"  allowed: [slots, experts, rank, in_features] and [slots, experts, width, rank]"
        )
    shape = (a.shape[0], 1, 1)
    return ExpertWeights(
        lora_a=a[:, :, None],
        lora_b=b,
        ranks=torch.full(shape, a.shape[2], dtype=torch.int32, device=a.device),
        scalings=torch.ones(shape, dtype=torch.float32, device=a.device),
        output_slices=(b.shape[2],),
        num_experts=max(a.shape[1], b.shape[1]),
    )


def _check_shapes(
    output: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, top_k: int, per_pair: bool
) -> tuple[int, int]:
    if weights.ndim != 2 or weights.shape[1] != top_k or x.ndim != 2:
        raise InvalidInputError(
            f"topk_weights or the inputs do not fit\n"
            f"  given: topk_weights {list(weights.shape)}, inputs {list(x.shape)}\n"
            f"  allowed: [tokens, {top_k}] and two axes"
        )
    tokens, k = weights.shape
    rows = tokens * k if per_pair else tokens
    if x.shape[0] != rows:
        raise InvalidInputError(
            f"the inputs do not fit topk_weights\n  given: {x.shape[0]} rows\n"
            f"  allowed: {rows}, one per {'pair' if per_pair else 'token'}"
        )
    check_output(output, (tokens, k, None), x)
    return tokens, k
