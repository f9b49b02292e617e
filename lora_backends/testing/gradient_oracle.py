"""The right gradients: in float64, from the formulas of the interface, each with a bound.

No autograd takes part. The derivation of the bounds is in docs/explanation/numerics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.dtypes import accumulator_dtype
from lora_backends.operations import BY_NAME, Input, Operation
from lora_backends.testing.cases.inputs import LoRAInputs, stack_of_a, stack_of_b
from lora_backends.testing.oracles import (
    SMALLEST,
    Expected,
    counted,
    expected_expand,
    expected_shrink,
    gamma,
    masked,
    one_hot,
    rank_mask,
    rounding_bound,
    scale_operations,
    sum_bound,
    sum_unit,
)

ExpectedGradients: TypeAlias = Mapping[str, Expected]
"""By the name of a tensor: x, h, lora_a, lora_b, bias, output_scales, base_output."""


def expected_gradients(
    operation: str,
    inputs: LoRAInputs,
    grad: torch.Tensor,
    h: torch.Tensor | None = None,
    *,
    narrow: bool = False,
) -> ExpectedGradients:
    """Return the gradients of all tensors that an operation reads, and their bounds.

    Those of stacks have the shapes [num_slots, num_slices, max_rank, in_features] and
    [num_slots, out_features, max_rank]. The bound is 0 where a gradient is exactly zero: beyond
    ranks, for slots without tokens, and in rows without an adapter.

    Args:
        operation: name of one on dense layers.
        inputs: of the call. Where a token has several adapters, the gradients of each are rounded,
            and their sum is rounded again.
        grad: of the result, in its dtype.
        h: the first argument of `run_lora_b`.
        narrow: whether the backend keeps operands in 16 bits (`narrow_intermediate`).
    """
    total: dict[str, Expected] = {}
    for part in inputs.batch.per_adapter(inputs.batch.adapters_per_token):
        expected_of = _Part(BY_NAME[operation], inputs, part, grad, h, narrow).gradients()
        for name, (gradient, dtype) in expected_of.items():
            if name == "base_output" and name in total:
                continue  # the gradient that one adapter passes on to the next: no term of a sum
            if name in total:
                added = total[name] + gradient
                gradient = rounded(added, dtype, added.bound > 0)
            total[name] = gradient
    return total


def rounded(expected: Expected, dtype: torch.dtype, where: torch.Tensor) -> Expected:
    """Return a value that is rounded to a dtype at some places."""
    more = rounding_bound(expected.value, expected.bound, dtype)
    return Expected(expected.value, expected.bound + more * where)


def operand(expected: Expected, dtype: torch.dtype, narrow: bool) -> Expected:
    """Return an operand of a product, which a narrow backend rounds to the weights' dtype."""
    if not narrow or dtype not in (torch.float16, torch.bfloat16):
        return expected
    return rounded(expected, dtype, expected.value != 0)


def zeros(*shape: int) -> Expected:
    """Return a sum that has no terms yet."""
    value = torch.zeros(shape, dtype=torch.float64, device="cpu")
    return Expected(value, value.clone())


@dataclass(eq=False)
class _Part:
    """The gradients of a call with one adapter per token."""

    operation: Operation
    inputs: LoRAInputs
    batch: LoRABatch
    grad: torch.Tensor
    h: torch.Tensor | None
    narrow: bool

    def __post_init__(self) -> None:
        inputs, weights = self.inputs, self.inputs.weights
        self.weights = weights
        self.kind = weights.compute_dtype or torch.float32
        self.sums = self.kind if self.grad.dtype != torch.float64 else torch.float64
        self.slots = self.batch.token_slots
        self.has = (self.slots != NO_ADAPTER)[:, None]
        self.a, self.b = stack_of_a(weights).double(), stack_of_b(weights).double()
        x = inputs.x
        if self.operation.input is Input.TOKEN_IDS:
            x = one_hot(inputs.token_ids, weights.in_features, self.kind)
        self.x = x
        self.x_values = masked(x, self.has)
        self.h_dtype = accumulator_dtype(self.kind) if self.h is None else self.h.dtype

    def gradients(self) -> dict[str, tuple[Expected, torch.dtype]]:
        """Return each gradient, rounded, and its dtype."""
        if self.operation.result == "h":
            within = rank_mask(self.weights, self.slots).permute(1, 0, 2)
            value = masked(self.grad, within)
            return self._through_a(self._operand(Expected(value, torch.zeros_like(value))))
        result = self.grad.dtype
        scaled = self._scaled()
        expected_of = {"base_output": (scaled, result)}
        operand = scaled if result == self.kind else self._operand(scaled)
        dh = self._dh(operand)
        expected_of["lora_b"] = (self._db(operand), self.kind)
        if self.operation.input is Input.H:
            # the gradient of an argument, in its own dtype
            expected_of["h"] = (rounded(dh, self.h_dtype, dh.bound > 0), self.h_dtype)
        else:
            expected_of |= self._through_a(self._operand(dh))
        if self.weights.bias is not None:
            expected_of["bias"] = self._over_tokens(self._exact(), self.weights.bias.dtype)
        if self.weights.output_scales is not None:
            expected_of["output_scales"] = self._over_tokens(self._unscaled(), torch.float32)
        return expected_of

    def _operand(self, expected: Expected) -> Expected:
        return operand(expected, self.kind, self.narrow)

    def _scaled(self) -> Expected:
        """Return g', dL/dy times output_scales, rounded to the dtype of y."""
        value = masked(self.grad, self.has)
        scales = self.weights.output_scales
        if scales is None:
            return Expected(value, torch.zeros_like(value))
        value = value * masked(scales.cpu()[self.slots.clamp(min=0)], self.has)
        bound = gamma(1, sum_unit(self.grad.dtype)) * value.abs() + SMALLEST[torch.float32]
        return rounded(Expected(value, bound * self.has), self.grad.dtype, self.has)

    def _factors(self, rows: torch.Tensor, slot: int, s: int) -> torch.Tensor:
        """Return scaling times token_scale of some tokens of a slot, [rows, 1]."""
        scaling = float(self.weights.scalings[slot, s])
        scales = self.batch.token_scales
        ones = torch.ones(len(rows), dtype=torch.float64, device="cpu")
        return scaling * (ones if scales is None else scales[rows].double())[:, None]

    def _own(self) -> list[tuple[int, torch.Tensor, int, int, slice]]:
        """Return slot, tokens, slice, rank and columns wherever there is a rank."""
        offsets, ranks = self.weights.slice_offsets, self.weights.ranks.tolist()
        return [
            (slot, (self.slots == slot).nonzero().flatten(), s, rank, slice(*offsets[s : s + 2]))
            for slot in sorted({*self.slots.tolist()} - {NO_ADAPTER})
            for s, rank in enumerate(ranks[slot])
            if rank
        ]

    def _dh(self, g: Expected) -> Expected:
        """Return dh[s, t, :r] = c * g'[t, o:o'] @ lora_b[l, o:o', :r]."""
        dh = zeros(self.weights.num_slices, len(self.slots), self.weights.max_rank)
        more = 3 + scale_operations(self.weights)  # both factors, and a conversion
        for slot, rows, s, rank, cols in self._own():
            b, c = self.b[slot, cols, :rank], self._factors(rows, slot, s)
            value, error = g.value[rows, cols], g.bound[rows, cols]
            terms = counted(value)[:, None] + more
            sums = sum_bound((value.abs() + error) @ b.abs(), terms, self.sums)
            dh.value[s, rows, :rank] = c * (value @ b)
            dh.bound[s, rows, :rank] = c.abs().clamp(min=1) * sums + c.abs() * (error @ b.abs())
        return dh

    def _db(self, g: Expected) -> Expected:
        """Return dlora_b[l, o:o', :r] = sum over t of c * g'[t, o:o'].T h[s, t, :r]."""
        h, db = self._h(), zeros(*self.b.shape)
        for slot, rows, s, rank, cols in self._own():
            c = self._factors(rows, slot, s)
            value, error = c * g.value[rows, cols], c.abs() * g.bound[rows, cols]
            own, wrong = h.value[s, rows, :rank], h.bound[s, rows, :rank]
            most = value.abs() + error
            sums = sum_bound(most.T @ (own.abs() + wrong), len(rows) + 3, self.sums)
            db.value[slot, cols, :rank] = value.T @ own
            bound = error.T @ own.abs() + most.T @ wrong + max(1.0, float(c.abs().max())) * sums
            db.bound[slot, cols, :rank] = bound
        return rounded(db, self.kind, db.bound > 0)

    def _through_a(self, dh: Expected) -> dict[str, tuple[Expected, torch.dtype]]:
        """Return dx = sum over s of dh @ lora_a, and dlora_a[l, s, :r] = sum over t of dh.T x."""
        dx, most = zeros(*self.x.shape), zeros(*self.x.shape).value
        da = zeros(*self.a.shape)
        terms = self.weights.num_slices * self.weights.max_rank + scale_operations(self.weights)
        for slot, rows, s, rank, _ in self._own():
            a, x = self.a[slot, s, :rank], self.x_values[rows]
            value, error = dh.value[s, rows, :rank], dh.bound[s, rows, :rank]
            largest = value.abs() + error
            dx.value[rows] += value @ a
            dx.bound[rows] += error @ a.abs()
            most[rows] += largest @ a.abs()
            da.value[slot, s, :rank] = value.T @ x
            sums = sum_bound(largest.T @ x.abs(), len(rows) + 1, self.sums)
            da.bound[slot, s, :rank] = error.T @ x.abs() + sums
        summed = torch.zeros_like(self.has)
        for _, rows, *_ in self._own():
            summed[rows] = True
        dx = Expected(dx.value, (dx.bound + sum_bound(most, terms, self.sums)) * summed)
        expected_of = {"lora_a": (rounded(da, self.kind, da.bound > 0), self.kind)}
        if self.operation.input is not Input.TOKEN_IDS:
            expected_of["x"] = (rounded(dx, self.x.dtype, summed), self.x.dtype)
        return expected_of

    def _h(self) -> Expected:
        """Return h as the backward may have it: given, or shrunk again, narrow if declared."""
        if self.h is None:
            kind = self.kind if self.narrow else torch.float32
            return expected_shrink(self.x, self.weights, self.batch, kind)
        within = rank_mask(self.weights, self.slots).permute(1, 0, 2)
        value = masked(self.h, within)
        return self._operand(Expected(value, torch.zeros_like(value)))

    def _exact(self) -> Expected:
        ones = torch.ones(self.grad.shape, dtype=torch.float64, device="cpu")
        return Expected(ones, torch.zeros_like(ones))

    def _unscaled(self) -> Expected:
        """Return u, y before output_scales and bias, in the dtype of sums of y."""
        plain = replace(self.weights, bias=None, output_scales=None)
        sums = accumulator_dtype(self.grad.dtype)
        return expected_expand(self._h(), plain, self.batch, self.inputs.base, sums)

    def _over_tokens(self, factor: Expected, dtype: torch.dtype) -> tuple[Expected, torch.dtype]:
        """Return the sum over each slot's tokens of dL/dy times a factor."""
        total = zeros(self.weights.num_slots, self.weights.out_features)
        g = masked(self.grad, self.has)
        for slot in sorted({*self.slots.tolist()} - {NO_ADAPTER}):
            rows = (self.slots == slot).nonzero().flatten()
            value, error = factor.value[rows], factor.bound[rows]
            most = (g[rows].abs() * (value.abs() + error)).sum(0)
            total.value[slot] = (g[rows] * value).sum(0)
            sums = sum_bound(most, len(rows) + 1, self.grad.dtype)
            total.bound[slot] = (g[rows].abs() * error).sum(0) + sums
        return rounded(total, dtype, total.bound > 0), dtype
