"""Measures 8-bit stacks beside 16-bit ones on a GPU, over the cells of the peers' file.

    python benchmarks/h200_eight_bit.py --backends triton,csgmv --dtype int8

Writes benchmarks/results/h200_eight_bit.json, or --output: the time of each cell with bfloat16 and
with 8-bit stacks of a scale per row, timed in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from h200 import DEVICE, DTYPE, PEERS, RESULTS, cell_of, create
from h200_features import in_turns

from lora_backends import LoRABackend, LoRAWeights, quantize_weights
from lora_backends.bench.cells import Cell
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


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    parser.add_argument("--dtype", default="int8", help="of the stacks, as torch names it")
    parser.add_argument("--every", type=int, default=1, help="take every n-th cell")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200_eight_bit.json")
    arguments = parser.parse_args()
    stored = getattr(torch, arguments.dtype)
    peers = json.loads(PEERS.read_text())
    cells = [cell_of(row, peers["projections"]) for row in peers["rows"]]
    cells = cells[:: arguments.every]
    result = new_result(METHOD, DEVICE, dtype=dtype_name(DTYPE), stored=arguments.dtype)
    torch.manual_seed(0)
    try:
        for name in arguments.backends.split(","):
            result["rows"] += list(measure_cells(create(name, {}), cells, stored))
            result["summary"][name] = summarize(result["rows"], name)
            print(name, result["summary"][name], flush=True)
    finally:  # keeps the rows measured before an interruption
        write_result(arguments.output, result)


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
    """Return what runs the layer of an index."""
    return lambda layer: backend.run_linear(work.x, layers[layer], plan, work.y)


def summarize(rows: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    """Return the geometric mean and the least speedup of decode and prefill."""
    summary = {}
    for phase, is_decode in (("decode", True), ("prefill", False)):
        own = [
            row["speedup"]
            for row in rows
            if row["backend"] == backend and (row["tokens"] <= DECODE) == is_decode
        ]
        mean = math.exp(statistics.fmean(map(math.log, own)))
        summary[phase] = {"mean": round(mean, 3), "least": min(own), "greatest": max(own)}
    return summary


if __name__ == "__main__":
    main()
