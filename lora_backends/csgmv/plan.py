"""The plan: tokens permuted by slot, cut into segments, and segments of a slot grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import runs
from lora_backends.sgmv.layout import RowSizes, SgmvPlan, Tables
from lora_backends.sgmv.runs import Counted, Ints


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
            return runs.max_runs(rows, self.num_slots, self.tile_tokens)
        return self.num_groups

    @override
    def h_rows(self, rows: int) -> int:
        # all places that a refill of as many tokens can use: the strides of h stay the same
        return runs.max_runs(rows, self.num_slots, self.run_tokens) * self.run_tokens

    @override
    def row_constants(self, by_token: bool) -> RowSizes:
        return RowSizes(self.run_tokens, self.tile_tokens // self.run_tokens, by_token)

    @override
    def _view_tables(self) -> Tables:
        first, size, room = self.tables_at(), self.run_tokens, self.most_runs
        at = first + runs.run_tables_size(size, room)
        starts = runs.view(self.packed, at, self.most_rows + 1)
        return *runs.run_tables(self.packed, first, size, room), starts

    @override
    @classmethod
    def packed_size(cls, capacity: int, num_slots: int, run_sizes: Sequence[int]) -> int:
        # groups are never more than segments
        groups = runs.max_runs(capacity, num_slots, min(run_sizes)) + 1
        return super().packed_size(capacity, num_slots, run_sizes) + groups

    @override
    def stage(
        self, staged: npt.NDArray[np.int32], batch: LoRABatch, counted: Counted, *cut: int
    ) -> None:
        segment_size, group_size = cut
        tile = segment_size * group_size
        tables = self._stage_runs(staged, batch, counted, segment_size, tile)
        starts = group_starts(counted, self.run_tokens, self.tile_tokens // self.run_tokens)
        self.num_groups = starts.size
        tables[: starts.size] = starts
        tables[starts.size : self.most_rows + 1] = self.num_runs


def group_starts(counted: Counted, segment_size: int, group_size: int) -> Ints:
    """Return the first segment of every group of a batch, computed once for all plans."""
    key = segment_size, group_size
    starts: Ints | None = counted.kept.get(key)
    if starts is None and group_size == 1:
        starts = np.arange(counted.runs(segment_size).slots.size)
    elif starts is None:
        starts = starts_of_groups(runs.split(counted.counts[1:], segment_size), group_size)
    counted.kept[key] = starts
    return starts


def starts_of_groups(segments: Ints, group_size: int) -> Ints:
    """Return the first segment of every group.

    >>> starts_of_groups(np.array([1, 0, 3]), 2).tolist()
    [0, 1, 3]
    """
    groups = runs.split(segments, group_size)
    starts: Ints = np.arange(int(groups.sum())) * group_size
    starts -= runs.padding_before(segments, group_size).repeat(groups)
    return starts
