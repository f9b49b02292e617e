"""The plan: tokens permuted by slot, cut into segments, and segments of a slot grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import layout
from lora_backends.sgmv.layout import Counted, Ints, SgmvPlan, Tables


class GroupRow(NamedTuple):
    """The constants by which a program finds its group."""

    SEGMENT: int  # tokens of a segment
    GROUP: int  # most segments of a group
    BY_TOKEN: bool  # whether h has a row for every token, not for every place


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

    has_places: ClassVar[bool] = True

    segment_size: int  # tokens per segment, a power of two >= 16
    group_size: int  # most segments per group, a power of two
    num_segments: int  # segments in use now, <= max_segments
    num_groups: int  # groups in use now, <= max_groups
    max_segments: int  # segments that any composition of `capacity` tokens can need
    max_groups: int  # groups that any such composition can need

    @property
    def group_starts(self) -> torch.Tensor:
        """The first segment of every group: [max_groups + 1] int32, ascending."""
        starts: torch.Tensor = self.tables()[2]
        return starts

    @override
    def grid_rows(self, capturing: bool, rows: int) -> int:
        if capturing:
            return layout.max_runs(rows, self.num_slots, self.segment_size * self.group_size)
        return self.num_groups

    @property
    @override
    def run_tokens(self) -> int:
        return self.segment_size

    @override
    def runs(self, capturing: bool, rows: int) -> int:
        if capturing:
            return layout.max_runs(rows, self.num_slots, self.segment_size)
        return self.num_segments

    @override
    def h_rows(self, rows: int) -> int:
        # all places that a refill of as many tokens can use: the strides of h stay the same
        segments = layout.max_runs(rows, self.num_slots, self.segment_size)
        return segments * self.segment_size

    @override
    def row_constants(self, by_token: bool) -> GroupRow:
        return GroupRow(self.segment_size, self.group_size, by_token)

    @override
    def _view_tables(self) -> Tables:
        first, size = self.tables_at(), self.segment_size
        at = first + layout.run_tables_size(size, self.max_segments)
        starts = self.packed.as_strided((self.max_groups + 1,), (1,), at)
        return *layout.run_tables(self.packed, first, size, self.max_segments), starts

    def fill(self, batch: LoRABatch, counted: Counted, segment_size: int, group_size: int) -> None:
        """Cut a batch into segments; the copy of the tables to the device is under way."""
        if batch.token_scales is not None:
            self.refuse_scales_of_captured()
        if self.may_cut_anew():
            self.active_slots = counted.active
            if (self.segment_size, self.group_size) != (segment_size, group_size):
                self.segment_size, self.group_size = segment_size, group_size
                self.tile_tokens = tile = segment_size * group_size
                self.max_segments = layout.max_runs(self.capacity, self.num_slots, segment_size)
                self.max_groups = layout.max_runs(self.capacity, self.num_slots, tile)
                self._views = None
            self.cut = (segment_size, group_size, *self.sizes_key(batch))
        size, room = self.segment_size, self.max_segments
        groups_at = layout.run_tables_size(size, room)
        staged, tables = self._stage(batch, counted, groups_at)
        self.num_segments = layout.fill_runs(tables, counted, size, room)
        if self.group_size == 1:
            starts = np.arange(self.num_segments)
        else:
            segments = layout.split(counted.counts[1:], size)
            starts = starts_of_groups(segments, self.group_size)
        self.num_tokens, self.num_groups = batch.num_tokens, starts.size
        group_starts = tables[groups_at : groups_at + self.max_groups + 1]
        group_starts.fill(self.num_segments)
        group_starts[: starts.size] = starts
        self._send(staged)


def starts_of_groups(segments: Ints, group_size: int) -> Ints:
    """Return the first segment of every group.

    >>> starts_of_groups(np.array([1, 0, 3]), 2).tolist()
    [0, 1, 3]
    """
    groups = layout.split(segments, group_size)
    starts: Ints = np.arange(int(groups.sum())) * group_size
    starts -= layout.padding_before(segments, group_size).repeat(groups)
    return starts


def new_plan(
    batch: LoRABatch, capacity: int | None, segment_sizes: Sequence[int], device: torch.device
) -> CsgmvPlan:
    """Return a plan with room for `capacity` tokens in segments of any of the sizes, to be filled.

    Groups are never more than segments.
    """
    has_room, capacity = capacity is not None, capacity or batch.num_tokens
    tables = layout.most_run_tables(capacity, batch.num_slots, segment_sizes)
    groups = layout.max_runs(capacity, batch.num_slots, min(segment_sizes)) + 1
    size = 2 * layout.aligned(capacity) + tables + groups
    packed = torch.empty(size, dtype=torch.int32, device=device)
    return CsgmvPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        capacity=capacity,
        tile_tokens=0,
        active_slots=0,
        packed=packed,
        has_room=has_room,
        segment_size=0,
        group_size=0,
        num_segments=0,
        num_groups=0,
        max_segments=0,
        max_groups=0,
    )
