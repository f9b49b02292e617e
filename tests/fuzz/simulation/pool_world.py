"""Calls, loads, updates, prefetches and changes of files, on one pool and its store."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from lora_backends.adapters import AdapterStore, Checkpoint
from lora_backends.adapters.pool.stacks import ModuleStacks
from lora_backends.errors import LoRABackendError
from lora_backends.hf.loading import ModelAdapters

from . import adapters
from .operations import NAMES, VERSIONS, InjectedError, Operations
from .threads import Simulation

OPERATIONS = 8  # of each thread
WRITE_ERRORS = 0.02


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


class PoolWorld(Operations):
    """The threads of one run, and the invariants.

    Args:
        simulation: that runs.
        root: a folder for the files.
    """

    def __init__(self, simulation: Simulation, root: Path) -> None:
        super().__init__(simulation, root, adapters.files_of, checkpoints())

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
