"""Operations on adapters and their files, which the threads of every world draw."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from lora_backends.adapters import AdapterPool, AdapterStore, Checkpoint
from lora_backends.errors import LoRABackendError
from lora_backends.hf.loading import ModelAdapters

from .disk import Disk, FilesOf
from .expected import Expected
from .threads import Interrupt, Simulation

NAMES, VERSIONS = [f"a{i}" for i in range(5)], 16


class InjectedError(RuntimeError):
    """A write or a pass that fails, as on a lost device."""


class Operations:
    """Loads, updates, prefetches, pins and changes of files on one pool and its store.

    Args:
        simulation: that runs.
        root: a folder for the files.
        files_of: returns the files of a version of an adapter.
        checkpoints: each version of each adapter, as its files are read without disturbance.
    """

    pool: AdapterPool
    store: AdapterStore | None
    _model: ModelAdapters

    def __init__(
        self,
        simulation: Simulation,
        root: Path,
        files_of: FilesOf,
        checkpoints: Mapping[tuple[str, int], Checkpoint],
    ) -> None:
        self._sim, self._draw = simulation, simulation.draw
        self.disk = Disk(simulation, root, files_of)
        self._checkpoints = checkpoints
        self._pins: Counter[str] = Counter()  # lower bounds, from operations that have ended
        self._unsure: set[str] = set()  # names whose pins an interrupt or a failure left open
        self._updated: list[str] = []  # names of updates that run
        self._expected = Expected(NAMES)
        self.disk.on_write = self._expected.write
        self._is_faulty = True

    def _any_operation(self) -> Callable[[], None]:
        raise NotImplementedError

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
        adapter = self._checkpoints[name, version]
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
