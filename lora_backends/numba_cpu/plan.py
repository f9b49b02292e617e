"""Per-batch data: the tokens of each active slot, in pieces that threads share."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.cached import CachingPlan, CallCache
from lora_backends.numba_cpu.config import LONG_SEGMENT, MAX_SEGMENT
from lora_backends.numba_cpu.needs import LONG

Ints = npt.NDArray[np.int64]


EXPERT_BITS = 32
"""The key of a segment is its slot + (its expert << EXPERT_BITS); the slot in a dense layer."""

_ONE = np.ones(1, np.float32)
NO_SCALES = _ONE.ctypes.data, 0  # the factor of every row


class Work(NamedTuple):
    """The segments of both halves of a call: each is a key and a range of positions.

    Arrays are given by their addresses. `..._order` has the row of x, h or y at each position.
    """

    a_count: int  # segments of the first half
    a_segments: int  # [count, 3] int64: key, first and last + 1 of the positions
    a_span: int  # experts, from a segment's on, whose A the segment shrinks: several share one
    b_count: int  # segments of the second half
    b_segments: int
    x_order: int  # [positions of the first half] int64
    to_order: int  # the same, for h, which that half writes
    h_order: int  # [positions of the second half] int64
    y_order: int
    scales: int  # float32: the factor of each row's delta
    scales_row: int  # bytes from one to the next; 0: all rows have the same
    scales_order: int


PACK_WORK = struct.Struct(f"{len(Work._fields)}q").pack


class Job(NamedTuple):
    """The plan of `launch.run`, for experts; a `NumbaPlan` has all attributes but the last."""

    packed_work: bytes  # a `Work`
    halves_match: bool  # whether both halves run over the same segments
    num_segments: int  # that read weights of their own
    num_positions: int  # of the second half
    h_rows: int  # of h
    needs: int  # LONG or 0
    buffer: array[int]  # keeps alive what the work points into: another thread may group pairs anew


@dataclass(eq=False)
class NumbaPlan(CachingPlan):
    """The tokens in order of their slots, cut into segments of one slot each.

    Slots ``[2, -1, 0, 2]`` make the order ``[2, 0, 3]`` and the segments
    ``[[0, 0, 1], [2, 1, 3]]``.
    """

    order: Ints  # [num_active_tokens] tokens with an adapter, by slot, then by position
    segments: Ints  # [num_segments, 3] slot, first and last + 1 in `order`; at most MAX_SEGMENT

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refill(self.order, self.segments, self.token_scales)

    def __getstate__(self) -> dict[str, Any]:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return state | {"call_cache": CallCache()}  # addresses die with a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refill(self.order, self.segments, self.token_scales)  # where a copy's arrays lie

    def refill(self, order: Ints, segments: Ints, token_scales: torch.Tensor | None) -> None:
        """Take another batch's arrays."""
        self.order, self.segments, self.token_scales = order, segments, token_scales
        self.num_segments, self.num_positions = len(segments), len(order)
        self.h_rows = self.num_tokens
        self.needs = needs_of(segments)
        halves = (len(segments), segments.ctypes.data)
        at = order.ctypes.data
        scales = NO_SCALES if token_scales is None else (token_scales.data_ptr(), 4)
        self.work = Work(*halves, 1, *halves, at, at, at, at, *scales, at)
        self.packed_work, self.halves_match = PACK_WORK(*self.work), True
        self._rows: list[tuple[int, slice | torch.Tensor]] | None = None
        self.slots = frozenset(segments[:, 0].tolist())
        self._places: tuple[Sequence[int] | None, Ints] | None = None

    def places_of(self, slots: Sequence[int] | None) -> Ints:
        """Return each slot's index in `slots`, or -1; with None, the slot itself."""
        wanted = None if slots is None else tuple(slots)
        kept = self._places  # once: another thread may ask for other slots meanwhile
        if kept is None or kept[0] != wanted:
            places = np.arange(self.num_slots, dtype=np.int64)
            if wanted is not None:
                places[:] = -1
                places[list(wanted)] = range(len(wanted))
            kept = self._places = wanted, places
        return kept[1]

    def rows_by_slot(self) -> list[tuple[int, slice | torch.Tensor]]:
        """Return each active slot and its tokens, as a slice where they are neighbours."""
        if self._rows is None:  # once per batch: the backward of every layer asks
            rows: dict[int, list[Ints]] = {}
            for slot, first, end in self.segments.tolist():
                rows.setdefault(slot, []).append(self.order[first:end])
            self._rows = [(slot, _as_rows(np.concatenate(parts))) for slot, parts in rows.items()]
        return self._rows


def _as_rows(tokens: Ints) -> slice | torch.Tensor:
    """Return ascending tokens as rows: a slice is a view, indices copy."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else torch.from_numpy(tokens)


def needs_of(segments: Ints) -> int:
    """Return LONG where a segment is long, else 0."""
    if not len(segments) or segments[-1, 2] < LONG_SEGMENT:
        return 0
    return LONG if (segments[:, 2] - segments[:, 1]).max() >= LONG_SEGMENT else 0


def order_and_segments(batch: LoRABatch) -> tuple[Ints, Ints]:
    """Return the two arrays of a `NumbaPlan`."""
    slots = batch.token_slots.numpy()
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    segments = []
    start = 0
    bounds = np.flatnonzero(np.diff(slots[order], append=-1)) + 1  # ends of runs
    for end in bounds.tolist():
        for first in range(start, end, MAX_SEGMENT):
            segments.append((slots[order[start]], first, min(first + MAX_SEGMENT, end)))
        start = end
    return np.ascontiguousarray(order), np.array(segments, dtype=np.int64).reshape(-1, 3)
