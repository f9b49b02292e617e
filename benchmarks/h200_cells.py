"""Times a backend on one GPU over 80 cells of a Llama-3-8B layer and compares with the limit.

A cell is (projection, tokens, active adapters, rank). Its time is that of one `run_linear` into an
existing y, replayed from one CUDA graph that runs the call over many layers with different weights
(240 MB or more in all, so that they do not stay in the L2 cache); the median of 5 timings of 10
replays. Every cell is checked against float32 products before it is timed. Efficiency is the limit
(bytes that must move at the copy rate, and two launches) over the time.

    python benchmarks/h200_cells.py --output benchmarks/results/h200_triton.json
    python benchmarks/h200_cells.py --backend csgmv --segment-size auto --output csgmv_auto.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from lora_backends import LoRABackend, LoRABatch, LoRAWeights
from lora_backends.csgmv import CsgmvBackend
from lora_backends.triton import TritonBackend

PEERS = Path(__file__).parent / "peers" / "h200.json"
TOLERANCE = 1e-2  # relative error of bfloat16 results, in the Frobenius norm
Cell = dict[str, Any]


def main() -> None:
    """Run the cells and the side measurements, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=PEERS, help="cells, limits and peers")
    parser.add_argument("--output", type=Path, default=Path("h200_cells.json"))
    parser.add_argument("--backend", choices=["triton", "csgmv"], default="triton")
    parser.add_argument("--segment-size", help='of csgmv: a number or "auto"')
    parser.add_argument("--batch-invariant", action="store_true")
    arguments = parser.parse_args()
    peers = json.loads(arguments.peers.read_text())
    options: dict[str, Any] = {"batch_invariant": arguments.batch_invariant}
    size = arguments.segment_size
    if size is not None:
        options["segment_size"] = size if size == "auto" else int(size)
    engines: dict[str, type[LoRABackend]] = {"triton": TritonBackend, "csgmv": CsgmvBackend}
    backend = engines[arguments.backend]("cuda", **options)
    results = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.date.today().isoformat(),
        "backend": arguments.backend,
        "options": options,
        "method": peers["method"],
        "cells": measure_cells(backend, peers),
        "host_us": measure_host(backend),
        "mixed_ranks": measure_mixed_ranks(backend),
    }
    results["summary"] = summarize(results["cells"])
    for name in ("host_us", "mixed_ranks", "summary"):
        print(name, json.dumps(results[name]))
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def measure_cells(backend: LoRABackend, peers: dict[str, Any]) -> list[Cell]:
    """Return every cell with its time, its efficiency and the best peer's time."""
    results: list[Cell] = []
    keys = ("projection", "active_adapters", "rank")
    layers: list[LoRAWeights] = []
    made_for: tuple[Any, ...] = ()
    for row in sorted(peers["rows"], key=lambda row: tuple(map(str, (row[k] for k in keys)))):
        slots = max(8, row["active_adapters"])
        if made_for != (row["projection"], slots, row["rank"]):
            made_for = (row["projection"], slots, row["rank"])
            layers.clear()
            layers += make_layers(*peers["projections"][row["projection"]], slots, row["rank"])
        batch = LoRABatch(token_slots(row), slots)
        microseconds = time_layers(backend, layers, batch)
        cell = {k: row[k] for k in (*keys, "tokens", "mix", "limit_us", "best_peer_us")}
        cell |= {"us": round(microseconds, 2), "efficiency": row["limit_us"] / microseconds}
        results.append(cell)
        print(
            f"{row['projection']:8}{row['tokens']:5}{row['active_adapters']:4}{row['rank']:4}"
            f"{microseconds:9.2f} us  efficiency {cell['efficiency']:.2f}"
            f"  of best peer {microseconds / row['best_peer_us']:.2f}"
        )
    return results


def make_layers(
    in_features: int, output_slices: list[int], num_slots: int, rank: int, max_rank: int = 0
) -> list[LoRAWeights]:
    """Return layers that hold 240 MB of weights together, 4 to 32 of them."""
    max_rank = max_rank or rank
    num_slices, out_features = len(output_slices), sum(output_slices)
    size = 2 * num_slots * max_rank * (num_slices * in_features + out_features)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return [
        LoRAWeights(
            lora_a=torch.randn(num_slots, num_slices, max_rank, in_features, **options)
            / math.sqrt(in_features),
            lora_b=torch.randn(num_slots, out_features, max_rank, **options) / math.sqrt(rank),
            ranks=torch.full((num_slots, num_slices), rank, dtype=torch.int32),
            scalings=torch.full((num_slots, num_slices), 0.5),
            output_slices=tuple(output_slices),
        )
        for _ in range(max(4, min(32, math.ceil(240e6 / size))))
    ]


def token_slots(row: Cell) -> list[int]:
    """Deal the tokens round-robin over the adapters, or by Zipf 1.5 and grouped."""
    tokens, active = row["tokens"], row["active_adapters"]
    if row["mix"] == "uniform":
        return [token % active for token in range(tokens)]
    weights = torch.arange(1, active + 1).double() ** -1.5
    generator = torch.Generator().manual_seed(0)
    return sorted(torch.multinomial(weights, tokens, True, generator=generator).tolist())


def time_layers(backend: LoRABackend, layers: list[LoRAWeights], batch: LoRABatch) -> float:
    """Return microseconds of one call, after checking the first layer's result."""
    plan = backend.prepare_batch(batch)
    shape = (batch.num_tokens, layers[0].in_features)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(shape[0], layers[0].out_features, device="cuda", dtype=torch.bfloat16)
    backend.run_linear(x, layers[0], plan, y)
    expected = reference(x, layers[0], batch)
    error = float((y.float() - expected).norm() / expected.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"wrong result: relative error {error} in {layers[0]}, {shape[0]} tokens")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weights in layers:
            backend.run_linear(x, weights, plan, y)
    return median_of_replays(graph.replay) / len(layers)


def reference(x: torch.Tensor, weights: LoRAWeights, batch: LoRABatch) -> torch.Tensor:
    """Return the LoRA of every token by float32 products, adapter by adapter."""
    delta = torch.zeros(x.shape[0], weights.out_features, device=x.device)
    offsets = weights.slice_offsets
    for slot in batch.token_slots.unique().tolist():
        rows = (batch.token_slots == slot).nonzero().flatten().to(x.device)
        for s in range(weights.num_slices):
            rank, columns = int(weights.ranks[slot, s]), slice(offsets[s], offsets[s + 1])
            h = x[rows].float() @ weights.lora_a[slot, s, :rank].float().T
            b = weights.lora_b[slot, columns, :rank].float()
            delta[rows, columns] = weights.scalings[slot, s] * (h @ b.T)
    return delta


def median_of_replays(replay: Callable[[], None], timings: int = 5, replays: int = 10) -> float:
    """Return microseconds of one replay."""
    replay()
    torch.cuda.synchronize()
    medians = []
    for _ in range(timings):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            replay()
        end.record()
        end.synchronize()
        medians.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(medians)


def measure_host(backend: LoRABackend, calls: int = 200) -> dict[str, float]:
    """Return host microseconds of one call, the GPU idle at its start."""
    layer = make_layers(4096, [4096], 64, 16)[0]
    batch = LoRABatch([token % 64 for token in range(256)], 64)
    plan = backend.prepare_batch(batch)
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    y = torch.zeros(256, 4096, device="cuda", dtype=torch.bfloat16)

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return round(statistics.median(times), 1)

    return {
        "run_linear": median(lambda: backend.run_linear(x, layer, plan, y)),
        "prepare_batch": median(lambda: backend.prepare_batch(batch)),
        "prepare_batch_refill": median(lambda: backend.prepare_batch(batch, out=plan)),
    }


def measure_mixed_ranks(backend: LoRABackend) -> list[dict[str, Any]]:
    """Return what adapters of rank 8 cost in a stack of 64 ranks, against one of 8."""
    results = []
    for active in (8, 64):
        batch = LoRABatch([token % active for token in range(64)], max(8, active))
        times = {
            width: time_layers(backend, make_layers(4096, [4096], max(8, active), 8, width), batch)
            for width in (8, 64)
        }
        results.append(
            {"active_adapters": active, "max_rank_8_us": times[8], "max_rank_64_us": times[64]}
            | {"ratio": times[64] / times[8]}
        )
    return results


def summarize(cells: list[Cell]) -> dict[str, Any]:
    """Return geometric means by phase, and the cells slower than 1.05 of the best peer."""
    phases = {"decode": lambda tokens: tokens <= 256, "prefill": lambda tokens: tokens > 256}
    summary: dict[str, Any] = {}
    for phase, belongs in phases.items():
        values = [cell["efficiency"] for cell in cells if belongs(cell["tokens"])]
        summary[phase] = {
            "cells": len(values),
            "geometric_mean": statistics.geometric_mean(values),
            "lowest": min(values),
        }
    slow = [cell for cell in cells if cell["us"] > 1.05 * cell["best_peer_us"]]
    summary["slower_than_best_peer"] = slow
    return summary


if __name__ == "__main__":
    main()
