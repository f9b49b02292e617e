"""The right result: in float64 with a bound on the error, or exact for small integers.

The formula is that of the interface, written as a gather over tokens; no backend is used. The
derivation of the bound is in docs/explanation/numerics.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.testing.cases.inputs import stack_of_a, stack_of_b
from lora_backends.weights import LoRAWeights

_UNIT_ROUNDOFF = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
SMALLEST = {  # most that an underflow loses; except in float16, denormals count as lost
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-126,
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
}
Count: TypeAlias = int | torch.Tensor  # one number, or one for each sum
_CHUNK = 1 << 22  # float64 values gathered at once


@dataclass(frozen=True, eq=False)
class Expected:
    """A result in float64 and how far a right backend may be from it, element by element."""

    value: torch.Tensor  # float64, CPU
    bound: torch.Tensor  # float64, same shape, >= 0; 0: equal

    def __add__(self, other: Expected) -> Expected:
        return Expected(self.value + other.value, self.bound + other.bound)


def gamma(operations: Count, unit: float) -> Any:
    """Return ``k u / (1 - k u)``: the relative error that k roundings of unit u add up to."""
    return operations * unit / (1 - operations * unit)


def sum_unit(dtype: torch.dtype | None) -> float:
    """Return the relative error of one addition: float32 that may truncate, or float64."""
    return 2.0**-52 if dtype == torch.float64 else 2.0**-23


def expected_shrink(
    x: torch.Tensor,
    weights: LoRAWeights,
    batch: LoRABatch,
    intermediate: torch.dtype = torch.float32,
) -> Expected:
    """Return h and its bound, ``gamma(2n) * sum |x| |a|`` for n nonzero elements of a row of x.

    h is kept in the dtype `intermediate`; narrower than float32 it is rounded once more. It is
    [num_slices, num_tokens, max_rank]; zero, with bound 0, beyond a rank and without adapter.
    """
    tokens = batch.num_tokens
    shape = (weights.num_slices, tokens, weights.max_rank)
    value, magnitude = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))
    x_all = masked(x, (batch.token_slots != NO_ADAPTER)[:, None])
    used, terms, a_all = (x_all != 0).any(0), counted(x_all)[:, None], stack_of_a(weights)
    if 2 * int(used.sum()) < weights.in_features:
        # a sparse x leaves little to gather: products of 0 with finite values add nothing
        some = (used | _not_finite(a_all, weights, batch)).nonzero().flatten()
        x_all, a_all = x_all[:, some], a_all[..., some]
    width = max(1, weights.num_slices * weights.max_rank * x_all.shape[1])
    for rows in _chunks(batch.token_slots, width):
        slots = batch.token_slots[rows]
        slots, token = (slots[:1], "u") if _of_one_slot(rows) else (slots, "t")
        mask = rank_mask(weights, slots)  # [T, S, R], or of one slot
        a = masked(a_all[slots.clamp(min=0)], mask[..., None])  # [T, S, R, I]
        x_rows, product = x_all[rows], f"ti,{token}sri->str"
        value[:, rows] = torch.einsum(product, x_rows, a)
        magnitude[:, rows] = torch.einsum(product, x_rows.abs(), a.abs())
    bound = sum_bound(magnitude, terms + scale_operations(weights), weights.compute_dtype)
    if intermediate in (torch.float16, torch.bfloat16):
        bound += rounding_bound(value, bound, intermediate)
    within = rank_mask(weights, batch.token_slots).permute(1, 0, 2)
    return Expected(value, bound * within)


def _not_finite(a: torch.Tensor, weights: LoRAWeights, batch: LoRABatch) -> torch.Tensor:
    """Return the columns of A in which a token's slot holds NaN or infinity, [in_features] bool."""
    slots = torch.tensor(sorted({*batch.token_slots.tolist()}), dtype=torch.int64, device="cpu")
    odd = ~a[slots.clamp(min=0)].isfinite() & rank_mask(weights, slots)[..., None]
    return odd.flatten(0, 2).any(0)


def expected_expand(
    h: Expected,
    weights: LoRAWeights,
    batch: LoRABatch,
    base_output: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> Expected:
    """Return y, [num_tokens, out_features], and its bound, from h with its own.

    An h that is given has bound 0. The bound of y is 0 where y keeps base_output.
    """
    return _add(h, weights, batch, _start(weights, batch, base_output), out_dtype)


def _start(weights: LoRAWeights, batch: LoRABatch, base_output: torch.Tensor | None) -> Expected:
    """Return the value that a call adds to: base_output, or zeros."""
    zeros = torch.zeros(batch.num_tokens, weights.out_features, dtype=torch.float64, device="cpu")
    return Expected(zeros if base_output is None else base_output.detach().cpu().double(), zeros)


def _add(
    h: Expected,
    weights: LoRAWeights,
    batch: LoRABatch,
    start: Expected,
    out_dtype: torch.dtype,
) -> Expected:
    """Return y of a batch of one adapter per token, added to `start`, which has a bound too."""
    _tokens, out_features = batch.num_tokens, weights.out_features
    base, value, bound = start.value, start.value.clone(), start.bound.clone()
    b_all = stack_of_b(weights)
    scalings = masked(weights.scalings, weights.ranks.detach().cpu() > 0)
    factors = (2 if batch.token_scales is None else 3) + scale_operations(weights)
    for rows in _chunks(batch.token_slots, max(1, out_features * weights.max_rank)):
        slots = batch.token_slots[rows]
        safe, mask = slots.clamp(min=0), rank_mask(weights, slots)  # [T], [T, S, R]
        own, token = (slice(1), "u") if _of_one_slot(rows) else (slice(None), "t")
        product = f"tr,{token}nr->tn"
        for s, (first, end) in enumerate(_columns(weights)):
            b = masked(b_all[safe[own], first:end], mask[own, s, None])  # [T, N, R], or of one slot
            scaling = scalings[safe, s, None]
            if batch.token_scales is not None:
                scaling = scaling * batch.token_scales[rows, None].double()
            h_rows = masked(h.value[s, rows], mask[:, s])
            h_error = masked(h.bound[s, rows], mask[:, s])
            delta = scaling * torch.einsum(product, h_rows, b)
            b = b.abs_()
            from_h = torch.einsum(product, h_error, b)
            magnitude = torch.einsum(product, h_rows.abs(), b) + from_h
            terms = mask[:, s].sum(1, keepdim=True) + factors
            sums = sum_bound(magnitude, terms, weights.compute_dtype)
            value[rows, first:end] += delta
            bound[rows, first:end] += scaling.abs() * (from_h + sums)
    value, bound = _finish(value, bound, weights, batch, base)
    bound += rounding_bound(value, bound, out_dtype)
    changed = touched(weights, batch)
    return Expected(torch.where(changed, value, base), torch.where(changed, bound, start.bound))


def _finish(
    value: torch.Tensor,
    bound: torch.Tensor,
    weights: LoRAWeights,
    batch: LoRABatch,
    base: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``output_scales * value + bias`` and its bound; value is base plus delta."""
    slots, has_adapter = batch.token_slots.clamp(min=0), (batch.token_slots != NO_ADAPTER)[:, None]
    magnitude, unit = base.abs() + (value - base).abs() + bound, sum_unit(weights.compute_dtype)
    bias, operations, lost = torch.zeros_like(value), 4, 0.0
    if weights.output_scales is not None:
        scales = masked(weights.output_scales.cpu()[slots], has_adapter)
        value, bound, magnitude = scales * value, scales.abs() * bound, scales.abs() * magnitude
        # a small scale may make denormals, which a device may flush
        operations, lost = 6, 2 * SMALLEST[torch.float32]
    if weights.bias is not None:
        bias = masked(weights.bias.cpu()[slots], has_adapter)
    bound = bound + gamma(operations, unit) * (magnitude + bias.abs()) + lost
    return value + bias, bound


def rounding_bound(value: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error that one rounding to `dtype` adds to the bound of a value."""
    return _UNIT_ROUNDOFF[dtype] * (value.abs() + bound) + SMALLEST[dtype]


def expected_linear(
    x: torch.Tensor,
    weights: LoRAWeights,
    batch: LoRABatch,
    base_output: torch.Tensor | None = None,
    *,
    intermediate: torch.dtype = torch.float32,
) -> Expected:
    """Return y of `run_linear`, as `LoRABackend` defines it, and its bound.

    `intermediate` is the dtype that a backend keeps h in between the two products. Of several
    adapters per token, each is added in float32 or wider to the sum of those before it, and the sum
    is rounded once.
    """
    out_dtype = x.dtype if base_output is None else base_output.dtype
    y, parts = _start(weights, batch, base_output), batch.per_adapter(batch.adapters_per_token)
    sum_dtype = out_dtype if len(parts) == 1 else torch.promote_types(out_dtype, torch.float32)
    for part in parts:
        h = expected_shrink(x, weights, part, intermediate)
        y = _add(h, weights, part, y, sum_dtype)
    if sum_dtype != out_dtype:
        rounding = rounding_bound(y.value, y.bound, out_dtype) * touched(weights, batch)
        y = Expected(y.value, y.bound + rounding)
    return y


def expected_embedding(
    token_ids: torch.Tensor,
    weights: LoRAWeights,
    batch: LoRABatch,
    base_output: torch.Tensor | None = None,
    *,
    intermediate: torch.dtype = torch.float32,
) -> Expected:
    """Return `expected_linear` for ``x = one_hot(token_ids)``."""
    x = one_hot(token_ids, weights.in_features, weights.compute_dtype)
    return expected_linear(x, weights, batch, base_output, intermediate=intermediate)


def one_hot(token_ids: torch.Tensor, columns: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Return ``one_hot(token_ids)`` on the CPU, also for no tokens and 0 columns, unlike torch."""
    ids = token_ids.cpu().long()[:, None]
    return torch.zeros(len(ids), columns, dtype=dtype, device="cpu").scatter_(1, ids, 1)


def rounded_exactly(expected: Expected, dtype: torch.dtype) -> torch.Tensor:
    """Return the one result that a case of small integers has: exact sums, rounded once."""
    # exact in float32, so that the rounding into y is the only one
    exact = expected.value.float()
    if not torch.equal(exact.double(), expected.value):
        raise ValueError("the sums of this case are not exact in float32; use values='integer'")
    return expected.value.to(dtype) if dtype == torch.float64 else exact.to(dtype)


def touched(weights: LoRAWeights, batch: LoRABatch) -> torch.Tensor:
    """Return which elements of y may change.

    They have an adapter, and a rank above 0, or a bias or output_scales.
    """
    if batch.adapters_per_token > 1:
        parts = batch.per_adapter(batch.adapters_per_token)
        return torch.stack([touched(weights, part) for part in parts]).any(0)
    slots = batch.token_slots
    adapted = weights.ranks.detach().cpu()[slots.clamp(min=0)] > 0  # [T, S]
    if weights.bias is not None or weights.output_scales is not None:
        # both act on slices of rank 0 too
        adapted = torch.ones_like(adapted)
    adapted &= (slots != NO_ADAPTER)[:, None]
    return adapted.repeat_interleave(torch.tensor(weights.output_slices, device="cpu"), dim=1)


def scale_operations(weights: LoRAWeights) -> int:
    """Return the operations that scales of 8-bit stacks add to a sum of products."""
    return 0 if weights.a_scales is None and weights.b_scales is None else 1


def sum_bound(magnitude: torch.Tensor, terms: Count, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the error of a sum of products whose absolute values sum to `magnitude`.

    `terms` is the number of products, without those that have a factor of 0: one number for all
    sums, or a tensor with one for each.
    """
    lost = 2 * terms * SMALLEST[torch.float64 if dtype == torch.float64 else torch.float32]
    return gamma(2 * terms, sum_unit(dtype)) * magnitude + lost  # type: ignore[no-any-return]


def counted(factors: torch.Tensor) -> torch.Tensor:
    """Return the number of nonzero factors in each row, [rows] float64, as `terms` of a bound."""
    # adding a product with a factor of 0 is exact, in any order
    return (factors != 0).sum(-1, dtype=torch.float64)


def rank_mask(weights: LoRAWeights, slots: torch.Tensor) -> torch.Tensor:
    """Return which h are within the token's own rank: [num_tokens, num_slices, max_rank] bool."""
    ranks = weights.ranks.detach().cpu()[slots.clamp(min=0)]
    within = torch.arange(weights.max_rank, device="cpu") < ranks[..., None]
    return within & (slots != NO_ADAPTER)[:, None, None]


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return float64 values on the CPU, zero where `mask` is false, also for NaN."""
    return torch.where(mask, values.detach().cpu().double(), 0.0)


def _columns(weights: LoRAWeights) -> list[tuple[int, int]]:
    offsets = weights.slice_offsets
    return list(zip(offsets[:-1], offsets[1:], strict=True))


def _chunks(slots: torch.Tensor, values_per_token: int) -> Iterator[slice | torch.Tensor]:
    """Yield all tokens, or those of each slot where their matrices would take gigabytes."""
    if len(slots) * values_per_token <= _CHUNK:
        yield slice(len(slots))
        return
    for slot in sorted({*slots.tolist()} - {NO_ADAPTER}):
        yield (slots == slot).nonzero().flatten()


def _of_one_slot(rows: slice | torch.Tensor) -> bool:
    return isinstance(rows, torch.Tensor)
