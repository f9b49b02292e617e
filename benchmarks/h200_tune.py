"""Tunes an engine within a budget, then times what was found beside what was there before.

Contenders are the rules, the table in use (the library's own, if the user has none) and the table
that the search of this run has written; each in every cell that was searched, one after the other.

    PYTHONPATH=. python benchmarks/h200_tune.py triton --tokens 64,2048 --adapters 8 --rank 16 \
        --budget 60s --table triton.json --output benchmarks/results/h200_tune_triton.json

What an existing --table has of other layers and batches is kept.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_backends import get_backend
from lora_backends.bench.cells import Cell
from lora_backends.bench.contenders import Contender, from_backend
from lora_backends.bench.measure import measure
from lora_backends.bench.results import write_json
from lora_backends.bench.tune import gpu_lab_of, summary_lines, tell_lines, tune_points
from lora_backends.bench.tune_job import DEFAULTS, Tuning, make_tuning


def main() -> None:
    """Tune, compare, write the result and print a line a cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--budget", default="60s")
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--table", type=Path, required=True, help="what the search writes")
    parser.add_argument("--output", type=Path, required=True, help="the comparison")
    given = parser.parse_args()
    layers = {name: getattr(given, name) for name in DEFAULTS}
    job = make_tuning(
        given.backend,
        budget=given.budget,
        output=given.table,
        preset_name=given.preset,
        **layers,
    )
    progress = tune_points(job, gpu_lab_of, tell_lines)
    lines = summary_lines(job, progress)
    print("\n".join(lines))
    result = compare(job)
    result["tuning"] = {"budget_s": job.budget, "points": len(job.points), "summary": lines}
    write_json(given.output, result)
    for row in result["cells"]:
        print(row["projection"], row["tokens"], row["adapters"], row["rank"], times_of(row))
    print(result["gains"])


def compare(job: Tuning) -> dict[str, Any]:
    """Return the times of the rules, of the table in use and of the one that was found."""
    choices = {"rules": "rules", "in use": "auto", "found": str(job.path)}
    contenders: list[Contender] = []
    for name, tiles in choices.items():
        backend = get_backend(job.backend, job.device, tiles=tiles)
        contenders.append(replace(from_backend(backend, {"tiles": tiles}), name=name))
    cells: list[Cell] = list(dict.fromkeys(point.cell for point in job.points))
    result = measure(cells, contenders, job.device, job.dtype)
    rows = [times_of(row) for row in result["cells"]]
    result["gains"] = {
        f"{name} over found": statistics.geometric_mean(row[name] / row["found"] for row in rows)
        for name in ("rules", "in use")
    }
    return result


def times_of(row: dict[str, Any]) -> dict[str, float]:
    """Return the microseconds of every contender in a cell."""
    return {name: found["us"] for name, found in row["results"].items()}


if __name__ == "__main__":
    main()
