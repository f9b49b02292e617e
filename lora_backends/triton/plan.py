"""The plan: tokens sorted by slot and cut into tiles of one slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from lora_backends.batch import LoRABatch
from lora_backends.sgmv import layout
from lora_backends.sgmv.layout import Ints, SgmvPlan


@dataclass(eq=False)
class TritonPlan(SgmvPlan):
    """Which slot and which tokens every tile has.

    Slots [2, -1, 0, 2, 2] in tiles of 2 tokens; over three slots, 5 tokens need at most 4 tiles:

        slot_table   [0, 2, 2, -1]
        token_table  [[2, -1], [0, 3], [4, -1], [-1, -1]]
    """

    num_tiles: int  # tiles in use now, <= max_tiles
    max_tiles: int  # tiles that any composition of as many tokens and slots can need
    slot_table: torch.Tensor  # [max_tiles] int32, slot of the tile or -1
    token_table: torch.Tensor  # [max_tiles, tile_tokens] int32, token or -1
    refills: int = field(default=0, init=False)  # how often the tables were written anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        tables = layout.run_tables(self.packed, self.tile_tokens, self.max_tiles)
        self.slot_table, self.token_table = tables

    def token_slots(self) -> torch.Tensor:
        """Return the slot of every token or -1: [num_tokens] int32, the end of `packed`."""
        return self.packed[self.packed.shape[0] - self.num_tokens :]

    @override
    def grid_rows(self, capturing: bool) -> int:
        return self.max_tiles if capturing else self.num_tiles

    @override
    def h_rows(self) -> int:
        return self.num_tokens

    @override
    def row_constants(self, by_token: bool) -> tuple[tuple[str, int], ...]:
        return (("TILE", self.tile_tokens),)

    @override
    def tables(self) -> tuple[torch.Tensor, ...]:
        return self.slot_table, self.token_table


def make_plan(batch: LoRABatch, counts: Ints, tile_tokens: int, device: torch.device) -> TritonPlan:
    """Return a new plan; the copy of its tables to the device is under way."""
    tiles = layout.max_runs(batch.num_tokens, batch.num_slots, tile_tokens)
    slots_at = layout.aligned(layout.aligned(tiles) + tiles * tile_tokens)
    staged, array = layout.staging_buffer(slots_at + batch.num_tokens, device)
    runs = layout.fill_runs(array, batch, counts, tile_tokens, tiles)
    array[slots_at:] = batch.token_slots.numpy()
    packed = staged.to(device, non_blocking=True)
    slot_table, token_table = layout.run_tables(packed, tile_tokens, tiles)
    return TritonPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        tile_tokens=tile_tokens,
        active_slots=layout.count_active(counts),
        packed=packed,
        num_tiles=int(runs.sum()),
        max_tiles=tiles,
        slot_table=slot_table,
        token_table=token_table,
    )


def refill(plan: TritonPlan, batch: LoRABatch, counts: Ints) -> TritonPlan:
    """Write the tables of `batch` into the plan: one asynchronous copy from pinned memory."""
    staged, array = layout.staging_buffer(plan.packed.shape[0], plan.packed.device)
    runs = layout.fill_runs(array, batch, counts, plan.tile_tokens, plan.max_tiles)
    array[array.size - plan.num_tokens :] = batch.token_slots.numpy()
    plan.num_tiles = int(runs.sum())
    plan.refills += 1
    plan.packed.copy_(staged, non_blocking=True)
    return plan
