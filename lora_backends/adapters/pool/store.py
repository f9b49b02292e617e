"""Adapters that wait outside the slots: in memory up to a budget, and in a folder.

The store brings a name that a batch asks for into a slot: from memory, where every adapter that was
read stays until the budget is spent, else from its folder. `prefetch` reads adapters and writes
slots while batches run, in a thread and on a CUDA stream of its own.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from lora_backends.adapters.files.folders import (
    Stamp,
    adapter_folders,
    newest,
    stamp_of,
    unchanged,
)
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.pool.policy import keep
from lora_backends.adapters.pool.pool import AdapterPool, Loaded
from lora_backends.adapters.pool.slots import Commit
from lora_backends.adapters.pool.staging import Staged, check_checkpoint
from lora_backends.adapters.pool.tensors import side_by_side, tensors_of
from lora_backends.adapters.specs import Checkpoint
from lora_backends.common.files import as_path
from lora_backends.errors import InvalidInputError, LoRABackendError, shown

MOST_FAILED = 64
"""Failed prefetches whose errors are kept for the next batch that asks for their names."""


@dataclass(frozen=True, eq=False)
class CachedAdapter:
    """An adapter in memory."""

    checkpoint: Checkpoint
    bytes: int  # of its tensors
    stamp: Stamp | None  # of the files it was read from; None: it came from memory


@dataclass(frozen=True, eq=False)
class _Ready:
    """An adapter on the device, without a slot."""

    cached: CachedAdapter
    staged: Staged
    event: torch.cuda.Event | None  # after the last copy; None on a CPU


class _Prefetch:
    """One name that a prefetch brings ahead."""

    result: Future[_Ready | None]  # None: it was written into its slot, or is not wanted any more
    failed = False  # True: `result` holds the error, for the next batch that asks for the name


class AdapterStore:
    """Adapters of a pool that are not in its slots, and where they come from.

    Made by `MultiLoRAModel.keep_adapters`, for a pool that has none yet.

    Args:
        pool: whose slots it fills.
        cpu_bytes: of the tensors of adapters that stay in memory, those in slots included. The
            least recently used are dropped first. One that came from memory is lost then.
        folder: with a folder for each adapter, by its name; new ones are seen when a row asks for
            them.
        watch_s: seconds between two looks at the files of an adapter that is asked for; changed
            files are loaded between batches. None: never look.
        accept: gets the checkpoint and raises to refuse it.

    Raises:
        InvalidInputError: a number that is negative, or the folder is none.
    """

    def __init__(
        self,
        pool: AdapterPool,
        cpu_bytes: int = 2**30,
        folder: str | Path | None = None,
        watch_s: float | None = 1.0,
        accept: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        if isinstance(cpu_bytes, bool) or not isinstance(cpu_bytes, int) or cpu_bytes < 0:
            raise InvalidInputError(
                f"cpu_bytes is {shown(cpu_bytes)}\n  allowed: an int, 0 or more"
            )
        if watch_s is not None and not (isinstance(watch_s, (int, float)) and watch_s >= 0):
            raise InvalidInputError(
                f"watch_s is {shown(watch_s)}\n  allowed: a number of seconds, 0 or more; None"
            )
        self.cpu_bytes = cpu_bytes
        self.folder = None if folder is None else as_path(folder, "the folder of adapters")
        self.swaps = 0
        """Adapters that came into a slot because a batch or a prefetch asked for them."""
        self.disk_reads = 0
        """Checkpoints that were read from a folder."""
        self._pool, self._watch_s, self._accept = pool, watch_s, accept
        self._folders: dict[str, Path] = {} if self.folder is None else adapter_folders(self.folder)
        self._lock = (
            Lock()
        )  # of the tables below; taken inside the lock of the slots, never around it
        self._only_in_memory: set[str] = set()  # names that are not looked up in the folder
        self._cached: OrderedDict[str, CachedAdapter] = (
            OrderedDict()
        )  # the least recently used first
        self._in_slots: dict[
            str, Stamp | None
        ] = {}  # name to the files that its slot was written from
        self._ahead: dict[str, _Prefetch] = {}
        self._looked: dict[str, float] = {}  # name to the time of the last look at its files
        self._warned: dict[str, Stamp | None] = {}  # name to the files that a warning was about
        self._changes = 0  # times that a name got another adapter; in the lock of the slots
        self._worker = ThreadPoolExecutor(1, "adapter prefetch")
        self._stream: Any = None
        self._closed = False
        pool.slots.provider = self.provide

    @property
    def kept_bytes(self) -> int:
        """Bytes of all adapters in memory."""
        with self._lock:
            return sum(cached.bytes for cached in self._cached.values())

    def names(self) -> list[str]:
        """Return every name that a row may ask for, sorted."""
        self._look_for_folders()
        with self._lock:
            return sorted({*self._folders, *self._cached, *self._pool.slots.names})

    def kept(self) -> dict[str, CachedAdapter]:
        """Return the adapters in memory by name, the least recently used first."""
        with self._lock:
            return dict(self._cached)

    def folders(self) -> dict[str, Path]:
        """Return the folder of every adapter that has one, by name."""
        with self._lock:
            return dict(self._folders)

    def load(self, name: str, folder: str | Path, replace_existing: bool = False) -> Loaded:
        """Load a checkpoint into a slot, as `AdapterPool.load`, and remember where it came from."""
        path = as_path(folder, "the folder of a checkpoint")
        self._pool.check_new(name, replace_existing)
        ready = self._staged(name, self._read(path))

        def then() -> None:
            self._changes += 1
            with self._lock:
                self._folders[name] = path
                self._only_in_memory.discard(name)
            self._note(name, ready.cached)

        with self._pool.slots.lock:
            self._pool.slots.wait_for_room([name])  # other threads may load it in that time
            self._pool.check_new(name, replace_existing)
            return self._pool.put(name, ready.staged, then)

    def add(self, name: str, checkpoint: Checkpoint) -> Loaded:
        """Put an adapter that is in memory into a slot, as `AdapterPool.add`."""
        staged = self._pool.stage(name, checkpoint)
        return self._pool.put(name, staged, self._from_memory(name, checkpoint))

    def update(self, name: str, checkpoint: Checkpoint, timeout_s: float) -> None:
        """Overwrite a loaded adapter in place, as `AdapterPool.update`."""
        self._pool.update(name, checkpoint, timeout_s, self._from_memory(name, checkpoint))

    def forget(self, name: str) -> None:
        """Drop an adapter from memory; with a folder of adapters it may come back from there."""
        with self._pool.slots.lock, self._lock:
            self._changes += 1
            for table in (self._cached, self._in_slots, self._ahead, self._looked):
                table.pop(name, None)
            self._only_in_memory.discard(name)
            if self.folder is None or self._folders.get(name) != self.folder / name:
                self._folders.pop(name, None)

    def prefetch(self, names: Iterable[str]) -> None:
        """Write adapters into slots while batches run, so that a batch finds them there.

        Returns at once. An adapter takes a free slot, else the least recently used one that can be
        spared: no call, request, prepared adapters or pin holds its adapter, the last batch did not
        use it, and no earlier prefetch brought it for a batch that is still to come. If there is no
        such slot, or the adapter has modules of its own, it waits on the device, in further memory,
        and the batch that asks for it writes the slot. If it fails to load, that batch gets the
        error.

        Raises:
            InvalidInputError: `names` is no list of names, or the model was detached.
        """
        if isinstance(names, str):
            raise InvalidInputError(f"names is {names!r}\n  to do: prefetch([{names!r}])")
        names = list(names) if isinstance(names, Iterable) else [names]
        if not all(isinstance(name, str) for name in names):
            raise InvalidInputError(f"names is {shown(names)}\n  allowed: names of adapters")
        for name in names:
            loaded = name in self._pool.slots and self._pool.slots.expect(name)
            with self._lock:
                if self._closed:
                    raise InvalidInputError(
                        "the store is closed, because its model was detached\n"
                        "  to do: wrap the base model again, and call keep_adapters"
                    )
                if not loaded and name not in self._ahead:
                    job = _Prefetch()
                    job.result = self._worker.submit(self._bring_ahead, name, job)
                    self._ahead[name] = job  # not before: `submit` may fail

    def provide(self, names: Sequence[str]) -> Commit:
        """Prepare the adapters that a batch asks for, and return a function that loads them."""
        with self._lock:
            known = [name for name in names if name in self._cached or name in self._folders]
        if known:
            # before a file is read: a request retries until it has a slot
            self._pool.slots.check_room(known)
        # the slow steps, reading and copying to the device, happen here
        changes = self._changes
        changed = {name: ready for name in names if (ready := self._changed(name)) is not None}
        missing = {
            name: ready
            for name in names
            if name not in changed
            and name not in self._pool.slots
            and (ready := self._get(name)) is not None
        }
        # called with the slots locked, and with the names in their slots
        return partial(self._commit, changes, names, changed, missing)

    def close(self) -> None:
        """Stop loading ahead, and leave the pool as it is without a store."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._pool.slots.provider = None

    def _commit(
        self,
        changes: int,
        names: Sequence[str],
        changed: Mapping[str, _Ready],
        missing: Mapping[str, _Ready],
        hold: Callable[[], None],
    ) -> None:
        if changes != self._changes:  # another thread may have loaded newer weights of these names
            changed, missing = {}, {}
        for name, ready in changed.items():
            if name in self._pool.slots and self._pool.slots.is_free(name):
                self._put(name, ready)
        self._changes += bool(changed)
        hold()  # from here on, none of the names is evicted for another
        for name in names:
            if name not in self._pool.slots:
                # Another thread may have evicted it since; from memory it comes without a read.
                ready_now = changed.get(name) or missing.get(name) or self._get(name, wait=False)
                if ready_now is not None:
                    self._put(name, ready_now)
                    self.swaps += 1
        with self._lock:
            for name in names:
                if name in self._cached:
                    self._cached.move_to_end(name)

    def _put(self, name: str, ready: _Ready) -> None:
        _wait_for(ready, self._pool.device)
        self._pool.put(name, ready.staged, partial(self._note, name, ready.cached))

    def _get(self, name: str, wait: bool = True) -> _Ready | None:
        """Return an adapter on the device, or None for a name that is not known or in its slot.

        `wait`: for its prefetch, which must not be waited for while the slots are locked.
        """
        ready = self._prefetched(name, wait)
        with self._lock:
            cached = self._cached.get(name)
        if name in self._pool.slots:
            return None
        if ready is not None and (cached is None or cached is ready.cached):
            return ready
        cached = cached or self._from_folder(name)
        return None if cached is None else self._staged(name, cached)

    def _prefetched(self, name: str, wait: bool) -> _Ready | None:
        """Return the adapter that a prefetch left on the device; cancel one that has not begun.

        Raises:
            Exception: the error of the prefetch.
        """
        with self._lock:
            job = self._ahead.get(name)
        if job is None:
            return None
        try:
            if job.result.cancel() or not (wait or job.result.done()):
                return None
            return job.result.result()
        except CancelledError:  # the model is being detached
            return None
        finally:
            # Only now: a prefetch that is not in `_ahead` writes no slot.
            self._forget_job(name, job)

    def _staged(self, name: str, cached: CachedAdapter) -> _Ready:
        return _Ready(cached, self._pool.stage(name, cached.checkpoint), None)

    def _bring_ahead(self, name: str, job: _Prefetch) -> _Ready | None:
        """Prefetch one name; remember at most `MOST_FAILED` failures."""
        try:
            return self._bring(name, job)
        except BaseException:
            with self._lock:
                job.failed = True
                failed = [name for name, ahead in self._ahead.items() if ahead.failed]
                for old in failed[:-MOST_FAILED]:  # a batch that asks for one reads it again
                    del self._ahead[old]
            raise

    def _forget_job(self, name: str, job: _Prefetch) -> None:
        with self._lock:
            if self._ahead.get(name) is job:
                del self._ahead[name]

    @torch.no_grad()
    def _bring(self, name: str, job: _Prefetch) -> _Ready | None:
        """Write an adapter into a slot, or return it on the device if no slot can be spared."""
        with self._lock:
            cached = self._cached.get(name)
        cached = cached or self._from_folder(name)
        if cached is None:
            raise InvalidInputError(f"no adapter named {name!r} to prefetch")
        device = self._pool.device
        if device.type != "cuda":
            return self._write_ahead(name, job, self._staged(name, cached))
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            staged = self._pool.stage(name, cached.checkpoint)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            return self._write_ahead(name, job, _Ready(cached, staged, event))

    def _write_ahead(self, name: str, job: _Prefetch, ready: _Ready) -> _Ready | None:
        def is_wanted() -> bool:
            with self._lock:
                known = self._ahead.get(name) is job and not self._closed
            return known and name not in self._pool.slots

        def then() -> None:
            self._note(name, ready.cached)
            self.swaps += 1

        if not self._pool.put_ahead(name, ready.staged, is_wanted, then) and is_wanted():
            return ready
        self._forget_job(name, job)  # so that its tensors are freed
        return None

    def _from_folder(self, name: str) -> CachedAdapter | None:
        with self._lock:
            folder = self._folders.get(name)
        if folder is None:
            self._look_for_folders()
            with self._lock:
                folder = self._folders.get(name)
        return None if folder is None else self._read(folder)

    def _read(self, folder: Path) -> CachedAdapter:
        """Read a checkpoint whose files do not change meanwhile."""
        with unchanged(folder) as stamp:
            checkpoint = self._pool.read(folder)
            self.disk_reads += 1
        if self._accept is not None:
            self._accept(checkpoint)
        return CachedAdapter(*_counted(checkpoint, self._pool.device), stamp)

    def _changed(self, name: str) -> _Ready | None:
        """Return newer files of an adapter in a slot or in memory, once they have been quiet."""
        with self._lock:
            cached = self._cached.get(name)
            folder, stamp = self._folders.get(name), self._in_slots.get(name)
            stamp = stamp if cached is None else cached.stamp
            looked = self._looked.get(name, 0.0)
            due = self._watch_s is not None and time.monotonic() - looked >= self._watch_s
            if folder is None or stamp is None or not due:
                return None
            self._looked[name] = time.monotonic()
        now: Stamp | None = None
        try:
            now = stamp_of(folder)
            if now is None or now == stamp:  # taken away, or as it was
                return None
            if 0 <= time.time() - newest(now) < (self._watch_s or 0):
                return None  # a writer may not have finished
            return self._staged(name, self._read(folder))
        except LoRABackendError as error:
            with self._lock:
                is_new = self._warned.get(name, ()) != now
                self._warned[name] = now
            if is_new:
                warnings.warn(
                    f"the files of adapter {name!r} changed and cannot be loaded, so it stays as "
                    f"it was: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def _look_for_folders(self) -> None:
        """Note new folders, and forget folders that are gone unless their adapter is still held."""
        folders = {} if self.folder is None else adapter_folders(self.folder)
        with self._lock:
            known = self._known()
            # A name is kept here only while its adapter, or a folder that it hides, still exists.
            self._only_in_memory &= {*known, *folders}
            readable = {n: path for n, path in folders.items() if n not in self._only_in_memory}
            kept = {
                name: path
                for name, path in self._folders.items()  # preferred: it was loaded
                if name in known or (path / CONFIG_FILE).is_file()
            }
            self._folders = readable | kept

    def _known(self, *names: str) -> set[str]:
        """Return `names` and those of all adapters in slots or in memory; needs the lock."""
        return {*self._pool.slots.names, *self._cached, *names}

    def _from_memory(self, name: str, checkpoint: Checkpoint) -> Callable[[], None]:
        """Return a function that notes that an adapter came from memory; the slots are locked."""
        check_checkpoint(checkpoint)
        # pinning may fail, so it comes before the first write
        cached = CachedAdapter(*_counted(checkpoint, self._pool.device), None)

        def note() -> None:
            self._changes += 1
            with self._lock:
                self._folders.pop(name, None)  # its files are those of another adapter
                self._only_in_memory.add(name)
            self._note(name, cached)

        return note

    def _note(self, name: str, cached: CachedAdapter) -> None:
        """Remember the adapter in the slot of a name, and keep it in memory within the budget."""
        with self._lock:
            self._ahead.pop(name, None)  # of before
            self._in_slots[name] = cached.stamp
            if cached is not self._cached.get(name):  # else its files have not been looked at
                self._looked[name] = time.monotonic()
            keep(self._cached, name, cached, self.cpu_bytes)
            known = self._known(name)
            for table in (self._in_slots, self._looked, self._warned):
                for old in [each for each in table if each not in known]:
                    del table[old]


def _counted(checkpoint: Checkpoint, device: torch.device) -> tuple[Checkpoint, int]:
    """Return a checkpoint and its bytes; in pinned memory where there is a GPU to copy to."""
    if device.type == "cuda":
        checkpoint = pinned(checkpoint)
    return checkpoint, sum(t.numel() * t.element_size() for t in tensors_of(checkpoint))


def pinned(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the matrices in pinned memory, from which a GPU copies by itself."""
    deltas = checkpoint.modules.values()
    matrices = iter(side_by_side([m for delta in deltas for m in (delta.lora_a, delta.lora_b)]))
    pairs = zip(matrices, matrices, strict=True)
    modules = {
        delta.module: replace(delta, lora_a=a, lora_b=b)
        for delta, (a, b) in zip(deltas, pairs, strict=True)
    }
    experts = {
        path: replace(delta, lora_a=delta.lora_a.pin_memory(), lora_b=delta.lora_b.pin_memory())
        for path, delta in checkpoint.experts.items()
    }
    return replace(checkpoint, modules=modules, experts=experts)


def _wait_for(ahead: _Ready, device: torch.device) -> None:
    """Make the current stream wait for copies of another stream, and record its use of them."""
    if ahead.event is None:
        return
    stream = torch.cuda.current_stream(device)  # that of the writes: not of the current device
    stream.wait_event(ahead.event)
    tensors = [tensor for tensor in tensors_of(ahead.staged) if tensor.is_cuda]
    for tensor in {each.untyped_storage().data_ptr(): each for each in tensors}.values():
        tensor.record_stream(stream)  # of its whole storage
