"""Measures backends on an H200: cells beside peers, sweeps, and the bytes that memory moves."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, ROOT, Measurement, Options, Result, Row, flag

from lora_backends import LoRABackend, get_backend
from lora_backends.bench.cells import Cell
from lora_backends.bench.contenders import from_backend
from lora_backends.bench.layers import make_layers, make_workload
from lora_backends.bench.measure import measure, time_contenders
from lora_backends.bench.results import read_result, summarize
from lora_backends.bench.timing import measure_limits
from lora_backends.errors import UnknownBackendError
from lora_backends.model_shapes import preset
from lora_backends.selection.option_text import read_options

PEERS = Path(__file__).parent / "peers" / "h200.json"
DEVICE, DTYPE = "cuda", torch.bfloat16
O_PROJECTION = ("o", 4096, (4096,))
COPY_GB_PER_S, LAUNCH_US = 4270.0, 0.96  # of the limits in the peers' file
RANK = 16
TOKENS = sorted([2**power for power in range(15)] + [3, 24, 100, 777, 3000])
SWEEPS = {
    "active": [(256, adapters) for adapters in (1, 4, 16, 64, 256)],
    "tokens": [(tokens, 8) for tokens in TOKENS],
    "adapters": [(512, 2**power) for power in range(10)],
}
METRIC = "dram__bytes_read.sum"
WIDTHS = (8, 64)  # of the stack, for adapters of rank 8
LAUNCHES = 3  # of every kernel, under Nsight Compute
MEMORY_CELL = Cell(*O_PROJECTION, tokens=64, adapters=64, rank=8)


def create(name: str, options: dict[str, Any], device: Any = None) -> LoRABackend:
    """Return a backend, on the GPU by default; the source tree need not be installed."""
    device = DEVICE if device is None else device
    try:
        return get_backend(name, device, **options)
    except UnknownBackendError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        registered = project["entry-points"]["lora_backends"]
        if name not in registered:
            raise
        module, _, attribute = registered[name].partition(":")
        backend: LoRABackend = getattr(importlib.import_module(module), attribute)(
            device, **options
        )
        return backend


def time_cells(options: Options, result: Result) -> Iterator[Row]:
    """Time one backend over the peers' cells, and its host work and mixed ranks."""
    settings = read_options(options.option)
    backend, peers = create(options.backend, settings), json.loads(options.peers.read_text())
    contender = replace(from_backend(backend, settings), name=options.backend)
    by_cell = {cell_of(row, peers["projections"]): row for row in peers["rows"]}
    limits = replace(
        measure_limits(torch.device(DEVICE), DTYPE),
        copy_gb_per_s=COPY_GB_PER_S,
        launch_us=LAUNCH_US,
    )
    try:
        measure(
            list(by_cell), [contender], DEVICE, DTYPE, limits=limits, progress=show, result=result
        )
        result["host_us"] = attempt(lambda: measure_host(backend))
        result["mixed_ranks"] = attempt(lambda: measure_mixed_ranks(backend))
        print(result["host_us"], result["mixed_ranks"])
    finally:
        for row in result.get("rows", ()):
            add_peers(row, by_cell)
    yield from ()


def cell_of(row: dict[str, Any], projections: dict[str, tuple[int, list[int]]]) -> Cell:
    """Return a row of the peers' file as a cell."""
    width, slices = projections[row["projection"]]
    batch = (row["tokens"], row["active_adapters"], row["rank"], row["mix"])
    return Cell(row["projection"], width, tuple(slices), *batch)


def add_peers(row: dict[str, Any], by_cell: dict[Cell, dict[str, Any]]) -> None:
    """Add the best peer's time to a row, and take the limit that the peers are compared with."""
    keys = ("projection", "tokens", "adapters", "rank", "mix")
    peer = next(p for cell, p in by_cell.items() if all(getattr(cell, k) == row[k] for k in keys))
    row |= {"limit_us": peer["limit_us"], "best_peer_us": peer["best_peer_us"]}
    for found in row["results"].values():
        if "us" in found:
            found["efficiency"] = float(f"{row['limit_us'] / found['us']:.4g}")


def attempt(measurement: Callable[[], Any]) -> Any:
    """Return a side measurement, or its error: the cells are worth keeping without it."""
    try:
        return measurement()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def show(index: int, cell: Cell) -> None:
    """Print the cell that is measured next."""
    batch = f"{cell.tokens} tokens, {cell.adapters} adapters ({cell.mix}), rank {cell.rank}"
    print(f"{index + 1:3} {cell.projection}: {batch}", flush=True)


def measure_host(backend: LoRABackend, calls: int = 200) -> dict[str, float]:
    """Return host microseconds of one call as an engine makes it, the GPU idle at its start."""
    cell = Cell(*O_PROJECTION, tokens=256, adapters=64, rank=16)
    work = make_workload(cell, make_layers(cell, DEVICE, DTYPE)[:1])
    plan = backend.prepare_batch(work.batch)

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return round(statistics.median(times), 1)

    return {
        "run_linear": median(lambda: backend.run_linear(work.x, work.layers[0], plan, work.y)),
        "prepare_batch": median(lambda: backend.prepare_batch(work.batch)),
        "prepare_batch_refill": median(lambda: backend.prepare_batch(work.batch, out=plan)),
    }


def measure_mixed_ranks(backend: LoRABackend) -> list[dict[str, Any]]:
    """Return times of adapters of rank 8 in a stack of 64 ranks, and in one of 8."""
    results = []
    for active in (8, 64):
        cell = Cell(*O_PROJECTION, tokens=64, adapters=active, rank=8)
        times = {}
        for width in WIDTHS:
            work = make_workload(cell, make_layers(cell, DEVICE, DTYPE, width))
            times[width] = time_contenders([from_backend(backend)], work)[backend.name]["us"]
        results.append(
            {"active_adapters": active, "max_rank_8_us": times[8], "max_rank_64_us": times[64]}
            | {"ratio": times[64] / times[8]}
        )
    return results


def time_sweeps(options: Options, result: Result) -> Iterator[Row]:
    """Time backends side by side along tokens and adapters; sweeps not asked for are kept."""
    contenders = [from_backend(create(name, {})) for name in options.backends.split(",")]
    output = options.output or RESULTS / SWEEP.file
    try:
        cells = sweep_cells(options.sweep)
        measure(cells, contenders, DEVICE, DTYPE, progress=show, result=result)
    finally:
        if result.get("rows"):
            keep_others(result, output)
    yield from ()


def sweep_cells(sweeps: Iterable[str]) -> list[Cell]:
    """Return the cells of some sweeps, none twice."""
    projections, _ = preset("llama3-8b")
    batches = dict.fromkeys(batch for sweep in sweeps for batch in SWEEPS[sweep])
    return [
        Cell(name, *projections[name], tokens=tokens, adapters=adapters, rank=RANK)
        for name in ("qkv", "o")
        for tokens, adapters in batches
    ]


def keep_others(result: dict[str, Any], path: Path) -> None:
    """Add the file's rows that were not measured now, if the same machine and engines made them."""
    if not path.exists():
        return
    earlier = read_result(path)
    same = ("device", "versions", "contenders", "dtype")
    if any(earlier[key] != result[key] for key in same):
        return
    keys = ("projection", "tokens", "adapters", "rank")
    measured = {tuple(row[key] for key in keys) for row in result["rows"]}
    rows = earlier["rows"]
    result["rows"] += [row for row in rows if tuple(row[key] for key in keys) not in measured]


def read_bytes(options: Options, _: Result) -> list[Row]:
    """Return the bytes that kernels read for rank 8 in a narrow and in a wide stack.

    The adapters are the same in both stacks and each layer runs once, so nothing is in a cache: the
    difference is the layout alone.
    """
    names = options.backends.split(",")
    return bytes_read(profile(names), names, MEMORY_CELL)


def run_layers(names: Sequence[str], cell: Cell) -> None:
    """Run every backend on both stacks, each layer once."""
    for name in names:
        backend = create(name, {})
        for width in WIDTHS:
            work = make_workload(cell, make_layers(cell, DEVICE, DTYPE, width))
            plan = backend.prepare_batch(work.batch)
            for weights in work.layers[:LAUNCHES]:
                backend.run_linear(work.x, weights, plan, work.y)
            torch.cuda.synchronize()
            del work


def profile(names: Sequence[str]) -> list[dict[str, str]]:
    """Run this file under Nsight Compute; return its rows, one per launch, in order."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("Nsight Compute (ncu) is not on the PATH; it comes with the CUDA toolkit")
    command = [ncu, "--csv", "-k", "regex:shrink_kernel|expand_kernel", "--metrics", METRIC]
    command += [sys.executable, __file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))


def bytes_read(
    launches: Sequence[dict[str, str]], names: Sequence[str], cell: Cell
) -> list[dict[str, Any]]:
    """Return the median bytes read by kernel, stack and backend."""
    cases = [(name, width) for name in names for width in WIDTHS]
    each = 2 * LAUNCHES
    if len(launches) != len(cases) * each:
        raise SystemExit(f"ncu saw {len(launches)} launches instead of {len(cases) * each}")
    rows = []
    for place, (name, width) in enumerate(cases):
        for kernel in ("shrink", "expand"):
            read = [
                int(row["Metric Value"].replace(",", ""))
                for row in launches[place * each : (place + 1) * each]
                if row["Kernel Name"].startswith(kernel)
            ]
            rows.append(
                {
                    "backend": name,
                    "max_rank": width,
                    "rank": cell.rank,
                    "adapters": cell.adapters,
                    "kernel": kernel,
                    "bytes_read": int(statistics.median(read)),
                    "bytes_of_weights": 2 * cell.adapters * cell.rank * cell.in_features,
                }
            )
    return rows


BACKENDS = flag("triton,csgmv", "separated by commas")

CELLS = Measurement(
    rows=time_cells,
    file=lambda options: f"h200_{options.backend}.json",
    settings=None,
    summary=summarize,
    partial=True,
    options={
        "--backend": flag("triton"),
        "--option": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
        "--peers": {"type": Path, "default": PEERS, "help": "cells, limits and peers"},
    },
)

SWEEP = Measurement(
    rows=time_sweeps,
    file="h200_sweep.json",
    settings=None,
    summary=summarize,
    partial=True,
    options={
        "--backends": BACKENDS,
        "--sweep": {"choices": list(SWEEPS), "nargs": "+", "default": list(SWEEPS)},
    },
)

MEMORY = Measurement(
    rows=read_bytes,
    file="h200_mixed_ranks.json",
    method=f"Bytes read from memory by one launch ({METRIC} of Nsight Compute, median of "
    f"{LAUNCHES}), one layer of {MEMORY_CELL.in_features} inputs and outputs, "
    f"{MEMORY_CELL.adapters} adapters of rank {MEMORY_CELL.rank} with a token each.",
    settings=lambda _: {"device": DEVICE, "dtype": "bfloat16"},
    options={"--backends": BACKENDS},
)


if __name__ == "__main__":  # under Nsight Compute, which writes what each launch reads
    with torch.no_grad():
        run_layers(sys.argv[1:], MEMORY_CELL)
