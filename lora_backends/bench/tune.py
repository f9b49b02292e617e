"""Tuning: points in turn, a share of the time each, kept as it goes, and the table at the end.

``python -m lora_backends.bench.tune triton`` runs it with torch and Triton alone.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from lora_backends.bench.results import environment
from lora_backends.bench.search import MARGIN, Found, Lab, RulesFail, search
from lora_backends.bench.tune_job import DEFAULTS, Point, Tuning, make_tuning
from lora_backends.errors import InvalidInputError, LoRABackendError
from lora_backends.gpu.choice import TileChoice, tile_choice
from lora_backends.gpu.tables import (
    SCHEMA,
    BatchTiles,
    Entry,
    TileTable,
    device_of,
    read_table,
    table_text,
)


@dataclass
class Progress:
    """What has been found, in this run and in those before it."""

    entries: dict[tuple[Any, ...], Entry] = field(default_factory=dict)
    resumed: int = 0
    tried: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # points whose rules cannot be run
    broken: str = ""  # why searches could not begin with a table in use


Tell = Callable[[int, Point, Found | None], None]
"""Called before a point with None and after it with what was found."""


def tune_points(
    job: Tuning,
    make_lab: Callable[[Tuning], Callable[[Point], Lab]],
    tell: Tell = lambda *_: None,
    now: Callable[[], float] = time.monotonic,
) -> Progress:
    """Search every point that earlier runs have not, until the budget is used up.

    Each point has an equal share of what is left, so time that one saves goes to those after it.
    A search begins with the sizes that backends take now, from a table or the rules. What is found
    is written at once to ``job.partial``, and the table when the budget ends.

    Args:
        job: what to tune.
        make_lab: returns what makes the lab of a point.
        tell: is told of each point.
        now: a clock, in seconds.

    Returns:
        What was found.

    Raises:
        KeyboardInterrupt: as it came; the points that were done are kept in ``job.partial``.
    """
    progress = Progress(_resume(job))
    progress.resumed = sum(point.key in progress.entries for point in job.points)
    todo = [point for point in job.points if point.key not in progress.entries]
    try:
        in_use = tile_choice(job.rules, job.backend, job.device, "auto")
    except InvalidInputError as error:  # is no reason not to measure a new table
        progress.broken = str(error).splitlines()[0]
        in_use = tile_choice(job.rules, job.backend, job.device, "rules")
    end = now() + job.budget
    lab_of = make_lab(job)
    for i, point in enumerate(todo):
        start = now()
        if start >= end:
            break
        share_ends = start + (end - start) / (len(todo) - i)
        tell(len(job.points) - len(todo) + i, point, None)
        try:
            found = _search_point(job, point, lab_of(point), share_ends, now, in_use)
        except RulesFail as error:
            progress.skipped.append(f"{point.cell}: {error}")
            continue
        progress.entries[point.key] = _entry(point, found)
        progress.tried += found.tried
        progress.failed += found.failed
        _write(job.partial, _table(job, progress.entries.values(), {}))
        tell(len(job.points) - len(todo) + i, point, found)
    _finish(job, progress)
    return progress


def _search_point(
    job: Tuning,
    point: Point,
    lab: Lab,
    share_ends: float,
    now: Callable[[], float],
    in_use: TileChoice,
) -> Found:
    layer = astuple(point.layer)
    shape = (point.cell.tokens, point.active_slots, point.tile_tokens, *layer)
    return search(
        job.rules.choose_tiles(*shape),
        job.rules.candidates(*shape),
        lambda tiles: not job.rules.tile_faults(tiles, point.tile_tokens, *layer),
        lab,
        lambda: now() >= share_ends,
        [in_use.choose_tiles(*shape)],
    )


def _entry(point: Point, found: Found) -> Entry:
    return Entry(
        layer=point.layer,
        num_tokens=point.cell.tokens,
        active_slots=point.active_slots,
        tile_tokens=point.tile_tokens,
        tiles=found.tiles,
        tuned_us=round(found.tuned_us, 3),
        rules_us=round(found.rules_us, 3),
    )


def _resume(job: Tuning) -> dict[tuple[Any, ...], Entry]:
    """Return what an interrupted run has found with the same software."""
    if not job.partial.exists():
        return {}
    table = read_table(job.partial, job.rules, job.backend, job.device)
    if table.versions != _versions(job):
        raise InvalidInputError(
            f"{job.partial} was begun with other software\n"
            f"  given: {dict(table.versions)}, here: {_versions(job)}\n"
            f"  to do: delete it to begin anew"
        )
    return _by_key(table)


def _finish(job: Tuning, progress: Progress) -> None:
    """Write the table: what was found now, and what it had of other layers and batches."""
    if not progress.entries:
        return
    entries, batches = progress.entries, best_tiles(progress.entries.values(), job.rules)
    if job.path.exists():
        old = read_table(job.path, job.rules, job.backend, job.device)
        entries = _by_key(old) | entries
        batches = {(b.num_tokens, b.active_slots): b for b in old.batches} | batches
    _write(job.path, _table(job, entries.values(), batches))
    if all(point.key in progress.entries for point in job.points):
        job.partial.unlink(missing_ok=True)


def _by_key(table: TileTable) -> dict[tuple[Any, ...], Entry]:
    return {(e.layer, e.num_tokens, e.active_slots, e.tile_tokens): e for e in table.entries}


def best_tiles(entries: Iterable[Entry], rules: Any) -> dict[tuple[int, int], BatchTiles]:
    """Return per batch the tiles of the plan that take the least time over all layers measured.

    A plan serves all layers, so sizes compete only where as many layers were measured; the rules'
    size holds its place unless it is beaten by `MARGIN`.
    """
    times: dict[tuple[int, int], dict[int, list[float]]] = {}
    for entry in entries:
        by_tile = times.setdefault((entry.num_tokens, entry.active_slots), {})
        by_tile.setdefault(entry.tile_tokens, []).append(entry.tuned_us)
    best = {}
    for batch, by_tile in times.items():
        most = max(map(len, by_tile.values()))
        totals = {tile: sum(us) for tile, us in by_tile.items() if len(us) == most}
        own, fastest = rules.block_tokens(*batch), min(totals, key=totals.__getitem__)
        if own in totals and totals[fastest] >= (1 - MARGIN) * totals[own]:
            fastest = own
        best[batch] = BatchTiles(*batch, fastest)
    return best


def _table(job: Tuning, entries: Any, batches: dict[Any, BatchTiles]) -> TileTable:
    device, capability = device_of(job.device)
    return TileTable(
        schema=SCHEMA,
        backend=job.backend,
        device=device,
        capability=capability,
        versions=_versions(job),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        batches=tuple(batches.values()),
        entries=tuple(entries),
    )


def _versions(job: Tuning) -> dict[str, str]:
    found = environment(job.device)["versions"]
    return {name: str(found[name]) for name in ("torch", "triton")}


def _write(path: Path, table: TileTable) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(table_text(table), encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@dataclass(frozen=True)
class Gain:
    """One layer and batch: the rules against the table, each with its own tiles of the plan."""

    point: Point  # with the table's tiles of the plan
    rules_us: float
    tuned_us: float


def gains(job: Tuning, progress: Progress) -> list[Gain]:
    """Return what the table gains, layer by layer and batch by batch."""
    best = best_tiles(progress.entries.values(), job.rules)
    found = []
    for point in job.points:
        batch = (point.cell.tokens, point.active_slots)
        if point.key not in progress.entries or best[batch].tile_tokens != point.tile_tokens:
            continue
        own = (point.layer, *batch, job.rules.block_tokens(*batch))
        if own in progress.entries:
            rules_us = progress.entries[own].rules_us
            found.append(Gain(point, rules_us, progress.entries[point.key].tuned_us))
    return found


def summary_lines(job: Tuning, progress: Progress) -> list[str]:
    """Return what to tell at the end, a sentence a line."""
    table = gains(job, progress)
    done = sum(point.key in progress.entries for point in job.points)
    lines = [f"{progress.tried} sizes timed, {len(progress.failed)} could not be run"]
    if table:
        ratio = statistics.geometric_mean(gain.rules_us / gain.tuned_us for gain in table)
        lines.append(f"geometric mean: {ratio:.3f} times as fast as the rules, {len(table)} cells")
    if progress.broken:
        lines.append(f"searches began with the rules, not with a table in use: {progress.broken}")
    lines += [f"skipped, the rules cannot be run: {text}" for text in progress.skipped]
    if done + len(progress.skipped) < len(job.points):
        left = len(job.points) - done - len(progress.skipped)
        lines.append(f"{left} of {len(job.points)} points are left: the same command goes on")
    lines.append(f"written to {job.path}" if progress.entries else "nothing was found")
    return lines


def main() -> int:
    """Tune on this machine's GPU with a line a point; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lora_backends.bench.tune", description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--budget", default="10m", help="e.g. 90s, 5m, 1h")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--preset", dest="preset_name")
    parser.add_argument("--config-json", type=Path)
    parser.add_argument("--in-features", type=int)
    for name in ("output-slices", *DEFAULTS):
        parser.add_argument(f"--{name}", help=f"separated by commas; {DEFAULTS.get(name, '')}")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    try:
        job = make_tuning(**vars(parser.parse_args()))
        progress = tune_points(job, gpu_lab_of, tell_lines)
    except LoRABackendError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {job.partial} keeps what was found", file=sys.stderr)
        return 130
    for gain in gains(job, progress):
        ratio = gain.rules_us / gain.tuned_us
        print(f"{gain.rules_us:9.2f} -> {gain.tuned_us:9.2f} us {ratio:5.2f}  {gain.point}")
    print("\n".join(summary_lines(job, progress)))
    return 0


def gpu_lab_of(job: Tuning) -> Callable[[Point], Lab]:
    """Return what makes labs on the job's GPU."""
    from lora_backends.bench.tune_lab import gpu_lab  # Triton is imported where it is used

    return gpu_lab(job)


def tell_lines(index: int, point: Point, found: Found | None) -> None:
    """Print a line before a point and one after it."""
    if found is not None:
        print(f"  {found.rules_us:.2f} -> {found.tuned_us:.2f} us, {found.tried} tried", flush=True)
    else:
        print(f"{index + 1} {point}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
