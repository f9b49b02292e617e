"""One run of the simulation, and the seams where it replaces threads, time and files."""

import contextlib
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import lora_backends.adapters.files.folders as folders
import lora_backends.adapters.pool.pool as pool
import lora_backends.adapters.pool.slots as slots
import lora_backends.adapters.pool.store as store
import lora_backends.adapters.pool.uninterrupted as uninterrupted
import lora_backends.common.files as files
from lora_backends.adapters.pool.stacks import ModuleStacks

from . import primitives
from .pool_world import PoolWorld, checkpoints, failing
from .threads import Simulation

TICK_S = folders.TICK_S or 0.01  # the tests set it to 0
PREEMPTED = tuple(f"adapters/pool/{name}.py" for name in ("pool", "slots", "store"))


class Found(NamedTuple):
    """The results of one run."""

    failure: str | None  # with the last turns
    digest: int  # of all turns
    turns: int
    seen: set[str]


def run(number: int, seed: int = 0) -> Found:
    """Run the simulation with a number as its seed."""
    checkpoints()
    sim = Simulation(seed * 1_000_003 + number, PREEMPTED)
    collects = gc.isenabled()
    gc.disable()  # it would run destructors, and their locks, at moments of its own
    try:
        with (
            tempfile.TemporaryDirectory() as root,
            warnings.catch_warnings(),
            primitives.current(sim),
        ):
            warnings.simplefilter("ignore")
            world = PoolWorld(sim, Path(root))
            with seams(world):
                failure = sim.run(world.run)
        if failure is not None:
            failure = f"{failure}\n{sim.trace}"
        return Found(failure, sim.digest, sim.turns, sim.seen)
    finally:
        gc.collect()  # before the next run: destructors take locks
        if collects:
            gc.enable()


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes other values within the block."""
    missing = object()
    kept = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(kept):
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def seams(world: PoolWorld) -> contextlib.AbstractContextManager[None]:
    """Replace threads, time and files by the simulation's."""
    disk = world.disk
    return replaced(
        (sys, "unraisablehook", lambda _: None),  # an interrupt in a destructor
        (slots, "RLock", primitives.RLock),
        (slots, "Condition", primitives.Condition),
        (store, "Lock", primitives.Lock),
        (store, "ThreadPoolExecutor", primitives.Executor),
        (store, "time", primitives.TIME),
        (pool, "time", primitives.TIME),
        (uninterrupted, "Thread", primitives.Thread),
        (folders, "os", _changed(os, scandir=disk.scandir)),
        (folders, "time", primitives.TIME),
        (folders, "TICK_S", TICK_S),
        (files, "os", _changed(os, open=disk.open)),
        (files, "open", disk.opener()),
        (files, "_READERS", files._READERS | {"tests", "fuzz"}),  # the disk's errors are a file's
        *(
            (ModuleStacks, name, failing(world, name))
            for name in ("write", "write_tables", "reserve")
        ),
    )


def _changed(module: ModuleType, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(module), **changes})
