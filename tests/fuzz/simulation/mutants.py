"""Bugs planted into pool and store; a few runs must find each of them."""

import contextlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import lora_backends.adapters.files.folders as folders
import lora_backends.adapters.pool.pool as pool
import lora_backends.adapters.pool.slots as slots
import lora_backends.adapters.pool.store as store
import lora_backends.hf.loading as loading

from .runs import replaced


class Mutant(NamedTuple):
    """A change of the source of a method."""

    owner: Any  # its class, or its module
    name: str
    old: str
    new: str


MUTANTS = {
    "a pinned or used slot is evicted": Mutant(
        slots.SlotTable,
        "candidate",
        "if self._is_free(oldest):",
        "if True:",
    ),
    "a prefetch takes a slot in use": Mutant(
        slots.SlotTable, "reserve", "self._is_free(old, kinds)", "not self._pins[old]"
    ),
    "a call does not hold its slots": Mutant(
        slots.SlotTable, "in_use", "self._holds[token] = _Hold(by, ", "_Hold(by, "
    ),
    "a hold is not released": Mutant(
        slots.SlotTable,
        "in_use",
        "self._holds.pop(token, None)",
        "by == 'call' and self._holds.pop(token, None)",
    ),
    "the end of a write ahead wakes nobody": Mutant(
        slots.SlotTable, "settle", "self._settled.notify_all()", "pass"
    ),
    "a slot is settled without the lock's condition": Mutant(
        slots.SlotTable, "settle", "self._written_ahead.discard(slot)", "pass"
    ),
    "an unpin takes all pins": Mutant(
        slots.SlotTable, "unpin", "self._pins[name] -= 1", "self._pins[name] = 0"
    ),
    "the old name stays while a slot is written": Mutant(
        pool.AdapterPool, "put", "self.slots.vacate(name, slot)", "pass"
    ),
    "the new name comes before the weights": Mutant(
        pool.AdapterPool,
        "put",
        "self.slots.vacate(name, slot)",
        "self.slots.vacate(name, slot); self.slots.assign(name, slot)",
    ),
    "ranks of the evicted adapter stay": Mutant(
        pool.AdapterPool, "put", "self._clear(slot)", "pass"
    ),
    "a failed write ahead keeps its slot": Mutant(
        pool.AdapterPool,
        "put_ahead",
        "except BaseException:\n        self._give_up(slot)",
        "except BaseException:",
    ),
    "an update can be interrupted": Mutant(
        pool.AdapterPool,
        "_overwrite",
        "failure, interrupt = run_whole(overwrite, self.device)",
        "failure = interrupt = overwrite()",
    ),
    "an update that failed keeps its name": Mutant(
        pool.AdapterPool, "_overwrite", "self.slots.vacate(name, slot)", "pass"
    ),
    "an update does not wait for calls": Mutant(
        slots.SlotTable, "updatable", '("call", "request", "training")', '("training",)'
    ),
    "a torn file is accepted": Mutant(
        folders, "stamp_of", "return tuple(stamps) or None", "return (('', 0, 0, 0, 0),)"
    ),
    "a file torn within a tick is accepted": Mutant(folders, "newest", "/ 1e9", "/ 1e9 - 1.0"),
    "a failed prefetch stays": Mutant(
        store.AdapterStore,
        "_prefetched",
        "self._forget_job(name, job)",
        "job.result.cancelled() or job.result.exception() or self._forget_job(name, job)",
    ),
    "an older adapter that was made ready is loaded": Mutant(
        store.AdapterStore, "_commit", "if changes != self._changes:", "if False:"
    ),
    "a prefetch does not look at what came meanwhile": Mutant(
        store.AdapterStore,
        "_write_ahead",
        "known = self._ahead.get(name) is job and not self._closed",
        "known = True",
    ),
    "memory grows beyond its budget": Mutant(
        store, "keep", "while total > budget:", "while False:"
    ),
    "locks are taken in another order": Mutant(
        store.AdapterStore,
        "forget",
        "with self._pool.slots.lock, self._lock:",
        "with self._lock, self._pool.slots.lock:",
    ),
    "an unload leaves the adapter in memory": Mutant(
        loading.ModelAdapters, "unload_adapter", "self.store.forget(name)", "pass"
    ),
    "an adapter from memory leaves its files readable": Mutant(
        store.AdapterStore, "_from_memory", "self._only_in_memory.add(name)", "pass"
    ),
    "a prefetch is waited for with the slots locked": Mutant(
        store.AdapterStore, "_commit", "self._get(name, wait=False)", "self._get(name)"
    ),
}


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run the block with a bug."""
    original = inspect.unwrap(vars(mutant.owner)[mutant.name])
    text = textwrap.dedent(inspect.getsource(original))
    assert text.count(textwrap.dedent(mutant.old)) == 1, f"{mutant.name} has not {mutant.old!r}"
    text = text.replace(mutant.old, mutant.new)
    # Outside of its class a method has no such call without arguments.
    text = text.replace("super().", f"super({mutant.owner.__name__}, self).")
    # Compiled under its own file's name, because the simulation preempts lines of named files.
    code = compile(text, original.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, original.__globals__, made)
    with replaced((mutant.owner, mutant.name, made[mutant.name])):
        yield
