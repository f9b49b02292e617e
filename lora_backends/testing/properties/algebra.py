"""Relations that follow from the formula being linear: sums, shards, merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER
from lora_backends.eight_bit import b_row_groups
from lora_backends.testing import oracles
from lora_backends.testing.assertions import assert_close, assert_same_values
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.inputs import LoRAInputs, guarded
from lora_backends.testing.oracles import Expected
from lora_backends.testing.properties.core import ANY_LAYER, BOUNDED, either_prop, prop
from lora_backends.testing.properties.runs import assert_agree, columns, expected, linear
from lora_backends.weights import LoRAWeights


def _assert_sum(backend: LoRABackend, whole: LoRAInputs, parts: Sequence[LoRAInputs]) -> None:
    """Check that y of `whole` is the sum of the parts' y, within all their bounds."""
    wanted = expected(backend, whole)
    total = Expected(torch.zeros_like(wanted.value), wanted.bound)
    for part in parts:
        y = linear(backend, part).detach().cpu().double()
        total = total + Expected(y, expected(backend, part).bound)
    assert_close(linear(backend, whole), total, whole)


def _halves(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    """Return a random mask; values under it and values outside add up to all, exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(tuple(shape), generator=generator, device="cpu") < 0.5).to(device)


@prop("The delta is linear in x.", values="either", agreement=BOUNDED)
def delta_is_linear_in_x(backend: LoRABackend, case: LoRACase) -> None:
    """The input x is cut into two parts that add up to it without rounding."""
    inputs = case.build(backend.device).without_base_and_bias()
    # a mask, not a sum of halves: the parts must add up exactly
    mask = _halves(inputs.x.shape, case.seed, inputs.x.device)
    parts = [inputs.replace(x=inputs.x.masked_fill(cut, 0.0)) for cut in (mask, ~mask)]
    _assert_sum(backend, inputs, parts)


@prop("The delta is linear in lora_b.", values="either", agreement=BOUNDED, examples=20)
def delta_is_linear_in_lora_b(backend: LoRABackend, case: LoRACase) -> None:
    """lora_b is cut into two parts that add up to it without rounding."""
    inputs = case.build(backend.device).without_base_and_bias()
    b = inputs.weights.lora_b
    mask = _halves(b.shape, case.seed, b.device)
    parts = [
        inputs.replace(weights=replace(inputs.weights, lora_b=b.masked_fill(cut, 0.0)))
        for cut in (mask, ~mask)
    ]
    _assert_sum(backend, inputs, parts)


@prop(
    "Concatenated ranks are the sum of two adapters.",
    values="either",
    agreement=BOUNDED,
    examples=20,
)
def concatenated_ranks_are_a_sum(backend: LoRABackend, case: LoRACase) -> None:
    """Every adapter is cut into its first ranks and its last."""
    inputs = case.build(backend.device).without_base_and_bias()
    weights = inputs.weights
    first = replace(weights, ranks=weights.ranks // 2)
    # NaN beyond the new ranks, as in any case
    a, b = torch.full_like(weights.lora_a, torch.nan), torch.full_like(weights.lora_b, torch.nan)
    ranks = weights.ranks - first.ranks
    for slot, of_slot in enumerate(ranks.tolist()):
        for s, rest in enumerate(of_slot):
            start, cols = int(first.ranks[slot, s]), columns(weights, s)
            a[slot, s, :rest] = weights.lora_a[slot, s, start : start + rest]
            b[slot, cols, :rest] = weights.lora_b[slot, cols, start : start + rest]
    last = replace(weights, lora_a=a, lora_b=b, ranks=ranks)
    _assert_sum(backend, inputs, [inputs.replace(weights=part) for part in (first, last)])


@either_prop("Stacked slices equal separate layers.", num_slices=3, features=ANY_LAYER, examples=20)
def stacked_slices_equal_separate_layers(backend: LoRABackend, case: LoRACase) -> None:
    """A fused qkv against q, k and v, each a layer of one slice."""
    inputs = case.build(backend.device)
    wanted = expected(backend, inputs)
    y = linear(backend, inputs)
    for s in range(3):
        cols = columns(inputs.weights, s)
        base = None if inputs.base is None else inputs.base[:, cols].contiguous()
        single = replace(inputs.replace(weights=slice_of_layer(inputs.weights, s)), base=base)
        alone = linear(backend, single)
        # each of the two results may be off by its own bound
        bound = 2 * wanted.bound[:, cols]
        assert_agree(alone, y[:, cols], bound, single, exact=case.is_integer, claimed=False)


def slice_of_layer(weights: LoRAWeights, slice_index: int) -> LoRAWeights:
    """Return one slice of a fused layer as a layer of its own; its tensors are views."""
    cols, only = columns(weights, slice_index), slice(slice_index, slice_index + 1)
    scales: dict[str, Any] = {}
    if weights.a_scales is not None and weights.b_scales is not None:
        groups = b_row_groups(weights.output_slices, weights.scale_block)
        scales["a_scales"] = weights.a_scales[:, only]
        scales["b_scales"] = torch.split_with_sizes(weights.b_scales, groups, 1)[slice_index]
        scales |= {"scale_block": weights.scale_block, "compute_dtype": weights.compute_dtype}
    return LoRAWeights(
        lora_a=weights.a_of(slice_index)[:, None],
        lora_b=weights.b_of(slice_index),
        ranks=weights.ranks[:, only],
        scalings=weights.scalings[:, only],
        output_slices=(weights.output_slices[slice_index],),
        bias=_of_columns(weights.bias, cols),
        output_scales=_of_columns(weights.output_scales, cols),
        **scales,
    )


def _of_columns(per_column: torch.Tensor | None, cols: slice) -> torch.Tensor | None:
    return None if per_column is None else per_column[:, cols]


@prop(
    "Merged weights, W + s B A, equal unmerged ones.",
    agreement=BOUNDED,
    base=True,
    values="either",
    output_scales=False,
    features=ANY_LAYER,
)
def merged_weights_equal_unmerged(backend: LoRABackend, case: LoRACase) -> None:
    """Row by row x (W + s B A)^T, for every adapter's own merged matrix, in float64."""
    inputs = case.build(backend.device)
    weights = inputs.weights
    generator = torch.Generator().manual_seed(case.seed)
    w = torch.randn(
        weights.out_features, weights.in_features, generator=generator, device="cpu"
    ).double()
    x = inputs.x.cpu().double().nan_to_num(nan=0.0)
    base = (x @ w.T).to(case.base)
    y_inputs = replace(inputs, base=base.to(backend.device))
    wanted, scales = x @ w.T, inputs.batch.token_scales
    for token, slot in enumerate(case.slots):
        if slot != NO_ADAPTER:
            factor = 1.0 if scales is None else float(scales[token])
            wanted[token] = x[token] @ (w + factor * delta_of(weights, slot)).T
            if weights.bias is not None:
                wanted[token] += weights.bias[slot].cpu().double()
    # base_output was rounded to its dtype before the call
    rounding = (base.double() - x @ w.T).abs() + 1e-12 * (x.abs() @ w.abs().T)
    bound = expected(backend, y_inputs).bound + rounding
    assert_close(linear(backend, y_inputs), Expected(wanted, bound), y_inputs)


def delta_of(weights: LoRAWeights, slot: int) -> torch.Tensor:
    """Return s B A of a slot, all slices below each other: [out_features, in_features] float64."""
    delta = torch.zeros(
        weights.out_features, weights.in_features, dtype=torch.float64, device="cpu"
    )
    for s in range(weights.num_slices):
        rank, cols = int(weights.ranks[slot, s]), columns(weights, s)
        a = weights.a_values(slot, s, rank, torch.float64).cpu()
        b = weights.b_values(slot, s, rank, torch.float64).cpu()
        if rank:
            delta[cols] = float(weights.scalings[slot, s]) * b @ a
    return delta


@either_prop("Column-parallel shards put side by side are the whole.", num_slices=1)
def column_shards_recombine(backend: LoRABackend, case: LoRACase) -> None:
    """Rows of lora_b are cut in two; every shard has all of lora_a."""
    inputs = case.build(backend.device)
    weights = inputs.weights
    y, bound = linear(backend, inputs), 2 * expected(backend, inputs).bound
    for cols in _shards(weights.out_features):
        shard = replace(
            weights,
            lora_b=weights.lora_b[:, cols],
            output_slices=(cols.stop - cols.start,),
            bias=_of_columns(weights.bias, cols),
            output_scales=_of_columns(weights.output_scales, cols),
        )
        base = None if inputs.base is None else inputs.base[:, cols].contiguous()
        part = replace(inputs.replace(weights=shard), base=base)
        left, exact = linear(backend, part), case.is_integer
        assert_agree(left, y[:, cols], bound[:, cols], part, exact=exact, claimed=False)


def _shards(width: int) -> list[slice]:
    """Return the columns of two shards, or of one where there is one column."""
    cut = (width + 1) // 2
    return [slice(0, cut), slice(cut, width)][:width]


@either_prop("Row-parallel shards, their h summed, are the whole.")
def row_shards_recombine(backend: LoRABackend, case: LoRACase) -> None:
    """Both x and the columns of lora_a are cut in two; h is summed before run_lora_b."""
    inputs = case.build(backend.device)
    weights = inputs.weights
    plan = backend.prepare_batch(inputs.batch)
    h = None
    for cols in _shards(weights.in_features):
        # a shard's x is a tensor of its own in a parallel layer
        x = guarded(inputs.x[:, cols], inputs.x_pad, float("nan"))
        part = backend.run_lora_a(x, replace(weights, lora_a=weights.lora_a[..., cols]), plan)
        h = part if h is None else h + part
    assert h is not None
    y = backend.run_lora_b(h, weights, plan, inputs.new_view())
    wanted = oracles.expected_linear(inputs.x, weights, inputs.batch, inputs.base)
    if case.is_integer:
        assert_same_values(y, oracles.rounded_exactly(wanted, y.dtype), inputs)
    else:
        assert_close(y, replace(wanted, bound=2 * wanted.bound), inputs)
