"""Requests that wait until a slot of the pool comes free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from lora_backends.adapters.pool.policy import may_try
from lora_backends.adapters.pool.slots import NoFreeSlotError, SlotTable
from lora_backends.errors import InvalidInputError

T = TypeVar("T")

LOOK_S = 0.1
"""Seconds between polls for changes that notify nobody: pins, other calls, a dead thread."""


class Line:
    """Requests that wait for a slot, in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._changes = 0
        self._since: dict[str, float | None] = {}  # id to the time when it found no slot
        self._cancelled: set[str] = set()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._since

    def __len__(self) -> int:
        """Return how many requests have looked for a slot and found none."""
        return sum(since is not None for since in list(self._since.values()))

    def move(self) -> None:
        """Let the waiting requests look again: a slot may be free."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request, whose thread gets an error; return False if it does not wait here."""
        with self._changed:
            was_waiting = request_id in self._since
            if was_waiting:
                self._cancelled.add(request_id)
        self.move()
        return was_waiting

    def wait(
        self,
        request_id: str,
        names: Collection[str],
        slots: SlotTable,
        attempt: Callable[[], T],
        may_free: Callable[[], bool],
        may_wait: bool = True,
    ) -> T:
        """Return `attempt()`, repeated until it finds its slots.

        Args:
            request_id: of the request.
            names: of its adapters.
            slots: of the pool.
            attempt: takes the slots, or raises NoFreeSlotError.
            may_free: returns whether a slot can still become free.
            may_wait: False: make one attempt at once, ahead of waiting requests.

        Raises:
            NoFreeSlotError: no slot can become free.
            InvalidInputError: the request was cancelled while it waited, or its id waits already.
        """
        with self._changed:
            if request_id in self._since:
                raise InvalidInputError(
                    f"a request {request_id!r} waits for a slot\n  to do: give each its own id"
                )
            self._since[request_id] = None
        try:
            while True:
                with self._changed:
                    seen = self._changes
                if not may_wait or self._is_turn(request_id, names, slots):
                    try:
                        return attempt()
                    except NoFreeSlotError:
                        if not may_wait or len(names) > slots.num_slots or not may_free():
                            raise
                    self._since[request_id] = self._since[request_id] or time.monotonic()
                with self._changed:
                    if self._changes == seen:
                        self._changed.wait(LOOK_S)
                    if request_id in self._cancelled:
                        raise InvalidInputError(
                            f"request {request_id!r} was cancelled while it waited for a slot"
                        )
        finally:
            with self._changed:
                del self._since[request_id]
                self._cancelled.discard(request_id)
            self.move()

    def _is_turn(self, request_id: str, names: Collection[str], slots: SlotTable) -> bool:
        first_refused = None
        with self._changed:
            for other, since in self._since.items():
                if other == request_id:
                    break
                if since is not None:
                    first_refused = since
                    break
        loaded = all(name in slots for name in names)
        return may_try(first_refused, loaded, time.monotonic())
