"""Measures experts on an H200: 60 cells beside peers, routing alone, and cells without peers."""

from __future__ import annotations

import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from expert_cells import (
    LAUNCHES,
    ExpertCell,
    Step,
    Steps,
    make_steps,
    reference,
)
from h200 import create
from measuring import Measurement, Options, Result, Row, flag

from lora_backends import LoRABackend
from lora_backends.bench.results import DECODE_TOKENS
from lora_backends.bench.timing import graph_times, spread

PEERS = Path(__file__).parent / "peers" / "h200_moe.json"
DEVICE, DTYPE = "cuda", torch.bfloat16
LAUNCH_US = 0.96  # of the limits in the peers' file
TOLERANCE = 1e-2  # largest error of a row over its norm: h and y are each rounded to 8 bits
CHECKED_PAIRS = 2048  # a step of more pairs is not compared with the reference
ONE_A = ("gpt-oss-20b",)
"""Models whose gate and up share one A, as PEFT's `target_parameters` makes them."""
ROUTED = [(256, 64, 128, 8), (256, 8, 32, 4), (1024, 64, 128, 2), (4096, 64, 128, 8)]
"""Tokens, slots, experts and experts per token for which the routing is timed alone."""


def measure_all(options: Options, result: Result) -> Iterator[Row]:
    """Yield a row per cell, with the best peer's time where there is one."""
    peers = json.loads(options.peers.read_text())
    cells = [cell for cell in all_cells(peers) if options.only in name_of(cell)]
    compile_ahead(run_once, [options.backend], cells, options.processes)
    backend = create(options.backend, {})
    known = {cell_of(peers, row): row for row in peers["cells"]}
    for cell in cells:
        row = measure(backend, cell, result["copy_gb_per_s"])
        if cell in known:
            row["best_peer_us"] = known[cell]["best_peer_us"]
            row["peer_limit_us"] = known[cell]["limit_us"]
        yield row
    result["routing_us"] = [measure_routing(backend, *shape) for shape in ROUTED]


def settings(options: Options) -> dict[str, Any]:
    """Return what the result says besides its rows."""
    peers = json.loads(options.peers.read_text())
    checked = f"Here y of every cell is checked, up to {CHECKED_PAIRS} pairs."
    return {
        "method": f"{peers['method']} {checked}",
        "device": DEVICE,
        "dtype": "bfloat16",
        "backend": options.backend,
        "copy_gb_per_s": peers["copy_tb_per_s"] * 1e3,
        "launch_us": LAUNCH_US,
    }


def cell_of(peers: dict[str, Any], row: dict[str, Any]) -> ExpertCell:
    """Return a row of the peers' file as a cell."""
    shape = peers["shapes"][row["model"]]
    sizes = (shape["hidden"], shape["intermediate"], shape["experts"], shape["top_k"])
    batch = (row["tokens"], row["adapters"], row["rank"])
    return ExpertCell(row["model"], *sizes, *batch, num_a=1 if row["model"] in ONE_A else 2)


def all_cells(peers: dict[str, Any]) -> list[ExpertCell]:
    """Return the peers' cells, then those of shared factors, low ranks and skewed routers."""
    cells = [cell_of(peers, row) for row in peers["cells"]]
    shared = [replace(cell_of(peers, row), shared_outer=True) for row in peers["shared_outer"]]
    some = [cell for cell in cells if cell.tokens in (64, 4096) and cell.adapters == 8]
    low = [replace(cell, rank=rank) for cell in some if cell.rank == 16 for rank in (1, 2, 4, 8)]
    skewed = [replace(cell, skewed=True) for cell in some if cell.rank == 16]
    return [*cells, *shared, *low, *skewed]


def name_of(cell: ExpertCell) -> str:
    """Return a cell's name in printed lines."""
    kind = " shared" * cell.shared_outer + " skewed" * cell.skewed
    return f"{cell.model} T{cell.tokens} a{cell.adapters} r{cell.rank}{kind}"


def measure(backend: LoRABackend, cell: ExpertCell, copy_gb_per_s: float) -> dict[str, Any]:
    """Check and time one cell."""
    torch.manual_seed(0)
    steps = make_steps(cell, DEVICE, DTYPE)
    calls = Steps(backend, cell, steps)
    error = check(calls, cell) if cell.tokens * cell.top_k <= CHECKED_PAIRS else None
    keys = statistics.mean(step.active_keys(cell.token_slots) for step in steps)
    moved = cell.bytes_moved(keys, DTYPE.itemsize)
    limit = moved / copy_gb_per_s / 1e3 + LAUNCHES * LAUNCH_US
    found = spread(graph_times(calls.run, len(steps)))
    routing = statistics.median(graph_times(calls.route, len(steps)))
    return cell.describe() | {
        "steps": len(steps),
        "active_keys": round(keys, 2),
        "limit_us": round(limit, 3),
        **found,
        "efficiency": round(limit / found["us"], 4),
        "routing_us": round(routing, 3),
        "largest_error": error,
    }


def check(
    calls: Steps, cell: ExpertCell, exact: Step | None = None, bound: float = TOLERANCE
) -> float:
    """Return the largest error of a row over its norm, or raise if it is too large.

    Args:
        calls: the first step is run.
        cell: of the steps.
        exact: the step with the weights to compare with; by default the first one.
        bound: the largest error that is allowed.
    """
    calls.run(0)
    step, worst = exact or calls.steps[0], 0.0
    wanted = reference(step, cell.token_slots)
    for y, delta in zip((step.y13, step.y2), wanted, strict=True):
        errors = (y.float() - delta).norm(dim=-1) / delta.norm(dim=-1)
        worst = max(worst, float(errors.max()))
        y.zero_()
    if not worst <= bound:
        raise SystemExit(f"{name_of(cell)}: a row is off by {worst:.1e}, allowed {bound:g}")
    return round(worst, 5)


def measure_routing(
    backend: LoRABackend, tokens: int, slots: int, experts: int, top_k: int
) -> dict[str, Any]:
    """Time the routing alone."""
    cell = ExpertCell("routing", 16, 16, experts, top_k, tokens, slots, 1)
    calls = Steps(backend, cell, make_steps(cell, DEVICE, DTYPE, fewest=20))
    us = statistics.median(graph_times(calls.route, len(calls.steps)))
    return {"pairs": tokens * top_k, "keys": slots * experts, "us": round(us, 3)}


def summary(result: Result) -> dict[str, Any]:
    """Return geometric means of efficiency over the cells that have peers, and the slower cells."""
    rows = [row for row in result["rows"] if "best_peer_us" in row]
    groups = {
        f"{phase}{rank}": [
            row["efficiency"]
            for row in rows
            if (row["tokens"] <= DECODE_TOKENS) is (phase == "decode")
            and rank in ("", f" rank {row['rank']}")
        ]
        for phase in ("decode", "prefill")
        for rank in ("", " rank 16", " rank 64")
    }
    means = {name: statistics.geometric_mean(found) for name, found in groups.items() if found}
    slower = sum(row["us"] > row["best_peer_us"] for row in rows)
    speedup = [row["best_peer_us"] / row["us"] for row in rows]
    return {name: round(mean, 4) for name, mean in means.items()} | {
        "cells": len(rows),
        "slower_than_best_peer": slower,
        "speedup_over_best_peer": round(statistics.geometric_mean(speedup), 3) if rows else None,
    }


def compile_ahead(
    run: Callable[..., None], names: list[str], cells: list[Any], processes: int, *more: Any
) -> None:
    """Compile the kernels of all cells: Triton keeps them on the disk for the timing."""
    if processes:
        parts = [(names, cells[index::processes], *more) for index in range(processes)]
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.starmap(run, parts)


@torch.no_grad()
def run_once(names: list[str], cells: list[ExpertCell]) -> None:
    """Run one step of every cell, so that its kernels are compiled."""
    for name in names:
        backend = create(name, {})
        for cell in cells:
            calls = Steps(backend, cell, make_steps(cell, DEVICE, DTYPE, fewest=1)[:1])
            calls.run(0)
            torch.cuda.synchronize()
            del calls
            torch.cuda.empty_cache()


PROCESSES = flag(0, "that compile beforehand")
ONLY = flag("", "cells whose name contains this")

EXPERTS = Measurement(
    rows=measure_all,
    file="h200_experts.json",
    settings=settings,
    summary=summary,
    partial=True,
    options={
        "--backend": flag("triton"),
        "--peers": {"type": Path, "default": PEERS, "help": "cells, limits and peers"},
        "--processes": PROCESSES,
        "--only": ONLY,
    },
)
