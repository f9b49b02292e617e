"""Compiling, checking and timing tile sizes on a GPU.

Triton compiles a kernel in 0.5 to 1 s on one core, so other processes compile: they run the same
call on the same shapes, which leaves the kernels in Triton's cache on disk. While anything is
timed they wait.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import Workload, check, make_layers, make_workload, reference
from lora_backends.bench.search import Lab
from lora_backends.bench.timing import between_events
from lora_backends.bench.tune_job import Point, Tuning
from lora_backends.gpu.choice import fixed_choice
from lora_backends.selection import get_backend
from lora_backends.weights import LoRAWeights

SAMPLE_US = 1000.0
"""A timing replays a graph for about as long: short enough to take many in turns."""

LONGEST_COMPILE = 120.0
"""Seconds after which compiling processes are given up."""


def gpu_lab(job: Tuning) -> Callable[[Point], Lab]:
    """Return what makes the lab of a point; layers and processes serve points in a row."""
    torch.cuda.set_device(job.device)
    compiler = Compiler(job)
    kept: dict[tuple[Any, ...], list[LoRAWeights]] = {}

    def lab_of(point: Point) -> Lab:
        key = (point.layer, point.cell.output_slices, point.cell.num_slots)
        if key not in kept:
            kept.clear()  # the next point's weights may need the room
            kept[key] = make_layers(point.cell, job.device, job.dtype)
        return GpuLab(job, point, make_workload(point.cell, kept[key]), compiler)

    return lab_of


@dataclass(frozen=True, eq=False)
class _Prepared:
    graph: torch.cuda.CUDAGraph
    replays: int


class GpuLab:
    """A `Lab` for one point.

    Args:
        job: what is tuned.
        point: the layer, the batch and the tiles of its plan.
        work: the layers that a graph passes through, and a batch.
        compiler: compiles ahead.
    """

    def __init__(self, job: Tuning, point: Point, work: Workload, compiler: Compiler) -> None:
        self._job, self._point, self._work, self._compiler = job, point, work, compiler
        self._backend = get_backend(job.backend, job.device, tiles="rules")
        self._expected = reference(work.x, work.layers[0], work.batch)
        self._prepared: dict[Any, _Prepared] = {}

    def prepare(self, candidates: Sequence[Any]) -> Mapping[Any, str]:
        """Compile, check against plain products, and capture a graph over all layers."""
        reasons = dict(self._compiler.compile(self._point, candidates))
        for tiles in candidates:
            if tiles in reasons or tiles in self._prepared:
                continue
            try:
                self._prepared[tiles] = self._capture(tiles)
            except Exception as error:  # of the compiler, the driver, or a wrong result
                torch.cuda.synchronize()  # an error that sticks to the device ends the run here
                reasons[tiles] = told(error)
        return reasons

    def sample(self, tiles: Any) -> float:
        """Return microseconds of one call: some replays of the graph, over its layers."""
        prepared = self._prepared[tiles]
        return self._replay(prepared.graph, prepared.replays)

    def keep(self, candidates: Iterable[Any]) -> None:
        """Drop the graphs of all others, and their memory."""
        kept = set(candidates)
        self._prepared = {t: found for t, found in self._prepared.items() if t in kept}

    def _capture(self, tiles: Any) -> _Prepared:
        work = self._work
        call = bound(self._backend, self._point, tiles, work)
        check(call, work, self._expected)
        for layer in range(len(work.layers)):
            call(layer)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(len(work.layers)):
                call(layer)
        self._replay(graph, 1)
        once = self._replay(graph, 1) * len(work.layers)
        return _Prepared(graph, max(1, min(100, math.ceil(SAMPLE_US / once))))

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        def run() -> None:
            for _ in range(replays):
                graph.replay()

        return between_events(run) / (replays * len(self._work.layers))


def bound(backend: Any, point: Point, tiles: Any, work: Workload) -> Callable[[int], object]:
    """Return what runs the layer of an index with these tiles."""
    backend.tile_choice = fixed_choice(point.tile_tokens, tiles)
    plan = backend.prepare_batch(work.batch)
    return lambda layer: backend.run_linear(work.x, work.layers[layer], plan, work.y)


class Compiler:
    """Processes that compile kernels into Triton's cache on disk.

    Args:
        job: what is tuned; with one process nothing is compiled ahead.
    """

    def __init__(self, job: Tuning) -> None:
        self._job = job
        self._pool: ProcessPoolExecutor | None = None
        self._done: set[tuple[Any, ...]] = set()

    def compile(self, point: Point, candidates: Sequence[Any]) -> Mapping[Any, str]:
        """Compile candidates side by side; return why some cannot be compiled or run.

        Kernels do not depend on the number of tokens, so what one batch needed is there for the
        others of its layer.
        """
        shape = (point.layer, point.cell.output_slices, point.tile_tokens)
        fresh = [tiles for tiles in candidates if (shape, tiles) not in self._done]
        if self._job.jobs == 1 or len(fresh) < 2:
            return {}
        pool = self._pool or self._start()
        parts = [part for i in range(self._job.jobs) if (part := fresh[i :: self._job.jobs])]
        arguments = (self._job.backend, str(self._job.device), self._job.dtype, point)
        futures = [(part, pool.submit(_compile, *arguments, part)) for part in parts]
        reasons: dict[Any, str] = {}
        for part, future in futures:
            reasons |= self._collect(part, future)
        self._done |= {(shape, tiles) for tiles in fresh if tiles not in reasons}
        return reasons

    def _collect(self, part: Sequence[Any], future: Future[dict[Any, str]]) -> dict[Any, str]:
        try:
            return future.result(LONGEST_COMPILE)
        except (BrokenProcessPool, CancelledError, TimeoutError) as error:
            self._stop()  # the next round starts new ones
            return dict.fromkeys(part, told(error))

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
        ignore = (signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
        self._pool = ProcessPoolExecutor(self._job.jobs, context, signal.signal, ignore)
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


_WORK: dict[tuple[Any, ...], Workload] = {}
"""In a compiling process: the tensors of the point that it compiles for."""


def _compile(
    backend: str, device: str, dtype: torch.dtype, point: Point, candidates: Sequence[Any]
) -> dict[Any, str]:
    """Run every candidate once, in a process of its own; return why some fail."""
    torch.cuda.set_device(device)
    key = (point.layer, point.cell, device)
    if key not in _WORK:
        _WORK.clear()
        _WORK[key] = _one_layer(point.cell, torch.device(device), dtype)
    engine = get_backend(backend, device, tiles="rules")
    reasons = {}
    for tiles in candidates:
        try:
            bound(engine, point, tiles, _WORK[key])(0)
            torch.cuda.synchronize()
        except Exception as error:  # whatever a compiler or driver raises is a reason
            reasons[tiles] = told(error)
    return reasons


def _one_layer(cell: Cell, device: torch.device, dtype: torch.dtype) -> Workload:
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    slots, slices = cell.num_slots, len(cell.output_slices)
    layer = LoRAWeights(
        lora_a=torch.zeros(slots, slices, cell.rank, cell.in_features, **like),
        lora_b=torch.zeros(slots, cell.out_features, cell.rank, **like),
        ranks=torch.full((slots, slices), cell.rank, dtype=torch.int32, device="cpu"),
        scalings=torch.ones(slots, slices, device="cpu"),
        output_slices=cell.output_slices,
    )
    return Workload(
        layers=[layer],
        batch=LoRABatch(cell.token_slots, slots),
        x=torch.zeros(cell.tokens, cell.in_features, **like),
        y=torch.zeros(cell.tokens, cell.out_features, **like),
    )


def told(error: BaseException) -> str:
    """Return an error's type and first line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"
