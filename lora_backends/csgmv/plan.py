"""The plan: tokens permuted by slot, cut into segments, and segments of a slot grouped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import layout
from lora_backends.sgmv.layout import Ints, SgmvPlan


@dataclass(eq=False)
class CsgmvPlan(SgmvPlan):
    """Which slot and tokens every segment has, and which segments every group has.

    Slots [2, -1, 0, 2, 2, 2, 2] in segments of 2 tokens and groups of 2 segments. Place p is
    position p % 2 of segment p // 2, and h has a row for every place:

        slot_table    [0, 2, 2, 2, -1]
        token_table   [[2, -1], [0, 3], [4, 5], [6, -1], [-1, -1]]
        group_starts  [0, 1, 3, 4, 4]        group g has segments [starts[g], starts[g + 1])

    No composition of 7 tokens over 3 slots needs more than 5 segments or 4 groups.
    """

    segment_size: int  # tokens per segment, a power of two >= 16
    group_size: int  # most segments per group, a power of two
    num_segments: int  # segments in use now, <= max_segments
    num_groups: int  # groups in use now, <= max_groups
    max_segments: int  # segments that any composition of as many tokens and slots can need
    max_groups: int  # groups that any such composition can need
    slot_table: torch.Tensor  # [max_segments] int32, slot or -1
    token_table: torch.Tensor  # [max_segments, segment_size] int32, token or -1
    group_starts: torch.Tensor  # [max_groups + 1] int32, ascending
    refills: int = field(default=0, init=False)  # how often the tables were written anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        tables = _tables(self.packed, self.segment_size, self.max_segments, self.max_groups)
        self.slot_table, self.token_table, self.group_starts = tables

    def token_slots(self) -> torch.Tensor:
        """Return the slot of every token or -1: [num_tokens] int32, the end of `packed`."""
        return self.packed[self.packed.shape[0] - self.num_tokens :]

    @override
    def grid_rows(self, capturing: bool) -> int:
        return self.max_groups if capturing else self.num_groups

    @override
    def h_rows(self) -> int:
        # all places that a refill can use: the strides of h stay the same
        return self.max_segments * self.segment_size

    @override
    def row_constants(self, by_token: bool) -> tuple[tuple[str, int], ...]:
        sizes = (("SEGMENT", self.segment_size), ("GROUP", self.group_size))
        return (*sizes, ("BY_TOKEN", by_token))

    @override
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.slot_table, self.token_table, self.group_starts


def starts_of_groups(segments: Ints, group_size: int) -> Ints:
    """Return the first segment of every group.

    >>> starts_of_groups(np.array([1, 0, 3]), 2).tolist()
    [0, 1, 3]
    """
    groups = layout.split(segments, group_size)
    ends = groups.cumsum()
    # A slot's first group starts at its first segment.
    moved = (segments.cumsum() - segments) - (ends - groups) * group_size
    starts: Ints = np.arange(int(ends[-1])) * group_size + moved.repeat(groups)
    return starts


def make_plan(
    batch: LoRABatch, counts: Ints, segment_size: int, group_size: int, device: torch.device
) -> CsgmvPlan:
    """Return a new plan; the copy of its tables to the device is under way."""
    segments = layout.max_runs(batch.num_tokens, batch.num_slots, segment_size)
    groups = layout.max_runs(batch.num_tokens, batch.num_slots, segment_size * group_size)
    slots_at = layout.aligned(_groups_at(segments, segment_size) + groups + 1)
    staged, array = layout.staging_buffer(slots_at + batch.num_tokens, device)
    num_segments, num_groups = fill(
        array[:slots_at], batch, counts, segment_size, group_size, segments
    )
    array[slots_at:] = batch.token_slots.numpy()
    packed = staged.to(device, non_blocking=True)
    slot_table, token_table, group_starts = _tables(packed, segment_size, segments, groups)
    return CsgmvPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        tile_tokens=segment_size * group_size,
        active_slots=layout.count_active(counts),
        packed=packed,
        segment_size=segment_size,
        group_size=group_size,
        num_segments=num_segments,
        num_groups=num_groups,
        max_segments=segments,
        max_groups=groups,
        slot_table=slot_table,
        token_table=token_table,
        group_starts=group_starts,
    )


def fill(
    packed: npt.NDArray[np.int32],
    batch: LoRABatch,
    counts: Ints,
    segment_size: int,
    group_size: int,
    max_segments: int,
) -> tuple[int, int]:
    """Write the tables of a batch.

    Args:
        packed: overwritten.
        batch: the slots.
        counts: from `count_tokens`.
        segment_size: tokens per segment.
        group_size: segments per group.
        max_segments: segments that `packed` has room for.

    Returns:
        Segments and groups in use.
    """
    segments = layout.fill_runs(packed, batch, counts, segment_size, max_segments)
    starts, num_segments = starts_of_groups(segments, group_size), int(segments.sum())
    group_starts = packed[_groups_at(max_segments, segment_size) :]
    group_starts[: starts.size] = starts
    group_starts[starts.size :] = num_segments
    return num_segments, starts.size


def refill(plan: CsgmvPlan, batch: LoRABatch, counts: Ints) -> CsgmvPlan:
    """Write the tables of `batch` into the plan: one asynchronous copy from pinned memory."""
    staged, array = layout.staging_buffer(plan.packed.shape[0], plan.packed.device)
    sizes = (plan.segment_size, plan.group_size, plan.max_segments)
    slots_at = array.size - plan.num_tokens
    plan.num_segments, plan.num_groups = fill(array[:slots_at], batch, counts, *sizes)
    array[slots_at:] = batch.token_slots.numpy()
    plan.refills += 1
    plan.packed.copy_(staged, non_blocking=True)
    return plan


def _groups_at(max_segments: int, segment_size: int) -> int:
    """Return where `group_starts` begins in the packed buffer."""
    return layout.aligned(layout.aligned(max_segments) + max_segments * segment_size)


def _tables(
    packed: torch.Tensor, segment_size: int, segments: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = packed.as_strided((groups + 1,), (1,), _groups_at(segments, segment_size))
    return *layout.run_tables(packed, segment_size, segments), starts
