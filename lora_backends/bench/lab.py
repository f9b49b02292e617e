"""Compiling, checking and timing tile sizes on a GPU: the `Lab` of a search.

Candidates are compiled one by one, in 0.5 to 1 s for a kernel. A candidate changes one kernel of
two, and the batches of a layer share kernels, which do not depend on the numbers of tokens and
adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.backend import LoRABackend, LoRAPlan
from lora_backends.bench.layers import Workload, check, reference
from lora_backends.bench.timing import between_events, captured

SAMPLE_US = 1000.0
"""A timing replays a graph for about as long, so that many fit into one search."""


@dataclass(frozen=True, eq=False)
class _Prepared:
    graph: torch.cuda.CUDAGraph
    replays: int  # of one timing
    plan: LoRAPlan  # the graph reads it


class GpuLab:
    """A `Lab` that runs the batch of a workload on its layers.

    `backend_of` makes a backend with given sizes for every batch and layer.
    """

    def __init__(self, backend_of: Callable[[Any], LoRABackend], work: Workload) -> None:
        self._backend_of, self._work = backend_of, work
        self._expected = reference(work)
        self._prepared: dict[Any, _Prepared] = {}

    def prepare(self, tiles: Any) -> str | None:
        """Compile, compare with plain products, and capture a graph over all layers."""
        try:
            self._prepared[tiles] = self._capture(tiles)
        except Exception as error:  # of the compiler, the driver, or a wrong result
            torch.cuda.synchronize()  # raises, and ends the run, if the device is lost
            first = (str(error).strip() or "no message").splitlines()[0]
            return f"{type(error).__name__}: {first}"
        return None

    def sample(self, tiles: Any) -> float:
        """Return microseconds of one call: some replays of the graph, over its layers."""
        prepared = self._prepared[tiles]
        return self._replay(prepared.graph, prepared.replays)

    def keep(self, kept: Iterable[Any]) -> None:
        """Free all graphs but these."""
        self._prepared = {tiles: self._prepared[tiles] for tiles in kept}

    def _capture(self, tiles: Any) -> _Prepared:
        work, backend = self._work, self._backend_of(tiles)
        plan = backend.prepare_batch(work.batch)

        def call(layer: int) -> object:
            return backend.run_linear(work.x, work.layers[layer], plan, work.y)

        check(call, work, self._expected)
        graph = captured(call, len(work.layers))
        self._replay(graph, 1)
        once = self._replay(graph, 1) * len(work.layers)
        return _Prepared(graph, max(1, min(100, math.ceil(SAMPLE_US / once))), plan)

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        def run() -> None:
            for _ in range(replays):
                graph.replay()

        return between_events(run) / (replays * len(self._work.layers))
