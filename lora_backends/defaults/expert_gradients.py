"""The backward of `run_experts` in plain torch: the definition, and every backend's default.

For pair p = (t, j) of slot l and expert e, with gy = dL/dy[t, j] (dL/dy[t] with `reduce`),
f = topk_weights[t, j] if `weighted` else 1, and c = scalings[l, e, a] * token_scales[t]:

    u[p, a, :r]          = sum over the slices s of a of c * gy[o:o'] @ lora_b[l, e, o:o', :r]
    dtopk_weights[t, j]  = sum over a of u[p, a] . h[p, a]          h[p, a, :r] = x_row @ A.T
    dlora_b[l, e, o, :r] = sum over p of (l, e) of f * c * gy[o] * h[p, a, :r]
    dx_row               = sum over a of f * u[p, a, :r] @ lora_a[l, e, a, :r]
    dlora_a[l, e, a, :r] = sum over p of (l, e) of (f * u[p, a, :r]).T x_row

One product per slot, expert and slice, over their own pairs alone, so nothing of another adapter,
of another expert or of a dead pair can reach a gradient. Where an expert axis is 1, the products
of the slot's experts add up. Sums are kept in float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from lora_backends.dtypes import accumulator_dtype
from lora_backends.experts import ExpertRouting, ExpertWeights

Groups: TypeAlias = Sequence[tuple[int, int, torch.Tensor]]
"""Slot, expert and pairs [n] int64 of each that has pairs, all ascending; (t, j) is t * k + j."""


class ExpertGradients(NamedTuple):
    """Where the gradients of a call go, all overwritten; None: not wanted."""

    x: torch.Tensor | None = None  # as x
    lora_a: torch.Tensor | None = None  # [len(slots), experts or 1, num_a, max_rank, in_features]
    lora_b: torch.Tensor | None = None  # [len(slots), experts or 1, out_features, max_rank]
    topk_weights: torch.Tensor | None = None  # [num_tokens, k] float32


def groups_of(token_slots: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Groups:
    """Return the live pairs by slot and expert; waits for the device.

    token_slots [num_tokens] and ids [num_tokens, k] are int64, -1 for none.
    """
    slots = token_slots[:, None]
    keys = torch.where((slots >= 0) & (ids >= 0), slots * num_experts + ids, -1).flatten()
    ordered, pairs = keys.sort(stable=True)
    present, counts = torch.unique(ordered, return_counts=True)
    parts = zip(present.tolist(), torch.split(pairs, counts.tolist()), strict=True)
    return [(*divmod(key, num_experts), part) for key, part in parts if key >= 0]


class RoutedCall(NamedTuple):
    """A call of `run_experts`, as its backward needs it."""

    x: torch.Tensor | None  # of the forward; None where no gradient depends on it
    weights: ExpertWeights
    routing: ExpertRouting
    token_scales: torch.Tensor | None  # [num_tokens or more] float32
    rows: str
    weighted: bool
    reduce: bool


def backward(
    grad: torch.Tensor,
    call: RoutedCall,
    groups: Groups,
    out: ExpertGradients,
    slots: Sequence[int] | None,
) -> None:
    """Write the gradients of a call; `slots` as in `LoRABackend.run_experts_backward`."""
    for tensor in out:
        if tensor is not None:
            tensor.zero_()
    weights, routing = call.weights, call.routing
    sums = torch.promote_types(accumulator_dtype(weights.dtype), grad.dtype)
    dx = None  # with a row for each pair: tokens may name an expert twice
    if out.x is not None:
        shape = routing.topk_ids.numel(), weights.in_features
        dx = torch.zeros(shape, dtype=sums, device=grad.device)
    into = ExpertGradients(
        dx,
        # of experts that share a matrix, the sum is rounded once, after the last of them
        _wider_if_shared(out.lora_a, sums),
        _wider_if_shared(out.lora_b, sums),
        out.topk_weights,
    )
    tables = [
        table.expand(-1, weights.num_experts, -1).tolist()
        for table in (weights.ranks, weights.scalings)
    ]
    wanted = range(weights.num_slots) if slots is None else slots
    places = {slot: at for at, slot in enumerate(wanted)}
    for slot, expert, pairs in groups:
        ranks, scalings = (table[slot][expert] for table in tables)
        _add_group(grad, call, _Group(slot, expert, pairs, ranks, scalings), into, places.get(slot))
    if out.x is not None and dx is not None:
        of_pairs = dx.view(routing.num_tokens, routing.top_k, weights.in_features)
        out.x.copy_(of_pairs.sum(1) if call.rows == "tokens" else dx)
    for stack, total in ((out.lora_a, into.lora_a), (out.lora_b, into.lora_b)):
        if stack is not None and total is not None and total is not stack:
            stack.copy_(total)


class _Group(NamedTuple):
    """The pairs of a slot and expert."""

    slot: int
    expert: int
    pairs: torch.Tensor
    ranks: list[int]  # of each A
    scalings: list[float]


def _add_group(
    grad: torch.Tensor, call: RoutedCall, group: _Group, into: ExpertGradients, place: int | None
) -> None:
    """Add the gradients of a group; `place` is the slot's in those of stacks, None: not wanted."""
    weights, top_k, pairs = call.weights, call.routing.top_k, group.pairs
    slot, expert, ranks, scalings = group.slot, group.expert, group.ranks, group.scalings
    sums = torch.promote_types(accumulator_dtype(weights.dtype), grad.dtype)
    tokens, nth = pairs // top_k, pairs % top_k
    g = (grad[tokens] if call.reduce else grad[tokens, nth]).to(sums)
    if call.token_scales is not None:
        g = call.token_scales[tokens, None] * g
    factors = call.routing.topk_weights[tokens, nth, None] if call.weighted else None
    x = None if call.x is None else call.x[tokens if call.rows == "tokens" else pairs].to(sums)
    da, db = (_part(stack, place, expert) for stack in (into.lora_a, into.lora_b))
    dtopk, of_router = into.topk_weights, g.new_zeros(len(pairs))
    for a, (rank, scaling) in enumerate(zip(ranks, scalings, strict=True)):
        if rank == 0:
            continue
        slices = [a] if weights.num_a > 1 else range(weights.num_slices)  # that this A feeds
        values, scaled = weights.a_values(slot, expert, a, rank, sums), scaling * g
        columns = [weights.columns(s) for s in slices]
        if x is not None and (db is not None or dtopk is not None):
            h = x @ values.T
        if db is not None:
            weighted = scaled if factors is None else factors * scaled
            for of_slice in columns:
                db[of_slice, :rank] += weighted[:, of_slice].T @ h
        if into.x is None and da is None and dtopk is None:
            continue
        u = g.new_zeros(len(pairs), rank)
        for s, of_slice in zip(slices, columns, strict=True):
            u = u + scaled[:, of_slice] @ weights.b_values(slot, expert, s, rank, sums)
        if dtopk is not None:
            of_router = of_router + (u * h).sum(1)
        dh = u if factors is None else factors * u
        if into.x is not None:
            into.x[pairs] += dh @ values
        if da is not None and x is not None:
            da[a, :rank] += dh.T @ x
    if dtopk is not None:
        dtopk.view(-1)[pairs] = of_router.to(dtopk.dtype)


def _wider_if_shared(stack: torch.Tensor | None, sums: torch.dtype) -> torch.Tensor | None:
    return stack if stack is None or stack.shape[1] > 1 else stack.to(sums)


def _part(stack: torch.Tensor | None, place: int | None, expert: int) -> torch.Tensor | None:
    """Return an expert's matrices of a stack's gradient; None where they are not wanted."""
    if stack is None or place is None:
        return None
    return stack[place, expert if stack.shape[1] > 1 else 0]
