"""`run_experts` in plain torch, for every backend: right on any device, and slow.

Each pair gathers its own A and B. All products are summed by halves with elementwise additions,
whose order depends on the widths alone. So a row's result has the same bits in any batch, and every
backend keeps its claims here. Only the first call with a number of slots waits for the device
(`token_slots`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from lora_backends.dtypes import accumulator_dtype
from lora_backends.eight_bit import LARGEST, b_row_groups, spread
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.weights import LoRAWeights

VALUES_AT_ONCE = 2**24
"""Elements of A or B that are gathered at once: 64 MiB in float32."""


def add_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: ExpertRouting,
    *,
    slots: torch.Tensor,  # [num_tokens] int64, -1 for none
    token_scales: torch.Tensor | None,  # [num_tokens or more] float32
    rows: str,
    weighted: bool,
    reduce: bool,
) -> None:
    """Add the delta of every live pair to y, in place; others are arguments of `run_experts`."""
    tokens, top_k = routing.topk_ids.shape
    if rows == "tokens":
        x_pairs = x[:, None].expand(-1, top_k, -1)  # [T, k, in_features]
    else:
        x_pairs = x.view(tokens, top_k, weights.in_features)
    widest = max(weights.in_features, weights.out_features)
    step = max(1, VALUES_AT_ONCE // max(1, top_k * weights.max_rank * widest))
    for first in range(0, tokens, step):
        chunk = slice(first, first + step)
        ids, factors = routing.topk_ids[chunk], routing.topk_weights[chunk]
        factors = factors if weighted else torch.ones_like(factors)
        if token_scales is not None:  # their product would not be exact in float32
            scales = token_scales[: routing.num_tokens].to(accumulator_dtype(weights.dtype))
            factors = factors * scales[chunk, None]
        pairs = _PairMatrices(weights, slots[chunk, None].expand_as(ids), ids)
        for s in range(weights.num_slices):
            delta, touched = pairs.delta(x_pairs[chunk], s)  # [t, k, width], [t, k]
            if weighted or token_scales is not None:
                delta = delta * torch.where(touched, factors, 0)[..., None]
            if reduce:
                delta, touched = _sum(delta.movedim(1, -1)), touched.any(1)
            part = y[chunk][..., weights.columns(s)]
            total = (part.to(torch.promote_types(delta.dtype, y.dtype)) + delta).to(y.dtype)
            part.copy_(torch.where(touched[..., None], total, part))  # others keep their bits


class _PairMatrices:
    """Pairs of some tokens, and the matrices of each."""

    def __init__(self, weights: ExpertWeights, slots: torch.Tensor, ids: torch.Tensor) -> None:
        self.weights = weights
        self.live = (slots >= 0) & (ids >= 0)  # [t, k]
        self.slots, self.ids = slots.clamp(min=0), ids.clamp(min=0)

    def delta(self, x: torch.Tensor, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the delta of slice s, zero where nothing is added, and where something is."""
        weights, sums = self.weights, accumulator_dtype(self.weights.dtype)
        a = s if weights.num_a > 1 else 0
        rank = self._of_pairs(weights.ranks[:, :, a])
        touched = self.live & (rank > 0)
        within = torch.arange(weights.max_rank, device=rank.device) < rank[..., None]  # [t, k, R]
        within = within & touched[..., None]
        lora_a = _masked(within[..., None], self._of_pairs(weights.lora_a[:, :, a]), sums)
        lora_b = self._of_pairs(weights.lora_b[:, :, weights.columns(s)])
        lora_b = _masked(within[:, :, None], lora_b, sums)
        if weights.a_scales is not None and weights.b_scales is not None:
            block, inputs = weights.scale_block, weights.in_features
            a_scales = self._of_pairs(weights.a_scales[:, :, a])
            a_scales = spread(a_scales, weights.max_rank, inputs, block)
            groups = b_row_groups(weights.output_slices, block)
            first = sum(groups[:s])
            b_scales = self._of_pairs(weights.b_scales[:, :, first : first + groups[s]])
            b_scales = spread(b_scales, weights.output_slices[s], weights.max_rank, block)
            lora_a = lora_a * torch.where(within[..., None], a_scales, 0)
            lora_b = lora_b * torch.where(within[:, :, None], b_scales, 0)
        h = _sum(lora_a * _masked(touched[..., None], x, sums)[:, :, None])  # [t, k, R]
        scaling = _masked(touched, self._of_pairs(weights.scalings[:, :, a]), sums)
        return scaling[..., None] * _sum(lora_b * h[:, :, None]), touched

    def _of_pairs(self, stack: torch.Tensor) -> torch.Tensor:
        """Return the part of [num_slots, num_experts or 1, ...] that is each pair's own."""
        ids = self.ids if stack.shape[1] > 1 else torch.zeros_like(self.ids)
        if stack.dtype in LARGEST:  # torch picks bytes, not float8
            return stack.view(torch.int8)[self.slots, ids].view(stack.dtype)
        return stack[self.slots, ids]


def _masked(mask: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` where `mask` is true, else zero, also for NaN."""
    return torch.where(mask, values.to(dtype), 0)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last axis: its second half is added to its first, again and again."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        total = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat([total, values[..., 2 * half :]], -1)
    return values.sum(-1)  # of one value, or of none


def token_slots(
    shrink: Callable[..., torch.Tensor],  # the engine's `run_lora_a`
    dtype: torch.dtype,  # that the engine supports
    device: torch.device,
    plan: Any,
    num_slots: int,
    num_tokens: int,
) -> torch.Tensor:
    """Return the slot of every token, [num_tokens] int64 on the device, -1 for none."""
    # The function cannot look into a plan. So it lets the engine shrink ones with a layer whose h
    # is the number of the slot. Making that layer waits for the device, once for each number of
    # slots.
    ones = torch.ones(num_tokens, 1, dtype=dtype, device=device)
    with torch.no_grad():
        digits = shrink(ones, _slot_numbers(num_slots, dtype, device), plan)[0].long()
    number = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    for digit in reversed(digits.unbind(-1)):
        number = number * _DIGIT + digit
    return number - 1


_DIGIT = 128
"""Slots are written with digits below this, which all dtypes represent exactly."""


@lru_cache(maxsize=64)
def _slot_numbers(num_slots: int, dtype: torch.dtype, device: torch.device) -> LoRAWeights:
    """Return a layer of one input whose h are the digits of slot + 1, the lowest first."""
    count = 1
    while _DIGIT**count <= num_slots:
        count += 1
    numbers = [
        [slot // _DIGIT**i % _DIGIT for i in range(count)] for slot in range(1, num_slots + 1)
    ]
    return LoRAWeights(
        lora_a=torch.tensor(numbers, dtype=dtype, device=device)[:, None, :, None].contiguous(),
        lora_b=torch.zeros(num_slots, 1, count, dtype=dtype, device=device),
        ranks=torch.full((num_slots, 1), count, device=device),
        scalings=torch.zeros(num_slots, 1, device=device),
        output_slices=(1,),
    )
