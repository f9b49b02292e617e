"""Measures backends on an H200: cells beside peers, sweeps, and the bytes that memory moves.

    python benchmarks/h200.py cells --backend csgmv --option segment_size=auto
    python benchmarks/h200.py sweep --sweep tokens
    python benchmarks/h200.py plot docs/images        # anywhere, from the results of sweep
    python benchmarks/h200.py memory                  # needs Nsight Compute

Run from the repository root with PYTHONPATH=. where the package is not installed. Each command
writes benchmarks/results/h200_NAME.json, or --output.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lora_backends import LoRABackend, get_backend
from lora_backends.bench.cells import Cell
from lora_backends.bench.contenders import from_backend
from lora_backends.bench.layers import make_layers, make_workload
from lora_backends.bench.measure import measure, time_contenders
from lora_backends.bench.results import new_result, read_result, summarize, write_result
from lora_backends.bench.timing import measure_limits
from lora_backends.errors import UnknownBackendError
from lora_backends.model_shapes import preset
from lora_backends.option_text import read_options

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers" / "h200.json"
RESULTS = Path(__file__).parent / "results"
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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    cells = commands.add_parser("cells", help="one backend over the 80 cells of the peers' file")
    cells.add_argument("--backend", default="triton")
    cells.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    cells.add_argument("--peers", type=Path, default=PEERS, help="cells, limits and peers")
    cells.add_argument("--output", type=Path)
    cells.set_defaults(run=run_cells)
    sweep = commands.add_parser("sweep", help="curves along tokens and along adapters")
    sweep.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    sweep.add_argument("--sweep", choices=list(SWEEPS), action="append", help="default: all")
    sweep.add_argument("--output", type=Path, default=RESULTS / "h200_sweep.json")
    sweep.set_defaults(run=run_sweep)
    plot = commands.add_parser("plot", help="draw the curves of a sweep")
    plot.add_argument("folder", type=Path)
    plot.add_argument("--input", type=Path, default=RESULTS / "h200_sweep.json")
    plot.set_defaults(run=run_plot)
    memory = commands.add_parser("memory", help="bytes read by each kernel, by Nsight Compute")
    memory.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    memory.add_argument("--output", type=Path, default=RESULTS / "h200_mixed_ranks.json")
    memory.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    memory.set_defaults(run=run_memory)
    arguments = parser.parse_args()
    arguments.run(arguments)


def create(name: str, options: dict[str, Any]) -> LoRABackend:
    """Return a backend on the GPU; the source tree need not be installed."""
    try:
        return get_backend(name, DEVICE, **options)
    except UnknownBackendError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        registered = project["entry-points"]["lora_backends"]
        if name not in registered:
            raise
        module, _, attribute = registered[name].partition(":")
        backend: LoRABackend = getattr(importlib.import_module(module), attribute)(
            DEVICE, **options
        )
        return backend


def run_cells(arguments: argparse.Namespace) -> None:
    """Time one backend over the peers' cells, and its host work and mixed ranks."""
    options = read_options(arguments.option)
    backend, peers = create(arguments.backend, options), json.loads(arguments.peers.read_text())
    contender = replace(from_backend(backend, options), name=arguments.backend)
    by_cell = {cell_of(row, peers["projections"]): row for row in peers["rows"]}
    device = torch.device(DEVICE)
    limits = replace(
        measure_limits(device, DTYPE), copy_gb_per_s=COPY_GB_PER_S, launch_us=LAUNCH_US
    )
    result: dict[str, Any] = {}
    try:
        measure(
            list(by_cell), [contender], device, DTYPE, limits=limits, progress=show, result=result
        )
        result["host_us"] = attempt(lambda: measure_host(backend))
        result["mixed_ranks"] = attempt(lambda: measure_mixed_ranks(backend))
    finally:  # keeps the rows measured before an interruption
        for row in result.get("rows", ()):
            add_peers(row, by_cell)
        if result:
            result["summary"] = summarize(result)
            output = arguments.output or RESULTS / f"h200_{arguments.backend}.json"
            write_result(output, result)
    for name in ("host_us", "mixed_ranks", "summary"):
        print(name, json.dumps(result[name]))


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


@torch.no_grad()
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


@torch.no_grad()
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


def run_sweep(arguments: argparse.Namespace) -> None:
    """Time backends side by side along tokens and adapters; sweeps not asked for are kept."""
    contenders = [from_backend(create(name, {})) for name in arguments.backends.split(",")]
    result: dict[str, Any] = {}
    try:
        cells = sweep_cells(arguments.sweep or SWEEPS)
        measure(cells, contenders, DEVICE, DTYPE, progress=show, result=result)
    finally:  # keeps the rows measured before an interruption
        if result.get("rows"):
            keep_others(result, arguments.output)
            result["summary"] = summarize(result)
            write_result(arguments.output, result)
            print(json.dumps(result["summary"]))


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


def run_plot(arguments: argparse.Namespace) -> None:
    """Write one SVG a sweep."""
    from lora_backends.bench.plots import save_figure, time_against_adapters, time_against_tokens

    result = read_result(arguments.input)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for sweep, batches in SWEEPS.items():
        plot = time_against_tokens if sweep == "tokens" else time_against_adapters
        rows = [row for row in result["rows"] if (row["tokens"], row["adapters"]) in batches]
        figure = plot({**result, "rows": rows}) if rows else None
        if figure is not None:
            print(save_figure(figure, arguments.folder / f"h200_sweep_{sweep}.svg"))


def run_memory(arguments: argparse.Namespace) -> None:
    """Write the bytes that kernels read for rank 8 in a narrow and in a wide stack.

    The adapters are the same in both stacks and each layer runs once, so nothing is in a cache: the
    difference is the layout alone.
    """
    cell = Cell(*O_PROJECTION, tokens=64, adapters=64, rank=8)
    names = arguments.backends.split(",")
    if arguments.child:
        run_layers(names, cell)
        return
    result = new_result(
        f"Bytes read from memory by one launch ({METRIC} of Nsight Compute, median of {LAUNCHES}), "
        f"one layer of {cell.in_features} inputs and outputs, {cell.adapters} adapters of rank "
        f"{cell.rank} with a token each.",
        DEVICE,
        dtype="bfloat16",
    )
    result["rows"] = bytes_read(profile(names), names, cell)
    for row in result["rows"]:
        print(row)
    write_result(arguments.output, result)


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
    command += [sys.executable, __file__, "memory", "--child", "--backends", ",".join(names)]
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


if __name__ == "__main__":
    main()
