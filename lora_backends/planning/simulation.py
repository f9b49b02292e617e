"""One card under a list of requests, in virtual time, by the pool's own decisions.

Slots are those of `SlotTable`, the memory behind them keeps what `AdapterStore` keeps, and a
request that finds no slot waits in the order of continuous batching (`policy.may_try`). Only times
are modelled: a step, a prompt, a copy into a slot, a read from a disk.
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
from lora_backends.planning.traffic import Request

WARM_UP = 0.2  # of the requests come before counting begins
OVERLOAD = 0.25  # of all requests wait, and not fewer than MOST_WAITING: the line grows, so stop
MOST_WAITING = 500


class Times(NamedTuple):
    """What the parts of serving take, in seconds."""

    step: Callable[[int, int], float]  # of a decode step, by rows and by adapters among them
    prompt: Callable[[int], float]  # of a prompt, by its tokens
    load: float  # of an adapter from memory into a slot; the batch waits
    read: float  # of an adapter from a disk into memory; its request waits, one read at a time


class _Held(NamedTuple):
    bytes: int


@dataclass
class _Running:
    number: int
    request: Request
    left: int  # tokens
    slot: AbstractContextManager[dict[str, int]]


@dataclass(frozen=True)
class Outcome:
    """What became of the requests, those of the warm-up left out."""

    slots: int
    requests: int
    hit_rate: float  # the adapter was in a slot
    memory_rate: float  # it came from memory
    disk_rate: float  # it came from a disk
    wait_p50_s: float  # from arrival to the first step
    wait_p95_s: float
    tokens_per_s: float  # generated
    busy: float  # share of the time in which a step ran
    loading: float  # share of the time in which a copy into a slot held the batch
    mean_rows: float  # of a step
    mean_adapters: float  # of a step
    keeps_up: bool  # the requests end about as soon as they come
    trace: Sequence[tuple[str, int, str]] = field(default=(), repr=False)
    """"begin" or "end", the number of a request and the name of its adapter, in order."""


def simulate(
    requests: Sequence[Request],
    times: Times,
    *,
    slots: int,
    rows: int,
    adapter_bytes: int,
    memory_bytes: int,
    in_memory: Sequence[int] = (),
) -> Outcome:
    """Serve requests on one card.

    Args:
        requests: in order of arrival.
        times: of the parts.
        slots: of the pool.
        rows: the most in a batch.
        adapter_bytes: of one adapter in memory.
        memory_bytes: of the adapters in memory, as `cpu_bytes` of `keep_adapters`.
        in_memory: adapters that lie there at first, the least recently used first.
    """
    card = _Card(requests, times, slots, rows, adapter_bytes, memory_bytes)
    for adapter in in_memory:
        card.keep(f"adapter {adapter}")
    return card.run()


class _Card:
    def __init__(
        self,
        requests: Sequence[Request],
        times: Times,
        slots: int,
        rows: int,
        adapter_bytes: int,
        memory_bytes: int,
    ) -> None:
        self._requests, self._times, self._most_rows = requests, times, rows
        self._adapter, self._budget = _Held(adapter_bytes), memory_bytes
        self._slots = SlotTable(slots)
        self._slots.provider = self._provide
        self._memory: OrderedDict[str, _Held] = OrderedDict()
        self._kept = 0  # bytes in memory
        self._now, self._coming = 0.0, 0
        self._line: deque[int] = deque()  # numbers of requests, in order of arrival
        self._begins: list[float] = []  # waits so far of requests whose first step comes next
        self._refused: dict[int, float] = {}  # when a request of the line found no slot
        self._running: list[_Running] = []
        self._from = "slot"  # where the last adapter came from
        self._stall = 0.0  # of the batch, before the next step
        self._disk = 0.0  # when the last read ends
        self._first = int(WARM_UP * len(requests))
        self._origins: dict[str, int] = {"slot": 0, "memory": 0, "disk": 0}
        self._waits: list[float] = []
        self._busy = self._loading = self._row_s = self._adapter_s = self._begun = 0.0
        self._tokens = 0
        self._trace: list[tuple[str, int, str]] = []

    def keep(self, name: str) -> None:
        """Keep an adapter in memory, the last to be dropped."""
        self._kept = keep(self._memory, name, self._adapter, self._budget, self._kept)

    def run(self) -> Outcome:
        while self._coming < len(self._requests) or self._line or self._running:
            self._arrive()
            if len(self._line) > max(MOST_WAITING, OVERLOAD * len(self._requests)):
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
            self._line.append(self._coming)
            self._coming += 1

    def _admit(self) -> None:
        """Let requests of the line begin, in its order, while there are rows."""
        first_refused: float | None = None
        waiting: list[int] = []
        while self._line and len(self._running) < self._most_rows:
            number = self._line.popleft()
            name = f"adapter {self._requests[number].adapter}"
            if not may_try(first_refused, name in self._slots, self._now):
                waiting.append(number)
                if not may_try(first_refused, True, self._now):
                    break  # the first has waited so long that nobody passes it
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
        self._line.extendleft(reversed(waiting))

    def _begin(self, number: int, name: str, slot: AbstractContextManager[dict[str, int]]) -> None:
        request = self._requests[number]
        self._refused.pop(number, None)
        self._running.append(_Running(number, request, request.output, slot))
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
        """Bring a name into a slot, as `AdapterStore` does."""

        def commit(hold: Callable[[], None]) -> None:
            hold()
            for name in names:
                if name in self._slots:
                    continue
                slot, _ = self._slots.candidate(name)
                self._from = "memory" if name in self._memory else "disk"
                self._slots.vacate(name, slot)
                self.keep(name)
                self._slots.assign(name, slot)

        return commit

    def _step(self) -> None:
        """Run steps until a request ends or another one comes."""
        rows = len(self._running)
        adapters = len({running.request.adapter for running in self._running})
        step = self._times.step(rows, adapters)
        count = min(running.left for running in self._running)
        if self._coming < len(self._requests) and rows < self._most_rows:
            gap = self._requests[self._coming].arrival - self._now - self._stall
            count = max(1, min(count, int(gap / step) + 1))
        passed = self._stall + count * step
        # Prompts and copies of all that begin together come before the first step of each.
        self._waits += [wait + self._stall for wait in self._begins]
        self._begins = []
        if self._coming > self._first:
            self._busy += passed
            self._row_s += rows * passed
            self._adapter_s += adapters * passed
            self._tokens += rows * count
        self._now, self._stall = self._now + passed, 0.0
        still: list[_Running] = []
        for running in self._running:
            running.left -= count
            if running.left > 0:
                still.append(running)
                continue
            running.slot.__exit__(None, None, None)
            self._trace.append(("end", running.number, f"adapter {running.request.adapter}"))
        self._running = still

    def _outcome(self) -> Outcome:
        # Where the simulation stopped early, those in the line have waited at least so long.
        waits = self._waits + [
            self._now - self._requests[number].arrival
            for number in self._line
            if number >= self._first
        ]
        cuts = (
            quantiles(waits, n=20, method="inclusive") if len(waits) > 1 else (waits or [0.0]) * 19
        )
        counted = len(self._waits)
        time = max(self._now - self._begun, 1e-9)
        last = self._requests[-1].arrival
        mean_output = sum(r.output for r in self._requests) / len(self._requests)
        # A last request takes its own steps; beyond them the line has grown.
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
            keeps_up=not self._line and max(self._now, self._disk) - last <= grace,
            trace=tuple(self._trace),
        )
