"""Times engines on one GPU along tokens and along adapters, and draws the curves.

Layers qkv and o of Llama-3-8B, bfloat16, rank 16, by the method of `lora-backends bench`:

- active: 1, 4, 16, 64, 256 active adapters at 256 tokens
- tokens: 1 to 16384 tokens at 8 adapters
- adapters: 1 to 512 adapters at 512 tokens

    PYTHONPATH=. python benchmarks/h200_sweep.py --output benchmarks/results/h200_sweep.json
    PYTHONPATH=. python benchmarks/h200_sweep.py --plot docs/images      # anywhere, from that file

One sweep takes less time than all: `--sweep tokens` and so on; its cells replace those in the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from h200_cells import create

from lora_backends.bench.cells import Cell
from lora_backends.bench.contenders import from_backend
from lora_backends.bench.measure import measure
from lora_backends.bench.results import read_result, summarize, write_json
from lora_backends.model_shapes import Projections, preset

RESULT = Path(__file__).parent / "results" / "h200_sweep.json"
DEVICE = "cuda"
RANK = 16
TOKENS = sorted([2**power for power in range(15)] + [3, 24, 100, 777, 3000])
SWEEPS = {
    "active": [(256, adapters) for adapters in (1, 4, 16, 64, 256)],
    "tokens": [(tokens, 8) for tokens in TOKENS],
    "adapters": [(512, 2**power) for power in range(10)],
}


def main() -> None:
    """Measure and write, or draw what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    parser.add_argument("--sweep", choices=list(SWEEPS), action="append", help="all if left out")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--plot", type=Path, help="measure nothing: draw --output into this folder")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(read_result(arguments.output), arguments.plot)
        return
    results: dict[str, Any] = {}
    try:
        run(arguments.backends.split(","), arguments.sweep or list(SWEEPS), results)
    finally:  # what was measured before an interruption is kept
        if results.get("cells"):
            keep_others(results, arguments.output)
            write_json(arguments.output, results)
            print(json.dumps(summarize(results)))


def run(backends: Iterable[str], sweeps: Iterable[str], results: dict[str, Any]) -> None:
    """Measure the cells of some sweeps."""
    contenders = [from_backend(create(name, {})) for name in backends]
    names = [contender.name for contender in contenders]
    begin = time.perf_counter()

    def tell(index: int, cell: Cell) -> None:
        for row in results["cells"][-1:]:
            found = [row["results"][name] for name in names]
            times = "  ".join(str(one.get("us", one.get("error"))) for one in found)
            print(f"{row['limit_us']:9.2f} us at best  {times}")
        where = f"{index + 1:3} {time.perf_counter() - begin:6.1f} s"
        print(f"{where} {cell.projection} {cell.tokens:6} tokens {cell.adapters:4}", flush=True)

    measure(sweep_cells(sweeps), contenders, DEVICE, torch.bfloat16, progress=tell, result=results)


def sweep_cells(sweeps: Iterable[str]) -> list[Cell]:
    """Return the cells of some sweeps, none twice."""
    projections: Projections = preset("llama3-8b")[0]
    batches = dict.fromkeys(batch for sweep in sweeps for batch in SWEEPS[sweep])
    return [
        Cell(name, *projections[name], tokens=tokens, adapters=adapters, rank=RANK)
        for name in ("qkv", "o")
        for tokens, adapters in batches
    ]


def keep_others(results: dict[str, Any], path: Path) -> None:
    """Take from the file what was not measured now, if the same machine and engines made it."""
    if not path.exists():
        return
    earlier = read_result(path)
    if any(earlier[key] != results[key] for key in ("environment", "contenders", "dtype")):
        return
    keys = ("projection", "tokens", "adapters", "rank")
    measured = {tuple(cell[key] for key in keys) for cell in results["cells"]}
    results["cells"] += [
        cell for cell in earlier["cells"] if tuple(cell[key] for key in keys) not in measured
    ]


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write one SVG a sweep."""
    from lora_backends.bench.plots import save_figure, time_against_adapters, time_against_tokens

    folder.mkdir(parents=True, exist_ok=True)
    for sweep, batches in SWEEPS.items():
        plot = time_against_tokens if sweep == "tokens" else time_against_adapters
        cells = [c for c in result["cells"] if (c["tokens"], c["adapters"]) in batches]
        figure = plot({**result, "cells": cells}) if cells else None
        if figure is not None:
            print(save_figure(figure, folder / f"h200_sweep_{sweep}.svg"))


if __name__ == "__main__":
    main()
