"""Tuning: searches tile sizes within a budget and writes them to a table that backends read.

The table is also the state of the run. It is written after every point, whole or not at all, and
the same command continues with the points that it lacks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lora_backends.bench.cells import Cell
from lora_backends.bench.job import best_device, make_job
from lora_backends.bench.results import versions, writable_file, write_whole
from lora_backends.bench.search import MARGIN, Found, Lab, RulesFail, search_entry
from lora_backends.common.durations import seconds_of
from lora_backends.errors import UnsupportedInputError
from lora_backends.selection.registry import backend_class, unavailable_reasons
from lora_backends.sgmv.engine import SgmvBackend
from lora_backends.sgmv.tiles import rules
from lora_backends.sgmv.tiles.gpu import gpu_of
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS, BatchShape, LayerShape
from lora_backends.sgmv.tiles.source import tile_source, user_folder
from lora_backends.sgmv.tiles.table import (
    BatchTiles,
    Entry,
    Key,
    file_name,
    new_table,
    read_table,
    table_text,
)

DEFAULTS = {"tokens": "1,16,64,256,2048", "adapters": "1,8,64", "rank": "16"}
"""The batches to tune unless others are given; a measured batch serves those within a factor of 2.
"""


@dataclass(frozen=True)
class Point:
    """One search: a layer, a batch, and the tile of its plan."""

    cell: Cell
    layer: LayerShape
    active_slots: int
    tile_tokens: int

    @property
    def key(self) -> Key:
        """The key of the point's entry in a table."""
        return self.layer, self.cell.tokens, self.active_slots, self.tile_tokens


@dataclass(frozen=True)
class Tuning:
    """A tuning run, checked: all of it is possible here."""

    backend: str
    device: torch.device
    dtype: torch.dtype
    points: list[Point]  # those with the rules' own tile first
    path: Path  # the table
    budget: float  # seconds


@dataclass
class TuningState:
    """The table's entries, and the counts of this run."""

    entries: dict[Key, Entry]  # of the table, from this run and earlier ones
    resumed: int  # points that the table had before
    tried: int = 0  # sizes timed
    failed: list[str] = field(default_factory=list)  # why sizes could not be used
    skipped: list[str] = field(default_factory=list)  # points at which the rules' sizes fail


Notify = Callable[[int, Point, Found | None], object]
"""Called before a point is searched, with None, and after it, with the result."""


def tune_points(
    job: Tuning,
    lab_of: Callable[[Point], Lab],
    notify: Notify = lambda *_: None,
    now: Callable[[], float] = time.monotonic,
) -> TuningState:
    """Search every point that the table lacks, until the budget is used up.

    An interruption is raised; the table has all points searched before.
    """
    entries, same_software = _read_entries(job)
    done = {point.key for point in job.points if same_software and point.key in entries}
    progress = TuningState(entries, len(done))
    todo = [point for point in job.points if point.key not in done]
    # not the source of a backend, which tunes at first use if LORA_BACKENDS_TUNE is set
    package = engine_with_tiles(job.backend).package
    in_use = tile_source(job.backend, package, job.device, "auto")
    end = now() + job.budget
    for i, point in enumerate(todo):
        start = now()
        if start >= end:
            break
        # computed anew, so that points which finish early leave their time to later ones
        share_ends = start + (end - start) / (len(todo) - i)
        notify(len(done) + i, point, None)
        try:
            batch = BatchShape(point.cell.tokens, point.active_slots, point.tile_tokens)
            gpu, lab = gpu_of(job.device), lab_of(point)
            result, entry = search_entry(batch, point.layer, gpu, in_use, lab, now, share_ends)
        except RulesFail as error:
            progress.skipped.append(f"{point.cell}: {error}")
            continue
        progress.entries[point.key] = entry
        progress.tried += result.tried
        progress.failed += result.failed
        _write(job, progress.entries.values())
        notify(len(done) + i, point, result)
    return progress


def _read_entries(job: Tuning) -> tuple[dict[Key, Entry], bool]:
    """Return the table's entries, and whether the torch and Triton of this run measured them."""
    if not job.path.exists():
        return {}, True
    table = read_table(job.path, job.backend, job.device)
    return {entry.key: entry for entry in table.entries}, table.versions == _versions()


def _versions() -> dict[str, str]:
    return {name: str(number) for name, number in versions("torch", "triton").items()}


def _write(job: Tuning, entries: Iterable[Entry]) -> None:
    entries = tuple(entries)
    batches = best_tiles(entries).values()
    table = new_table(job.backend, job.device, _versions(), entries, batches)
    write_whole(job.path, table_text(table))


def best_tiles(entries: Iterable[Entry]) -> dict[tuple[int, int], BatchTiles]:
    """Return for each batch the tile of the plan with the least time over all measured layers.

    The rules' tile keeps its place unless another is faster by `MARGIN`.
    """
    # a plan serves all layers: only tiles measured for the same number of layers are compared
    times: dict[tuple[int, int], dict[int, list[float]]] = {}
    for entry in entries:
        by_tile = times.setdefault((entry.num_tokens, entry.active_slots), {})
        by_tile.setdefault(entry.tile_tokens, []).append(entry.tuned_us)
    best = {}
    for batch, by_tile in times.items():
        # a tile measured for fewer layers would win by its smaller sum
        most = max(map(len, by_tile.values()))
        totals = {tile: sum(us) for tile, us in by_tile.items() if len(us) == most}
        by_rules, fastest = rules.tile_tokens(*batch), min(totals, key=totals.__getitem__)
        if by_rules in totals and totals[fastest] >= (1 - MARGIN) * totals[by_rules]:
            fastest = by_rules
        best[batch] = BatchTiles(*batch, fastest)
    return best


def gains(job: Tuning, progress: TuningState) -> dict[Point, float]:
    """Return, by point, the rules' time over the table's, each with its own tile of the plan."""
    best = best_tiles(progress.entries.values())
    ratios = {}
    for point in job.points:
        batch = (point.cell.tokens, point.active_slots)
        if point.key not in progress.entries or best[batch].tile_tokens != point.tile_tokens:
            continue
        by_rules = progress.entries.get((point.layer, *batch, rules.tile_tokens(*batch)))
        if by_rules is not None:
            ratios[point] = by_rules.rules_us / progress.entries[point.key].tuned_us
    return ratios


def summary_lines(job: Tuning, progress: TuningState) -> list[str]:
    """Return the summary of a run, a sentence a line."""
    ratios = gains(job, progress)
    lines = [f"{progress.tried} sizes timed, {len(progress.failed)} could not be used"]
    lines += [f"  {reason}" for reason in sorted(set(progress.failed))]
    if ratios:
        mean, best = statistics.geometric_mean(ratios.values()), max(ratios.values())
        lines.append(
            f"{mean:.3f} times as fast as the rules (geometric mean of {len(ratios)} batches; "
            f"at most {best:.2f})"
        )
    lines += [f"skipped, the rules cannot be run: {text}" for text in progress.skipped]
    left = sum(point.key not in progress.entries for point in job.points) - len(progress.skipped)
    if left > 0:
        lines.append(f"{left} of {len(job.points)} points are left: run the same command again")
    lines.append(f"written to {job.path}" if progress.entries else "nothing was found")
    return lines


def make_tuning(
    backend: str,
    *,
    budget: str = "10m",
    output: Path | None = None,
    device: str | None = None,
    **layers: Any,
) -> Tuning:
    """Return the run that a command line asks for.

    The table goes to `output`, else to the user's folder under the device's name. `layers` holds
    arguments of `make_job`.

    Raises:
        LoRABackendError: arguments that contradict each other, a folder that cannot be written to,
            or an existing file that is no table of this device; nothing has been measured.
    """
    engine_with_tiles(backend)
    seconds, where = seconds_of(budget, "--budget"), _gpu(backend, device)
    asked = layers | {key: layers.get(key) or value for key, value in DEFAULTS.items()}
    # checks must not depend on the table that is about to be written
    options = [f"{backend}.tiles=rules"]
    measured = make_job(**asked, backends=backend, options=options, device=str(where))
    path = writable_file(output or user_folder() / file_name(backend, where), "--output")
    if path.exists():
        read_table(path, backend, where)  # its entries are kept
    points = make_points(measured.cells, measured.dtype)
    return Tuning(backend, where, measured.dtype, points, path, seconds)


def engine_with_tiles(backend: str) -> type[SgmvBackend]:
    """Return the class of an engine that has tile sizes; another one is an error."""
    engine = backend_class(backend)
    if not issubclass(engine, SgmvBackend):
        raise UnsupportedInputError(
            f"backend {backend!r} has no tiles to tune\n"
            f"  allowed: an engine with tiles, e.g. triton"
        )
    return engine


def _gpu(backend: str, device: str | None) -> torch.device:
    where = best_device(device)
    if where.type != "cuda":
        raise UnsupportedInputError(
            f"tune measures on a GPU\n  given: {where}\n"
            f"  to do: run it on a machine with a CUDA or ROCm device; "
            f"times in Triton's interpreter say nothing about one"
        )
    reasons = unavailable_reasons(backend, where)
    if reasons:
        raise UnsupportedInputError(f"{backend} cannot be tuned on {where}: {' '.join(reasons)}")
    return where


def make_points(cells: Sequence[Cell], dtype: torch.dtype) -> list[Point]:
    """Return the points to search: with the rules' tile first, then with twice and half of it.

    None comes twice: of cells with the same key in a table, the first counts.
    """
    first: dict[Key, Point] = {}
    others: dict[Key, Point] = {}
    for cell in cells:
        slices, active = len(cell.output_slices), cell.active_adapters
        layer = LayerShape(slices, cell.rank, cell.in_features, cell.out_features, dtype.itemsize)
        tile = rules.tile_tokens(cell.tokens, active)
        # points of one layer are neighbours, because they share compiled kernels
        for size in TILE_TOKENS:
            point = Point(cell, layer, active, size)
            if size == tile:
                first.setdefault(point.key, point)
            elif size in (tile // 2, 2 * tile) and cell.tokens / active >= size / 2:
                others.setdefault(point.key, point)
    return [*first.values(), *others.values()]
