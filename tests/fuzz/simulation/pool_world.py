"""Calls, loads, updates, prefetches and changes of files, on one pool and its store."""

import functools
import gc
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from lora_backends.adapters import AdapterStore, Checkpoint
from lora_backends.adapters.pool.stacks import ModuleStacks
from lora_backends.errors import LoRABackendError
from lora_backends.hf.loading import ModelAdapters

from . import adapters
from .disk import Disk
from .threads import Interrupt, Simulation

NAMES, VERSIONS = [f"a{i}" for i in range(5)], 16
OPERATIONS = 8  # of each thread
WRITE_ERRORS = 0.02


class InjectedError(RuntimeError):
    """A write that fails, as on a lost device."""


@functools.cache
def checkpoints() -> dict[tuple[str, int], Checkpoint]:
    """Return every version of every adapter, as its files are read without disturbance."""
    with tempfile.TemporaryDirectory() as root:
        return {
            (name, version): adapters.read_version(Path(root, name), name, version)
            for name in NAMES
            for version in range(VERSIONS)
            if Path(root, name).mkdir(exist_ok=True) is None
            and Path(root, name, f"{version}").mkdir() is None
        }


@dataclass(eq=False)
class Change:
    """A running operation that gives a name another adapter."""

    name: str
    versions: set[int]  # it gives one of them
    from_files: bool  # whether it reads the files, which may change meanwhile
    begun: int  # time of its start


class Expected:
    """The versions of each adapter that a row may get after the operations so far.

    An operation that has succeeded rules out the versions that were offered before it began,
    except those of operations that run at the same time.
    """

    def __init__(self) -> None:
        self._offered: dict[str, dict[int, int]] = {name: {} for name in NAMES}  # version to when
        self._changes: list[Change] = []
        self._calls: list[dict[str, set[int]]] = []
        self._count = 0

    def offer(self, name: str, version: int) -> None:
        """Allow a version from now on, also in running calls."""
        self._count += 1
        self._offered[name][version] = self._count
        for allowed in self._calls:
            allowed[name].add(version)

    def write(self, name: str, version: int) -> None:
        """Record that some files of a name have a version from now on."""
        self.offer(name, version)
        for change in self._changes:
            if change.name == name and change.from_files:
                change.versions.add(version)

    def open(self) -> dict[str, set[int]]:
        """Return the versions that a new call may get, kept up to date until `close`."""
        allowed = {name: set(versions) for name, versions in self._offered.items()}
        self._calls.append(allowed)
        return allowed

    def close(self, allowed: dict[str, set[int]]) -> None:
        self._calls = [each for each in self._calls if each is not allowed]

    def begin(self, name: str, version: int | None, from_files: bool) -> Change:
        """Begin to give a name a version, or that of its files."""
        change = Change(name, set() if version is None else {version}, from_files, self._count)
        self._changes.append(change)
        for each in change.versions:
            self.offer(name, each)
        return change

    def end(self, change: Change, outcome: str) -> None:
        """Record how a change has ended."""
        self._changes.remove(change)
        name = change.name
        if outcome == "done":
            for version in change.versions:
                self.offer(name, version)
            running = {v for each in self._changes if each.name == name for v in each.versions}
            offered = self._offered[name].items()
            kept = {v: count for v, count in offered if count > change.begun or v in running}
            self._offered[name] = kept
        elif outcome != "interrupted" and not change.from_files:
            for version in change.versions:
                del self._offered[name][version]


class PoolWorld:
    """The threads of one run, and the invariants.

    Args:
        simulation: that runs.
        root: a folder for the files.
    """

    def __init__(self, simulation: Simulation, root: Path) -> None:
        self._sim, self._draw = simulation, simulation.draw
        self.disk = Disk(simulation, root)
        self._pins: Counter[str] = Counter()  # lower bounds, from operations that have ended
        self._unsure: set[str] = set()  # names whose pins an interrupt or a failure left open
        self._updated: list[str] = []  # names of updates that run
        self._expected = Expected()
        self.disk.on_write = self._expected.write
        self._is_faulty = True

    def run(self) -> None:
        """Make a pool, use it from several threads, and check what is left."""
        sim, draw = self._sim, self._draw
        for name in NAMES[:4]:  # the last comes from memory, if at all
            self.disk.save(name, self.disk.new_version(name), "moved")
        sim.now += 10
        self.pool = adapters.make_pool(draw.choice((1, 2, 3, 3)))
        size = draw.choice((0, 900, 2000, 10**6))
        watch_s = draw.choice((None, 0.0, 0.002, 0.05))
        self.store = None
        if draw.random() < 0.85:
            self.store = AdapterStore(self.pool, size, self.disk.root, watch_s)
        self._model = _Adapters(self.pool, self.store)
        sim.check = self._check_slots
        self._left = draw.choice((1, 2, 3))
        for number in range(self._left):
            sim.spawn(f"worker {number}", self._work)
        for _ in range(OPERATIONS):
            points = int(10 ** draw.uniform(0, 3.3)) if draw.random() < 0.4 else None
            self._attempt(self._any_operation(), points)
        closes = self.store is None or draw.random() < 0.3
        if closes and self.store is not None:  # as `detach`, while others go on
            self.store.close()
        sim.pause("wait for workers", lambda: not self._left)
        self._finish(closes)

    # Operations

    def _work(self) -> None:
        for _ in range(OPERATIONS):
            self._attempt(self._any_operation())
        self._left -= 1

    def _attempt(self, operation: Callable[[], None], interrupt_after: int | None = None) -> None:
        """Run an operation, which may be refused, interrupted, or end with an injected failure."""
        try:
            if interrupt_after is not None:
                self._sim.interrupt_after(interrupt_after)
            operation()
            self._sim.seen.add("done")
        except LoRABackendError:
            self._sim.seen.add("refused")
        except InjectedError:
            self._sim.seen.add("failed write")
        except Interrupt:
            pass
        finally:
            if interrupt_after is not None:
                self._sim.interrupt_no_more()
                gc.collect()  # an interrupted block exits when its frame is freed

    def _any_operation(self) -> Callable[[], None]:
        draw, names = self._draw, self._draw.sample(NAMES, self._draw.choice((1, 1, 2)))
        name = names[0]
        loaded = draw.choice(self.pool.slots.names or [name])
        operations = {
            lambda: self._call(names): 6,
            lambda: self._hold(names): 1.5,
            lambda: self._prefetch(draw.sample(NAMES, 2)): 3,
            lambda: self._load(name): 1,
            lambda: self._give(name, "add"): 1.5,
            lambda: self._give(loaded, "update"): 1.5,
            lambda: self._unload(loaded): 1,
            lambda: self._pin(loaded): 1.5,
            lambda: self._write_files(name): 1.5,
            self._look: 0.3,
        }
        return draw.choices([*operations], [*operations.values()])[0]

    def _call(self, names: list[str]) -> None:
        """Read the slots of a batch module by module, as a forward pass does."""
        allowed = self._expected.open()
        self._sim.tell(f"call {names}")
        try:
            with self.pool.slots.in_use(names) as slots:
                found = {name: set(range(VERSIONS)) for name in names}
                for path in adapters.SPECS:
                    self._sim.pause("module")
                    for name, slot in slots.items():
                        self._narrow(found[name], name, path, slot)
                        if not found[name]:
                            self._sim.fail(f"{name} in slot {slot}: {path} is of no one version")
        finally:
            self._expected.close(allowed)
        for name in names:
            if not found[name] & allowed[name]:
                self._sim.fail(f"{name} is of version {found[name]}, not of {allowed[name]}")

    def _narrow(self, versions: set[int], name: str, path: str, slot: int) -> None:
        for version in [*versions]:
            if not adapters.holds(self.pool, path, slot, checkpoints()[name, version]):
                versions.discard(version)

    def _hold(self, names: list[str]) -> None:
        self._sim.tell(f"hold {names}")
        with self.pool.slots.in_use(names, by=self._draw.choice(("prepared", "request"))):
            for _ in range(self._draw.choice((1, 2, 3))):
                self._attempt(self._any_operation())

    def _prefetch(self, names: list[str]) -> None:
        if self.store is not None:
            self._sim.tell(f"prefetch {names}")
            self.store.prefetch(names)

    def _load(self, name: str) -> None:
        replaces = self._draw.random() < 0.7
        self._change(
            "load",
            name,
            None,
            lambda: self._model.load_adapter(
                name, self.disk.folder(name), replace_existing=replaces
            ),
        )

    def _give(self, name: str, how: str) -> None:
        version = self.disk.new_version(name)
        if version >= VERSIONS - 2:
            return
        adapter = checkpoints()[name, version]
        if how == "add":
            self._change("add", name, version, lambda: self._model.add_adapter(name, adapter))
        else:
            timeout = self._draw.choice((0.0, 0.01))
            self._updated.append(name)
            try:
                self._change(
                    "update",
                    name,
                    version,
                    lambda: self._model.update_adapter(name, adapter, timeout_s=timeout),
                )
            finally:
                self._updated.remove(name)

    def _unload(self, name: str) -> None:
        self._change("unload", name, None, lambda: self._model.unload_adapter(name))

    def _change(
        self, what: str, name: str, given: int | None, operation: Callable[[], object]
    ) -> None:
        version = self.disk.newest.get(name) if given is None else given
        told = f"{what} {name}{'' if version is None else f' version {version}'}"
        self._sim.tell(told)
        change, outcome = self._expected.begin(name, version, given is None), "interrupted"
        try:
            operation()
            outcome = "done"
        except (LoRABackendError, InjectedError) as error:
            outcome = "refused" if isinstance(error, LoRABackendError) else "failed"
            raise
        finally:
            self._expected.end(change, outcome)
            self._sim.tell(f"{told}: {outcome}")

    def _pin(self, name: str) -> None:
        try:
            self._model.pin_adapter(name)
        except Interrupt:
            self._unsure.add(name)
            raise
        self._pins[name] += 1
        try:
            if self._draw.random() < 0.3:
                self._attempt(lambda: self._pin(name))
            self._attempt(self._any_operation())
        except Interrupt:  # the pin stays
            self._unsure.add(name)
            raise
        finally:
            self._pins[name] -= 1
        try:
            self._model.unpin_adapter(name)
        except BaseException as error:
            if not isinstance(error, Interrupt) and name not in self._unsure:
                self._sim.fail(f"a pin of {name} is lost: {error}")
            self._unsure.add(name)
            raise

    def _write_files(self, name: str) -> None:
        how = self._draw.choice(("moved", "moved", "in place", "cut off", "removed"))
        self._sim.tell(f"files of {name}: {how}")
        if how == "removed":
            self.disk.remove(name)
            return
        version = self.disk.new_version(name)
        if version < VERSIONS - 2:
            self.disk.save(name, version, how)

    def _look(self) -> None:
        if self.store is not None and not set(self.store.names()) >= set(self.store.kept()):
            self._sim.fail("a name in memory is not listed")
        self._model.adapters_report()

    # Invariants

    def _check_slots(self) -> None:
        """Check slots, holds, pins and memory, unless a thread is changing them."""
        table, store = self.pool.slots, self.store
        if store is not None and not store._lock.locked():
            kept = sum(cached.bytes for cached in store._cached.values())
            if kept > store.cpu_bytes:
                self._sim.fail(f"{kept} bytes in memory, {store.cpu_bytes} allowed")
        if table.lock.locked():
            return
        places = [*table._slots.values()]
        if len({*places}) != len(places) or not {*places} <= {*range(table.num_slots)}:
            self._sim.fail(f"two names in one slot: {dict(table._slots)}")
        written = table._written_ahead
        if {*places} & written:
            self._sim.fail(f"slots {written} are written while they have names: {table._slots}")
        for hold in [*table._holds.values()]:
            others = {n: s for n, s in table._slots.items() if s in hold.slots}
            if hold.slots & written or {*others} - hold.names:
                self._sim.fail(
                    f"slots {set(hold.slots)} of {set(hold.names)} are held by a {hold.by}, "
                    f"and given to others: {others}, written ahead {written}"
                )
        for name, pins in self._pins.items():
            if table._pins[name] < pins and name not in self._unsure:
                self._sim.fail(f"{name} has {table._pins[name]} pins, of {pins}")

    def _finish(self, closes: bool) -> None:
        """Check what is left when nothing runs, and that adapters can still be served."""
        sim, table = self._sim, self.pool.slots
        self.disk.is_faulty = self._is_faulty = False
        if not closes:
            for name in list(self.store._ahead):  # the error of a prefetch is raised once
                self._attempt(lambda name=name: self._call([name]))
        if table._holds:
            sim.fail(f"held at the end: {table._holds}")
        for name in NAMES:
            while table._pins[name]:
                if name not in self._unsure:
                    sim.fail(f"a pin of {name} is left")
                table.unpin(name)
        if not closes:
            sim.now += 100
            for name in NAMES:
                if self.disk.versions.get(name) is not None:
                    try:
                        self._call([name])
                    except LoRABackendError as error:
                        # An adapter from memory is lost if memory is too small.
                        if name not in self.store._only_in_memory:
                            sim.fail(f"{name} cannot be used any more: {error}")
                        self._load(name)
                        self._call([name])
            self.store.close()
        if table._written_ahead:
            sim.fail(f"slots {table._written_ahead} are never given back")
        for name in table.names:
            self._model.unload_adapter(name)
        left = any(stack.ranks.any() for stack in self.pool.active_weights.values())
        if left and not sim.seen & {"interrupted", "interrupted while waiting", "failed write"}:
            sim.fail("an adapter is left in a slot without a name")
        sim.check = None


class _Adapters(ModelAdapters):
    """The methods that change adapters, without a base model."""

    def __init__(self, pool, store) -> None:
        self.pool, self.store = pool, store
        training = SimpleNamespace(adapters={}, check_untrained=lambda name: None)
        self._wrapped = SimpleNamespace(
            check_attached=lambda: None, check_checkpoint=lambda c: None, training=training
        )


def failing(world: PoolWorld, method: str) -> Callable[..., object]:
    """Return a method of the stacks that fails now and then."""
    original = getattr(ModuleStacks, method)

    def run(*arguments: object) -> object:
        world._sim.pause(method)
        if world._is_faulty and world._draw.random() < WRITE_ERRORS:
            # A failed update takes the name off its slot, and its pins with it.
            world._unsure.update(world._updated)
            raise InjectedError(method)
        return original(*arguments)

    return run
