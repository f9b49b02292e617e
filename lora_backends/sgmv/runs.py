"""A batch's tokens, slot by slot, cut into runs; and where tables of runs lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch

EMPTY = -1
"""The slot of an unused run and the token of an unused place."""

ALIGNMENT = 32
"""Every table starts at a multiple of this many int32 values: 128 bytes."""

Ints = npt.NDArray[Any]
"""int64"""


def bucket(count: int) -> int:
    """Return the power of two at or above a count: the key under which tile sizes are cached."""
    return 1 << max(0, count - 1).bit_length()


@lru_cache(maxsize=4096)
def max_runs(num_tokens: int, num_slots: int, size: int) -> int:
    """Return the most runs of at most `size` tokens of one slot that a batch can need, at least 1.

    One run with a single token for each of ``n = min(num_tokens, num_slots)`` slots, and one more
    for every `size` of the remaining tokens.

    >>> max_runs(num_tokens=7, num_slots=3, size=2), max_runs(7, 3, 4)
    (5, 4)
    """
    slots = min(num_tokens, num_slots)
    return max(1, slots + (num_tokens - slots) // size)


class Runs(NamedTuple):
    """The runs of a batch, in order of their slots."""

    slots: npt.NDArray[np.int32]  # [runs]
    tokens: npt.NDArray[np.int32]  # [runs * size], EMPTY where a run has fewer


@dataclass(eq=False)
class Counted:
    """A batch's tokens by slot."""

    slots: npt.NDArray[np.int32]  # [num_tokens]: the slot of every token, or -1
    counts: Ints  # [num_slots + 1]: tokens without an adapter, then those of every slot
    active: int  # slots that have tokens
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    # results that plans share

    def order(self) -> Ints:
        """Return the tokens that have an adapter, as `permutation`."""
        order: Ints | None = self.kept.get("order")
        if order is None:
            order = self.kept["order"] = permutation(self)
        return order

    def runs(self, size: int) -> Runs:
        """Return the runs of at most `size` tokens, a power of two."""
        runs: Runs | None = self.kept.get(size)
        if runs is None:
            runs = self.kept[size] = cut_runs(self, size)
        return runs


def count_tokens(batch: LoRABatch) -> Counted:
    """Count the tokens of every slot.

    >>> count_tokens(LoRABatch([2, -1, 0, 2, 2, 2, 2], num_slots=3)).counts.tolist()
    [1, 1, 0, 5]
    """
    return count_slots(batch.token_slots.numpy(), batch.num_slots)


def count_slots(slots: Ints, num_slots: int) -> Counted:
    """Count the tokens of every slot, from the slot of every token."""
    counts = np.bincount(slots + 1, minlength=num_slots + 1)
    return Counted(slots.astype(np.int32), counts, int(np.count_nonzero(counts[1:])))


def split(counts: Ints, size: int) -> Ints:
    """Return how many runs of at most `size` tokens each slot needs.

    >>> split(np.array([1, 0, 5]), 2).tolist()
    [1, 0, 3]
    """
    return (counts + (size - 1)) // size


def permutation(counted: Counted) -> Ints:
    """Return the tokens that have an adapter, slot by slot, in ascending order within each.

    >>> permutation(count_tokens(LoRABatch([2, -1, 0, 2, 2, 2, 2], num_slots=3))).tolist()
    [2, 0, 3, 4, 5, 6]
    """
    slots, counts = counted.slots, counted.counts
    if counts.size < 1 << 15:  # numpy sorts integers of 8 and 16 bits by radix
        slots = slots.astype(np.int8 if counts.size < 1 << 7 else np.int16)
    return slots.argsort(kind="stable")[counts[0] :]


def padding_before(counts: Ints, size: int) -> Ints:
    """Return the places that stay empty before each slot where every slot fills whole runs.

    `size` is a power of two.

    >>> padding_before(np.array([1, 0, 5]), 2).tolist()
    [0, 1, 1]
    """
    padding = -counts & (size - 1)
    before: Ints = np.add.accumulate(padding)
    before -= padding
    return before


def cut_runs(counted: Counted, size: int) -> Runs:
    """Cut each slot's tokens into runs of at most `size` tokens, a power of two.

    >>> runs = cut_runs(count_tokens(LoRABatch([2, -1, 0, 2, 2], num_slots=3)), 2)
    >>> runs.slots.tolist(), runs.tokens.tolist()
    ([0, 2, 2], [2, -1, 0, 3, 4, -1])
    """
    order, of_slots = counted.order(), counted.counts[1:]
    if not order.size:
        return Runs(order.astype(np.int32), order.astype(np.int32))
    places = padding_before(of_slots, size).repeat(of_slots)
    places += np.arange(order.size)
    tokens = np.full((int(places[-1]) // size + 1) * size, EMPTY, np.int32)
    tokens[places] = order.astype(np.int32)  # numpy scatters values of one dtype faster
    return Runs(counted.slots.take(tokens[::size]), tokens)  # a run begins with a token


def run_tables(
    packed: torch.Tensor, first: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [room] and the tokens [room, size] of runs, which begin at `first`."""
    return view(packed, first, room), view(packed, first + aligned(room), room, size)


def view(packed: torch.Tensor, first: int, *shape: int) -> torch.Tensor:
    """Return the values from `first` on as a contiguous tensor; slicing takes longer."""
    strides = (shape[-1], 1) if len(shape) == 2 else (1,)
    return packed.as_strided(shape, strides, packed.storage_offset() + first)


def most_run_tables(capacity: int, num_slots: int, sizes: Sequence[int]) -> int:
    """Return values enough for the tables of a batch in runs of any of the sizes."""
    if len(sizes) == 1:
        return run_tables_size(sizes[0], max_runs(capacity, num_slots, sizes[0]))
    slots = aligned(max_runs(capacity, num_slots, min(sizes)))
    return aligned(slots + max_runs(capacity, num_slots, max(sizes)) * max(sizes))


def run_tables_size(size: int, room: int) -> int:
    """Return the int32 values that the tables of `room` runs of `size` tokens take."""
    return aligned(aligned(room) + room * size)


def aligned(count: int) -> int:
    """Return the smallest multiple of `ALIGNMENT` that is at least `count`."""
    return -(-count // ALIGNMENT) * ALIGNMENT
