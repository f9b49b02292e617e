"""Stands for asyncio's event loops in the simulation: a thread that runs callbacks."""

from collections import deque
from collections.abc import Callable
from typing import Any

from .operations import InjectedError
from .threads import Simulation


class EventLoop:
    """Runs callbacks in a thread of its own until it is closed.

    Args:
        simulation: that runs.
        number: in its thread's name.
    """

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._sim, self.is_closed = simulation, False
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._runs = False
        simulation.spawn(f"loop {number}", self._run)

    @property
    def is_idle(self) -> bool:
        return self.is_closed or not (self._calls or self._runs)

    @property
    def lost(self) -> list[Callable[..., object]]:
        """Callbacks that were not called, and never will be."""
        return [callback for callback, _ in self._calls] if self.is_closed else []

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        """Let the loop's thread call `callback`; refused as asyncio does if it is closed."""
        self._sim.pause("call soon")
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self._calls.append((callback, args))

    def close(self) -> None:
        """Close the loop; what it has not called yet is lost, as with asyncio."""
        self.is_closed = True

    def _run(self) -> None:
        while True:
            self._sim.pause("wait for callbacks", lambda: self._calls or self.is_closed)
            if self.is_closed:
                return
            callback, args = self._calls.popleft()
            self._runs = True
            try:
                callback(*args)
            except InjectedError:
                self._sim.seen.add("failed callback")  # a loop reports it, and goes on
            self._runs = False
