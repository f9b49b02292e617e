"""Runs cells with the package of one source tree, for h200_compare.py, in a process of its own.

It imports no more of the package than `serve` does, after the tree's place in sys.path is set.
"""

from __future__ import annotations

import hashlib
import importlib
import statistics
import sys
import time
import tomllib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]
HOST_CELL = {"projection": "host", "in_features": 512, "output_slices": [512]}
HOST_CELL |= {"tokens": 16, "adapters": 4, "rank": 16, "mix": "uniform"}


class Worker:
    """Runs cells with the package of one tree.

    Args:
        tree: the folder that holds the package and its pyproject.toml.
        device: "cuda", or "cpu" to try the script out.
    """

    def __init__(self, tree: Path, device: str) -> None:
        import torch

        import lora_backends
        from lora_backends.bench import cells, layers, results, timing

        package = Path(lora_backends.__file__ or "")
        if not package.is_relative_to(tree):
            raise RuntimeError(f"imported {package}, not the package in {tree}")
        self.tree, self.device, self.torch, self.package = tree, device, torch, lora_backends
        self.cells, self.layers, self.results, self.timing = cells, layers, results, timing
        self._backends: dict[str, Any] = {}
        self._made: list[Any] = []
        self._made_for: Any = None

    def hello(self, _: Request) -> Reply:
        """Return the versions and the device of this process."""
        result = self.results.new_result("", self.device)
        return {key: result[key] for key in ("device", "versions")}

    def warm(self, request: Request) -> Reply:
        """Compile the kernels of a cell into Triton's cache on disk."""
        call, _ = self._call(request, most=1)
        call(0)
        self.synchronize()
        return {}

    def cell(self, request: Request) -> Reply:
        """Check a cell and time it; return a digest of y, and microseconds of a call per timing."""
        call, work = self._call(request)
        self.layers.check(call, work, self.layers.reference(work))
        call(0)
        bits = work.y.view(self.torch.int16).cpu().numpy().tobytes()
        work.y.zero_()
        count, rounds = len(work.layers), (request["timings"], request["replays"])
        clock = self.timing.graph_times if self.device == "cuda" else self._sweep_times
        return {"digest": hashlib.sha256(bits).hexdigest(), "us": clock(call, count, *rounds)}

    def host(self, request: Request) -> Reply:
        """Return host microseconds of the calls that an engine makes."""
        calls, backend = request["calls"], self._backend(request)
        linear, work = self._call(request | {"cell": HOST_CELL}, most=8)
        wide = self.package.LoRABatch([t % 64 for t in range(256)], 64)
        wide_plan = backend.prepare_batch(wide)
        return {
            "run_linear_one_layer": self._loop(lambda i: linear(0), calls),
            "run_linear_eight_layers": self._loop(lambda i: linear(i % len(work.layers)), calls),
            "prepare_batch_256": self._each(lambda: backend.prepare_batch(wide), calls // 10),
            "refill_256": self._each(
                lambda: backend.prepare_batch(wide, out=wide_plan), calls // 10
            ),
        }

    def _workload(self, cell: Any, most: int | None = None) -> Any:
        """Return the layers and the batch of a cell; the seeds are the same for both trees."""
        torch, key = self.torch, (cell.output_slices, cell.in_features, cell.rank, cell.num_slots)
        if self._made_for != key:
            self._made, self._made_for = [], None  # their memory makes room for the next
            torch.manual_seed(0)
            made = self.layers.make_layers(cell, self.device, torch.bfloat16)
            self._made, self._made_for = made, key
        torch.manual_seed(1)
        return self.layers.make_workload(cell, self._made[:most])

    def _call(self, request: Request, most: int | None = None) -> tuple[Callable[[int], None], Any]:
        work = self._workload(self.cells.Cell(**request["cell"]), most)
        backend = self._backend(request)
        plan = backend.prepare_batch(work.batch)

        def call(layer: int) -> None:
            backend.run_linear(work.x, work.layers[layer], plan, work.y)

        return call, work

    def _backend(self, request: Request) -> Any:
        name, options = request["backend"], request["options"]
        if name not in self._backends:
            # by the tree's entry point: the tree need not be installed
            project = tomllib.loads((self.tree / "pyproject.toml").read_text())["project"]
            module, _, attribute = project["entry-points"]["lora_backends"][name].partition(":")
            backend_class = getattr(importlib.import_module(module), attribute)
            self._backends[name] = backend_class(self.device, **options)
        return self._backends[name]

    def _sweep_times(
        self, call: Callable[[int], None], count: int, timings: int, replays: int
    ) -> list[float]:
        """Return what `graph_times` does, on a CPU and without a graph."""
        return [self._loop(lambda i: call(i % count), replays * count) for _ in range(timings)]

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _loop(self, call: Callable[[int], object], calls: int) -> float:
        """Return microseconds of one call in a tight loop of them."""
        for i in range(16):
            call(i)
        self.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds / calls * 1e6

    def _each(self, call: Callable[[], object], calls: int) -> float:
        """Return the median microseconds of a call, the GPU idle at its start."""
        times = []
        for _ in range(max(3, calls)):
            self.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def serve(tree: Path, device: str, pipe: Connection) -> None:
    """Answer requests until the other end closes the pipe."""
    sys.path.insert(0, str(tree))
    worker: Worker | None = None
    while True:
        try:
            op, request = pipe.recv()
        except EOFError:
            return
        try:
            import torch

            worker = worker or Worker(tree, device)
            with torch.no_grad():
                pipe.send(getattr(worker, op)(request))
        except Exception as error:
            text = (str(error).strip() or "no message").splitlines()[0]
            reply = {"error": f"{type(error).__name__}: {text}", "fatal": False}
            if worker is not None:
                try:
                    worker.synchronize()
                except Exception:  # the error sticks to the process: the driver starts another
                    reply["fatal"] = True
            pipe.send(reply)
