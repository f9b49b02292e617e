"""The plan: tokens permuted by slot, cut into segments, and segments of a slot grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import layout
from lora_backends.sgmv.layout import Counted, Ints, RowSizes, SgmvPlan, Tables


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

    num_groups: int = field(default=0, kw_only=True)  # groups in use now, <= most_rows

    @property
    def group_starts(self) -> torch.Tensor:
        """The first segment of every group: [most_rows + 1] int32, ascending."""
        starts: torch.Tensor = self.tables()[2]
        return starts

    @override
    def grid_rows(self, capturing: bool, rows: int) -> int:
        if capturing:
            return layout.max_runs(rows, self.num_slots, self.tile_tokens)
        return self.num_groups

    @override
    def h_rows(self, rows: int) -> int:
        # all places that a refill of as many tokens can use: the strides of h stay the same
        return layout.max_runs(rows, self.num_slots, self.run_tokens) * self.run_tokens

    @override
    def row_constants(self, by_token: bool) -> RowSizes:
        return RowSizes(self.run_tokens, self.tile_tokens // self.run_tokens, by_token)

    @override
    def _view_tables(self) -> Tables:
        first, size, room = self.tables_at(), self.run_tokens, self.most_runs
        at = first + layout.run_tables_size(size, room)
        starts = self.packed.as_strided((self.most_rows + 1,), (1,), at)
        return *layout.run_tables(self.packed, first, size, room), starts

    def fill(self, batch: LoRABatch, counted: Counted, segment_size: int, group_size: int) -> None:
        """Cut a batch into segments; the copy of the tables to the device is under way."""
        tile = segment_size * group_size
        staged, tables = self._fill_runs(batch, counted, segment_size, tile)
        if self.tile_tokens == self.run_tokens:
            starts = np.arange(self.num_runs)
        else:
            segments = layout.split(counted.counts[1:], self.run_tokens)
            starts = starts_of_groups(segments, self.tile_tokens // self.run_tokens)
        self.num_groups = starts.size
        groups_at = layout.run_tables_size(self.run_tokens, self.most_runs)
        group_starts = tables[groups_at : groups_at + self.most_rows + 1]
        group_starts.fill(self.num_runs)
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
    """Return a plan with room for `capacity` tokens in segments of any of the sizes."""
    # groups are never more than segments
    groups = layout.max_runs(capacity or batch.num_tokens, batch.num_slots, min(segment_sizes)) + 1
    return CsgmvPlan.with_room(batch, capacity, segment_sizes, device, groups)
