"""How a plan of a Triton engine lies in memory: one packed int32 buffer, written on the CPU.

Tokens are permuted so that those of one slot lie together, and each slot's tokens are cut into
runs of at most `size` tokens: the tiles of `triton`, the segments of `csgmv`. One asynchronous copy
sends the buffer; its tables keep their addresses when the plan is refilled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.cached import CachingPlan

EMPTY = -1
"""The slot of an unused run and the token of an unused place."""

ALIGNMENT = 32
"""Every table starts at a multiple of this many int32 values: 128 bytes."""

Ints = npt.NDArray[Any]
"""int64"""


@dataclass(eq=False)
class SgmvPlan(CachingPlan):
    """A plan that both kernels read from device tables; a row of the grid is one tile of tokens."""

    tile_tokens: int  # tokens per row of the grid; tile sizes follow from it
    active_slots: int  # slots with tokens when the plan was made; tile sizes follow from it
    packed: torch.Tensor  # [size] int32, on the device; the tables are views of it

    def grid_rows(self, capturing: bool) -> int:
        """Return the rows to launch: those in use, or while capturing all that refills can use."""
        raise NotImplementedError

    def h_rows(self) -> int:
        """Return the rows that h has per slice and plane in `run_linear`."""
        raise NotImplementedError

    def row_constants(self, by_token: bool) -> tuple[tuple[str, int], ...]:
        """Return the constants by which an entry kernel finds its row.

        `by_token` says that h has a row for every token, as callers of `run_lora_a` see it.
        """
        raise NotImplementedError

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return the tables that every entry kernel takes, in order."""
        raise NotImplementedError


def max_runs(num_tokens: int, num_slots: int, size: int) -> int:
    """Return the most runs of at most `size` tokens of one slot that a batch can need, at least 1.

    One run with a single token for each of ``n = min(num_tokens, num_slots)`` slots, and one more
    for every `size` of the remaining tokens.

    >>> max_runs(num_tokens=7, num_slots=3, size=2), max_runs(7, 3, 4)
    (5, 4)
    """
    slots = min(num_tokens, num_slots)
    return max(1, slots + (num_tokens - slots) // size)


def count_tokens(batch: LoRABatch) -> Ints:
    """Return the tokens without an adapter, then the tokens of every slot: [num_slots + 1].

    >>> count_tokens(LoRABatch([2, -1, 0, 2, 2, 2, 2], num_slots=3)).tolist()
    [1, 1, 0, 5]
    """
    return np.bincount(batch.token_slots.numpy() + 1, minlength=batch.num_slots + 1)


def count_active(counts: Ints) -> int:
    """Return how many slots have tokens."""
    return int(np.count_nonzero(counts[1:]))


def split(counts: Ints, size: int) -> Ints:
    """Return how many runs of at most `size` tokens each slot needs.

    >>> split(np.array([1, 0, 5]), 2).tolist()
    [1, 0, 3]
    """
    return (counts + (size - 1)) // size


def permutation(token_slots: Ints, counts: Ints) -> Ints:
    """Return the tokens that have an adapter, slot by slot, in ascending order within each.

    >>> batch = LoRABatch([2, -1, 0, 2, 2, 2, 2], num_slots=3)
    >>> permutation(batch.token_slots.numpy(), count_tokens(batch)).tolist()
    [2, 0, 3, 4, 5, 6]
    """
    if counts.size < 1 << 15:
        token_slots = token_slots.astype(np.int16)  # numpy sorts 16-bit integers by radix
    return token_slots.argsort(kind="stable")[counts[0] :]


def places(counts: Ints, runs: Ints, size: int) -> Ints:
    """Return the place of every token of the permutation; each slot starts a run of its own.

    >>> places(np.array([1, 0, 5]), np.array([1, 0, 3]), 2).tolist()
    [0, 2, 3, 4, 5, 6]
    """
    ends = counts.cumsum()
    # A slot's tokens move from their position in the permutation to that of its first run.
    moved = (runs.cumsum() - runs) * size - (ends - counts)
    found: Ints = np.arange(int(ends[-1])) + moved.repeat(counts)
    return found


def fill_runs(
    packed: npt.NDArray[np.int32], batch: LoRABatch, counts: Ints, size: int, room: int
) -> Ints:
    """Write the slot and the tokens of every run, laid out as `run_tables` finds them.

    `packed` has room for `room` runs of `size` tokens; both tables are overwritten to their ends.
    `counts` are those of `count_tokens`. Returns the runs of each slot; runs in use come first.
    """
    runs = split(counts[1:], size)
    tokens_at = aligned(room)
    packed[: tokens_at + room * size] = EMPTY
    packed[: int(runs.sum())] = np.arange(batch.num_slots).repeat(runs)
    order = permutation(batch.token_slots.numpy(), counts)
    packed[tokens_at:][places(counts[1:], runs, size)] = order
    return runs


def run_tables(packed: torch.Tensor, size: int, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [room] and the tokens [room, size] of runs, views of the packed buffer."""
    slots = packed.as_strided((room,), (1,))  # slicing takes longer
    return slots, packed.as_strided((room, size), (size, 1), aligned(room))


def aligned(count: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that is at least `count`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def staging_buffer(size: int, device: torch.device) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Return host memory for a copy to `device`: an int32 tensor, and an array of the same memory.

    It is pinned, and new each time: torch's allocator reuses pinned memory only after the copies
    from it have ended.
    """
    pinned = device.type != "cpu"
    staged = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
    return staged, staged.numpy()
