"""Times one backend on one GPU over 80 cells of a Llama-3-8B layer, against the limit and peers.

A cell is (projection, tokens, active adapters, rank). Its time is that of one `run_linear` into an
existing y, replayed from one CUDA graph that runs the call over many layers with different weights
(240 MB or more in all, so that they do not stay in the L2 cache); the median of 5 timings of 10
replays. Every cell is checked against float32 products before it is timed. Efficiency is the limit
(bytes that must move at the copy rate, and two launches) over the time.

    PYTHONPATH=. python benchmarks/h200_cells.py --backend csgmv --option segment_size=auto \
        --output benchmarks/results/h200_csgmv.json
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from lora_backends import LoRABackend, LoRABatch, LoRAWeights, get_backend
from lora_backends.bench.cells import Cell
from lora_backends.bench.job import option_value
from lora_backends.bench.layers import check, make_layers, make_workload, reference
from lora_backends.bench.results import DECODE_TOKENS, write_json
from lora_backends.bench.timing import graph_times
from lora_backends.errors import UnknownBackendError

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers" / "h200.json"
DEVICE = "cuda"
O_PROJECTION = ("o", 4096, (4096,))


def main() -> None:
    """Run the cells and the side measurements, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peers", type=Path, default=PEERS, help="cells, limits and peers")
    parser.add_argument("--output", type=Path, help="h200_BACKEND.json if left out")
    arguments = parser.parse_args()
    options = parse_options(arguments.option)
    backend = create(arguments.backend, options)
    peers = json.loads(arguments.peers.read_text())
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.date.today().isoformat(),
        "backend": arguments.backend,
        "options": options,
        "method": peers["method"],
        "cells": [],
    }
    try:
        measure_cells(backend, peers, results["cells"])
        results["host_us"] = attempt(measure_host, backend)
        results["mixed_ranks"] = attempt(measure_mixed_ranks, backend)
    finally:  # what was measured before an interruption is kept
        results["summary"] = summarize(results["cells"])
        write_json(arguments.output or Path(f"h200_{arguments.backend}.json"), results)
    for name in ("host_us", "mixed_ranks", "summary"):
        print(name, json.dumps(results[name]))


def parse_options(given: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE as a dict; a value is JSON, else a string."""
    pairs = [item.partition("=") for item in given]
    return {key: option_value(value) for key, _, value in pairs}


def create(name: str, options: dict[str, Any]) -> LoRABackend:
    """Return a backend on the GPU, from a source tree that is not installed too."""
    try:
        return get_backend(name, DEVICE, **options)
    except UnknownBackendError:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        registered = project["entry-points"]["lora_backends"]
        if name not in registered:
            raise
        module, _, found = registered[name].partition(":")
        return getattr(importlib.import_module(module), found)(DEVICE, **options)


def attempt(measurement: Callable[[LoRABackend], Any], backend: LoRABackend) -> Any:
    """Return a side measurement, or its error: the cells are worth keeping without it."""
    try:
        return measurement(backend)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def measure_cells(
    backend: LoRABackend, peers: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Append every cell with its time, its efficiency and the best peer's time."""
    keys = ("projection", "active_adapters", "rank")
    layers: list[LoRAWeights] = []
    made_for: tuple[Any, ...] = ()
    for row in sorted(peers["rows"], key=lambda row: tuple(map(str, (row[k] for k in keys)))):
        cell = cell_of(row, peers["projections"][row["projection"]])
        if made_for != (cell.projection, cell.num_slots, cell.rank):
            made_for = (cell.projection, cell.num_slots, cell.rank)
            layers.clear()
            layers += make_layers(cell, DEVICE, torch.bfloat16)
        found = {k: row[k] for k in (*keys, "tokens", "mix", "limit_us", "best_peer_us")}
        results.append(found)
        try:
            us = time_layers(backend, cell, layers)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
            print(cell, found["error"])
            continue
        found |= {"us": round(us, 2), "efficiency": row["limit_us"] / us}
        print(
            f"{cell.projection:8}{cell.tokens:5}{cell.adapters:4}{cell.rank:4}"
            f"{us:9.2f} us  efficiency {found['efficiency']:.2f}"
            f"  of best peer {us / row['best_peer_us']:.2f}",
            flush=True,
        )


def cell_of(row: dict[str, Any], projection: tuple[int, list[int]]) -> Cell:
    """Return a row of the peers' file as a cell."""
    width, slices = projection
    batch = (row["tokens"], row["active_adapters"], row["rank"], row["mix"])
    return Cell(row["projection"], width, tuple(slices), *batch)


def time_layers(backend: LoRABackend, cell: Cell, layers: list[LoRAWeights]) -> float:
    """Return microseconds of one call, after checking the first layer's result."""
    work = make_workload(cell, layers)
    plan = backend.prepare_batch(work.batch)

    def call(layer: int) -> None:
        backend.run_linear(work.x, layers[layer], plan, work.y)

    check(call, work, reference(work.x, layers[0], work.batch))
    return statistics.median(graph_times(call, len(layers)))


@torch.no_grad()
def measure_host(backend: LoRABackend, calls: int = 200) -> dict[str, float]:
    """Return host microseconds of one call as an engine makes it, the GPU idle at its start."""
    cell = Cell(*O_PROJECTION, tokens=256, adapters=64, rank=16)
    work = make_workload(cell, make_layers(cell, DEVICE, torch.bfloat16)[:1])
    batch: LoRABatch = work.batch
    plan = backend.prepare_batch(batch)

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
        "prepare_batch": median(lambda: backend.prepare_batch(batch)),
        "prepare_batch_refill": median(lambda: backend.prepare_batch(batch, out=plan)),
    }


def measure_mixed_ranks(backend: LoRABackend) -> list[dict[str, Any]]:
    """Return what adapters of rank 8 cost in a stack of 64 ranks, against one of 8."""
    results = []
    for active in (8, 64):
        cell = Cell(*O_PROJECTION, tokens=64, adapters=active, rank=8)
        times = {
            width: time_layers(backend, cell, make_layers(cell, DEVICE, torch.bfloat16, width))
            for width in (8, 64)
        }
        results.append(
            {"active_adapters": active, "max_rank_8_us": times[8], "max_rank_64_us": times[64]}
            | {"ratio": times[64] / times[8]}
        )
    return results


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return geometric means by phase, and the cells slower than 1.05 of the best peer."""
    timed = [cell for cell in cells if "us" in cell]
    summary: dict[str, Any] = {}
    for phase in ("decode", "prefill"):
        values = [
            cell["efficiency"]
            for cell in timed
            if (cell["tokens"] <= DECODE_TOKENS) is (phase == "decode")
        ]
        if values:
            summary[phase] = {
                "cells": len(values),
                "geometric_mean": statistics.geometric_mean(values),
                "lowest": min(values),
            }
    summary["slower_than_best_peer"] = [
        cell for cell in timed if cell["us"] > 1.05 * cell["best_peer_us"]
    ]
    summary["failed"] = [cell for cell in cells if "error" in cell]
    return summary


if __name__ == "__main__":
    main()
