"""Which adapter lies in which slot: names, pins and the order of use. No tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, RLock
from typing import TYPE_CHECKING, Literal, TypeAlias

from lora_backends.common.names import PEFT_BASE
from lora_backends.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    from lora_backends.adapters.pool.streams import SlotStreams

REMEMBERED = 1024
"""Names of evicted adapters that are remembered: errors say which name took the slot."""

Holder: TypeAlias = Literal["call", "prepared", "request", "training"]

_LASTING = ("request", "prepared", "training")
_HOLDERS = ("call", *_LASTING)

Commit: TypeAlias = Callable[[Callable[[], None]], None]
"""Puts names into slots and calls its argument, which holds them there; the slots are locked."""


class NoFreeSlotError(InvalidInputError):
    """Every slot is pinned or in use, at this moment."""


@dataclass(frozen=True)
class _Hold:
    """Adapters that keep their slots while something uses them."""

    by: Holder | Literal["coming"]  # coming: a call that has not taken its slots yet
    names: frozenset[str]
    slots: frozenset[int]  # theirs; kept from others even if a failed update took the names off


class SlotTable:
    """Names in slots, the least recently used first.

    Args:
        num_slots: how many adapters fit, at least 1.
        streams: orders the CUDA streams that use the slots; None on a CPU.

    Raises:
        InvalidInputError: `num_slots` is less than 1.
    """

    def __init__(self, num_slots: int, streams: SlotStreams | None = None) -> None:
        if num_slots < 1:
            raise InvalidInputError(f"max_adapters is {num_slots}; allowed: 1 or more")
        self.num_slots, self._streams = num_slots, streams
        self._slots: OrderedDict[str, int] = OrderedDict()  # oldest use first
        self._pins: Counter[str] = Counter()  # by pin()
        self._holds: dict[object, _Hold] = {}  # by calls in flight and prepared adapters
        self._lost: OrderedDict[str, str] = OrderedDict()  # name -> the name that took its slot
        self.provider: Callable[[Sequence[str]], Commit] | None = None
        """Prepares names that are about to be used, e.g. brings those without a slot."""
        self.before_use: Callable[[Iterable[str]], None] | None = None
        """Called with the names that are about to be used, before their slots are read."""
        self.lock = RLock()
        """Held while slots change; a pool holds it from `candidate` to `assign`."""
        self._written_ahead: set[int] = set()  # slots from `reserve` to `settle`
        self._settled = Condition(self.lock)
        self._expected: set[str] = set()  # names that were brought ahead and not used since
        self._recent: frozenset[str] = frozenset()  # names of the last use
        self.evictions = 0
        """Adapters that lost their slot to another."""

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
            if not isinstance(name, str) or name not in self._slots:
                raise InvalidInputError(self._missing(name))
            self._slots.move_to_end(name)
            self._expected.discard(name)
            return self._slots[name]

    def __contains__(self, name: object) -> bool:
        return name in self._slots

    def candidate(self, name: str) -> tuple[int, str | None]:
        """Return the slot that `name` would get, and the name that it would evict.

        Raises:
            NoFreeSlotError: every slot is pinned or in use.
            InvalidInputError: `name` itself is in use.
        """
        with self.lock:
            if name in self._slots:
                self._check_free(name, "replaced")
                return self._slots[name], None
            free = self._free()
            if free:
                return min(free), None
            # In the order of use: the first that nothing holds goes.
            for oldest in self._slots:
                if self._is_free(oldest):
                    return self._slots[oldest], oldest
            raise self._no_slot(name)

    def check_room(self, names: Sequence[str]) -> None:
        """Refuse names for which pins, requests, prepared adapters and training leave no slot.

        Slots that only calls use count as free, because calls end soon.

        Raises:
            NoFreeSlotError: there is no room.
        """
        with self.lock:
            new = self._new(names)
            if new and len(new) > self.num_slots - len(self._kept(names, _LASTING)):
                raise self._no_slot(new[0])

    def _no_slot(self, name: str) -> NoFreeSlotError:
        return NoFreeSlotError(
            f"no slot for adapter {name!r}: all {self.num_slots} are pinned or in use\n"
            f"  loaded: {', '.join(self._slots)}\n{self._trained()}"
            f"  to do: unpin one, release() prepared adapters, or raise max_adapters"
        )

    def reserve(self, name: str) -> int | None:
        """Take a slot that is written before a batch asks for `name`, or return None."""
        with self.lock:
            free = self._free()
            # the last batch used it, or an earlier prefetch brought it for a batch that is still to
            # come
            spared = self._recent | self._expected
            kinds = ("coming", *_HOLDERS)
            unused = (
                slot
                for old, slot in self._slots.items()
                if old not in spared and self._is_free(old, kinds)
            )
            slot = min(free) if free else next(unused, None)
            if slot is not None:
                # nobody else gets the slot before `settle`
                self._written_ahead.add(slot)
                self.vacate(name, slot)
            return slot

    def settle(self, slot: int, name: str | None = None) -> None:
        """End `reserve`: give the slot its name, or leave it free."""
        with self.lock:
            if name is not None:
                self.assign(name, slot)
                self._expected.add(name)
            self._written_ahead.discard(slot)
            self._settled.notify_all()

    def expect(self, name: str) -> bool:
        """Return whether `name` is loaded, and let no prefetch evict it before it is used."""
        with self.lock:
            if name not in self._slots:
                return False
            self._slots.move_to_end(name)
            self._expected.add(name)
            return True

    def wait_for_room(self, names: Iterable[str]) -> None:
        """Wait while `names` find no slot only because one is being written ahead."""
        names = list(names)
        with self.lock:
            while self._written_ahead and self._lacks_room(names):
                self._settled.wait()

    def _lacks_room(self, names: Sequence[str]) -> bool:
        room = self.num_slots - len(self._written_ahead) - len(self._kept(names, _HOLDERS))
        return len(self._new(names)) > room

    def _new(self, names: Sequence[str]) -> list[str]:
        """Return the names without a slot, each once."""
        return [name for name in dict.fromkeys(names) if name not in self._slots]

    def _kept(self, names: Sequence[str], kinds: tuple[str, ...]) -> list[str]:
        """Return the loaded names that are among `names`, pinned, or held by one of `kinds`."""
        return [name for name in self._slots if name in names or not self._is_free(name, kinds)]

    def _free(self) -> set[int]:
        held = (hold.slots for hold in list(self._holds.values()))
        return set(range(self.num_slots)).difference(
            self._slots.values(), self._written_ahead, *held
        )

    def vacate(self, name: str, slot: int) -> None:
        """Take the name off `slot`, whose weights are about to be overwritten by another's."""
        with self.lock:
            for old in [held for held, place in self._slots.items() if place == slot]:
                self._lost[old] = name
                self.evictions += old != name
                # until `assign`, no row can ask for the slot: a load that is interrupted leaves it
                # free
                self._forget(old)
            while len(self._lost) > REMEMBERED:
                self._lost.popitem(last=False)

    def assign(self, name: str, slot: int) -> None:
        """Give `name` a slot that `candidate` chose and `vacate` emptied; it is the last in use."""
        with self.lock:
            self._slots[name] = slot  # one step, so an interrupt finds it done or not done
            self._lost.pop(name, None)

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

    def place(self, name: str) -> int:
        """Return the slot of a loaded name; this does not count as a use."""
        return self._slots[name]

    def is_free(self, name: str) -> bool:
        """Return whether nothing pins or uses `name`, so that it may be replaced."""
        with self.lock:
            return self._is_free(name)

    def _is_free(self, name: str, kinds: tuple[str, ...] = _HOLDERS) -> bool:
        """Return whether `name` is neither pinned nor held by one of `kinds`; needs the lock."""
        return not self._pins[name] and self._holder(name, kinds) is None

    def updatable(self, name: str) -> int:
        """Return the slot of `name`, where an update may overwrite its weights.

        Pins and prepared adapters allow it: they keep the slot, not its weights.

        Raises:
            InvalidInputError: `name` is not loaded, or a running call or request uses it.
        """
        with self.lock:
            slot = self.slot(name)
            if self._holder(name, ("call", "request", "training")) is not None:
                self._check_free(name, "updated")
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

    def begin_training(self, name: str) -> None:
        """Keep `name` from being evicted, replaced, updated or unloaded until `end_training`."""
        with self.lock:
            slots = frozenset((self._slots[name],))
            self._holds[_training(name)] = _Hold("training", frozenset((name,)), slots)

    def end_training(self, name: str) -> None:
        """Take back `begin_training`; a backward on the current stream may read the slot still."""
        if self._streams is not None and name in self._slots:
            self._streams.after_use((self._slots[name],), on_this_stream=True)
        self._holds.pop(_training(name), None)

    @contextmanager
    def in_use(self, names: Iterable[str], by: Holder = "call") -> Iterator[dict[str, int]]:
        """Keep the slots of `names` as they are inside the block; yields name to slot.

        `by` names the holder in the error that an attempt to take a slot raises.

        Raises:
            InvalidInputError: a name is not loaded.
        """
        token, names = object(), list(names)
        slots: dict[str, int] = {}

        def hold() -> None:
            self._holds[token] = _Hold(by, frozenset(names), frozenset(slots.values()))

        if self.before_use is not None:
            self.before_use(names)
        provider = self.provider  # read once: another thread may detach the model
        try:
            # Names that are loaded here stay loaded while the provider works, unless another call
            # takes their slots.
            self._holds[token] = _Hold("coming", frozenset(names), frozenset())
            commit = None if provider is None or not names else provider(names)
            with self.lock:
                self.wait_for_room(names)
                if commit is not None:
                    commit(hold)
                # After the commit: it may have moved names to other slots.
                slots = {name: self.slot(name) for name in names}
                hold()
                if names:
                    self._recent = frozenset(names)
                if self._streams is not None:
                    self._streams.before_use(slots.values())
            yield slots
        finally:
            try:
                if self._streams is not None and slots:
                    self._streams.after_use(slots.values(), by == "call")
            finally:
                self._holds.pop(token, None)  # one step: an interrupt cannot leave a part of it

    def _holder(self, name: str, kinds: tuple[str, ...] = _HOLDERS) -> str | None:
        """Return the first of `kinds` that holds `name`, or None."""
        # A copy, since other threads end their calls without the lock.
        holders = {hold.by for hold in list(self._holds.values()) if name in hold.names}
        return next((kind for kind in kinds if kind in holders), None)

    def _check_free(self, name: str, what: str) -> None:
        holder = self._holder(name)
        if self._pins[name] and what != "updated":
            reason, to_do = "pinned", "unpin it first"
        elif holder == "call":
            reason, to_do = "in use by a running call", "wait until that call has ended"
        elif holder == "prepared":
            reason = "in use by prepared adapters"
            to_do = "give them other adapters with update(), or release() them"
        elif holder == "request":
            reason = "in use by a request of continuous batching"
            to_do = "wait until the request has ended, or cancel it"
        elif holder == "training":
            reason = "being trained"
            to_do = "change its parameters in place, or unload_adapter(), which ends its training"
        else:
            return
        raise InvalidInputError(
            f"adapter {name!r} is {reason}, so it cannot be {what}\n  to do: {to_do}"
        )

    def _trained(self) -> str:
        names = sorted(
            n for hold in list(self._holds.values()) if hold.by == "training" for n in hold.names
        )
        return f"  trained: {', '.join(names)}; unload_adapter() ends it\n" if names else ""

    def _forget(self, name: str) -> None:
        del self._slots[name]
        self._pins.pop(name, None)
        self._expected.discard(name)

    def _missing(self, name: str) -> str:
        loaded = f"loaded: {', '.join(sorted(self._slots)) or 'none'}"
        if isinstance(name, str) and name in self._lost:
            taker = self._lost[name]
            reason = f"was evicted when {taker!r} was loaded"
            if taker == name:
                reason = "was lost when loading its replacement was interrupted"
            return (
                f"adapter {name!r} {reason}\n  {loaded}"
                f"\n  to do: load it again, pin what must stay, or raise max_adapters"
            )
        to_do = f"load_adapter({name!r}, folder)"
        if name == PEFT_BASE:
            to_do = "name None: it stands for the base model"
        return (
            f"no adapter named {name!r}{did_you_mean(str(name), self._slots)}\n  {loaded}\n"
            f"  to do: {to_do}"
        )


def _training(name: str) -> object:
    """Return the key under which training holds a name."""
    return "training", name
