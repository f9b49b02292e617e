"""Measures 8-bit stacks on `numba_cpu` against the same layers in bfloat16 and float32.

    python benchmarks/cpu_eight_bit.py [--seconds 8] [--threads 2] [--output FILE]

A cell is one linear layer of the decode cells of `cpu_cells.py` with at least 8 adapters. Each cell
rotates over enough layers that the weights of each dtype do not stay in the second-level cache. x
and y have the dtype of the stacks, and are bfloat16 for those of 8 bits. The dtypes take turns call
by call for some seconds, so that a busy machine slows all of them; the time that a tenth of the
calls stays below counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from cpu_cells import COMPOSITIONS, RANKS, WIDTHS, Cell

from lora_backends import LoRAWeights, quantize_weights
from lora_backends.bench.results import new_result, write_result
from lora_backends.numba_cpu import NumbaCPUBackend

STORED = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
RESULT = Path(__file__).parent / "results" / "cpu_eight_bit.json"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def layers_of(cell: Cell, stored: torch.dtype) -> list[LoRAWeights]:
    """Return the layers of a cell with other stacks, as many as fill the rotation."""
    if stored == cell.dtype:
        return cell.layers
    ratio = cell.dtype.itemsize // stored.itemsize
    return [quantize_weights(layer, stored) for layer in cell.layers for _ in range(ratio)]


def measure(
    widths: tuple[int, int], batch: tuple[int, int], rank: int, seconds: float, stored: list[Any]
) -> dict[str, Any]:
    """Return microseconds per layer of every dtype."""
    backend = NumbaCPUBackend()
    cells = {torch.float32: Cell(torch.float32, widths, batch, rank)}
    cells[torch.bfloat16] = Cell(torch.bfloat16, widths, batch, rank)
    layers = {dtype: layers_of(cells.get(dtype, cells[torch.bfloat16]), dtype) for dtype in stored}
    times: dict[Any, list[float]] = {dtype: [] for dtype in stored}
    plan = backend.prepare_batch(cells[torch.float32].batch)
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 20:
        for dtype in stored:
            cell = cells.get(dtype, cells[torch.bfloat16])
            weights = layers[dtype][turn % len(layers[dtype])]
            start = time.perf_counter()
            backend.run_linear(cell.x, weights, plan, cell.y)
            times[dtype].append(time.perf_counter() - start)
        turn += 1
    best = {dtype: sorted(taken)[len(taken) // 10] for dtype, taken in times.items()}
    found: dict[str, Any] = {"in_features": widths[0], "out_features": widths[1]}
    found |= {"tokens": batch[0], "adapters": batch[1], "rank": rank}
    found["microseconds"] = {name_of(dtype): round(best[dtype] * 1e6, 2) for dtype in stored}
    for other in (torch.bfloat16, torch.float32):
        found[f"int8_times_{name_of(other)}"] = round(best[other] / best[torch.int8], 2)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean and the least of int8's speed over the wider dtypes."""
    found = {}
    for name in ("int8_times_bfloat16", "int8_times_float32"):
        speeds = [row[name] for row in rows]
        found[f"{name}_geometric_mean"] = round(statistics.geometric_mean(speeds), 2)
        found[f"{name}_least"] = min(speeds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="measure float8 as well")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    stored = list(STORED if options.all else STORED[:3])
    NumbaCPUBackend().warmup(stored)
    cells = [(w, b, r) for w in WIDTHS for b in COMPOSITIONS for r in RANKS]
    rows = []
    for widths, batch, rank in cells:
        if batch[1] >= 8 and batch[0] <= 64:
            with torch.no_grad():
                rows.append(measure(widths, batch, rank, options.seconds, stored))
            print(json.dumps(rows[-1]), flush=True)
    method = " ".join((__doc__ or "").split("\n\n")[2].split())
    result = new_result(method) | {"rows": rows, "summary": summary(rows)}
    write_result(options.output, result)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
