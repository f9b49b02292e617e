"""Simulates one card that serves requests, in virtual time, under the pool's own policy.

`SlotTable` assigns slots, host memory evicts as `AdapterStore` does (`policy.keep`), and requests
queue as in continuous batching (`policy.may_try`). Only durations are modelled: those of a step, a
prompt, a copy into a slot and a read from disk.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import NamedTuple

from lora_backends.adapters.pool.policy import keep, may_try
from lora_backends.adapters.pool.slots import Commit, NoFreeSlotError, SlotTable
from lora_backends.planning.traffic import Arrival

WARM_UP = 0.2  # share of the requests, from the first on, that is not counted
OVERLOAD = 0.25  # the simulation stops when a larger share waits, and more than MOST_WAITING
MOST_WAITING = 500


class Times(NamedTuple):
    """Durations in seconds."""

    step: Callable[[int, int], float]  # a decode step, from its numbers of rows and of adapters
    prompt: Callable[[int], float]  # a prompt, from its number of tokens
    load: float  # a copy of an adapter from memory into a slot; it blocks the batch
    read: float  # a read of an adapter from disk; it delays its request, and reads are serial


class _InMemory(NamedTuple):
    bytes: int


@dataclass
class _Generating:
    number: int
    request: Arrival
    left: int  # tokens
    slot: AbstractContextManager[dict[str, int]]


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation, without the requests of the warm-up."""

    slots: int
    requests: int
    hit_rate: float  # share of requests whose adapter was in a slot
    memory_rate: float  # share whose adapter was copied from memory
    disk_rate: float  # share whose adapter was read from disk
    wait_p50_s: float  # median time from arrival to the first step
    wait_p95_s: float
    tokens_per_s: float  # generated tokens
    busy: float  # share of the time that steps, prompts and copies take
    loading: float  # share of the time that copies into slots take
    mean_rows: float  # rows of a step, weighted by time
    mean_adapters: float  # adapters of a step, weighted by time
    keeps_up: bool  # whether the last request ends soon after it arrives
    trace: Sequence[tuple[str, int, str]] = field(default=(), repr=False)
    """"begin" or "end", index of the request and name of its adapter, in order of time."""


class Simulation:
    """One card that serves a list of requests, once."""

    def __init__(
        self,
        requests: Sequence[Arrival],  # in order of arrival
        times: Times,
        *,
        slots: int,  # of the pool
        rows: int,  # the most in a batch
        adapter_bytes: int,  # in host memory
        memory_bytes: int,  # for adapters
        in_memory: Sequence[int] = (),  # at the start, the least recently used first
    ) -> None:
        self._requests, self._times, self._most_rows = requests, times, rows
        self._adapter, self._budget = _InMemory(adapter_bytes), memory_bytes
        self._slots = SlotTable(slots)
        self._slots.provider = self._provide
        self._memory: OrderedDict[str, _InMemory] = OrderedDict()
        self._kept = 0  # bytes in memory
        self._now, self._coming = 0.0, 0
        self._queue: deque[int] = deque()  # indices of requests, in order of arrival
        self._begins: list[float] = []  # waits so far of requests whose first step comes next
        self._refused: dict[int, float] = {}  # when a queued request first found no slot
        self._running: list[_Generating] = []
        self._from = "slot"  # origin of the adapter that was asked for last
        self._stall = 0.0  # time of prompts and copies before the next step
        self._disk = 0.0  # end of the last read
        self._first = int(WARM_UP * len(requests))
        self._origins: dict[str, int] = {"slot": 0, "memory": 0, "disk": 0}
        self._waits: list[float] = []
        self._busy = self._loading = self._row_s = self._adapter_s = self._begun = 0.0
        self._tokens = 0
        self._trace: list[tuple[str, int, str]] = []
        for adapter in in_memory:
            self._keep(f"adapter {adapter}")

    def _keep(self, name: str) -> None:
        """Put an adapter into memory as the most recently used one."""
        self._kept = keep(self._memory, name, self._adapter, self._budget, self._kept)

    def run(self) -> Outcome:
        """Serve all requests, or stop early where the queue grows without bound."""
        while self._coming < len(self._requests) or self._queue or self._running:
            self._arrive()
            if len(self._queue) > max(MOST_WAITING, OVERLOAD * len(self._requests)):
                return self._outcome()
            if len(self._running) < self._most_rows:
                self._admit()
            if self._running:
                self._step()
            elif self._coming < len(self._requests):
                self._now = max(self._now, self._requests[self._coming].arrival)
        return self._outcome()

    def _arrive(self) -> None:
        requests = self._requests
        while self._coming < len(requests) and requests[self._coming].arrival <= self._now:
            if self._coming == self._first:
                self._begun = self._now
            self._queue.append(self._coming)
            self._coming += 1

    def _admit(self) -> None:
        """Start queued requests in order while the batch has rows left."""
        first_refused: float | None = None
        waiting: list[int] = []
        while self._queue and len(self._running) < self._most_rows:
            number = self._queue.popleft()
            name = f"adapter {self._requests[number].adapter}"
            if not may_try(first_refused, name in self._slots, self._now):
                waiting.append(number)
                if not may_try(first_refused, True, self._now):
                    break  # nothing passes the first refused request any more
                continue
            slot = self._slots.in_use([name], by="request")
            self._from = "slot"
            try:
                slot.__enter__()
            except NoFreeSlotError:
                since = self._refused.setdefault(number, self._now)
                first_refused = since if first_refused is None else first_refused
                waiting.append(number)
                continue
            self._begin(number, name, slot)
        self._queue.extendleft(reversed(waiting))

    def _begin(self, number: int, name: str, slot: AbstractContextManager[dict[str, int]]) -> None:
        request = self._requests[number]
        self._refused.pop(number, None)
        self._running.append(_Generating(number, request, request.output, slot))
        self._trace.append(("begin", number, name))
        if name in self._memory:
            self._memory.move_to_end(name)
        read = 0.0
        if self._from == "disk":
            self._disk = max(self._disk, self._now) + self._times.read
            read = self._disk - self._now
        if number >= self._first:
            self._origins[self._from] += 1
            self._begins.append(self._now - request.arrival + read)
        self._stall += self._times.prompt(request.prompt)
        if self._from != "slot":
            self._stall += self._times.load
            self._loading += self._times.load if number >= self._first else 0.0

    def _provide(self, names: Sequence[str]) -> Commit:
        """Return a commit that brings adapters into slots, as that of `AdapterStore` does."""

        def commit(hold: Callable[[], None]) -> None:
            hold()
            for name in names:
                if name in self._slots:
                    continue
                slot, _ = self._slots.candidate(name)
                self._from = "memory" if name in self._memory else "disk"
                self._slots.vacate(name, slot)
                self._keep(name)
                self._slots.assign(name, slot)

        return commit

    def _step(self) -> None:
        """Run steps until a request ends or the next one arrives."""
        rows = len(self._running)
        adapters = len({running.request.adapter for running in self._running})
        step = self._times.step(rows, adapters)
        count = min(running.left for running in self._running)
        if self._coming < len(self._requests) and rows < self._most_rows:
            gap = self._requests[self._coming].arrival - self._now - self._stall
            count = max(1, min(count, int(gap / step) + 1))
        passed = self._stall + count * step
        # The prompts and copies of all requests that start now precede their common first step.
        self._waits += [wait + self._stall for wait in self._begins]
        self._begins = []
        if self._coming > self._first:
            self._busy += passed
            self._row_s += rows * passed
            self._adapter_s += adapters * passed
            self._tokens += rows * count
        self._now, self._stall = self._now + passed, 0.0
        still: list[_Generating] = []
        for running in self._running:
            running.left -= count
            if running.left > 0:
                still.append(running)
                continue
            running.slot.__exit__(None, None, None)
            self._trace.append(("end", running.number, f"adapter {running.request.adapter}"))
        self._running = still

    def _outcome(self) -> Outcome:
        # After an early stop, queued requests count with their wait so far.
        waits = self._waits + [
            self._now - self._requests[number].arrival
            for number in self._queue
            if number >= self._first
        ]
        cuts = (
            quantiles(waits, n=20, method="inclusive") if len(waits) > 1 else (waits or [0.0]) * 19
        )
        counted = len(self._waits)
        time = max(self._now - self._begun, 1e-9)
        last = self._requests[-1].arrival
        mean_output = sum(r.output for r in self._requests) / len(self._requests)
        # The last request needs its own steps; a much later end means that a queue has grown.
        grace = 0.1 * (last - self._begun) + 4 * mean_output * self._times.step(1, 1)
        origins = {key: count / max(counted, 1) for key, count in self._origins.items()}
        return Outcome(
            slots=self._slots.num_slots,
            requests=counted,
            hit_rate=origins["slot"],
            memory_rate=origins["memory"],
            disk_rate=origins["disk"],
            wait_p50_s=cuts[9],
            wait_p95_s=cuts[18],
            tokens_per_s=self._tokens / time,
            busy=min(1.0, self._busy / time),
            loading=self._loading / time,
            mean_rows=self._row_s / max(self._busy, 1e-9),
            mean_adapters=self._adapter_s / max(self._busy, 1e-9),
            keeps_up=not self._queue and max(self._now, self._disk) - last <= grace,
            trace=tuple(self._trace),
        )
