"""How a plan of a Triton engine lies in memory: one packed int32 buffer, written on the CPU.

Tokens are permuted so that those of one slot lie together, and each slot's tokens are cut into
runs of at most `size` tokens: the tiles of `triton`, the segments of `csgmv`. One asynchronous copy
sends the buffer; its tables keep their addresses when the plan is refilled. Plans of several sizes
may share a buffer: a batch is sorted once for all of them, and sent by one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.cached import CachingPlan
from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.runs import (
    EMPTY,
    Counted,
    aligned,
    bucket,
    max_runs,
    most_run_tables,
    run_tables_size,
)

Tables: TypeAlias = tuple[torch.Tensor, torch.Tensor, Any]
"""Slots and tokens of the runs, and a third that `ABSENT` stands for if an engine has two."""


class Places(NamedTuple):
    """Where the parts of a buffer begin; token_scales are the first."""

    token_slots: int
    run_slots: int  # the slot of each run
    run_tokens: int  # the tokens of each run
    end: int  # of the runs; the engine's other tables begin here


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
    buffer: torch.Tensor | None = field(default=None, kw_only=True, repr=False)
    # memory that several plans share; `packed` is a part of it; None: not shared
    begins: int = field(default=0, kw_only=True)  # where the part begins
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
        self._places: Places | None = None  # of the tables, for the present cut

    def __getstate__(self) -> dict[str, Any]:
        # a graph does not use the copy, and the copy has memory of its own
        own = {"packed": self.packed.clone(), "buffer": None} if self.buffer is not None else {}
        return super().__getstate__() | own | {"is_captured": False, "_views": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.token_scales is not None:
            self.token_scales = self._scales()

    @classmethod
    def packed_size(cls, capacity: int, num_slots: int, run_sizes: Sequence[int]) -> int:
        """Return the values of a buffer for any `capacity` tokens in runs of any of the sizes."""
        return 2 * aligned(capacity) + most_run_tables(capacity, num_slots, run_sizes)

    @classmethod
    def with_room(
        cls, batch: LoRABatch, capacity: int | None, run_sizes: Sequence[int], device: torch.device
    ) -> Self:
        """Return a plan with room for `capacity` tokens in runs of any of the sizes, to be filled.

        `capacity`: as in `prepare_batch`.
        """
        has_room, capacity = capacity is not None, capacity or batch.num_tokens
        size = cls.packed_size(capacity, batch.num_slots, run_sizes)
        packed = torch.empty(size, dtype=torch.int32, device=device)
        sizes = batch.num_tokens, batch.num_slots
        return cls(*sizes, 0, 0, packed, capacity=capacity, has_room=has_room)

    @classmethod
    def in_one_buffer(
        cls,
        num_slots: int,
        capacities: Sequence[int],
        run_sizes: Sequence[int],
        device: torch.device,
    ) -> list[Self]:
        """Return a plan with room for each number of tokens, side by side, to be filled."""
        sizes = [aligned(cls.packed_size(each, num_slots, run_sizes)) for each in capacities]
        starts = list(accumulate(sizes, initial=0))
        buffer = torch.empty(starts[-1], dtype=torch.int32, device=device)
        shared: dict[str, Any] = {"has_room": True, "buffer": buffer}
        return [
            cls(0, num_slots, 0, 0, buffer[first:end], capacity=each, begins=first, **shared)
            for each, (first, end) in zip(capacities, pairwise(starts), strict=True)
        ]

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

    def is_before(self, other: SgmvPlan) -> bool:
        """Return whether `other` follows this plan in one buffer."""
        is_shared = self.buffer is not None and other.buffer is self.buffer
        return is_shared and other.begins == self.begins + self.packed.numel()

    def fill(self, batch: LoRABatch, counted: Counted, *cut: int) -> None:
        """Cut a batch as `stage` does; the copy of the tables to the device is under way."""
        fill_plans((self,), batch, counted, cut)

    def stage(
        self, staged: npt.NDArray[np.int32], batch: LoRABatch, counted: Counted, *cut: int
    ) -> None:
        """Write the plan of a batch to `staged`, of the size of `packed`.

        Args:
            staged: memory on the host that is sent to `packed` next.
            batch: of the tokens.
            counted: of the batch.
            cut: the engine's sizes; ignored once they are fixed, see the class.
        """
        raise NotImplementedError

    def _stage_runs(
        self,
        staged: npt.NDArray[np.int32],
        batch: LoRABatch,
        counted: Counted,
        run_tokens: int,
        tile_tokens: int,
    ) -> npt.NDArray[np.int32]:
        """Write token_scales, slots and runs; return the memory for the engine's own tables."""
        if self.may_cut_anew():
            self.active_slots = counted.active
            if (self.run_tokens, self.tile_tokens) != (run_tokens, tile_tokens):
                self.run_tokens, self.tile_tokens = run_tokens, tile_tokens
                self.most_runs = max_runs(self.capacity, self.num_slots, run_tokens)
                self.most_rows = max_runs(self.capacity, self.num_slots, tile_tokens)
                self._views = self._places = None
            self.cut = (run_tokens, tile_tokens, *self.sizes_key(batch))
        if self._places is None:
            self._places = self._find_places()
        at, slots_at, tokens_at, end = self._places
        has_scales = batch.token_scales is not None
        if has_scales or (self.is_captured and self.token_scales is not None):
            self._stage_scales(staged, batch)
        else:
            self.token_scales = None
        num_tokens = self.num_tokens = batch.num_tokens
        staged[at : at + num_tokens] = counted.slots
        staged[at + num_tokens : end] = EMPTY
        slots, tokens = counted.runs(self.run_tokens)
        self.num_runs = slots.size
        staged[slots_at : slots_at + slots.size] = slots
        staged[tokens_at : tokens_at + tokens.size] = tokens
        key = (*self.cut, self.token_scales is not None)
        if key != self.call_cache.key:  # else the same object: `Repeat` compares it by identity
            self.call_cache.key = key  # calls stored so far may not fit this cut
        return staged[end:]

    def _find_places(self) -> Places:
        at, tables = aligned(self.capacity), self.tables_at()
        end = tables + run_tables_size(self.run_tokens, self.most_runs)
        # the next values may be another plan's
        assert end <= self.packed.numel(), f"no room for runs of {self.run_tokens} tokens"
        return Places(at, tables, tables + aligned(self.most_runs), end)

    def _stage_scales(self, staged: npt.NDArray[np.int32], batch: LoRABatch) -> None:
        scales = staged[: self.capacity].view(np.float32)
        scales[:] = 1
        if batch.token_scales is not None:
            scales[: batch.num_tokens] = batch.token_scales.numpy()
        self.token_scales = self._scales()

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


def fill_plans(
    plans: Sequence[SgmvPlan], batch: LoRABatch, counted: Counted, cut: tuple[int, ...]
) -> None:
    """Fill plans with one batch; one copy sends those that lie side by side in a buffer.

    Raises:
        InvalidInputError: a captured graph cannot follow the batch; no plan has changed.
    """
    if batch.token_scales is not None:
        for plan in plans:
            plan.refuse_scales_of_captured()
    first, last = 0, len(plans) - 1
    for i, plan in enumerate(plans):
        if i == last or not plan.is_before(plans[i + 1]):
            _fill_side_by_side(plans[first : i + 1], batch, counted, cut)
            first = i + 1


def _fill_side_by_side(
    plans: Sequence[SgmvPlan], batch: LoRABatch, counted: Counted, cut: tuple[int, ...]
) -> None:
    memory, buffer = plans[0].packed, plans[0].buffer
    if len(plans) > 1 and buffer is not None:
        memory = buffer[plans[0].begins : plans[-1].begins + plans[-1].packed.numel()]
    # New each time: torch's allocator reuses pinned memory after the copies from it have ended.
    staged = torch.empty(
        memory.numel(), dtype=torch.int32, device="cpu", pin_memory=not memory.is_cpu
    )
    array, at = staged.numpy(), 0
    for plan in plans:
        end = at + plan.packed.numel()
        plan.stage(array[at:end], batch, counted, *cut)
        at = end
    memory.copy_(staged, non_blocking=True)
