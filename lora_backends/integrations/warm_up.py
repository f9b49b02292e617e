"""Compiles the kernels for every batch that an engine may run, before it serves.

Otherwise a kernel would be compiled by the first batch that needs it, and every request would wait
for seconds.

The backend's own code names the kernels: it runs on every size of batch while its launches are only
noted. The kernels are compiled in parallel, and one batch for each of them runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lora_backends.batch import NO_ADAPTER
from lora_backends.integrations.plans import Plans

PROGRESS = 10.0
"""Seconds between lines of progress in the log."""

TILES = (16, 32, 48, 64)
"""Rows of a slot that fill tiles of 16, 32 or 64 rows."""

WIDENED = (16, 32)
"""Rows of tiles that may become twice as wide where rows fall unevenly on slots."""

SIZED_ROWS = 256
"""Rows up to which a batch is cut by its sizes alone."""

ALIGNED = 16
"""Triton compiles other code for a stride that is a multiple of it."""


class Batch(NamedTuple):
    """The sizes of a batch that select its kernels."""

    rows: int
    slots: int  # that have rows
    most: int = 0  # fill slots to this, one after another; others have one row; 0: in turn
    idle: int = 0  # rows without an adapter


@dataclass(frozen=True)
class Trial:
    """One layer, and a call that runs it."""

    plans: Plans
    most_rows: int
    call: Callable[[int], None]  # runs the layer on so many rows, whatever they hold
    kind: Hashable  # equal for layers that differ at most in their addresses
    pads: bool = False  # whether x, and an h as long, may have more rows than the batch


def batches(most_rows: int, num_slots: int) -> list[Batch]:
    """Return batches of all sizes up to `most_rows` rows, a quarter of an octave apart.

    >>> [(batch.rows, batch.slots) for batch in batches(2, 4)]
    [(1, 1), (2, 1), (2, 2)]
    """
    return _combined(_steps(most_rows), _steps(num_slots))


def every_batch(most_rows: int, num_slots: int) -> list[Batch]:
    """Return batches that together need the kernels of batches up to `most_rows` rows.

    Kernels depend on the numbers of rows and of tiles. Past full tiles, each slot with one more row
    adds a tile: an eighth of the slots get one, then two eighths, and so on. Other rows: all up to
    64, then multiples of 16, from 1024 on of 256. Slots above 128 are an eighth of an octave apart.
    """
    found = set[Batch]()
    steps = [*range(1, 65), *range(80, 1024, 16), *range(1024, most_rows, 256), most_rows]
    slots = [*range(1, num_slots + 1)][:128]
    for active in [*slots, *(each for each in _steps(num_slots, 8) if each > 128)]:
        more = {-(-active * eighth // 8) for eighth in range(1, 9)}
        filled = [*TILES, *range(TILES[-1], most_rows // active, TILES[-1])]  # rows of each slot
        beyond = [active * each + few for each in filled for few in more]
        found.update(
            Batch(rows, active) for rows in (active, *steps, *beyond) if active <= rows <= most_rows
        )
    return sorted(found)


def _steps(most: int, per_octave: int = 4) -> list[int]:
    powers = range(per_octave * (most.bit_length() + 1))
    return sorted({min(most, round(2 ** (power / per_octave))) for power in powers})


def _combined(rows: Sequence[int], slots: Sequence[int]) -> list[Batch]:
    return [Batch(each, active) for each in rows for active in slots if active <= each]


def warm_up(trials: Sequence[Trial], log: Any) -> None:
    """Compile all kernels that the layers need for batches up to their most rows.

    Plans hold the announced batch again afterwards.

    Args:
        trials: of all layers.
        log: a logger.
    """
    _run(trials, log, captured=False)


def warm_up_captured(trials: Sequence[Trial], log: Any) -> None:
    """Compile the kernels of calls outside of graphs, on plans that graphs have captured.

    Such a plan keeps its tiles, so that these calls need other kernels than before the capture.
    Replays find the plans as they were.
    """
    _run([each for each in trials if each.plans.is_captured], log, captured=True)


def _run(trials: Sequence[Trial], log: Any, captured: bool) -> None:
    if not trials:
        return
    began = time.monotonic()
    groups: dict[Plans, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.plans, []).append(trial)
    with torch.inference_mode(), ExitStack() as stack:
        for plans in groups:
            stack.enter_context(plans.kept())
        jobs = _prepared(groups, log, captured)
        progress = _CompilingLog(log, len(jobs), "calls")
        for job in jobs:
            announce(job.trial.plans, job.batch)
            job.trial.call(job.rows)
            progress.step()
    if trials[0].plans.backend.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # engines measure the memory that is left
    log.info("LoRA kernels are compiled: %.1f s", time.monotonic() - began)


class _Job(NamedTuple):
    trial: Trial
    batch: Batch
    rows: int  # of x; those after the batch have no adapter


def _prepared(groups: dict[Plans, list[Trial]], log: Any, captured: bool) -> list[_Job]:
    """Compile what can be compiled ahead; return calls that together launch every kernel."""
    said = "compiling LoRA kernels: %d kinds of layers, %d %s"
    backend = next(iter(groups)).backend  # of all plans
    if backend.device.type == "cpu" or not hasattr(backend, "recording"):
        kinds = [trial for trials in groups.values() for trial in _by_kind(trials)]
        jobs = [] if captured else [job for trial in kinds for job in _calls(trial)]
        log.info(said, len(kinds), len(jobs), "calls")
        return jobs
    kinds, jobs, recorded = [], [], None
    for plans, trials in groups.items():
        unlike = _unlike(plans, trials)
        recorded, more = record(plans, unlike, captured, recorded)
        kinds, jobs = kinds + unlike, jobs + more
    assert recorded is not None
    log.info(said, len(kinds), recorded.missing, "kernels")
    recorded.compile(_CompilingLog(log, recorded.missing, "kernels").step)
    return jobs


def record(
    plans: Plans, trials: Sequence[Trial], captured: bool, recorded: Any = None
) -> tuple[Any, list[_Job]]:
    """Return the kernels that any batch needs, and calls that together launch the missing ones.

    Args:
        plans: of the layers.
        trials: one of each kind of layers.
        captured: of batches whose plan a graph has captured; else of all batches before any
            capture.
        recorded: kernels that others need, to which these are added.
    """
    jobs = []
    with plans.backend.recording(recorded) as recorded:  # type: ignore[attr-defined]
        for trial, batch in _needs(plans, trials, captured):
            for rows in _rows_of_x(trial, batch):
                known = recorded.missing
                trial.call(rows)
                if recorded.missing > known:
                    jobs.append(_Job(trial, batch, rows))
    return recorded, jobs


def _by_kind(trials: Sequence[Trial]) -> list[Trial]:
    return list({trial.kind: trial for trial in trials}.values())


def _calls(trial: Trial) -> list[_Job]:
    """Return calls of a layer for a backend that does not tell its kernels."""
    slots, most = trial.plans.num_slots, trial.most_rows
    sizes = batches(most, slots)
    if trial.plans.backend.device.type == "cpu":  # only the rows per slot select routines
        few = min(most, 64)
        sizes = [*dict.fromkeys([Batch(1, 1), Batch(few, min(few, slots)), Batch(few, 1)])]
    return [_Job(trial, batch, batch.rows) for batch in sizes]


def _unlike(plans: Plans, trials: Sequence[Trial]) -> list[Trial]:
    """Return one trial for each set of kernels, found by probing a few batches.

    Layers of one kind may differ in the distances of their tensors, on which kernels depend.
    """
    most = max(trial.most_rows for trial in trials)
    powers = sorted({1 << bits for bits in range(most.bit_length())} | {most})
    probes = _combined(powers, sorted({1, plans.num_slots}))
    seen: dict[int, list[Hashable]] = {place: [trials[place].kind] for place in range(len(trials))}
    for batch in probes:
        announce(plans, batch)
        for place, trial in enumerate(trials):
            if batch.rows <= trial.most_rows:
                with plans.backend.recording() as recorded:  # type: ignore[attr-defined]
                    trial.call(batch.rows)
                seen[place].append(frozenset(recorded.kernels))
    return list({tuple(seen[place]): trials[place] for place in seen}.values())


def _needs(plans: Plans, trials: Sequence[Trial], captured: bool) -> Iterator[tuple[Trial, Batch]]:
    """Announce each batch, then yield every layer that can take it, with the batch."""
    most = max(trial.most_rows for trial in trials)
    for batch in every_batch(most, 1 if captured else plans.num_slots):
        if captured and not plans.captures(batch.rows):
            continue
        for announced in _announced(plans, batch, captured):
            for trial in trials:
                if batch.rows <= trial.most_rows:
                    yield trial, announced


def _announced(plans: Plans, batch: Batch, captured: bool) -> Iterator[Batch]:
    """Announce and yield a batch, then uneven ones of the same sizes that are cut in a new way."""
    announce(plans, batch)
    yield batch
    if captured or batch.rows <= SIZED_ROWS:  # a captured plan keeps its cut
        return
    seen = {_cut(plans, batch)}
    for tile in WIDENED:
        spare = batch.rows - tile * batch.slots
        uneven = []
        if batch.slots < batch.rows and spare < batch.slots:  # slots of tile + 1 rows, or of one
            uneven.append(batch._replace(most=tile + 1))
        if 0 < spare < batch.slots:  # full tiles, the rest idle
            uneven.append(batch._replace(idle=spare))
        for each in uneven:
            announce(plans, each)
            cut = _cut(plans, batch)
            if cut not in seen:
                seen.add(cut)
                yield each


def _cut(plans: Plans, batch: Batch) -> Any:
    """Return how the plan for a batch is cut, where the backend's plans tell."""
    return getattr(plans.of(batch.rows), "cut", None)


def _rows_of_x(trial: Trial, batch: Batch) -> list[int]:
    """Return rows of x such that strides of its h are multiples of 16, and as they come."""
    if not trial.pads:
        return [batch.rows]
    aligned = -(-batch.rows // ALIGNED) * ALIGNED
    return sorted({batch.rows, min(aligned, trial.most_rows)})


def announce(plans: Plans, batch: Batch) -> None:
    """Let plans hold a batch."""
    rows, slots = batch.rows - batch.idle, batch.slots
    if batch.most:
        full, rest = divmod(rows - slots, batch.most - 1)
        more = [slot for slot in range(full) for _ in range(batch.most - 1)]
        taken = [*range(slots), *more, *[full] * rest]
    else:
        taken = (list(range(slots)) * (rows // slots + 1))[:rows]
    plans.set_slots([*taken, *[NO_ADAPTER] * batch.idle])


class _CompilingLog:
    """Logs how much is done, from any thread."""

    def __init__(self, log: Any, count: int, unit: str) -> None:
        self._log, self._count, self._unit = log, count, unit
        self._said, self._done, self._lock = time.monotonic(), 0, threading.Lock()

    def step(self) -> None:
        """Count one more."""
        with self._lock:
            self._done += 1
            if time.monotonic() - self._said > PROGRESS:
                self._said = time.monotonic()
                self._log.info(
                    "compiling LoRA kernels: %d of %d %s", self._done, self._count, self._unit
                )
