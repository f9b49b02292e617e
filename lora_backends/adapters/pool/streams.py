"""Orders the CUDA streams that read and write the slots of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lora_backends.errors import InvalidInputError


class SlotStreams:
    """Lets writes of a slot wait for its reads on other streams, and reads for its writes.

    Work on one stream runs in its order and needs none of this. `SlotTable` and `AdapterPool` hold
    the lock of the slots when they call a method, unless it says otherwise.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: dict[Any, Any] = {}  # stream -> event after the last use of any slot on it
        self._written: dict[int, tuple[Any, Any]] = {}  # slot -> stream of its last write, event
        self._untracked: set[int] = set()  # slots that streams may read that nothing here names

    def check_not_capturing(self, name: str) -> None:
        """Raise InvalidInputError if the current stream is captured; no lock."""
        if torch.cuda.is_current_stream_capturing():
            raise InvalidInputError(
                f"adapter {name!r} cannot be loaded, updated or unloaded while a CUDA graph is "
                f"captured\n  to do: do it before, and prepare() the adapters of the graph"
            )

    def before_use(self, slots: Iterable[int]) -> None:
        """Let the current stream wait for writes of `slots` on other streams."""
        stream = torch.cuda.current_stream(self._device)
        for slot in slots:
            writer, event = self._written.get(slot, (stream, None))
            # a capture runs nothing, and it cannot wait for work outside of it
            if writer != stream and not torch.cuda.is_current_stream_capturing():
                stream.wait_event(event)

    def after_use(self, slots: Iterable[int], on_this_stream: bool) -> None:
        """Note that work up to here, on the current stream, has used `slots`; without the lock."""
        if not on_this_stream:
            # a graph may be replayed on any stream
            self._untracked.update(slots)
        stream = torch.cuda.current_stream(self._device)
        if not torch.cuda.is_current_stream_capturing():  # nothing of a capture has run
            event = self._used.get(stream)
            if event is None:
                event = self._used.setdefault(stream, torch.cuda.Event())  # type: ignore[no-untyped-call]
            event.record(stream)  # moves the event; earlier waits keep the earlier record

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Let the writes of a slot in the block wait for its uses on other streams."""
        stream = torch.cuda.current_stream(self._device)
        self._wait_for_uses(slot, stream)
        try:
            yield
        finally:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._written[slot] = stream, event

    def before_write_ahead(self, slot: int) -> None:
        """Let the current stream wait for the uses of a slot; without the lock."""
        if slot in self._untracked:
            # a graph may have read the slot on any stream
            torch.cuda.synchronize(self._device)
            self._untracked.discard(slot)
        self._wait_for_uses(slot, torch.cuda.current_stream(self._device))

    def after_write_ahead(self, slot: int) -> None:
        """Wait on the host until the current stream has written `slot`; without the lock."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        # any stream may read the slot from then on, and so may a graph
        event.synchronize()
        self._written.pop(slot, None)

    def _wait_for_uses(self, slot: int, stream: Any) -> None:
        events = [event for used, event in list(self._used.items()) if used != stream]
        writer, written = self._written.get(slot, (stream, None))
        if writer != stream:
            events.append(written)
        for event in events:
            stream.wait_event(event)
