"""Locks, conditions, events, threads, queues and executors of the running simulation.

They behave as the standard library's. Queues and executors are the standard library's own code on
simulated locks.
"""

import concurrent.futures
import contextlib
import importlib.util
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from .threads import Simulation


class _Now:
    simulation: Simulation | None = None


def simulation() -> Simulation:
    """Return the running simulation."""
    assert _Now.simulation is not None
    return _Now.simulation


@contextlib.contextmanager
def current(made: Simulation) -> Iterator[None]:
    """Let the objects below belong to a simulation."""
    _Now.simulation = made
    try:
        yield
    finally:
        _Now.simulation = None
        _EXECUTOR._threads_queues.clear()  # their threads have ended


class RLock:
    """A lock that one thread may take several times."""

    most = 2**30

    def __init__(self) -> None:
        self._sim, self._owner, self._times = simulation(), None, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sim = self._sim
        sim.pause("acquire")
        while not self._is_open():
            if not blocking:
                return False
            if not sim.pause("wait for lock", self._is_open, None if timeout < 0 else timeout):
                return False
        self._owner, self._times = sim.current, self._times + 1
        return True

    def release(self) -> None:
        if not self._times:
            raise RuntimeError("release unlocked lock")
        self._times -= 1
        if not self._times:
            self._owner = None
            self._sim.pause("released")

    def locked(self) -> bool:
        return self._times > 0

    def is_mine(self) -> bool:
        return self._owner is self._sim.current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_open(self) -> bool:
        return not self._times or (self._owner is self._sim.current and self._times < self.most)

    def _give_up(self) -> int:
        times, self._times, self._owner = self._times, 0, None
        return times

    def _take_back(self, times: int) -> None:
        while self._times:
            self._sim.pause("wait for lock", lambda: not self._times)
        self._owner, self._times = self._sim.current, times


class Lock(RLock):
    """A lock that one thread may take once; another may release it."""

    most = 1

    def _is_open(self) -> bool:
        return not self._times


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self.acquire, self.release = self._lock.acquire, self._lock.release
        self._waiters: list[list[bool]] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._lock.is_mine():
            raise RuntimeError("cannot wait on un-acquired lock")
        ticket = [False]
        self._waiters.append(ticket)
        times = self._lock._give_up()
        try:
            return simulation().pause("wait", lambda: ticket[0], timeout)
        finally:
            if ticket in self._waiters:
                self._waiters.remove(ticket)
            self._lock._take_back(times)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        sim = simulation()
        end = None if timeout is None else sim.now + timeout
        while not (found := predicate()):
            if end is not None and sim.now >= end:
                return found
            self.wait(None if end is None else end - sim.now)
        return found

    def notify(self, n: int = 1) -> None:
        if not self._lock.is_mine():
            raise RuntimeError("cannot notify on un-acquired lock")
        for ticket in self._waiters[:n]:
            ticket[0] = True
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        simulation().pause("set")

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        simulation().pause("wait for event", lambda: self._is_set, timeout)
        return self._is_set


class Semaphore:
    """As `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        sim = simulation()
        if not self._value and (not blocking or timeout == 0):
            return False
        sim.pause("wait for semaphore", lambda: self._value > 0, timeout)
        if not self._value:
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        simulation().pause("release semaphore")


class SimpleQueue:
    """As `queue.SimpleQueue`, which is written in C: no signal interrupts it."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if _Now.simulation is not None:  # else the executor is deleted, after its simulation
            simulation().pause("put")

    def get(self, block: bool = True) -> Any:
        if block:
            simulation().pause("get", lambda: bool(self._items))
        if not self._items:
            raise QUEUE.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)


class Thread:
    """As `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] = lambda: None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon, self._task = name, daemon, None
        self._work = lambda: target(*args, **(kwargs or {}))

    def start(self) -> None:
        sim = simulation()
        self._task = sim.spawn(f"{self.name} {len(sim.tasks)}", self._work)

    def is_alive(self) -> bool:
        sim = simulation()  # after a failure nobody may wait for ever
        return self._task is not None and not self._task.done and sim.failure is None

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        simulation().pause("join", lambda: task.done, timeout)


def _standard(name: str) -> ModuleType:
    """Return another copy of a module of the standard library."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Semaphore=Semaphore,
    Thread=Thread,
    local=threading.local,
    get_ident=threading.get_ident,
    current_thread=threading.current_thread,
)
"""In the place of the module `threading`."""

TIME = SimpleNamespace(
    monotonic=lambda: simulation().now,
    time=lambda: simulation().now,
    perf_counter=lambda: simulation().now,
    sleep=lambda seconds: simulation().pause("sleep", lambda: False, seconds),
)
"""In the place of the module `time`."""

QUEUE = _standard("queue")
"""In the place of the module `queue`."""
QUEUE.threading, QUEUE.time = THREADING, TIME.monotonic
QUEUE.SimpleQueue = SimpleQueue

_BASE = _standard("concurrent.futures._base")
_BASE.threading, _BASE.time = THREADING, TIME
_BASE.LOGGER = SimpleNamespace(critical=lambda *_, **__: None, exception=lambda *_, **__: None)
_BASE.CancelledError = concurrent.futures.CancelledError
_EXECUTOR = _standard("concurrent.futures.thread")
_EXECUTOR.threading, _EXECUTOR.queue, _EXECUTOR._base = THREADING, QUEUE, _BASE
_EXECUTOR._global_shutdown_lock = contextlib.nullcontext()  # of the end of the process
Executor = _EXECUTOR.ThreadPoolExecutor
"""In the place of `ThreadPoolExecutor`."""
