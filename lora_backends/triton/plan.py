"""The plan: tokens sorted by slot and cut into tiles of one slot, in one packed int32 buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.gpu.ready import RememberingPlan
from lora_backends.gpu.staging import aligned, sort_key, staging_buffer

EMPTY = -1
"""The slot of an unused tile and the token of an unused place in a tile."""


Counts = npt.NDArray[np.int64]


@dataclass(eq=False)
class TritonPlan(RememberingPlan):
    """Which slot and which tokens every tile has.

    Slots [2, -1, 0, 2, 2] in tiles of 2 tokens, three slots and so at most three tiles:

        tile_slots   [0, 2, 2]
        tile_tokens  [[2, -1], [0, 3], [4, -1]]

    Both tables are views of `packed` and keep their addresses when the plan is refilled.
    """

    block_tokens: int  # tokens per tile, a power of two
    active_slots: int  # slots with tokens when the plan was made: tile sizes follow from it
    num_tiles: int  # tiles in use now, <= max_tiles
    max_tiles: int  # tiles that any composition of as many tokens and slots can need
    packed: torch.Tensor  # [aligned max_tiles + max_tiles * block_tokens] int32, on the device
    tile_slots: torch.Tensor  # [max_tiles] int32, slot of the tile or -1
    tile_tokens: torch.Tensor  # [max_tiles, block_tokens] int32, token or -1

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.tile_slots, self.tile_tokens = tables(self.packed, self.max_tiles, self.block_tokens)


def max_tiles(num_tokens: int, num_slots: int, block_tokens: int) -> int:
    """Return the most tiles that a batch can need, at least 1.

    One tile with one token for each of ``n = min(num_tokens, num_slots)`` slots, and one more for
    every `block_tokens` of the remaining tokens.
    """
    segments = min(num_tokens, num_slots)
    return max(1, segments + (num_tokens - segments) // block_tokens)


def count_tokens(batch: LoRABatch) -> Counts:
    """Return the tokens without an adapter, then those of every slot: [num_slots + 1]."""
    return np.bincount(batch.token_slots.numpy() + 1, minlength=batch.num_slots + 1)


def count_active(counts: Counts) -> int:
    """Return how many slots have tokens."""
    return int(np.count_nonzero(counts[1:]))


def fill_tiles(
    token_slots: npt.NDArray[np.int64],
    counts: Counts,
    block_tokens: int,
    packed: npt.NDArray[np.int32],
) -> int:
    """Write both tables into `packed` and return the number of tiles.

    Args:
        token_slots: [num_tokens], -1 or 0 <= slot < num_slots.
        counts: from `count_tokens`.
        block_tokens: tokens per tile.
        packed: [aligned max_tiles + max_tiles * block_tokens] int32, overwritten.

    Returns:
        Tiles in use; they come first.
    """
    packed.fill(EMPTY)
    num_slots = counts.size - 1
    order = sort_key(token_slots, num_slots).argsort(kind="stable")[counts[0] :]
    counts = counts[1:]
    tiles = (counts + (block_tokens - 1)) // block_tokens
    ends, tile_ends = counts.cumsum(), tiles.cumsum()
    num_tiles = int(tile_ends[-1])
    packed[:num_tiles] = np.arange(num_slots).repeat(tiles)
    # a slot's tokens move from their place in the order to the first place of its first tile
    moved = (tile_ends - tiles) * block_tokens - (ends - counts)
    places = np.arange(order.size) + moved.repeat(counts)
    packed[aligned(max_tiles(token_slots.size, num_slots, block_tokens)) :][places] = order
    return num_tiles


def make_plan(
    batch: LoRABatch, counts: Counts, block_tokens: int, device: torch.device
) -> TritonPlan:
    """Return a new plan, its tables on their way to the device."""
    tiles = max_tiles(batch.num_tokens, batch.num_slots, block_tokens)
    staged, array = staging_buffer(aligned(tiles) + tiles * block_tokens, device)
    num_tiles = fill_tiles(batch.token_slots.numpy(), counts, block_tokens, array)
    packed = staged.to(device, non_blocking=True)
    tile_slots, tile_tokens = tables(packed, tiles, block_tokens)
    return TritonPlan(
        num_tokens=batch.num_tokens,
        num_slots=batch.num_slots,
        block_tokens=block_tokens,
        active_slots=count_active(counts),
        num_tiles=num_tiles,
        max_tiles=tiles,
        packed=packed,
        tile_slots=tile_slots,
        tile_tokens=tile_tokens,
    )


def tables(
    packed: torch.Tensor, tiles: int, block_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `tile_slots` and `tile_tokens`, views of the packed buffer."""
    tokens = packed.as_strided((tiles, block_tokens), (block_tokens, 1), aligned(tiles))
    return packed.as_strided((tiles,), (1,)), tokens


def refill(plan: TritonPlan, batch: LoRABatch, counts: Counts) -> TritonPlan:
    """Write the tables of `batch` into the plan: one asynchronous copy from pinned memory."""
    staged, array = staging_buffer(plan.packed.shape[0], plan.packed.device)
    plan.num_tiles = fill_tiles(batch.token_slots.numpy(), counts, plan.block_tokens, array)
    plan.packed.copy_(staged, non_blocking=True)
    return plan
