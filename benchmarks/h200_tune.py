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
    rivals = [contender(job, "rules", "rules"), contender(job, "in use", "auto")]
    progress = tune_points(job, gpu_lab_of, tell_lines)
    lines = summary_lines(job, progress)
    print("\n".join(lines))
    searched = [point.cell for point in job.points if point.key in progress.entries]
    if not searched:
        raise SystemExit("nothing to compare")
    rivals.append(contender(job, "found", str(job.path)))
    result = measure(list(dict.fromkeys(searched)), rivals, job.device, job.dtype)
    result["tuning"] = {"budget_s": job.budget, "points": len(job.points), "summary": lines}
    write_json(given.output, result)
    for row in result["cells"]:
        batch = [row[key] for key in ("projection", "tokens", "adapters", "rank")]
        print(*batch, [found.get("us") for found in row["results"].values()])
    result["gains"] = {f"{rival} over found": gain(result, rival) for rival in ("rules", "in use")}
    write_json(given.output, result)
    print(result["gains"])


def contender(job: Tuning, name: str, tiles: str) -> Contender:
    """Return the engine with tile sizes of one kind; a table is read now."""
    backend = get_backend(job.backend, job.device, tiles=tiles)
    return replace(from_backend(backend, {"tiles": tiles}), name=name)


def gain(result: dict[str, Any], rival: str) -> float:
    """Return a rival's time over that of the found table, geometric mean of the cells."""
    rows = [row["results"] for row in result["cells"]]
    return statistics.geometric_mean(row[rival]["us"] / row["found"]["us"] for row in rows)


if __name__ == "__main__":
    main()
