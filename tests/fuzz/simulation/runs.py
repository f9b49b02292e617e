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

import transformers.generation.continuous_batching.continuous_api as continuous_api
import transformers.generation.continuous_batching.scheduler as scheduler
import transformers.generation.continuous_batching.utils as utils

import lora_backends.adapters.files.folders as folders
import lora_backends.adapters.pool.pool as pool
import lora_backends.adapters.pool.slots as slots
import lora_backends.adapters.pool.store as store
import lora_backends.adapters.pool.uninterrupted as uninterrupted
import lora_backends.common.files as files
import lora_backends.hf.calls.attention as attention
import lora_backends.hf.generating.continuous as continuous
import lora_backends.hf.generating.line as line
import lora_backends.hf.generating.outputs as outputs
import lora_backends.hf.hooks.installed as installed
import lora_backends.hf.replacements.modules as modules
from lora_backends.adapters.pool.stacks import ModuleStacks

from . import primitives, tiny_model
from .pool_world import PoolWorld, checkpoints, failing
from .requests_world import RequestsWorld
from .threads import Simulation

TICK_S = folders.TICK_S or 0.01  # the tests set it to 0
POOL_FILES = tuple(f"adapters/pool/{name}.py" for name in ("pool", "slots", "store"))
REQUEST_FILES = (
    "adapters/pool/slots.py",
    *(f"hf/generating/{name}.py" for name in ("continuous", "line", "outputs", "passes")),
    "continuous_batching/continuous_api.py",
)
WORLDS: dict[str, Any] = {
    "pool": (PoolWorld, POOL_FILES, 200_000),
    "requests": (RequestsWorld, REQUEST_FILES, 60_000),
}
"""Name to class, files between whose lines threads change, and the most turns of a run."""


class Found(NamedTuple):
    """The results of one run."""

    failure: str | None  # with the last turns
    digest: int  # of all turns
    turns: int
    seen: set[str]


def run(number: int, seed: int = 0, world: str = "pool") -> Found:
    """Run a world of the simulation with a number as its seed."""
    made, files, most_turns = WORLDS[world]
    prepared = {"pool": checkpoints, "requests": tiny_model.checkpoints}[world]
    prepared()
    sim = Simulation(seed * 1_000_003 + number, files, most_turns)
    collects = gc.isenabled()
    gc.disable()  # it would run destructors, and their locks, at moments of its own
    try:
        with (
            tempfile.TemporaryDirectory() as root,
            warnings.catch_warnings(),
            primitives.current(sim),
        ):
            warnings.simplefilter("ignore")
            run_of = made(sim, Path(root))
            with seams(run_of):
                failure = sim.run(run_of.run)
        if failure is None and isinstance(run_of, RequestsWorld):
            failure = run_of.check_tokens()
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


@contextlib.contextmanager
def seams(world: PoolWorld | RequestsWorld) -> Iterator[None]:
    """Replace threads, time and files by the simulation's."""
    disk = world.disk
    with replaced(
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
    ):
        if isinstance(world, RequestsWorld):
            with replaced(*_of_requests(world)):
                yield
        else:
            yield


def _of_requests(world: RequestsWorld) -> list[tuple[Any, str, Any]]:
    """Return the places in continuous batching, Transformers' own among them."""
    return [
        *((module, "threading", primitives.THREADING) for module in (continuous, line, outputs)),
        *((module, "time", primitives.TIME) for module in (line, outputs)),
        (continuous, "queue", primitives.QUEUE),
        (continuous, "asyncio", world.asyncio),
        (line, "PASS_S", world.pass_s),
        *((module, "Lock", primitives.Lock) for module in (installed, attention, modules)),
        *((module, "threading", primitives.THREADING) for module in (continuous_api, scheduler)),
        *((module, "queue", primitives.QUEUE) for module in (continuous_api, utils)),
        (continuous_api, "gc", SimpleNamespace(collect=lambda: 0)),  # slow, and it runs destructors
    ]


def _changed(module: ModuleType, **changes: Any) -> Any:
    return SimpleNamespace(**{**vars(module), **changes})
