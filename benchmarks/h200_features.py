"""Measures what factors, tensors per slice and several adapters per token cost, on a GPU.

    python benchmarks/h200_features.py --backends triton,csgmv

Writes benchmarks/results/h200_features.json, or --output: for each cell the time of a plain call
and the ratio of each variant to it. Variants of a cell are timed in turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from h200 import DEVICE, DTYPE, RESULTS, create, measure_host

from lora_backends import LoRABackend, LoRABatch, LoRAWeights
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import Workload, make_layers, make_workload
from lora_backends.bench.results import new_result, write_result
from lora_backends.bench.timing import Call, between_events
from lora_backends.dtypes import dtype_name
from lora_backends.model_shapes import preset

TOKENS, RANKS, ADAPTERS = (1, 64, 2048), (16, 64), 8
ROUNDS, REPLAYS = 9, 10
METHOD = (
    "Microseconds of run_linear into an existing y, in a CUDA graph over layers with different "
    "weights, 240 MB in all; graphs of all variants of a cell are replayed in turns, median of "
    "9 rounds of 10 replays. ratio: variant / plain. token_scales: a scale per token; "
    "output_scales: a scale per output column and adapter; slice_tensors: A and B as one tensor "
    "per slice; room: a plan with room for 4 times the tokens; two_adapters: two per token."
)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", default="triton,csgmv", help="separated by commas")
    parser.add_argument("--output", type=Path, default=RESULTS / "h200_features.json")
    arguments = parser.parse_args()
    names = arguments.backends.split(",")
    result = new_result(
        METHOD, torch.device(DEVICE), dtype=dtype_name(DTYPE), summary={}, host_us={}
    )
    torch.manual_seed(0)
    try:
        for name in names:
            backend = create(name, {})
            result["rows"] += list(measure_cells(backend))
            result["host_us"][name] = measure_host(backend)
            result["summary"][name] = summary = summarize(result["rows"], name)
            print(name, summary, result["host_us"][name], flush=True)
    finally:  # keeps the rows measured before an interruption
        write_result(arguments.output, result)


@torch.no_grad()
def measure_cells(backend: LoRABackend) -> Iterator[dict[str, Any]]:
    """Yield a row per cell."""
    projections, _ = preset("llama3-8b")
    for name, shape in projections.items():
        if name == "embedding":  # its x are token ids
            continue
        for rank in RANKS:
            for tokens in TOKENS:
                cell = Cell(name, *shape, tokens=tokens, adapters=min(ADAPTERS, tokens), rank=rank)
                work = make_workload(cell, make_layers(cell, DEVICE, DTYPE))
                times = in_turns(variants(backend, work), len(work.layers))
                plain = times.pop("plain")
                ratios = {variant: round(us / plain, 3) for variant, us in times.items()}
                print(backend.name, name, tokens, rank, round(plain, 2), ratios, flush=True)
                yield cell.describe() | {
                    "backend": backend.name,
                    "plain_us": round(plain, 3),
                    "ratios": ratios,
                }


def variants(backend: LoRABackend, work: Workload) -> dict[str, Call]:
    """Return the call of each variant, by name."""
    batch, slots = work.batch, work.batch.token_slots.tolist()
    count, num_slots = batch.num_tokens, batch.num_slots
    scaled = LoRABatch(slots, num_slots, torch.rand(count))
    pairs = LoRABatch([[slot, (slot + 1) % num_slots] for slot in slots], num_slots)
    scales = [torch.rand(num_slots, work.layers[0].out_features, device=DEVICE) for _ in range(8)]
    dora = [replace(one, output_scales=scales[i % 8]) for i, one in enumerate(work.layers)]
    parts = [per_slice(layer) for layer in work.layers]

    def call(plan: Any, layers: list[LoRAWeights]) -> Call:
        return lambda layer: backend.run_linear(work.x, layers[layer], plan, work.y)

    plan = backend.prepare_batch(batch)
    return {
        "plain": call(plan, work.layers),
        "token_scales": call(backend.prepare_batch(scaled), work.layers),
        "output_scales": call(plan, dora),
        "slice_tensors": call(plan, parts),
        "room": call(backend.prepare_batch(batch, capacity=4 * count), work.layers),
        "two_adapters": call(backend.prepare_batch(pairs), work.layers),
    }


def per_slice(layer: LoRAWeights) -> LoRAWeights:
    """Return a layer with a tensor of its own for each slice."""
    return replace(
        layer,
        lora_a=tuple(layer.a_of(s).clone() for s in range(layer.num_slices)),
        lora_b=tuple(layer.b_of(s).clone() for s in range(layer.num_slices)),
    )


def in_turns(calls: dict[str, Call], num_layers: int) -> dict[str, float]:
    """Return microseconds of one call of each variant."""
    graphs = {name: captured(call, num_layers) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, replay in graphs.items():
            found[name].append(between_events(replay) / (REPLAYS * num_layers))
    return {name: statistics.median(times) for name, times in found.items()}


def captured(call: Call, num_layers: int) -> Callable[[], None]:
    """Return a function that replays, `REPLAYS` times, a graph that runs every layer once."""
    for layer in range(num_layers):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            call(layer)

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    replay()
    return replay


def summarize(rows: list[dict[str, Any]], backend: str) -> dict[str, Any]:
    """Return the geometric mean and the greatest ratio of each variant."""
    own = [row["ratios"] for row in rows if row["backend"] == backend]
    return {
        name: {
            "mean": round(math.exp(statistics.fmean(math.log(row[name]) for row in own)), 3),
            "greatest": max(row[name] for row in own),
        }
        for name in own[0]
    }


if __name__ == "__main__":
    main()
