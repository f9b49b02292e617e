"""Measures 8-bit stacks beside 16-bit ones on a GPU, over the cells of the peers' files."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import h200_moe
import torch
from expert_cells import ExpertCell, Step, Steps, make_steps, rotated_steps
from h200 import BACKENDS, DEVICE, DTYPE, PEERS, cell_of, create
from h200_features import replays_in_turns
from measuring import Measurement, Options, Result, Row, by_backend, flag

from lora_backends import ExpertWeights, LoRABackend, LoRAWeights, quantize_weights
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import Workload, make_layers, make_workload
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


def measure_layers(options: Options, _: Result) -> Iterator[Row]:
    """Yield a row per cell and backend."""
    stored, names = getattr(torch, options.dtype), options.backends.split(",")
    peers = json.loads(PEERS.read_text())
    cells = [cell_of(row, peers["projections"]) for row in peers["rows"]][:: options.every]
    h200_moe.compile_ahead(run_once, names, cells, options.processes, stored)
    for backend in [create(name, {}) for name in names]:
        for cell in cells:
            work = make_workload(cell, make_layers(cell, DEVICE, DTYPE))
            narrow = [quantize_weights(layer, stored) for layer in work.layers]
            plan = backend.prepare_batch(work.batch)
            layouts = {"bfloat16": work.layers, "stored": narrow}
            calls = {name: call_of(backend, work, each, plan) for name, each in layouts.items()}
            times = replays_in_turns(calls, len(work.layers))
            yield cell.describe() | {"backend": backend.name} | speedup(times)


def measure_experts(options: Options, _: Result) -> Iterator[Row]:
    """Yield a row per decode cell and backend."""
    stored, names = getattr(torch, options.dtype), options.backends.split(",")
    peers = json.loads(h200_moe.PEERS.read_text())
    cells = [h200_moe.cell_of(peers, row) for row in peers["cells"]]
    cells = [c for c in cells if c.tokens <= DECODE and options.only in h200_moe.name_of(c)]
    cells = cells[:: options.every]
    h200_moe.compile_ahead(run_experts_once, names, cells, options.processes, stored)
    for backend in [create(name, {}) for name in names]:
        for cell in cells:
            torch.cuda.empty_cache()
            wide = make_steps(cell, DEVICE, DTYPE, fewest=2 * rotated_steps(cell, DTYPE.itemsize))
            narrow, error = Steps(backend, cell, quantized_steps(wide, stored)), None
            if cell.tokens * cell.top_k <= h200_moe.CHECKED_PAIRS:
                error = h200_moe.check(narrow, cell, wide[0], MOST_ERROR)
            calls = {"bfloat16": Steps(backend, cell, wide).run, "stored": narrow.run}
            found = {"backend": backend.name, "steps": len(wide)}
            found |= speedup(replays_in_turns(calls, len(wide)))
            yield cell.describe() | found | {"error": error}


def speedup(times: dict[str, float]) -> Row:
    """Return the times of both layouts and their ratio, as keys of a row."""
    found = {f"{name}_us": round(us, 3) for name, us in times.items()}
    return found | {"speedup": round(times["bfloat16"] / times["stored"], 3)}


def call_of(backend: LoRABackend, work: Workload, layers: list[LoRAWeights], plan: Any) -> Call:
    """Return a function that runs the layer of an index."""
    return lambda layer: backend.run_linear(work.x, layers[layer], plan, work.y)


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


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Return the geometric mean, the least and the greatest speedup of decode and prefill."""
    summary = {}
    for phase, is_decode in (("decode", True), ("prefill", False)):
        own = [row["speedup"] for row in rows if (row["tokens"] <= DECODE) == is_decode]
        if own:
            mean = round(statistics.geometric_mean(own), 3)
            summary[phase] = {"mean": mean, "least": min(own), "greatest": max(own)}
    return summary


def settings(options: Options) -> dict[str, Any]:
    """Return what the result says besides its rows."""
    return {"device": DEVICE, "dtype": dtype_name(DTYPE), "stored": options.dtype}


OPTIONS = {
    "--backends": BACKENDS,
    "--dtype": flag("int8", "of the stacks, as torch names it"),
    "--every": flag(1, "take every n-th cell"),
    "--processes": h200_moe.PROCESSES,
}

LAYERS = Measurement(
    rows=measure_layers,
    file="h200_eight_bit.json",
    method=METHOD,
    settings=settings,
    summary=by_backend(summarize),
    options=OPTIONS,
    partial=True,
)
EXPERTS = replace(
    LAYERS,
    rows=measure_experts,
    file="h200_eight_bit_experts.json",
    method=EXPERTS_METHOD,
    options=OPTIONS | {"--only": h200_moe.ONLY},
)
