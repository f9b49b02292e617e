"""The plans of one kind of rows: a batch's tokens, or the rows that it samples."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from lora_backends.backend import LoRABackend
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.common.devices import is_capturing
from lora_backends.errors import InvalidInputError, UnsupportedInputError

SMALLEST = 8
"""Rows that the smallest plan on a GPU has room for."""


MOST_ROUTINGS = 8
"""Routings that are kept to be refilled; beyond, the least recently used goes."""


class Routed(NamedTuple):
    """A routing with the choice of one layer; the next layer may refill it."""

    routing: Any
    refills: int  # of the routing, when it was filled with the layer's choice

    @property
    def is_current(self) -> bool:
        """Whether the routing still holds the layer's choice."""
        return bool(self.routing.refills == self.refills)


class _Room:
    """A plan for up to `capacity` rows, and whether it holds the current batch."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.plan: Any = None  # made when it is first needed
        self.is_current = False
        self.is_captured = False  # a CUDA graph replays it, so Python cannot refill it in time


class Plans:
    """Plans with room, one for each power of two of rows on a GPU, a single one on a CPU.

    Engines pad x to the size of a captured graph without telling, so a plan is chosen by the rows
    of x. Backends choose tile sizes when a plan is made: a plan per power of two fits them to the
    rows. A new batch refills the captured plans together, before a graph can be replayed, and each
    other plan when it is next used. Nothing waits for the device.

    Args:
        backend: that makes the plans.
        num_slots: of every layer.
        capacity: rows at most.
        compilation: vLLM's settings, which name the rows of the graphs that it captures; None
            where they are not known, so that any rows may be captured.
        grows: whether more rows than `capacity` get a plan, too.
    """

    def __init__(
        self,
        backend: LoRABackend,
        num_slots: int,
        capacity: int,
        compilation: Any = None,
        *,
        grows: bool = False,
    ) -> None:
        self.backend = backend
        self.num_slots = num_slots
        self._compilation = compilation
        self.most_rows = capacity
        self._grows = grows
        self._rooms = [_Room(size) for size in _sizes(backend.device.type, capacity)]
        self._routings: OrderedDict[Any, Any] = OrderedDict()  # least recently used first
        self.forget()

    def forget(self) -> None:
        """Take back what was announced, as if there had been no batch."""
        self.set_slots([])
        self._is_announced = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold other batches while a block runs, then the present one again."""
        batch, every, was_announced = self._batch, self._every, self._is_announced
        try:
            yield
        finally:
            if every is None:
                self.set_batch(batch)
            else:
                self.set_every(every)
            self._is_announced = was_announced

    @property
    def slots(self) -> tuple[int, ...]:
        """The slot of each row of the batch, or `NO_ADAPTER`."""
        return tuple(self._batch.token_slots.tolist())

    def set_slots(self, slots: Sequence[int] | torch.Tensor) -> None:
        """Take the batch that the next calls run on: one slot, or `NO_ADAPTER`, per row."""
        self.set_batch(LoRABatch(slots, self.num_slots))

    def set_batch(self, batch: LoRABatch) -> None:
        """Take the batch that the next calls run on, with `num_slots` slots."""
        self._every: int | None = None
        self._take(batch)

    def set_every(self, slot: int) -> None:
        """Take batches of any number of rows, all of one slot, or `NO_ADAPTER`."""
        batch = LoRABatch([slot], self.num_slots)
        self._every = slot
        self._take(batch)

    def _take(self, batch: LoRABatch) -> None:
        self._batch = batch
        self._is_idle: bool | None = None  # not known yet: replays of graphs do not ask
        self.num_rows = batch.num_tokens
        self._is_announced = True
        for room in self._rooms:
            room.is_current = False
        # a replay runs no Python, and the engine does not say which plan it reads
        captured = [r for r in self._rooms if r.is_captured and r.capacity >= self.num_rows]
        if captured:
            self._refill(captured)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is added to any row.

        Raises:
            UnsupportedInputError: a CUDA graph is captured before any batch, so that it would stay
                without LoRA whatever it is replayed on.
        """
        if not self._is_announced and is_capturing(self.backend.device):
            raise UnsupportedInputError(
                "a CUDA graph captures LoRA layers whose batch the engine has not announced\n"
                "  to do: capture no graph of an encoder (vLLM: cudagraph_mm_encoder=false)"
            )
        if self._is_idle is None:
            # the batch of one slot may have no rows now, and some in the next layer
            slots = self._batch.token_slots.numpy() if self._every is None else self._every
            self._is_idle = not np.any(np.not_equal(slots, NO_ADAPTER))
        return self._is_idle

    def may_be_captured(self, rows: int) -> bool:
        """Return whether vLLM captures a graph of `rows` rows."""
        if self._compilation is None:
            return True
        return rows in (self._compilation.cudagraph_capture_sizes or ())

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph replays one of the plans."""
        return any(room.is_captured for room in self._rooms)

    def captures(self, rows: int) -> bool:
        """Return whether a CUDA graph replays the plan for x of `rows` rows."""
        fitting = (room for room in self._rooms if room.capacity >= rows)
        found = next(fitting, None)
        return found is not None and found.is_captured

    @property
    def multiplies_bases(self) -> bool:
        """Whether the backend can run a base product together with its LoRA."""
        return getattr(self.backend, "multiplies_bases", False)

    def of(self, rows: int) -> Any:
        """Return the plan for x of `rows` rows; rows after the batch have no adapter.

        Raises:
            InvalidInputError: x has fewer rows than the batch, or more than there is room for.
            UnsupportedInputError: a CUDA graph captures what cannot be captured.
        """
        if self._every is not None and rows != self.num_rows:
            self._take(LoRABatch([self._every] * rows, self.num_slots))
            if rows > self._rooms[-1].capacity:  # an encoder may pad its rows
                self._rooms.append(_Room(rows))
        if self._grows and rows > self._rooms[-1].capacity:
            self._rooms.append(_Room(1 << (rows - 1).bit_length()))
        for room in self._rooms:
            if room.capacity >= rows:
                break
        if not self.num_rows <= rows <= room.capacity:
            raise InvalidInputError(
                f"x does not fit the batch that the engine has announced\n  given: {rows} rows\n"
                f"  allowed: {self.num_rows} to {self._rooms[-1].capacity} rows"
            )
        if is_capturing(self.backend.device):
            self._capture(room)
        if not room.is_current:
            self._refill([room])
        return room.plan

    def token_slots(self, rows: int) -> torch.Tensor:
        """Return the slot of each row of x, or -1: [rows] int64; a CUDA graph follows the batch."""
        return self.backend.token_slots(self.of(rows), rows, self.num_slots)

    def route(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None = None,
    ) -> Routed:
        """Return a routing filled with a copy of a layer's choice for the batch.

        Layers whose choices have the same sizes refill one routing in turn. During a capture each
        layer gets a new one, whose memory belongs to the graph.

        Args:
            topk_ids: [rows, k], of integers.
            topk_weights: [rows, k], of floats.
            num_experts: of this process.
            expert_map: [experts of all processes], from an expert to its number here, or -1.
                None: every expert is here.
        """
        if topk_ids.dtype not in (torch.int32, torch.int64):
            topk_ids = topk_ids.to(torch.int64)
        if expert_map is not None and expert_map.dtype != torch.int32:
            expert_map = expert_map.to(torch.int32)
        plan, prepare = self.of(topk_ids.shape[0]), self.backend.prepare_experts
        choice = (plan, topk_ids, topk_weights.to(torch.float32), num_experts, expert_map)
        if is_capturing(self.backend.device):
            routing = prepare(*choice)
            return Routed(routing, routing.refills)
        # tile sizes depend on all of these; rooms keep their plans alive, so ids stay unique
        key = (id(plan), getattr(plan, "active_slots", 0), *topk_ids.shape, num_experts)
        routing = prepare(*choice, out=self._routings.pop(key, None))
        self._routings[key] = routing
        if len(self._routings) > MOST_ROUTINGS:
            self._routings.popitem(last=False)
        return Routed(routing, routing.refills)

    def _capture(self, room: _Room) -> None:
        if not self.backend.cuda_graphs:
            raise UnsupportedInputError(
                f"a CUDA graph cannot capture backend {self.backend.name!r}\n"
                f"  to do: choose another backend, or capture none: --enforce-eager of vLLM, "
                f"--disable-cuda-graph of SGLang"
            )
        if not room.is_current:  # a copy from the host would be replayed with old values
            raise UnsupportedInputError(
                f"a CUDA graph captures {room.capacity} rows before they have run outside of one\n"
                f"  to do: let the engine warm up before it captures: vLLM's "
                f"cudagraph_num_of_warmups >= 1"
            )
        room.is_captured = True

    def _refill(self, rooms: Sequence[_Room]) -> None:
        """Fill the plans of rooms with the batch."""
        for room in rooms:
            if room.plan is None:
                self._make(room)
        plans = [room.plan for room in rooms]
        refill = getattr(self.backend, "refill", None)
        if refill is not None:
            refill(self._batch, plans)
        else:
            for plan in plans:
                self.backend.prepare_batch(self._batch, out=plan)
        for room in rooms:
            room.is_current = True

    def _make(self, room: _Room) -> None:
        """Make the plan of a room, or of all rooms together where the backend can."""
        prepare = getattr(self.backend, "prepare_rooms", None)
        if prepare is not None:
            rooms = [each for each in self._rooms if each.plan is None]
            plans = prepare(self.num_slots, [each.capacity for each in rooms])
            for each, plan in zip(rooms, plans, strict=True):
                each.plan = plan
            return
        # a typical batch: tile sizes follow the tokens per slot
        typical = [row % self.num_slots for row in range(room.capacity)]
        batch = LoRABatch(typical, self.num_slots)
        room.plan = self.backend.prepare_batch(batch, capacity=room.capacity)


def _sizes(device_type: str, capacity: int) -> list[int]:
    if device_type == "cpu":
        return [capacity]
    powers = [1 << bits for bits in range(capacity.bit_length())]
    return [size for size in powers if SMALLEST <= size < capacity] + [capacity]
