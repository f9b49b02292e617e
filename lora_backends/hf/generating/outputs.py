"""Delivers each output to its request's handler, or into the manager's queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter

# It ends one request with an error. Without it, a failed pass would raise an AttributeError.
if not hasattr(OutputRouter, "fail_and_deliver"):
    raise ImportError("OutputRouter has no fail_and_deliver, which Transformers 5.17 added")

LOOK_S = 0.01
"""Seconds between polls of the output queue: a new output wakes one waiting thread, which may be
that of another request."""


def remove(items: Any, is_removed: Callable[[Any], bool]) -> None:
    """Remove items from a `queue.Queue` that other threads use."""
    with items.mutex:
        others = [item for item in items.queue if not is_removed(item)]
        items.queue.clear()
        items.queue.extend(others)


class Outputs(OutputRouter):  # type: ignore[misc]  # has no types
    """Transformers' router, with a call of the event loop for each output.

    Transformers runs all callbacks of a batch in one call of the last handler's event loop. There,
    a callback that raises stops the others, and a closed loop stops the manager.

    Args:
        ended: called with the last output of each request, before its delivery.
    """

    def __init__(self, ended: Callable[[Any], None]) -> None:
        super().__init__()
        self._ended = ended
        self.delivery = threading.Lock()
        """Held from the end of a request until its output has been delivered."""

    def register(self, request_id: str, callback: Callable[[Any], object], loop: Any) -> None:
        """Let an event loop call `callback` with each output of a request."""
        with self._lock:
            self.result_handlers[request_id] = callback, loop

    def forget(self, request_id: str) -> None:
        """Drop the handler of a request, if it has one."""
        with self._lock:
            self.result_handlers.pop(request_id, None)

    def deliver(self, output: Any) -> None:
        """Deliver one output."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Deliver the outputs of one pass."""
        with self.delivery:
            for output in outputs:
                if output.is_finished():
                    self._ended(output)
                self._route(output)

    def take(
        self, names: Container[str] | None, timeout: float | None, is_running: Callable[[], bool]
    ) -> Any:
        """Return the first output of these requests, or of any, and leave the others in order.

        Args:
            names: None takes any.
            timeout: in seconds; None waits as long as the manager runs.
            is_running: returns whether the manager's thread may still deliver outputs.

        Returns:
            None if the time is over, or the thread has ended without one.
        """
        outputs = self.output_queue
        end = None if timeout is None else time.monotonic() + timeout
        with outputs.not_empty:  # the lock of the queue
            while True:
                # Read before the queue: the last output may arrive just before the thread ends.
                runs = is_running()
                for place, output in enumerate(outputs.queue):
                    if names is None or output.request_id in names:
                        del outputs.queue[place]
                        return output
                if not runs or (end is not None and time.monotonic() >= end):
                    return None
                outputs.not_empty.wait(LOOK_S)

    def drop(self, ids: Container[str]) -> None:
        """Remove the outputs of cancelled requests from the queue: no caller waits for them."""
        remove(self.output_queue, lambda output: output.request_id in ids)

    def _route(self, output: Any) -> None:
        name = output.request_id
        with self._lock:
            handler = self.result_handlers.get(name)
            if output.is_finished():
                self.result_handlers.pop(name, None)
        if handler is not None:
            callback, loop = handler
            try:
                # One call each: the loop reports what a callback raises, and goes on.
                loop.call_soon_threadsafe(callback, output)
                return
            except RuntimeError:  # the loop has closed: the queue keeps the output
                self.forget(name)
        self.output_queue.put(output)
