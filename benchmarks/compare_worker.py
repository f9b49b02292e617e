"""Runs cells with the package of one source tree, for h200_compare.py.

Reads requests from stdin, a line of JSON each, and answers each with a line on stdout. Needs torch
and Triton; the package need not be installed. It uses the public names of the package alone, so
that it runs old trees too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import statistics
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLERANCE = 1e-2  # largest error of a row, over the root mean square norm of the expected rows
ROTATED_BYTES, MOST_LAYERS, MIN_SLOTS = 240e6, 32, 8
ZIPF = 1.5

Request = dict[str, Any]
Reply = dict[str, Any]


class Worker:
    """Runs cells with the package of one tree.

    Args:
        tree: the folder that holds the package and its pyproject.toml.
        device: "cuda", or "cpu" to try the script out.
    """

    def __init__(self, tree: Path, device: str) -> None:
        import torch

        import lora_backends

        package = Path(lora_backends.__file__ or "")
        if not package.is_relative_to(tree):
            raise RuntimeError(f"imported {package}, not the package in {tree}")
        self.tree, self.device, self.torch, self.package = tree, device, torch, lora_backends
        self._backends: dict[str, Any] = {}
        self._layers: list[Any] = []
        self._layers_of: Any = None
        self._run: Callable[[], object] = lambda: None
        self._count = 1

    def hello(self, _: Request) -> Reply:
        """Return the versions and the device of this process."""
        gpu = self.torch.cuda.get_device_name() if self.device == "cuda" else self.device
        versions = {"python": platform.python_version(), "torch": self.torch.__version__}
        with contextlib.suppress(ImportError):
            versions["triton"] = importlib.import_module("triton").__version__
        return {"device": gpu, "versions": versions}

    def warm(self, request: Request) -> Reply:
        """Compile the kernels of a cell into Triton's cache on disk."""
        self._prepare(request, few_layers=True)
        self.drop({})
        return {}

    def prepare(self, request: Request) -> Reply:
        """Check a cell and capture its graph; return a digest of y."""
        return self._prepare(request, few_layers=False)

    def time(self, request: Request) -> Reply:
        """Return microseconds of one call, per timing."""
        replays = request["replays"]
        self._run()

        def some() -> None:
            for _ in range(replays):
                self._run()

        each = replays * self._count
        return {"us": [self._clock(some) / each for _ in range(request["timings"])]}

    def drop(self, _: Request) -> Reply:
        """Forget the prepared cell and its graph."""
        self._run = lambda: None
        return {}

    def host(self, request: Request) -> Reply:
        """Return host microseconds of the calls that an engine makes."""
        cell = {"in": 512, "slices": [512], "tokens": 16, "adapters": 4, "rank": 16}
        calls, backend = request["calls"], self._backend(request)
        layers = self._make_layers(cell | {"mix": "uniform"}, 8)
        batch, x, y = self._batch(cell | {"mix": "uniform"})
        plan = backend.prepare_batch(batch)
        wide = self.package.LoRABatch([t % 64 for t in range(256)], 64)
        wide_plan = backend.prepare_batch(wide)
        return {
            "run_linear_one_layer": self._loop(
                lambda i: backend.run_linear(x, layers[0], plan, y), calls
            ),
            "run_linear_eight_layers": self._loop(
                lambda i: backend.run_linear(x, layers[i % 8], plan, y), calls
            ),
            "prepare_batch_256": self._each(lambda: backend.prepare_batch(wide), calls // 10),
            "refill_256": self._each(
                lambda: backend.prepare_batch(wide, out=wide_plan), calls // 10
            ),
        }

    def _prepare(self, request: Request, few_layers: bool) -> Reply:
        cell = request["cell"]
        count = 1 if few_layers else number_of_layers(cell)
        key = [cell[k] for k in ("in", "slices", "rank")] + [num_slots(cell), count]
        if self._layers_of != key:
            self._layers, self._layers_of = [], None  # their memory makes room for the next
            self._layers, self._layers_of = self._make_layers(cell, count), key
        backend, layers = self._backend(request), self._layers
        batch, x, y = self._batch(cell)
        plan = backend.prepare_batch(batch)

        def sweep() -> None:
            for weights in layers:
                backend.run_linear(x, weights, plan, y)

        reply = {} if few_layers else self._checked(backend, batch, plan, x, y)
        self._run, self._count = sweep, len(layers)
        sweep()
        if self.device == "cuda":
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                sweep()
            self._run = graph.replay
            self._kept = (batch, plan, x, y)  # the graph reads them
        return reply

    def _checked(self, backend: Any, batch: Any, plan: Any, x: Any, y: Any) -> Reply:
        expected = self._reference(x, batch)
        y.fill_(1)
        backend.run_linear(x, self._layers[0], plan, y)
        error = (y.float() - 1 - expected).norm(dim=1).max()
        relative = float(error / expected.square().sum(1).mean().sqrt())
        if not relative <= TOLERANCE:
            raise RuntimeError(f"wrong result: a row is off by {relative:.1e}")
        digest = self._digest(y)
        y.zero_()
        return {"digest": digest, "relative_error": relative}

    def _reference(self, x: Any, batch: Any) -> Any:
        """Return the delta of every token in float32, adapter by adapter."""
        weights, torch = self._layers[0], self.torch
        slots = torch.as_tensor(batch.token_slots)
        delta = torch.zeros(x.shape[0], weights.out_features, device=x.device)
        for slot in slots.unique().tolist():
            rows = (slots == slot).nonzero().flatten().to(x.device)
            start = 0
            for s, width in enumerate(weights.output_slices):
                h = x[rows].float() @ weights.lora_a[slot, s].float().T
                b = weights.lora_b[slot, start : start + width].float()
                delta[rows, start : start + width] = 0.5 * (h @ b.T)
                start += width
        return delta

    def _digest(self, y: Any) -> int:
        """Return a number that differs where bits of y do."""
        torch, total = self.torch, 0
        columns = torch.arange(y.shape[1], device=y.device) % 8191 + 1
        for start in range(0, y.shape[0], 1024):
            bits = y[start : start + 1024].view(torch.int16).long()
            rows = torch.arange(start, start + bits.shape[0], device=y.device) % 4093 + 1
            total += int(((bits * columns).sum(1) * rows).sum())
        return total

    def _make_layers(self, cell: Request, count: int) -> list[Any]:
        torch, rank, slots = self.torch, cell["rank"], num_slots(cell)
        torch.manual_seed(0)
        like = {"device": self.device, "dtype": torch.bfloat16}
        slices, out = len(cell["slices"]), sum(cell["slices"])
        scales = 1 / math.sqrt(cell["in"]), 1 / math.sqrt(rank)
        return [
            self.package.LoRAWeights(
                lora_a=torch.randn(slots, slices, rank, cell["in"], **like).mul_(scales[0]),
                lora_b=torch.randn(slots, out, rank, **like).mul_(scales[1]),
                ranks=torch.full((slots, slices), rank, dtype=torch.int32),
                scalings=torch.full((slots, slices), 0.5),
                output_slices=tuple(cell["slices"]),
            )
            for _ in range(count)
        ]

    def _batch(self, cell: Request) -> tuple[Any, Any, Any]:
        torch, tokens = self.torch, cell["tokens"]
        torch.manual_seed(1)
        like = {"device": self.device, "dtype": torch.bfloat16}
        slots = [token % cell["adapters"] for token in range(tokens)]
        if cell["mix"] == "skewed":
            popularity = torch.arange(1, cell["adapters"] + 1).double() ** -ZIPF
            generator = torch.Generator().manual_seed(0)
            slots = sorted(
                torch.multinomial(popularity, tokens, True, generator=generator).tolist()
            )
        x = torch.randn(tokens, cell["in"], **like)
        y = torch.zeros(tokens, sum(cell["slices"]), **like)
        return self.package.LoRABatch(slots, num_slots(cell)), x, y

    def _backend(self, request: Request) -> Any:
        name, options = request["backend"], request["options"]
        key = json.dumps([name, options], sort_keys=True)
        if key not in self._backends:
            self._backends[key] = self._create(name, options)
        return self._backends[key]

    def _create(self, name: str, options: dict[str, Any]) -> Any:
        """Return a backend by the tree's own entry point: the tree need not be installed."""
        project = tomllib.loads((self.tree / "pyproject.toml").read_text())["project"]
        module, _, attribute = project["entry-points"]["lora_backends"][name].partition(":")
        return getattr(importlib.import_module(module), attribute)(self.device, **options)

    def _clock(self, run: Callable[[], object]) -> float:
        """Return microseconds of a run."""
        if self.device != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        event: Any = self.torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        self.torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000

    def _synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _loop(self, call: Callable[[int], object], calls: int) -> float:
        """Return microseconds of one call in a tight loop of them."""
        for i in range(16):
            call(i)
        self._synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(i)
        seconds = time.perf_counter() - start
        self._synchronize()
        return seconds / calls * 1e6

    def _each(self, call: Callable[[], object], calls: int) -> float:
        """Return the median microseconds of a call, the GPU idle at its start."""
        times = []
        for _ in range(max(3, calls)):
            self._synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)


def serve(tree: Path, device: str) -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not stand between the replies
    sys.path.insert(0, str(tree))
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or Worker(tree, device)
            import torch

            with torch.no_grad():
                reply = getattr(worker, request["op"])(request)
        except Exception as error:
            if worker is not None:
                worker.drop({})
            reply = {"error": first_line(error)}
            if device == "cuda" and worker is not None:
                try:
                    worker.torch.cuda.synchronize()
                except Exception:  # the error sticks to the process: the driver starts another
                    reply["fatal"] = True
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if reply.get("fatal"):
            os._exit(1)


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def num_slots(cell: Request) -> int:
    """Return the slots of a cell's stack."""
    return max(MIN_SLOTS, int(cell["adapters"]))


def number_of_layers(cell: Request) -> int:
    """Return how many layers hold `ROTATED_BYTES`, 4 to `MOST_LAYERS`."""
    width = len(cell["slices"]) * cell["in"] + sum(cell["slices"])
    size = num_slots(cell) * 2 * cell["rank"] * width
    return int(max(4, min(MOST_LAYERS, math.ceil(ROTATED_BYTES / size))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    serve(arguments.tree, arguments.device)
