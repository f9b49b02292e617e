"""Counts what memory moves for adapters of rank 8 in a narrow stack and in a wide one.

Runs one layer of 64 adapters, one token each, under Nsight Compute and writes, for stacks of
width 8 and 64, the bytes that the shrink and the expand kernel read from memory. The adapters are
the same in both stacks, so what differs is the layout alone: in a stack of width 64 a row of B of
rank 8 is 16 of 128 bytes.

    python benchmarks/h200_mixed_ranks.py --output benchmarks/results/h200_mixed_ranks.json
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lora_backends import get_backend
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import make_layers, make_workload
from lora_backends.bench.results import write_result

WIDTHS, RANK, ADAPTERS, FEATURES = (8, 64), 8, 64, 4096
BACKENDS = ("triton", "csgmv")
METRIC = "dram__bytes_read.sum"
LAUNCHES = 3  # of every kernel

METHOD = (
    f"Bytes read from memory by one launch ({METRIC} of Nsight Compute, median of {LAUNCHES}), "
    f"bfloat16, one layer of {FEATURES} inputs and outputs, {ADAPTERS} adapters of rank {RANK} "
    f"with a token each."
)


def main() -> None:
    """Profile this file as a child process, or be that child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("h200_mixed_ranks.json"))
    parser.add_argument("--child", action="store_true", help="only run the layers")
    arguments = parser.parse_args()
    if arguments.child:
        run_layers()
        return
    rows = summarize(profile())
    for row in rows:
        print(row)
    write_result(arguments.output, METHOD, "cuda", kernels=rows)


def run_layers() -> None:
    """Run every backend on both stacks, each layer once: nothing is in a cache."""
    cell = Cell("o", FEATURES, (FEATURES,), tokens=ADAPTERS, adapters=ADAPTERS, rank=RANK)
    for name in BACKENDS:
        backend = get_backend(name, device="cuda")
        for width in WIDTHS:
            work = make_workload(cell, make_layers(cell, "cuda", torch.bfloat16, width))
            plan = backend.prepare_batch(work.batch)
            for weights in work.layers[:LAUNCHES]:
                backend.run_linear(work.x, weights, plan, work.y)
            torch.cuda.synchronize()
            del work


def profile() -> list[dict[str, str]]:
    """Return Nsight Compute's rows, one per launch, in order."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("Nsight Compute (ncu) is not on the PATH; it comes with the CUDA toolkit")
    command = [ncu, "--csv", "-k", "regex:shrink_kernel|expand_kernel", "--metrics", METRIC]
    done = subprocess.run(
        [*command, sys.executable, __file__, "--child"], capture_output=True, text=True, check=True
    )
    return list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))


def summarize(launches: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the median bytes read by kernel, stack and backend."""
    expected = len(BACKENDS) * len(WIDTHS) * LAUNCHES * 2
    if len(launches) != expected:
        raise SystemExit(f"ncu saw {len(launches)} launches instead of {expected}")
    cases = [(name, width) for name in BACKENDS for width in WIDTHS]
    rows = []
    for place, (name, width) in enumerate(cases):
        mine = launches[place * 2 * LAUNCHES : (place + 1) * 2 * LAUNCHES]
        for kernel in ("shrink", "expand"):
            read = [
                int(row["Metric Value"].replace(",", ""))
                for row in mine
                if row["Kernel Name"].startswith(kernel)
            ]
            rows.append(
                {
                    "backend": name,
                    "max_rank": width,
                    "rank": RANK,
                    "adapters": ADAPTERS,
                    "kernel": kernel,
                    "bytes_read": int(statistics.median(read)),
                    "bytes_of_weights": 2 * ADAPTERS * RANK * FEATURES,
                }
            )
    return rows


if __name__ == "__main__":
    main()
