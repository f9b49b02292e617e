"""Which adapter lies in which slot: names, pins and the order of use. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock

from lora_backends.errors import InvalidInputError, did_you_mean


class SlotTable:
    """Names in slots, the least recently used first.

    Args:
        num_slots: how many adapters fit, at least 1.

    Raises:
        InvalidInputError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise InvalidInputError(f"max_adapters is {num_slots}; allowed: 1 or more")
        self.num_slots = num_slots
        self._slots: OrderedDict[str, int] = OrderedDict()  # oldest use first
        self._pins: Counter[str] = Counter()  # by pin()
        self._uses: Counter[str] = Counter()  # by calls in flight
        self._evicted: dict[str, str] = {}  # name -> what took its slot
        self.lock = RLock()
        """Held while slots change; a pool holds it from `candidate` to `assign`."""

    @property
    def names(self) -> list[str]:
        """Loaded names, the least recently used first."""
        return list(self._slots)

    def slot(self, name: str) -> int:
        """Return the slot of `name` and count this as a use.

        Raises:
            InvalidInputError: `name` is not loaded; says so if it was evicted.
        """
        with self.lock:
            if name not in self._slots:
                raise InvalidInputError(self._missing(name))
            self._slots.move_to_end(name)
            return self._slots[name]

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def candidate(self, name: str) -> tuple[int, str | None]:
        """Return the slot that `name` would get, and the name that it would evict.

        Raises:
            InvalidInputError: every slot is pinned, or `name` itself is in use.
        """
        with self.lock:
            if name in self._slots:
                self._check_free(name, "replaced")
                return self._slots[name], None
            free = set(range(self.num_slots)) - set(self._slots.values())
            if free:
                return min(free), None
            for oldest in self._slots:
                if not self._pins[oldest] and not self._uses[oldest]:
                    return self._slots[oldest], oldest
            raise InvalidInputError(
                f"no slot for adapter {name!r}: all {self.num_slots} are pinned or in use\n"
                f"  loaded: {', '.join(self._slots)}\n"
                f"  to do: unpin or unload one, or raise max_adapters"
            )

    def assign(self, name: str, slot: int, evicted: str | None) -> None:
        """Record the outcome of `candidate`."""
        with self.lock:
            if evicted is not None:
                self._forget(evicted)
                self._evicted[evicted] = name
            self._slots[name] = slot
            self._slots.move_to_end(name)
            self._evicted.pop(name, None)

    def release(self, name: str) -> int:
        """Forget `name` and return the slot that it had.

        Raises:
            InvalidInputError: `name` is not loaded, or pinned or in use.
        """
        with self.lock:
            slot = self.slot(name)
            self._check_free(name, "unloaded")
            self._forget(name)
            return slot

    def pin(self, name: str) -> None:
        """Keep `name` from being evicted, replaced or unloaded until `unpin`; pins count.

        Raises:
            InvalidInputError: `name` is not loaded.
        """
        with self.lock:
            self.slot(name)
            self._pins[name] += 1

    def unpin(self, name: str) -> None:
        """Take one pin back.

        Raises:
            InvalidInputError: `name` is not loaded or has no pin.
        """
        with self.lock:
            self.slot(name)
            if not self._pins[name]:
                raise InvalidInputError(f"adapter {name!r} is not pinned")
            self._pins[name] -= 1

    @contextmanager
    def in_use(self, names: Iterable[str]) -> Iterator[dict[str, int]]:
        """Hold the slots of `names` for the length of a call; yields name to slot."""
        held: list[str] = []
        try:
            with self.lock:
                slots = {name: self.slot(name) for name in names}
                for name in slots:
                    self._uses[name] += 1
                    held.append(name)
            yield slots
        finally:
            with self.lock:
                for name in held:
                    self._uses[name] -= 1

    def _check_free(self, name: str, what: str) -> None:
        if self._pins[name] or self._uses[name]:
            reason = "pinned" if self._pins[name] else "in use by a running call"
            raise InvalidInputError(
                f"adapter {name!r} is {reason}, so it cannot be {what}\n"
                f"  to do: unpin it, or wait until the call that uses it has ended"
            )

    def _forget(self, name: str) -> None:
        del self._slots[name]
        del self._pins[name], self._uses[name]

    def _missing(self, name: str) -> str:
        loaded = f"loaded: {', '.join(sorted(self._slots)) or 'none'}"
        if name in self._evicted:
            return (
                f"adapter {name!r} was evicted when {self._evicted[name]!r} was loaded\n  {loaded}"
                f"\n  to do: load it again, pin what must stay, or raise max_adapters"
            )
        return (
            f"no adapter named {name!r}{did_you_mean(str(name), self._slots)}\n  {loaded}\n"
            f"  to do: load_adapter({name!r}, folder)"
        )
