"""Measures 8-bit stacks beside 16-bit ones on a GPU, over the cells of the peers' file.

    python benchmarks/h200_eight_bit.py --backends triton,csgmv --dtype int8
    python benchmarks/h200_eight_bit.py --experts --backends triton --processes 12

Writes benchmarks/results/h200_eight_bit.json, or with --experts h200_eight_bit_experts.json, or
--output: the time of each cell with bfloat16 and with 8-bit stacks of a scale per row, timed in
turns. --experts takes the decode cells of the peers' file of experts.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h200_moe
import torch
from h200 import DEVICE, DTYPE, PEERS, RESULTS, cell_of, create
from h200_features import in_turns

from lora_backends import ExpertWeights, LoRABackend, LoRAWeights, quantize_weights
from lora_backends.bench.cells import Cell
from lora_backends.bench.expert_cells import (
    ExpertCell,
    Step,
    Steps,
    make_steps,
    reference,
    rotated_steps,
)
from lora_backends.bench.layers import Workload, make_layers, make_workload
from lora_backends.bench.results import new_result, write_result
from lora_backends.bench.timing import Call
from lora_backends.dtypes import dtype_name

DECODE = 256  # batches of at most as many tokens
METHOD = (
    "Microseconds of run_linear into an existing y, in a CUDA graph over layers with different "
    "weights, 240 MB of bfloat16 in all; graphs of both layouts of a cell are replayed in turns, "
    "median of 9 rounds of 10 replays. speedup: bfloat16 / 8-bit. x and y are bfloat16; a scale "
    "per row of A and per row of B."
)
EXPERTS_METHOD = (
    "Microseconds of a step of experts: the routing, run_experts of gate_up and of down into an "
    "existing y, in a CUDA graph over steps with different weights and routings, 208 MB of "
    "bfloat16 in all; graphs of both layouts of a cell are replayed in turns, median of 9 rounds "
    "of 10 replays. speedup: bfloat16 / 8-bit. x and y are bfloat16; a scale per row of A and per "
    "row of B. error: the largest of a row of a step with 8 bits against products in float32 of "
    "the weights before quantisation, over the norm of the row."
)
MOST_ERROR = 0.15  # of any row of a step: a scale or a matrix of another expert is far above


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    parser.add_argument("--dtype", default="int8", help="of the stacks, as torch names it")
    parser.add_argument("--every", type=int, default=1, help="take every n-th cell")
    parser.add_argument("--experts", action="store_true", help="measure experts, in decode")
    parser.add_argument("--only", default="", help="cells of experts whose name contains this")
    parser.add_argument("--processes", type=int, default=0, help="that compile beforehand")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    stored = getattr(torch, arguments.dtype)
    names, method, file = arguments.backends.split(","), METHOD, "h200_eight_bit.json"
    if arguments.experts:
        method, file = EXPERTS_METHOD, "h200_eight_bit_experts.json"
        experts = expert_cells(arguments.only)[:: arguments.every]
    else:
        peers = json.loads(PEERS.read_text())
        cells = [cell_of(row, peers["projections"]) for row in peers["rows"]]
        cells = cells[:: arguments.every]
    if arguments.processes:
        own = experts if arguments.experts else cells
        compile_ahead(arguments.experts, names, own, stored, arguments.processes)
    result = new_result(method, DEVICE, dtype=dtype_name(DTYPE), stored=arguments.dtype)
    torch.manual_seed(0)
    try:
        for name in names:
            backend = create(name, {})
            if arguments.experts:
                rows = measure_experts(backend, experts, stored)
            else:
                rows = measure_cells(backend, cells, stored)
            for row in rows:
                result["rows"].append(row)
            result["summary"][name] = summarize(result["rows"], name)
            print(name, result["summary"][name], flush=True)
    finally:  # keeps the rows measured before an interruption
        write_result(arguments.output or RESULTS / file, result)


@torch.no_grad()
def measure_cells(
    backend: LoRABackend, cells: list[Cell], stored: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield a row per cell."""
    for cell in cells:
        work = make_workload(cell, make_layers(cell, DEVICE, DTYPE))
        narrow = [quantize_weights(layer, stored) for layer in work.layers]
        plan = backend.prepare_batch(work.batch)

        layouts = {"bfloat16": work.layers, "stored": narrow}
        calls = {name: call_of(backend, work, layers, plan) for name, layers in layouts.items()}
        times = in_turns(calls, len(work.layers))
        speedup = round(times["bfloat16"] / times["stored"], 3)
        print(
            backend.name,
            cell.projection,
            cell.tokens,
            cell.adapters,
            cell.rank,
            speedup,
            flush=True,
        )
        yield cell.describe() | {
            "backend": backend.name,
            "bfloat16_us": round(times["bfloat16"], 3),
            "stored_us": round(times["stored"], 3),
            "speedup": speedup,
        }


def call_of(backend: LoRABackend, work: Workload, layers: list[LoRAWeights], plan: Any) -> Call:
    """Return a function that runs the layer of an index."""
    return lambda layer: backend.run_linear(work.x, layers[layer], plan, work.y)


def expert_cells(only: str) -> list[ExpertCell]:
    """Return the decode cells of the peers' file of experts."""
    peers = json.loads(h200_moe.PEERS.read_text())
    cells = [h200_moe.cell_of(peers, row) for row in peers["cells"]]
    return [c for c in cells if c.tokens <= DECODE and only in h200_moe.name_of(c)]


@torch.no_grad()
def measure_experts(
    backend: LoRABackend, cells: list[ExpertCell], stored: torch.dtype
) -> Iterator[dict[str, Any]]:
    """Yield a row per cell."""
    for cell in cells:
        torch.cuda.empty_cache()
        wide = make_steps(cell, DEVICE, DTYPE, fewest=2 * rotated_steps(cell, DTYPE.itemsize))
        narrow = Steps(backend, cell, quantized_steps(wide, stored))
        error = check(narrow, wide[0], cell)
        times = in_turns(
            {"bfloat16": Steps(backend, cell, wide).run, "stored": narrow.run}, len(wide)
        )
        speedup = round(times["bfloat16"] / times["stored"], 3)
        print(backend.name, h200_moe.name_of(cell), times, speedup, error, flush=True)
        yield cell.describe() | {
            "backend": backend.name,
            "steps": len(wide),
            "bfloat16_us": round(times["bfloat16"], 3),
            "stored_us": round(times["stored"], 3),
            "speedup": speedup,
            "error": error,
        }


def quantized_steps(steps: list[Step], stored: torch.dtype) -> list[Step]:
    """Return the steps with 8-bit stacks; steps that share stacks still do."""
    made: dict[int, ExpertWeights] = {}

    def narrow(site: ExpertWeights) -> ExpertWeights:
        if id(site) not in made:
            made[id(site)] = quantized_site(site, stored)
        return made[id(site)]

    return [replace(s, gate_up=narrow(s.gate_up), down=narrow(s.down)) for s in steps]


def quantized_site(site: ExpertWeights, stored: torch.dtype) -> ExpertWeights:
    """Quantise slot by slot: float32 copies of the largest stacks would not fit beside them."""
    tables = ("lora_a", "lora_b", "ranks", "scalings")
    parts = [
        quantize_weights(
            replace(site, **{name: getattr(site, name)[slot : slot + 1] for name in tables}), stored
        )
        for slot in range(site.num_slots)
    ]
    whole: dict[str, Any] = {
        name: torch.cat([getattr(part, name).view(torch.int8) for part in parts]).view(stored)
        for name in ("lora_a", "lora_b")
    }
    for name in ("a_scales", "b_scales"):
        whole[name] = torch.cat([getattr(part, name) for part in parts])
    return replace(site, **whole, compute_dtype=site.dtype)


def check(calls: Steps, exact: Step, cell: ExpertCell) -> float | None:
    """Return the largest error of a row over its norm; None where too many pairs are to check."""
    if cell.tokens * cell.top_k > h200_moe.CHECKED_PAIRS:
        return None
    calls.run(0)
    worst = 0.0
    for y, delta in zip((exact.y13, exact.y2), reference(exact, cell.token_slots), strict=True):
        errors = (y.float() - delta).norm(dim=-1) / delta.norm(dim=-1)
        worst = max(worst, float(errors.max()))
        y.zero_()
    if not worst <= MOST_ERROR:
        raise SystemExit(f"{h200_moe.name_of(cell)}: a row is off by {worst:.1e}")
    return round(worst, 5)


def compile_ahead(
    experts: bool, names: list[str], cells: list[Any], stored: torch.dtype, processes: int
) -> None:
    """Compile the kernels of all cells: Triton keeps them on the disk for the timing."""
    run = run_experts_once if experts else run_once
    parts = [(names, cells[index::processes], stored) for index in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.starmap(run, parts)


@torch.no_grad()
def run_once(names: list[str], cells: list[Cell], stored: torch.dtype) -> None:
    """Run one layer of every cell in both layouts, so that its kernels are compiled."""
    for cell in cells:
        work = make_workload(cell, make_layers(cell, DEVICE, DTYPE)[:1])
        for name in names:
            backend = create(name, {})
            plan = backend.prepare_batch(work.batch)
            for layer in (work.layers[0], quantize_weights(work.layers[0], stored)):
                backend.run_linear(work.x, layer, plan, work.y)
                torch.cuda.synchronize()
        del work, layer
        torch.cuda.empty_cache()


@torch.no_grad()
def run_experts_once(names: list[str], cells: list[ExpertCell], stored: torch.dtype) -> None:
    """Run one step of every cell in both layouts, so that its kernels are compiled."""
    for cell in cells:
        wide = make_steps(cell, DEVICE, DTYPE, fewest=1)[:1]
        for name in names:
            for steps in (wide, quantized_steps(wide, stored)):
                Steps(create(name, {}), cell, steps).run(0)
                torch.cuda.synchronize()
        del wide, steps
        torch.cuda.empty_cache()


def summarize(rows: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    """Return the geometric mean and the least speedup of decode and prefill."""
    summary = {}
    for phase, is_decode in (("decode", True), ("prefill", False)):
        own = [
            row["speedup"]
            for row in rows
            if row["backend"] == backend and (row["tokens"] <= DECODE) == is_decode
        ]
        if not own:
            continue
        mean = math.exp(statistics.fmean(map(math.log, own)))
        summary[phase] = {"mean": round(mean, 3), "least": min(own), "greatest": max(own)}
    return summary


if __name__ == "__main__":
    main()
