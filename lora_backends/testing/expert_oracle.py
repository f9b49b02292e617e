"""The right result of experts: each pair is a token of a dense layer, one slot per expert.

The bound of the dense oracle is that of a pair. The router's weight adds one rounding, the scale of
the token another, and a sum over k pairs at most k - 1 additions. base_output adds two operations,
since it may be converted first. The rounding into y comes last. The bound is 0 where no live pair
has a rank.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.testing.cases.experts import ExpertInputs
from lora_backends.testing.oracles import (
    Expected,
    expected_expand,
    expected_shrink,
    gamma,
    rounding_bound,
    sum_unit,
    touched,
)
from lora_backends.weights import LoRAWeights


def dense_layer(inputs: ExpertInputs) -> tuple[torch.Tensor, LoRAWeights, LoRABatch]:
    """Return x, layer and batch whose tokens are the pairs and whose slots are the experts.

    Slot l * num_experts + e is expert e of slot l. Slices are blocks of columns, each with an A of
    its own; `in_dense_order` says where the columns of an interleaved layer went.
    """
    weights, top_k = inputs.weights, inputs.ids.shape[1]
    slots, experts, slices = weights.num_slots, weights.num_experts, weights.num_slices
    a = weights.lora_a.expand(slots, experts, slices, -1, -1)
    b = weights.lora_b.expand(slots, experts, -1, -1)
    if weights.b_scales is not None:  # torch picks bytes, not float8
        b = b.view(torch.int8)
    b = b[:, :, in_dense_order(inputs)].view(weights.dtype)
    eight: dict[str, Any] = {}
    if weights.a_scales is not None and weights.b_scales is not None:
        eight = {
            "a_scales": weights.a_scales.expand(slots, experts, slices, -1, -1).flatten(0, 1),
            "b_scales": weights.b_scales.expand(slots, experts, -1, -1).flatten(0, 1),
            "scale_block": weights.scale_block,
            "compute_dtype": weights.compute_dtype,
        }
    ranks, scalings = (t.expand(slots, experts, slices) for t in (weights.ranks, weights.scalings))
    layer = LoRAWeights(
        lora_a=a.flatten(0, 1),
        lora_b=b.flatten(0, 1),
        ranks=ranks.flatten(0, 1),
        scalings=scalings.flatten(0, 1),
        output_slices=weights.output_slices,
        **eight,
    )
    pair_slots = inputs.batch.token_slots[:, None] * experts + inputs.ids
    # dead pairs have ids below 0, and would name another slot
    pair_slots = torch.where(inputs.live, pair_slots, NO_ADAPTER).flatten()
    x = inputs.x
    if inputs.options["rows"] == "tokens":
        x = x.repeat_interleave(top_k, 0)
    return x, layer, LoRABatch(pair_slots, slots * experts)


def in_dense_order(inputs: ExpertInputs) -> torch.Tensor:
    """Return the column of y that each column of the dense layer is: [out_features] int64."""
    weights = inputs.weights
    columns = torch.arange(weights.out_features, device="cpu")
    return torch.cat([columns[weights.columns(s)] for s in range(weights.num_slices)])


def expected_experts(
    inputs: ExpertInputs, *, intermediate: torch.dtype = torch.float32
) -> Expected:
    """Return y of `run_experts` and its bound; `intermediate` as in `expected_linear`.

    It is [num_tokens, k, out_features], or [num_tokens, out_features] where pairs are summed.
    """
    x, layer, batch = dense_layer(inputs)
    h = expected_shrink(x, layer, batch, intermediate)
    delta = expected_expand(h, layer, batch, None, torch.float64)
    back, pairs = in_dense_order(inputs).argsort(), (*inputs.ids.shape, -1)
    value, bound = (
        part[:, back].reshape(*pairs[:2], layer.out_features) for part in (delta.value, delta.bound)
    )
    unit = sum_unit(layer.compute_dtype)
    factors, roundings = _factors(inputs)
    value, bound = factors * value, factors.abs() * bound
    bound = bound + gamma(roundings, unit) * (value.abs() + bound)
    if inputs.options["reduce"]:
        magnitude = (value.abs() + bound).sum(1)
        value, bound = value.sum(1), bound.sum(1) + gamma(pairs[1], unit) * magnitude
    base = torch.zeros_like(value) if inputs.base is None else inputs.base.cpu().double()
    bound = bound + gamma(2, unit) * (base.abs() + value.abs() + bound)
    value = base + value
    out_dtype = inputs.x.dtype if inputs.base is None else inputs.base.dtype
    bound = bound + rounding_bound(value, bound, out_dtype)
    return Expected(value, bound * touched_by_experts(inputs))


def _factors(inputs: ExpertInputs) -> tuple[torch.Tensor, int]:
    """Return the factor of each pair, [num_tokens, k, 1], and how many factors it has."""
    factors, count = torch.ones(*inputs.ids.shape, 1, dtype=torch.float64, device="cpu"), 0
    if inputs.options["weighted"]:
        factors, count = inputs.topk_weights.cpu().double().nan_to_num(0.0)[..., None], 1
    if inputs.batch.token_scales is not None:
        return factors * inputs.batch.token_scales.double()[:, None, None], count + 1
    return factors, count


def touched_by_experts(inputs: ExpertInputs) -> torch.Tensor:
    """Return which elements of y may change, of the shape of y, bool."""
    _, layer, batch = dense_layer(inputs)
    pairs = touched(layer, batch)[:, in_dense_order(inputs).argsort()]
    pairs = pairs.reshape(*inputs.ids.shape, layer.out_features)
    return pairs.any(1) if inputs.options["reduce"] else pairs
