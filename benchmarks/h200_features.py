"""Measures what factors, tensors per slice and several adapters per token cost, on a GPU."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from h200 import BACKENDS, DEVICE, DTYPE, create, measure_host
from measuring import Measurement, Options, Result, Row, by_backend, in_turns

from lora_backends import LoRABackend, LoRABatch, LoRAWeights
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import Workload, make_layers, make_workload
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
    "per slice; room: a plan with room for 4 times the tokens."
)


def measure_cells(options: Options, result: Result) -> Iterator[Row]:
    """Yield the time of a plain call and the ratio of each variant to it, cell by cell."""
    projections, _ = preset("llama3-8b")
    names = [name for name in projections if name != "embedding"]  # whose x are token ids
    for backend in [create(name, {}) for name in options.backends.split(",")]:
        for name, rank, tokens in itertools.product(names, RANKS, TOKENS):
            batch = {"tokens": tokens, "adapters": min(ADAPTERS, tokens), "rank": rank}
            cell = Cell(name, *projections[name], **batch)
            work = make_workload(cell, make_layers(cell, DEVICE, DTYPE))
            times = replays_in_turns(variants(backend, work), len(work.layers))
            plain = times.pop("plain")
            ratios = {variant: round(us / plain, 3) for variant, us in times.items()}
            found = {"backend": backend.name, "plain_us": round(plain, 3), "ratios": ratios}
            yield cell.describe() | found
        result["host_us"][backend.name] = measure_host(backend)


def variants(backend: LoRABackend, work: Workload) -> dict[str, Call]:
    """Return the call of each variant, by name."""
    batch, slots = work.batch, work.batch.token_slots.tolist()
    count, num_slots = batch.num_tokens, batch.num_slots
    scaled = LoRABatch(slots, num_slots, torch.rand(count))
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
    }


def per_slice(layer: LoRAWeights) -> LoRAWeights:
    """Return a layer with a tensor of its own for each slice."""
    return replace(
        layer,
        lora_a=tuple(layer.a_of(s).clone() for s in range(layer.num_slices)),
        lora_b=tuple(layer.b_of(s).clone() for s in range(layer.num_slices)),
    )


def replays_in_turns(calls: dict[str, Call], num_layers: int) -> dict[str, float]:
    """Return microseconds of one call of each variant."""
    graphs = {name: captured(call, num_layers) for name, call in calls.items()}
    clocks = {name: partial(between_events, replay) for name, replay in graphs.items()}
    found = in_turns(clocks, ROUNDS)
    return {name: statistics.median(us) / (REPLAYS * num_layers) for name, us in found.items()}


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


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Return the geometric mean and the greatest ratio of each variant."""
    every = {name: [row["ratios"][name] for row in rows] for name in rows[0]["ratios"]}
    return {
        name: {"mean": round(statistics.geometric_mean(ratios), 3), "greatest": max(ratios)}
        for name, ratios in every.items()
    }


FEATURES = Measurement(
    rows=measure_cells,
    file="h200_features.json",
    method=METHOD,
    settings=lambda _: {"device": DEVICE, "dtype": dtype_name(DTYPE), "host_us": {}},
    summary=by_backend(summarize),
    options={"--backends": BACKENDS},
    partial=True,
)
