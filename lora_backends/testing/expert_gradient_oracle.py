"""The right gradients of experts: in float64, from the formulas of the interface, with bounds.

No autograd takes part. As in `expert_oracle`, each pair is a token of a dense layer whose slots are
the experts of each slot and whose slices have an A each. Where several experts or slices share a
matrix, its gradient is the sum of theirs: the bound of a sum of n products, taken for the most
products that any such sum can have, holds for the sum of the parts.

A backend with a `narrow_intermediate` rounds operands of a product to the weights' dtype: h, u, a
dL/dy that is wider, and either of h and dL/dy with its factors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lora_backends.batch import NO_ADAPTER
from lora_backends.testing.cases.experts import ExpertInputs
from lora_backends.testing.cases.inputs import stack_of_a, stack_of_b
from lora_backends.testing.expert_oracle import dense_layer, in_dense_order
from lora_backends.testing.gradient_oracle import operand, rounded, zeros
from lora_backends.testing.oracles import (
    Expected,
    counted,
    gamma,
    masked,
    scale_operations,
    sum_bound,
    sum_unit,
)

ExpectedGradients: TypeAlias = Mapping[str, Expected]
"""By the name of a tensor: x, lora_a, lora_b, topk_weights, base_output."""


def expected_expert_gradients(
    inputs: ExpertInputs, grad: torch.Tensor, *, narrow: bool = False
) -> ExpectedGradients:
    """Return the gradients of all tensors that `run_experts` reads, and their bounds.

    Each has the shape of its tensor. The bound is 0 where a gradient is exactly zero: beyond ranks,
    for a slot and expert without pairs, for dead pairs, and for tokens that have no other.

    Args:
        inputs: of the call, one adapter per token.
        grad: of the result, in its dtype.
        narrow: whether the backend keeps operands in 16 bits (`narrow_intermediate`).
    """
    return _Gradients(inputs, grad, narrow).all()


@dataclass(eq=False)
class _Gradients:
    inputs: ExpertInputs
    grad: torch.Tensor
    narrow: bool

    def __post_init__(self) -> None:
        inputs = self.inputs
        x, self.layer, batch = dense_layer(inputs)
        self.slots = batch.token_slots  # of pairs: slot * experts + expert, or none
        live = (self.slots != NO_ADAPTER)[:, None]
        self.x = masked(x, live)
        self.kind = self.layer.compute_dtype or torch.float32
        g = self.grad.detach().cpu().double()
        if inputs.options["reduce"]:
            g = g[:, None].expand(-1, inputs.ids.shape[1], -1)
        self.g = masked(g.flatten(0, 1)[:, in_dense_order(inputs)], live)
        self.factors = torch.ones_like(live, dtype=torch.float64)
        if inputs.options["weighted"]:
            self.factors = masked(inputs.topk_weights.flatten()[:, None], live)
        self.token_scales = torch.ones_like(self.factors)
        if inputs.batch.token_scales is not None:
            scales = inputs.batch.token_scales.double()
            self.token_scales = scales.repeat_interleave(inputs.ids.shape[1])[:, None]

    def all(self) -> ExpectedGradients:
        """Return each gradient, rounded once."""
        layer, kind = self.layer, self.kind
        a, b = stack_of_a(layer).double(), stack_of_b(layer).double()
        pairs = len(self.slots)
        most = pairs * layer.num_slices + 8  # products of a sum over pairs
        dx, dx_most = zeros(pairs, layer.in_features), zeros(pairs, layer.in_features).value
        dfactor, dfactor_most = zeros(pairs, 1), zeros(pairs, 1).value
        da, db = zeros(*a.shape), zeros(*b.shape)
        offsets, ranks = layer.slice_offsets, layer.ranks.tolist()
        for key in sorted({*self.slots.tolist()} - {NO_ADAPTER}):
            rows = (self.slots == key).nonzero().flatten()
            x = self.x[rows]
            for s, rank in enumerate(ranks[key]):
                if rank == 0:
                    continue
                cols = slice(*offsets[s : s + 2])
                a_own, b_own = a[key, s, :rank], b[key, cols, :rank]
                u, h = self._u(key, s, rows, b_own, cols), self._h(x, a_own)
                f = self.factors[rows]
                products = (u.value * h.value).sum(1, keepdim=True)
                largest = (u.value.abs() + u.bound) * (h.value.abs() + h.bound)
                dfactor.value[rows] += products
                dfactor.bound[rows] += (
                    u.bound * h.value.abs() + (u.value.abs() + u.bound) * h.bound
                ).sum(1, keepdim=True)
                dfactor_most[rows] += largest.sum(1, keepdim=True)
                dh = self._operand(_times(f, u))
                dx.value[rows] += dh.value @ a_own
                dx.bound[rows] += dh.bound @ a_own.abs()
                dx_most[rows] += (dh.value.abs() + dh.bound) @ a_own.abs()
                _put(da, (key, s, slice(rank)), dh, Expected(x, torch.zeros_like(x)), most, kind)
                scaled = self._operand(self._scaled(key, s, rows, cols, f))
                _put(db, (key, cols, slice(rank)), scaled, self._operand(h), most, kind)
        return self._gathered(dx, dx_most, dfactor, dfactor_most, da, db)

    def _u(self, key: int, s: int, rows: torch.Tensor, b: torch.Tensor, cols: slice) -> Expected:
        """Return u = scaling * token_scale * (g @ B) of some pairs and a slice."""
        c = float(self.layer.scalings[key, s]) * self.token_scales[rows]
        g = Expected(self.g[rows, cols], torch.zeros_like(self.g[rows, cols]))
        if self.grad.dtype != self.kind:
            g = self._operand(g)
        largest = (g.value.abs() + g.bound) @ b.abs()
        # of all slices, as one A may feed them
        terms = counted(self.g[rows])[:, None] + 4 + scale_operations(self.layer)
        sums = sum_bound(largest, terms, self.kind)
        return Expected(
            c * (g.value @ b), c.abs() * (g.bound @ b.abs()) + c.abs().clamp(min=1) * sums
        )

    def _h(self, x: torch.Tensor, a: torch.Tensor) -> Expected:
        terms = counted(x)[:, None] + scale_operations(self.layer)
        return self._operand(Expected(x @ a.T, sum_bound(x.abs() @ a.abs().T, terms, self.kind)))

    def _scaled(
        self, key: int, s: int, rows: torch.Tensor, cols: slice, f: torch.Tensor
    ) -> Expected:
        """Return f * c * g: its three factors may be multiplied in any order."""
        c = f * float(self.layer.scalings[key, s]) * self.token_scales[rows]
        value = c * self.g[rows, cols]
        return Expected(value, gamma(4, sum_unit(self.kind)) * value.abs())

    def _operand(self, expected: Expected) -> Expected:
        return operand(expected, self.kind, self.narrow)

    def _gathered(
        self,
        dx: Expected,
        dx_most: torch.Tensor,
        dfactor: Expected,
        dfactor_most: torch.Tensor,
        da: Expected,
        db: Expected,
    ) -> ExpectedGradients:
        """Return the gradients of pairs, experts and slices as those of the tensors themselves."""
        inputs, layer, weights = self.inputs, self.layer, self.inputs.weights
        top_k, per_row = inputs.ids.shape[1], layer.num_slices * layer.max_rank
        touched = (dx_most > 0).any(1, keepdim=True)
        terms = per_row + top_k + 4 + scale_operations(layer)
        dx = Expected(dx.value, (dx.bound + sum_bound(dx_most, terms, self.kind)) * touched)
        if inputs.options["rows"] == "tokens":
            tokens = len(inputs.ids)
            dx = _each(dx, lambda part: part.view(tokens, top_k, layer.in_features).sum(1))
            touched = touched.view(tokens, top_k, 1).any(1)
        bound = dfactor.bound + sum_bound(dfactor_most, per_row + 4, self.kind)
        used = dfactor_most > 0
        dfactor = rounded(Expected(dfactor.value, bound * used), torch.float32, used)
        base = self.grad.detach().cpu().double()
        expected = {
            "x": rounded(dx, inputs.x.dtype, touched),
            "topk_weights": _each(dfactor, lambda part: part.view(inputs.ids.shape)),
            "base_output": Expected(base, torch.zeros_like(base)),
        }
        if weights.a_scales is None:
            back = in_dense_order(inputs).argsort()
            da = self._folded(da, weights.lora_a.shape[1] == 1)
            if weights.num_a == 1:
                da = _each(da, lambda part: part.sum(2, keepdim=True))
            db = self._folded(_each(db, lambda part: part[:, back]), weights.lora_b.shape[1] == 1)
            for name, stack in (("lora_a", da), ("lora_b", db)):
                expected[name] = rounded(stack, self.kind, stack.bound > 0)
        return expected

    def _folded(self, stack: Expected, shared: bool) -> Expected:
        """Return the gradient of a stack with an axis of experts, of which one may be shared."""
        sizes = self.inputs.weights.num_slots, self.inputs.weights.num_experts
        stack = _each(stack, lambda part: part.view(*sizes, *part.shape[1:]))
        return _each(stack, lambda part: part.sum(1, keepdim=True)) if shared else stack


def _put(
    into: Expected,
    at: tuple[int | slice, ...],
    left: Expected,
    right: Expected,
    most: int,
    kind: torch.dtype,
) -> None:
    """Write ``left.T @ right`` and its bound at a place of a gradient."""
    largest = left.value.abs() + left.bound
    sums = sum_bound(largest.T @ (right.value.abs() + right.bound), most, kind)
    into.value[at] = left.value.T @ right.value
    into.bound[at] = left.bound.T @ right.value.abs() + largest.T @ right.bound + sums


def _each(expected: Expected, change: Callable[[torch.Tensor], torch.Tensor]) -> Expected:
    """Return an expected result whose value and bound are changed alike."""
    return Expected(change(expected.value), change(expected.bound))


def _times(factor: torch.Tensor, expected: Expected) -> Expected:
    """Return the product with a factor, which may be multiplied before or after others."""
    value, bound = factor * expected.value, factor.abs() * expected.bound
    return Expected(value, bound + gamma(2, sum_unit(torch.float32)) * (value.abs() + bound))
