"""How a plan of a Triton engine lies in memory: one packed int32 buffer, written on the CPU.

Tokens are permuted so that those of one slot lie together, and each slot's tokens are cut into
runs of at most `size` tokens: the tiles of `triton`, the segments of `csgmv`. One asynchronous copy
sends the buffer; its tables keep their addresses when the plan is refilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.cached import CachingPlan
from lora_backends.errors import InvalidInputError

EMPTY = -1
"""The slot of an unused run and the token of an unused place."""

ALIGNMENT = 32
"""Every table starts at a multiple of this many int32 values: 128 bytes."""

Ints = npt.NDArray[Any]
"""int64"""

Tables: TypeAlias = tuple[torch.Tensor, torch.Tensor, Any]
"""Slots and tokens of the runs, and a third that `ABSENT` stands for if an engine has two."""


class RowSizes(NamedTuple):
    """The constants by which a program finds its row of the grid: a group of segments."""

    SEGMENT: int  # tokens of a segment
    GROUP: int  # most segments of a group
    BY_TOKEN: bool  # whether h has a row for every token, not for every place
    WIDTH: int = 1  # tokens that share a row of x: pairs of one token


@dataclass(eq=False)
class SgmvPlan(CachingPlan):
    """A plan that both kernels read from device tables; a row of the grid is one tile of tokens.

    The buffer has room for every composition of `capacity` tokens: first token_scales, then the
    slot of every token, then the tables of the engine. A plan that was made with `capacity` cuts
    each batch into tiles of the size that suits it, until a CUDA graph is captured: a graph keeps
    the grid, the addresses of tables and the kernels. Any other plan keeps the size that it began
    with, so that a graph can be captured after a refill: a capture must not meet a kernel that is
    yet to be compiled.
    """

    has_places: ClassVar[bool] = False
    """Whether h has a row for every place of the tables, unless a call is by token."""

    tile_tokens: int  # tokens per row of the grid; tile sizes follow from it
    active_slots: int  # slots with tokens; tile sizes follow from it
    packed: torch.Tensor  # [size] int32, on the device; the tables are views of it
    has_room: bool = field(default=False, kw_only=True)  # whether it was made with `capacity`
    is_captured: bool = field(default=False, kw_only=True)  # whether a CUDA graph uses the plan
    cut: tuple[int, ...] = field(default=(), kw_only=True)  # sizes that the kernels follow from
    run_tokens: int = field(default=0, kw_only=True)  # tokens per run, a power of two
    num_runs: int = field(default=0, kw_only=True)  # runs in use now, <= most_runs
    most_runs: int = field(default=0, kw_only=True)  # that any batch of `capacity` tokens can need
    most_rows: int = field(default=0, kw_only=True)  # of the grid, likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        self._views: Tables | None = None  # of the buffer, once a launch has needed them

    def __getstate__(self) -> dict[str, Any]:
        # a graph does not use the copy, and the copy has a buffer of its own
        return super().__getstate__() | {"is_captured": False, "_views": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.token_scales is not None:
            self.token_scales = self._scales()

    @classmethod
    def with_room(
        cls,
        batch: LoRABatch,
        capacity: int | None,
        run_sizes: Sequence[int],
        device: torch.device,
        others: int = 0,
    ) -> Self:
        """Return a plan with room for `capacity` tokens in runs of any of the sizes, to be filled.

        `others`: values of the engine's tables besides the runs.
        """
        has_room, capacity = capacity is not None, capacity or batch.num_tokens
        tables = most_run_tables(capacity, batch.num_slots, run_sizes) + others
        packed = torch.empty(2 * aligned(capacity) + tables, dtype=torch.int32, device=device)
        sizes = batch.num_tokens, batch.num_slots
        return cls(*sizes, 0, 0, packed, capacity=capacity, has_room=has_room)

    def grid_rows(self, capturing: bool, rows: int) -> int:
        """Return the rows of the grid for x of `rows` rows; capturing: of any refill of as many."""
        return max_runs(rows, self.num_slots, self.tile_tokens) if capturing else self.num_runs

    def runs(self, capturing: bool, rows: int) -> int:
        """Return the runs for x of `rows` rows, in use or at most, as `grid_rows`."""
        return max_runs(rows, self.num_slots, self.run_tokens) if capturing else self.num_runs

    def h_rows(self, rows: int) -> int:
        """Return the rows that h has per slice and plane in `run_linear` on x of `rows` rows."""
        return rows

    def row_constants(self, by_token: bool) -> RowSizes:
        """Return the constants by which `find_rows` finds a row of the grid.

        `by_token` says that h has a row for every token, as callers of `run_lora_a` see it.
        """
        raise NotImplementedError

    def tables(self) -> Tables:
        """Return the tables that every entry kernel takes, in order."""
        if self._views is None:  # late: stored calls hold the addresses
            self._views = self._view_tables()
        return self._views

    @property
    def slot_table(self) -> torch.Tensor:
        """The slot of every run or -1: [most runs] int32."""
        return self.tables()[0]

    @property
    def token_table(self) -> torch.Tensor:
        """The tokens of every run or -1: [most runs, tokens of a run] int32."""
        return self.tables()[1]

    def _view_tables(self) -> Tables:
        """Return views of the tables where they lie in the buffer for the current tile size."""
        raise NotImplementedError

    def token_slots(self) -> torch.Tensor:
        """Return the slot of every token or -1: [capacity] int32, -1 after the batch."""
        return self.packed[aligned(self.capacity) :][: self.capacity]

    def tables_at(self) -> int:
        """Return where the tables of the engine begin in the buffer."""
        return 2 * aligned(self.capacity)

    def _scales(self) -> torch.Tensor:
        """Return where the buffer has token_scales."""
        return self.packed[: self.capacity].view(torch.float32)

    def _fill_runs(
        self, batch: LoRABatch, counted: Counted, run_tokens: int, tile_tokens: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """Cut a batch into runs of such sizes, unless these are fixed by now.

        Returns host memory to be sent, and the part of it for the tables of the engine.

        Raises:
            InvalidInputError: a captured graph cannot follow the batch.
        """
        if batch.token_scales is not None:
            self.refuse_scales_of_captured()
        if self.may_cut_anew():
            self.active_slots = counted.active
            if (self.run_tokens, self.tile_tokens) != (run_tokens, tile_tokens):
                self.run_tokens, self.tile_tokens = run_tokens, tile_tokens
                self.most_runs = max_runs(self.capacity, self.num_slots, run_tokens)
                self.most_rows = max_runs(self.capacity, self.num_slots, tile_tokens)
                self._views = None
            self.cut = (run_tokens, tile_tokens, *self.sizes_key(batch))
        size, room = self.run_tokens, self.most_runs
        staged, tables = self._stage(batch, counted, run_tables_size(size, room))
        self.num_runs = fill_runs(tables, counted, size, room)
        self.num_tokens = batch.num_tokens
        return staged, tables

    def _stage(
        self, batch: LoRABatch, counted: Counted, tables: int
    ) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """Return host memory for the buffer, and the part of it for the tables of the engine.

        Writes the slots and any token_scales, and fills `tables` values of the tables with EMPTY.
        """
        tokens, slots_at = counted.slots.size, aligned(self.capacity)
        has_scales = batch.token_scales is not None
        has_scales = has_scales or (self.is_captured and self.token_scales is not None)
        pinned = not self.packed.is_cpu
        # New each time: torch's allocator reuses pinned memory after the copies from it have ended.
        staged = torch.empty(
            self.packed.numel(), dtype=torch.int32, device="cpu", pin_memory=pinned
        )
        array = staged.numpy()
        array[slots_at : slots_at + tokens] = counted.slots
        array[slots_at + tokens : 2 * slots_at + tables].fill(EMPTY)
        if has_scales:
            scales = array[: self.capacity].view(np.float32)
            scales[:] = 1
            if batch.token_scales is not None:
                scales[:tokens] = batch.token_scales.numpy()
        self.token_scales = self._scales() if has_scales else None
        return staged, array[2 * slots_at :]

    def _send(self, staged: torch.Tensor) -> None:
        """Copy staged memory to the device, asynchronously; calls stored so far fit this cut."""
        key = (*self.cut, self.token_scales is not None)
        if key != self.call_cache.key:  # else the same object: `Repeat` compares it by identity
            self.call_cache.key = key
        self.packed.copy_(staged, non_blocking=True)

    def sizes_key(self, batch: LoRABatch) -> tuple[int, int]:
        """Return the sizes that kernels follow from besides the tile: like batches repeat calls."""
        return bucket(batch.num_tokens), bucket(self.active_slots)

    def may_cut_anew(self) -> bool:
        """Return whether the next batch may have tiles of another size."""
        return self.tile_tokens == 0 or (self.has_room and not self.is_captured)

    def refuse_scales_of_captured(self) -> None:
        """Raise InvalidInputError where captured kernels would not read token_scales."""
        if self.is_captured and self.token_scales is None:
            raise InvalidInputError(
                "a CUDA graph captured the plan without token_scales, which it would not read\n"
                "  given: a batch with token_scales\n"
                "  to do: give the batch that is captured token_scales, of ones for instance"
            )


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


class Counted(NamedTuple):
    """A batch's tokens by slot."""

    slots: Ints  # [num_tokens]: the slot of every token, or -1
    counts: Ints  # [num_slots + 1]: tokens without an adapter, then those of every slot
    active: int  # slots that have tokens


def count_tokens(batch: LoRABatch) -> Counted:
    """Count the tokens of every slot.

    >>> count_tokens(LoRABatch([2, -1, 0, 2, 2, 2, 2], num_slots=3)).counts.tolist()
    [1, 1, 0, 5]
    """
    slots = batch.token_slots.numpy()
    counts = np.bincount(slots + 1, minlength=batch.num_slots + 1)
    return Counted(slots, counts, int(np.count_nonzero(counts[1:])))


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
    slots, counts, _ = counted
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


def fill_runs(packed: npt.NDArray[np.int32], counted: Counted, size: int, room: int) -> int:
    """Write the slot and the tokens of every run, laid out as `run_tables` finds them.

    `packed` has room for `room` runs of `size` tokens and is EMPTY. Returns how many runs are in
    use; they come first.
    """
    order = permutation(counted)
    if not order.size:
        return 0
    of_slots, tokens = counted.counts[1:], packed[aligned(room) :]
    places = padding_before(of_slots, size).repeat(of_slots)
    places += np.arange(order.size)
    tokens[places] = order.astype(np.int32)  # numpy scatters values of one dtype faster
    used = int(places[-1]) // size + 1
    packed[:used] = counted.slots.take(tokens[: used * size : size])  # of each run's first token
    return used


def run_tables(
    packed: torch.Tensor, first: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots [room] and the tokens [room, size] of runs, which begin at `first`."""
    slots = packed.as_strided((room,), (1,), first)  # slicing takes longer
    return slots, packed.as_strided((room, size), (size, 1), first + aligned(room))


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
