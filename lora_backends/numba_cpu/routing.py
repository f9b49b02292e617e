"""Which pairs of token and expert run, in groups of one slot and expert."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lora_backends.experts import ExpertRouting
from lora_backends.numba_cpu import launch
from lora_backends.numba_cpu.config import LONG_SEGMENT
from lora_backends.numba_cpu.kernels.experts import Grouping
from lora_backends.numba_cpu.layer import LocatedLayer, require_memory
from lora_backends.numba_cpu.needs import LONG
from lora_backends.numba_cpu.plan import NO_SCALES, PACK_WORK, Job, Work

_PACK = struct.Struct(f"{len(Grouping._fields)}q").pack


class Groups(NamedTuple):
    """The live pairs of a routing, sorted by slot, then expert, then position."""

    made_for: Work  # the plan's, which a refill replaces
    buffer: array[int]  # the addresses below point into it
    num_pairs: int
    pairs: int  # address of [num_pairs] int64: t * top_k + j
    tokens: int  # address of [num_pairs] int64: t
    by_expert: tuple[int, int]  # segments of one slot and expert: how many, and their address
    by_slot: tuple[int, int]  # segments of one slot


@dataclass(eq=False)
class NumbaRouting(ExpertRouting):
    """A routing and its groups, which follow the plan."""

    # both of its tensors are contiguous

    _groups: Groups | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_groups": None}  # addresses mean nothing to a copy

    @property
    def num_pairs(self) -> int:
        """Pairs, dead ones included."""
        return self.topk_ids.numel()

    @classmethod
    def of(
        cls,
        plan: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
    ) -> Self:
        """Return a routing with memory for its tensors; arguments as in `prepare_experts`."""
        shape = topk_ids.shape
        ids = torch.empty(shape, dtype=torch.int64, device="cpu")
        made = cls(plan, num_experts, ids, torch.empty(shape, device="cpu"))
        made.refill(plan, topk_ids, topk_weights, expert_map)
        return made

    def refill(
        self, plan: Any, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None
    ) -> None:
        """Take another choice of as many tokens and experts; the tensors keep their addresses."""
        require_memory()
        self.plan = plan
        self.topk_weights.copy_(topk_weights)
        self._groups = _group(self, topk_ids, expert_map)

    def groups(self) -> Groups:
        """Return the groups as of the plan's present batch."""
        groups = self._groups
        if groups is None or groups.made_for is not self.plan.work:
            groups = self._groups = _group(self, self.topk_ids, None)
        return groups


def _group(routing: NumbaRouting, topk_ids: Tensor, expert_map: Tensor | None) -> Groups:
    """Write the local ids of the router's choice, and group the pairs."""
    work, size, most = routing.plan.work, topk_ids.itemsize, routing.num_pairs
    row, step = topk_ids.stride()
    mapped = (0, 0)
    if expert_map is not None:
        expert_map = expert_map.contiguous()
        mapped = expert_map.data_ptr(), expert_map.numel()
    buffer = array("q", bytes(8 * (routing.num_experts + 8 * most + 3)))
    counts, length = buffer.buffer_info()
    pairs = counts + 8 * routing.num_experts
    tokens = pairs + 8 * most
    by_expert = tokens + 8 * most
    by_slot = by_expert + 24 * most
    launch.grouping_kernel().run(
        _PACK(
            topk_ids.data_ptr(),
            size,
            size * row,
            size * step,
            *mapped,
            routing.topk_ids.data_ptr(),
            routing.top_k,
            routing.num_experts,
            routing.num_tokens,
            work.b_count,
            work.b_segments,
            work.y_order,
            counts,
            pairs,
            tokens,
            by_expert,
            by_slot,
            by_slot + 24 * most,
        )
    )
    num_pairs, num_by_expert, num_by_slot = buffer[length - 3 :]
    slots = (num_by_slot, by_slot)
    return Groups(work, buffer, num_pairs, pairs, tokens, (num_by_expert, by_expert), slots)


def job_of(routing: NumbaRouting, located: LocatedLayer, rows: str, scales: Tensor | None) -> Job:
    """Return the job of a call; `scales` are the factors of the pairs, or None."""
    groups, plan = routing.groups(), routing.plan
    pairs = groups.pairs
    # where experts share an A, the first half shrinks each token once (or each slot's pairs
    # together), and the pairs read the token's h
    a_segments = groups.by_slot if located.shares_a else groups.by_expert
    # where they share B, rank and scaling, the second half takes each slot's pairs together
    b_segments = groups.by_slot if located.shares_b else groups.by_expert
    x_order = to_order = h_order = pairs
    h_rows = routing.num_pairs
    if rows == "tokens":
        x_order = groups.tokens
    if rows == "tokens" and located.shares_a:
        a_segments = plan.work.b_count, plan.work.b_segments
        x_order = to_order = plan.work.y_order
        h_order, h_rows = groups.tokens, routing.num_tokens
    factors = NO_SCALES if scales is None else (scales.data_ptr(), 4)
    orders = (x_order, to_order, h_order, pairs)
    work = (*a_segments, located.a_span, *b_segments, *orders, *factors, pairs)  # a `Work`
    longest = max(groups.num_pairs, plan.num_positions)  # that a segment may be
    needs = LONG if longest >= LONG_SEGMENT else 0
    sizes = groups.by_expert[0], groups.num_pairs, h_rows
    return Job(PACK_WORK(*work), a_segments == b_segments, *sizes, needs, groups.buffer)
