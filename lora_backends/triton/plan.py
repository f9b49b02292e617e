"""The plan: tokens sorted by slot and cut into tiles of one slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import layout
from lora_backends.sgmv.launching.kernel import ABSENT
from lora_backends.sgmv.layout import Counted, SgmvPlan, Tables


class TileRow(NamedTuple):
    """The constants by which a program finds its tile."""

    TILE: int  # tokens


@dataclass(eq=False)
class TritonPlan(SgmvPlan):
    """Which slot and which tokens every tile has.

    Slots [2, -1, 0, 2, 2] in tiles of 2 tokens; over three slots, 5 tokens need at most 4 tiles:

        slot_table   [0, 2, 2, -1]
        token_table  [[2, -1], [0, 3], [4, -1], [-1, -1]]
    """

    num_tiles: int  # tiles in use now, <= max_tiles
    max_tiles: int  # tiles that any composition of `capacity` tokens can need

    @override
    def grid_rows(self, capturing: bool, rows: int) -> int:
        if capturing:
            return layout.max_runs(rows, self.num_slots, self.tile_tokens)
        return self.num_tiles

    @property
    @override
    def run_tokens(self) -> int:
        return self.tile_tokens

    @override
    def runs(self, capturing: bool, rows: int) -> int:
        return self.grid_rows(capturing, rows)

    @override
    def h_rows(self, rows: int) -> int:
        return rows

    @override
    def row_constants(self, by_token: bool) -> TileRow:
        return _row(self.tile_tokens)

    @override
    def _view_tables(self) -> Tables:
        first = self.tables_at()
        return *layout.run_tables(self.packed, first, self.tile_tokens, self.max_tiles), ABSENT

    def fill(self, batch: LoRABatch, counted: Counted, tile_tokens: int) -> None:
        """Cut a batch into tiles; the copy of the tables to the device is under way."""
        if batch.token_scales is not None:
            self.refuse_scales_of_captured()
        if self.may_cut_anew():
            self.active_slots = counted.active
            if self.tile_tokens != tile_tokens:
                self.tile_tokens = tile_tokens
                self.max_tiles = layout.max_runs(self.capacity, self.num_slots, tile_tokens)
                self._views = None
            self.cut = (tile_tokens, *self.sizes_key(batch))
        size, room = self.tile_tokens, self.max_tiles
        staged, tables = self._stage(batch, counted, layout.run_tables_size(size, room))
        self.num_tiles = layout.fill_runs(tables, counted, size, room)
        self.num_tokens = batch.num_tokens
        self._send(staged)


@lru_cache(maxsize=64)
def _row(tile_tokens: int) -> TileRow:
    return TileRow(tile_tokens)


def new_plan(
    batch: LoRABatch, capacity: int | None, tile_sizes: Sequence[int], device: torch.device
) -> TritonPlan:
    """Return a plan with room for `capacity` tokens in tiles of any of the sizes, to be filled."""
    has_room, capacity = capacity is not None, capacity or batch.num_tokens
    tables = layout.most_run_tables(capacity, batch.num_slots, tile_sizes)
    packed = torch.empty(2 * layout.aligned(capacity) + tables, dtype=torch.int32, device=device)
    return TritonPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        capacity=capacity,
        tile_tokens=0,
        active_slots=0,
        packed=packed,
        has_room=has_room,
        num_tiles=0,
        max_tiles=0,
    )
