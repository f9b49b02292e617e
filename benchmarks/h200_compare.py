"""Compares two source trees of the package on one GPU, cell by cell.

Each tree runs in a process of its own, with PYTHONPATH set to that tree. Within a cell the trees
take turns (old, new, old, new), so a clock that drifts meets both alike. The time of a cell is that
of one `run_linear` into an existing y, replayed from one CUDA graph that runs the call over many
layers with different weights (240 MB or more in all); medians of timings of 10 replays. Both trees
get the same seeds, and each result is compared with float32 products before it is timed.

    python3 benchmarks/h200_compare.py ../old ../new --backend triton --backend csgmv \
        --output compare.json

Needs torch and Triton; the package need not be installed. A cell that fails is recorded, and its
process is replaced if the error has ended it. Efficiency = modelled minimum time / measured time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers" / "h200.json"
TREES = ("old", "new")
DECODE_TOKENS = 256  # batches of at most as many tokens count as decode
SLOWER = 1.03  # new over old from which a cell is listed, after a second look
TOLERANCE = 1e-2  # largest error of a row, over the root mean square norm of the expected rows
ROTATED_BYTES, MOST_LAYERS, MIN_SLOTS = 240e6, 32, 8
REPLY_SECONDS = 60.0  # a worker that takes longer is replaced
ZIPF = 1.5
FORMAT = "lora-backends results 2"  # of lora_backends.bench.results, which old trees lack

Request = dict[str, Any]
Reply = dict[str, Any]


# The worker: one tree, one process. It answers each line of JSON on stdin with one.


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
        """Return what runs here."""
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


# The driver.


class WorkerError(Exception):
    """A request failed; the message says why."""


class Process:
    """A worker process, started anew after it has died.

    Args:
        tree: its source tree.
        device: where its cells run.
    """

    def __init__(self, tree: Path, device: str) -> None:
        self._tree, self._device = tree, device
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def ask(self, op: str, **request: Any) -> Reply:
        """Return the reply to a request.

        Raises:
            WorkerError: the request failed, or the process died or did not answer in time.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None and process.stdin and process.stdout
        try:
            process.stdin.write((json.dumps({"op": op, **request}) + "\n").encode())
            process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"the process has ended: {self._end()}") from error
        ready, _, _ = select.select([process.stdout], [], [], REPLY_SECONDS)
        line = process.stdout.readline() if ready else b""
        if not line:
            why = "the process has ended" if ready else f"no reply in {REPLY_SECONDS:.0f} s"
            raise WorkerError(f"{why}: {self._end()}")
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        self._end()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()
        paths = [str(self._tree), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(self._tree)]
        self._process = subprocess.Popen(
            [*command, "--device", self._device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )

    def _end(self) -> str:
        """Kill the process; return the last line it wrote to stderr."""
        if self._process is None:
            return ""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close() if pipe else None
        self._process = None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self._log.close()
        return lines[-1] if lines else "nothing on stderr"


def warm(trees: dict[str, Path], todo: Sequence[Request], device: str, most: int) -> str:
    """Compile the kernels of all cells into Triton's cache, several processes a tree."""
    start = time.perf_counter()
    failed: list[str] = []  # met again, and recorded, when the cell is timed
    jobs = [(tree, todo[i::most]) for tree in set(trees.values()) for i in range(most)]

    def run(job: tuple[Path, Sequence[Request]]) -> None:
        tree, requests = job
        if not requests:
            return
        process = Process(tree, device)
        for request in requests:
            try:
                process.ask("warm", **request)
            except WorkerError as error:
                failed.append(str(error))
        process.close()

    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        list(pool.map(run, jobs))
    seconds = time.perf_counter() - start
    text = f"compiled ahead in {seconds:.0f} s"
    return text + (f", {len(failed)} failed, first: {failed[0]}" if failed else "")


def compare_cell(
    processes: dict[str, Process], request: Request, timings: int, replays: int
) -> dict[str, Any]:
    """Return both trees' times of a cell, or their errors."""
    found: dict[str, Any] = {}
    prepared: dict[str, Reply] = {}
    for name in TREES:
        try:
            prepared[name] = processes[name].ask("prepare", **request)
        except WorkerError as error:
            found[f"{name}_error"] = str(error)
    times: dict[str, list[float]] = {name: [] for name in prepared}

    def turns(rounds: int) -> None:
        for _ in range(rounds):
            for name in times:
                reply = processes[name].ask("time", timings=timings, replays=replays)
                times[name] += reply["us"]

    try:
        turns(2)
        if len(times) == 2 and _ratio(times) > SLOWER:
            turns(3)  # a second look, for both
    except WorkerError as error:
        return found | {"error": str(error)}
    for name, series in times.items():
        found[f"{name}_us"] = round(statistics.median(series), 3)
        found[f"{name}_relative_error"] = prepared[name]["relative_error"]
        with contextlib.suppress(WorkerError):
            processes[name].ask("drop")
    if len(times) == 2:
        found["ratio"] = round(_ratio(times), 4)
        found["timings"] = len(times["old"])
        found["same_bits"] = prepared["old"]["digest"] == prepared["new"]["digest"]
    return found


def _ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(times["new"]) / statistics.median(times["old"])


def compare_host(
    processes: dict[str, Process], request: Request, rounds: int, calls: int
) -> dict[str, Any]:
    """Return medians of host times of both trees, timed in turns, or the error."""
    series: dict[str, list[Reply]] = {name: [] for name in TREES}
    try:
        for _ in range(rounds):
            for name in TREES:
                series[name].append(processes[name].ask("host", calls=calls, **request))
    except WorkerError as error:
        return {"error": str(error)}
    return {
        key: {
            name: round(statistics.median(reply[key] for reply in series[name]), 2)
            for name in TREES
        }
        for key in series["old"][0]
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return geometric means of efficiency, the worst ratio, and the cells over `SLOWER`."""
    both = [row for row in rows if "ratio" in row]
    summary: dict[str, Any] = {
        "cells": len(rows),
        "compared": len(both),
        "same_bits": sum(row["same_bits"] for row in both),
    }
    for phase in ("decode", "prefill"):
        mine = [row for row in both if (row["tokens"] <= DECODE_TOKENS) is (phase == "decode")]
        if mine:
            means = {
                name: statistics.geometric_mean(row["limit_us"] / row[f"{name}_us"] for row in mine)
                for name in TREES
            }
            summary[phase] = {
                "cells": len(mine),
                **{name: round(mean, 4) for name, mean in means.items()},
                "new_over_old": round(means["new"] / means["old"], 4),
                "worst_ratio": max(row["ratio"] for row in mine),
            }
    keys = ("projection", "tokens", "adapters", "rank", "mix", "ratio")
    slower = sorted((r for r in both if r["ratio"] > SLOWER), key=lambda r: -r["ratio"])
    summary["slower"] = [{key: row[key] for key in keys} for row in slower]
    summary["failed"] = [
        {key: row.get(key) for key in keys[:5]}
        | {key: row[key] for key in row if key.endswith("error") and isinstance(row[key], str)}
        for row in rows
        if "ratio" not in row
    ]
    return summary


def read_cells(peers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of the peers' file, those of one layer together."""
    cells = []
    for row in peers["rows"]:
        width, slices = peers["projections"][row["projection"]]
        cells.append(
            {"projection": row["projection"], "in": width, "slices": slices}
            | {"tokens": row["tokens"], "adapters": row["active_adapters"]}
            | {"rank": row["rank"], "mix": row["mix"], "limit_us": row["limit_us"]}
        )
    return sorted(cells, key=lambda c: (c["projection"], num_slots(c), c["rank"], c["tokens"]))


def parse_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return BACKEND.KEY=VALUE as a dict per backend; a value is JSON, else a string."""
    options: dict[str, dict[str, Any]] = {}
    for item in given:
        key, equals, value = item.partition("=")
        backend, dot, option = key.partition(".")
        if not (backend and dot and option and equals):
            raise SystemExit(f"--option {item!r}: allowed: BACKEND.KEY=VALUE")
        try:
            options.setdefault(backend, {})[option] = json.loads(value)
        except ValueError:
            options.setdefault(backend, {})[option] = value
    return options


def run(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill `result`, cell by cell."""
    end = time.monotonic() + arguments.budget
    backends, options = arguments.backend or ["triton"], parse_options(arguments.option)
    trees = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    cells = read_cells(json.loads(arguments.peers.read_text()))
    requests = {name: {"backend": name, "options": options.get(name, {})} for name in backends}
    processes = {name: Process(tree, arguments.device) for name, tree in trees.items()}
    try:
        result["trees"] = {name: str(tree) for name, tree in trees.items()}
        result["options"] = options
        result |= processes["old"].ask("hello")
        processes["new"].ask("hello")
        todo = [{**request, "cell": cell} for cell in cells for request in requests.values()]
        if arguments.jobs:
            result["compiling"] = warm(trees, todo, arguments.device, arguments.jobs)
            print(result["compiling"], flush=True)
        for name in backends:  # the first call of a backend loads and allocates
            result["host_us"][name] = compare_host(
                processes, requests[name], arguments.host_rounds, arguments.host_calls
            )
        for request in todo:
            row = {"backend": request["backend"], **request["cell"]}
            result["rows"].append(row)
            if time.monotonic() > end:
                row["error"] = "not run: the budget is used up"
                continue
            row |= compare_cell(processes, request, arguments.timings, arguments.replays)
            print(row_text(row), flush=True)
    finally:
        for process in processes.values():
            process.close()


def row_text(row: dict[str, Any]) -> str:
    """Return a cell as a line."""
    batch = f"{row['backend']:10}{row['projection']:8}{row['tokens']:5}{row['adapters']:4}"
    text = f"{batch}{row['rank']:4} {row['mix']:8}"
    if "ratio" in row:
        bits = "same bits" if row["same_bits"] else ""
        return f"{text}{row['old_us']:9.2f}{row['new_us']:9.2f} us{row['ratio']:7.3f}  {bits}"
    return text + "  ".join(f"{k}: {v}" for k, v in row.items() if k.endswith("error"))


def print_table(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"\n{'':10}{'':8}{'cells':>6}{'old':>8}{'new':>8}{'new/old':>9}{'worst time ratio':>18}")
    for backend, found in result["summary"].items():
        for phase in ("decode", "prefill"):
            if phase in found:
                one = found[phase]
                print(
                    f"{backend:10}{phase:8}{one['cells']:6}{one['old']:8.4f}{one['new']:8.4f}"
                    f"{one['new_over_old']:9.4f}{one['worst_ratio']:18.4f}"
                )
        print(f"{backend:10}same bits in {found['same_bits']} of {found['compared']} cells")
        for row in found["slower"]:
            print(f"{backend:10}over {SLOWER}: {row}")
        for row in found["failed"]:
            print(f"{backend:10}failed: {row}")
    for backend, times in result["host_us"].items():
        print(f"{backend:10}host us: {json.dumps(times)}")


def main() -> None:
    """Compare, print a table last, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?")
    parser.add_argument("--backend", action="append", help="may be repeated; triton if left out")
    parser.add_argument("--option", action="append", default=[], metavar="BACKEND.KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("h200_compare.json"))
    parser.add_argument("--peers", type=Path, default=PEERS, help="cells and limits")
    parser.add_argument("--device", default="cuda", help="cpu tries the script out")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds; later cells are left")
    parser.add_argument("--timings", type=int, default=5)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--host-rounds", type=int, default=3)
    parser.add_argument("--host-calls", type=int, default=1000)
    jobs = max(1, min(8, (os.cpu_count() or 2) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="compiling processes a tree; or 0")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.device)
        return
    if arguments.old is None or arguments.new is None:
        parser.error("two source trees are needed: OLD and NEW")
    result: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "rows": [],
        "summary": {},
        "host_us": {},
    }
    try:
        run(arguments, result)
    finally:  # keeps the rows measured before an interruption
        names = dict.fromkeys(row["backend"] for row in result["rows"])
        result["summary"] = {
            name: summarize([row for row in result["rows"] if row["backend"] == name])
            for name in names
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print_table(result)
        print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
