"""Tuning at first use: a layer's sizes are searched when it first runs, if the user asks for it.

`tiles="tune:60s"` asks for it, or LORA_BACKENDS_TUNE=60s with `tiles="auto"`; nothing else does. If
no table of this card has the layer, its first call waits for the search. Results go to a file of
their own, which later processes read.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.common.durations import seconds_of
from lora_backends.common.names import TUNE_VARIABLE
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.sgmv.tiles.bounds import is_prefill
from lora_backends.sgmv.tiles.gpu import gpu_of
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS, BatchShape, LayerShape, TileConfig
from lora_backends.sgmv.tiles.source import (
    REACH,
    TileSource,
    fixed_source,
    kind_of,
    standing_for,
    tile_source,
    user_folder,
)
from lora_backends.sgmv.tiles.table import (
    Entry,
    Key,
    file_name,
    new_table,
    read_table,
    table_text,
)

if TYPE_CHECKING:
    from lora_backends.bench.search import Lab

ASKED = "tune:"
"""The beginning of an option `tiles` that asks for tuning; a time follows."""

SHARE = 4
"""A search takes at most the time that is left divided by this, so that later layers get some."""

MOST_SECONDS, LEAST_SECONDS = 20.0, 2.0
"""The longest search, and the shortest that begins. Compiling a candidate takes about a second."""

_PACKAGES = ("torch", "triton", "lora-backends")

LabOf = Callable[[BatchShape, LayerShape], "Lab"]


def asked_source(
    engine: Any,  # the class; searches make backends of it
    device: torch.device,
    tiles: str | os.PathLike[str] | TileSource,  # as for `tile_source`, or "tune:60s"
    batch_invariant: bool = False,  # nothing is tuned then
) -> TileSource:
    """Return the source that an engine's option `tiles`, or the variable, asks for.

    Raises:
        InvalidInputError: as `tile_source`; or the time cannot be read, or the user's folder cannot
            be written to.
        UnsupportedInputError: tuning is asked for on a device that is not a GPU.
    """
    package = engine.package
    seconds, given = None, os.environ.get(TUNE_VARIABLE)
    if isinstance(tiles, str) and tiles.startswith(ASKED) and not batch_invariant:
        seconds = seconds_of(tiles.removeprefix(ASKED), f"tiles of backend {engine.name!r}:")
    elif tiles == "auto" and given and not batch_invariant:
        seconds = seconds_of(given, TUNE_VARIABLE)
    if seconds is None:
        return tile_source(engine.name, package, device, tiles, batch_invariant)
    if device.type != "cuda":
        raise UnsupportedInputError(
            f"tuning at first use measures on a GPU\n  given: {device}\n"
            f"  to do: unset {TUNE_VARIABLE}, or pass tiles='rules'"
        )
    tables = tile_source(engine.name, package, device, "auto")
    return first_use_source(engine.name, device, seconds, tables, partial(_lab, engine, device))


def first_use_source(
    backend: str,
    device: torch.device,
    seconds: float,  # for all searches of the source together
    tables: TileSource,  # where a search starts, and for calls that are not searched
    lab_of: LabOf,
    now: Callable[[], float] = time.monotonic,
) -> TileSource:
    """Return a source that searches sizes for layers that no table of this card has."""
    from lora_backends.bench.results import check_writable, versions

    software = {name: str(number) for name, number in versions(*_PACKAGES).items()}
    path = user_folder() / cache_name(backend, device, software)
    check_writable(path.parent, TUNE_VARIABLE)
    state = _FirstUse(backend, device, seconds, tables, lab_of, now, path, software)
    state.entries = state.read()
    # a function, not a method: a copy of a backend shares it, where copying the lock would fail
    return replace(
        tables,
        choose_tiles=lambda batch, layer: state.choose_tiles(batch, layer),
        files=(str(path), *tables.files),
    )


def cache_name(backend: str, device: torch.device, software: Mapping[str, str]) -> str:
    """Return the name of the file for a backend, a card, and the versions of its software."""
    parts = [file_name(backend, device).removesuffix(".json")]
    parts += [f"{name}-{number}" for name, number in software.items()]
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(parts).lower()) + ".json"


@dataclass
class _FirstUse:
    """The entries that one source has found, and the time that it has left."""

    backend: str
    device: torch.device
    left: float  # seconds
    tables: TileSource
    lab_of: LabOf
    now: Callable[[], float]
    path: Path
    software: dict[str, str]
    entries: dict[Key, Entry] = field(default_factory=dict)
    chosen: dict[tuple[BatchShape, LayerShape], TileConfig] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def choose_tiles(self, batch: BatchShape, layer: LayerShape) -> TileConfig:
        """Return the sizes of a table of this card, or of an earlier search, or search now."""
        tiles = self.chosen.get((batch, layer))
        if tiles is None:
            # a search synchronizes with the device, which is forbidden during a capture
            if is_capturing(self.device):
                return self._known(batch, layer) or self.tables.choose_tiles(batch, layer)
            with self.lock:
                tiles = self._choose(batch, layer)
            self.chosen[batch, layer] = tiles
        return tiles

    def _choose(self, batch: BatchShape, layer: LayerShape) -> TileConfig:
        known = self._known(batch, layer)
        if known is not None:
            return known
        # 8-bit stacks take tables and rules: the lab has no such layers
        is_searched = batch.active_slots > 0 and batch.tile_tokens in TILE_TOKENS
        # if a table has only the rounded batch, the rules serve this one
        is_searched = is_searched and self.tables.measured(rounded(batch), layer) is None
        if is_searched and layer.item_bytes > 1 and self._share() >= LEAST_SECONDS:
            self.entries |= self.read()  # another process may have found it
            known = self._known(batch, layer) or self._search(rounded(batch), layer)
        return known or self.tables.choose_tiles(batch, layer)

    def _known(self, batch: BatchShape, layer: LayerShape) -> TileConfig | None:
        measured = self.tables.measured(batch, layer)
        if measured is not None:
            return measured
        kind = layer, batch.tile_tokens, is_prefill(batch)
        alike = [each for each in self.entries.values() if _of_entry(each) == kind]
        near: Entry | None = standing_for(alike, batch.num_tokens, batch.active_slots, REACH)
        return None if near is None else near.tiles

    def _share(self) -> float:
        return min(MOST_SECONDS, self.left / SHARE)

    def _search(self, batch: BatchShape, layer: LayerShape) -> TileConfig | None:
        """Search within a share of the time that is left, and add the result to the file."""
        from lora_backends.bench.search import RulesFail, search_entry

        began = self.now()
        end = began + self._share()
        _say(
            f"tuning {self.backend}: {layer.in_features} -> {layer.out_features}, rank "
            f"{layer.max_rank}, {batch.num_tokens} tokens, {batch.active_slots} adapters; "
            f"{self._share():.0f} s at most, {self.left:.0f} s left"
        )
        try:
            with _apart(self.device):
                lab, gpu = self.lab_of(batch, layer), gpu_of(self.device)
                result, entry = search_entry(batch, layer, gpu, self.tables, lab, self.now, end)
        except (RulesFail, torch.cuda.OutOfMemoryError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            _say(f"  not tuned: {first}")
            return None
        finally:
            self.left -= self.now() - began
        times = f"rules {entry.rules_us:.2f} us -> {entry.tuned_us:.2f} us"
        _say(f"  {times}, {result.tried} sizes timed")
        if self._share() < LEAST_SECONDS:
            _say(f"the time to tune is used up; results are in {self.path}")
        self._add(entry)
        return entry.tiles

    def read(self) -> dict[Key, Entry]:
        """Return the entries of the file; a torn one, or one of other versions, has none."""
        if not self.path.is_file():
            return {}
        try:
            table = read_table(self.path, self.backend, self.device)
        except InvalidInputError as error:
            # not an error: no user wrote the file, and the next search writes a new one
            problem = str(error).splitlines()[0]
            warnings.warn(f"ignored, and to be written anew: {problem}", stacklevel=2)
            return {}
        if table.versions != self.software:
            warnings.warn(f"ignored, it is of other versions: {self.path}", stacklevel=2)
            return {}
        return {entry.key: entry for entry in table.entries}

    def _add(self, entry: Entry) -> None:
        """Add an entry to the file, and keep those that other processes have added meanwhile."""
        from lora_backends.bench.results import write_whole

        with _locked(self.path.parent):
            self.entries |= self.read() | {entry.key: entry}
            # without `batches`: the tokens per tile are chosen before a layer is known
            table = new_table(self.backend, self.device, self.software, self.entries.values())
            write_whole(self.path, table_text(table))


def rounded(batch: BatchShape) -> BatchShape:
    """Return a batch with sizes rounded to powers of two, so that processes measure the same ones.

    A batch stays as it is if rounding would change its kind.

    >>> rounded(BatchShape(num_tokens=100, active_slots=5, tile_tokens=16))
    BatchShape(num_tokens=128, active_slots=4, tile_tokens=16)
    >>> rounded(BatchShape(num_tokens=300, active_slots=8, tile_tokens=64))
    BatchShape(num_tokens=300, active_slots=8, tile_tokens=64)
    """
    tokens, active = (_nearest_power(n) for n in (batch.num_tokens, batch.active_slots))
    near = replace(batch, num_tokens=tokens, active_slots=min(active, tokens))
    return near if _kind(near) == _kind(batch) else batch


def _of_entry(entry: Entry) -> tuple[LayerShape, int, bool]:
    batch = BatchShape(entry.num_tokens, entry.active_slots, entry.tile_tokens)
    return entry.layer, entry.tile_tokens, is_prefill(batch)


def _kind(batch: BatchShape) -> tuple[bool, tuple[bool, bool]]:
    return is_prefill(batch), kind_of(batch.num_tokens, batch.active_slots)


def _nearest_power(value: int) -> int:
    below = 1 << (value.bit_length() - 1)
    return 2 * below if value * value > 2 * below * below else below


def _lab(engine: Any, device: torch.device, batch: BatchShape, layer: LayerShape) -> Lab:
    """Return a lab with random weights of a layer's shape; its slices are equally wide."""
    from lora_backends.bench.cells import Cell
    from lora_backends.bench.lab import GpuLab
    from lora_backends.bench.layers import make_layers, make_workload

    width, rest = divmod(layer.out_features, layer.num_slices)
    slices = tuple(width + (i < rest) for i in range(layer.num_slices))
    active, rank = batch.active_slots, layer.max_rank
    cell = Cell("layer", layer.in_features, slices, batch.num_tokens, active, rank)
    dtype = torch.bfloat16 if layer.item_bytes == 2 else torch.float32

    def backend_of(tiles: TileConfig) -> Any:
        return engine(device, tiles=fixed_source(batch.tile_tokens, tiles))

    return GpuLab(backend_of, make_workload(cell, make_layers(cell, device, dtype)))


@contextlib.contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Isolate a search: the caller's random state and modes stay, cached memory is freed."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.callback(torch.cuda.empty_cache)
            stack.enter_context(torch.cuda.device(device))
        devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the files of a folder, where the system has locks."""
    try:
        import fcntl
    except ImportError:
        yield  # files are still whole, but may lack entries of another process
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(line: str) -> None:
    """Print progress to stderr: the user waits for the search."""
    print(f"lora_backends: {line}", file=sys.stderr, flush=True)
