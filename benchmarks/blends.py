"""Measures several adapters per token: a plan for all of them, and a plan for each."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from h200 import DTYPE, create
from h200_features import replays_in_turns
from measuring import Measurement, Options, Result, Row, by_backend, flag, in_turns, seconds

from lora_backends import LoRABackend, LoRABatch
from lora_backends.bench.cells import Cell
from lora_backends.bench.layers import Workload, make_layers, make_workload
from lora_backends.bench.timing import Call
from lora_backends.dtypes import dtype_name

LAYERS = {
    "cuda": {"qkv": (4096, (4096, 1024, 1024)), "down": (14336, (4096,))},
    "cpu": {"small": (576, (1536,)), "square": (4096, (4096,))},
}
TOKENS = {"cuda": [1, 16, 64, 4096], "cpu": [1, 16, 64, 512]}
RANKS, ADAPTERS, COUNTS = (16, 64), 8, (2, 4)
ROUNDS = 9
METHOD = (
    "Microseconds of run_linear into an existing y, over layers with different weights, 192 MB or"
    " more in all: in a CUDA graph on a GPU, 9 rounds of 10 replays; call by call on a CPU, 9 "
    "sweeps. All variants of a cell are timed in turns, and the median is taken. one: one adapter"
    " per token. The others are ratios to it, for a plan of 2 and 4 adapters per token; `passes`: a"
    " call with a plan of its own for each adapter, which rounds y each time. like: a token's first"
    " adapter determines the others, so there are 8 sets; unlike: drawn at random."
)


def measure_cells(options: Options, result: Result) -> Iterator[Row]:
    """Yield the time of a call with one adapter per token, and the ratios of blends to it."""
    for backend in [create(name, {}, options.device) for name in options.backends.split(",")]:
        numbers: list[int] = options.tokens if any(options.tokens) else TOKENS[options.device]
        for name, tokens, rank in itertools.product(LAYERS[options.device], numbers, RANKS):
            batch = {"tokens": tokens, "adapters": ADAPTERS, "rank": rank}
            cell = Cell(name, *LAYERS[options.device][name], **batch)
            work = make_workload(cell, make_layers(cell, options.device, DTYPE))
            times = clocked(variants(backend, work), len(work.layers), options.device)
            one = times.pop("one")
            ratios = {variant: round(us / one, 3) for variant, us in times.items()}
            found = {"backend": backend.name, "one_us": round(one, 3), "ratios": ratios}
            yield cell.describe() | found


def variants(backend: LoRABackend, work: Workload) -> dict[str, Call]:
    """Return the call of each variant, by name."""
    slots, num_slots = work.batch.token_slots, work.batch.num_slots
    calls = {"one": one_pass(backend, work, backend.prepare_batch(work.batch))}
    for count in COUNTS:
        like = [(slots + j) % num_slots for j in range(count)]
        drawn = torch.rand(len(slots), num_slots).argsort(1)[:, :count]
        for kind, chosen in (("like", torch.stack(like, 1)), ("unlike", drawn)):
            batch = LoRABatch(chosen, num_slots, torch.rand(chosen.shape))
            calls[f"{kind}_{count}"] = one_pass(backend, work, backend.prepare_batch(batch))
            parts = [backend.prepare_batch(part) for part in batch.per_adapter(count)]
            calls[f"{kind}_{count}_passes"] = passes(backend, work, parts)
    return calls


def one_pass(backend: LoRABackend, work: Workload, plan: Any) -> Call:
    """Return the library's call."""
    return lambda layer: backend.run_linear(work.x, work.layers[layer], plan, work.y)


def passes(backend: LoRABackend, work: Workload, plans: list[Any]) -> Call:
    """Return a call for each plan, one after the other."""

    def call(layer: int) -> None:
        for plan in plans:
            backend.run_linear(work.x, work.layers[layer], plan, work.y)

    return call


def clocked(calls: dict[str, Call], num_layers: int, device: str) -> dict[str, float]:
    """Return microseconds of one call of each variant."""
    if device == "cuda":
        return replays_in_turns(calls, num_layers)
    clocks = {name: partial(seconds, sweep(call, num_layers)) for name, call in calls.items()}
    found = in_turns(clocks, ROUNDS, warmup=1)
    return {name: statistics.median(taken) * 1e6 / num_layers for name, taken in found.items()}


def sweep(call: Call, num_layers: int) -> Callable[[], None]:
    """Return a function that calls every layer once."""

    def run() -> None:
        for layer in range(num_layers):
            call(layer)

    return run


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Return the geometric mean and the greatest ratio of each variant."""
    every = {name: [row["ratios"][name] for row in rows] for name in rows[-1]["ratios"]}
    return {
        name: {"mean": round(statistics.geometric_mean(ratios), 3), "greatest": max(ratios)}
        for name, ratios in every.items()
    }


BLENDS = Measurement(
    rows=measure_cells,
    file=lambda options: f"blends_{options.device}.json",
    method=METHOD,
    settings=lambda options: {"device": options.device, "dtype": dtype_name(DTYPE)},
    summary=by_backend(summarize),
    options={
        "--backends": flag("triton,csgmv"),
        "--device": flag("cuda", choices=("cuda", "cpu")),
        "--tokens": flag([0], "of a batch; 0: the usual numbers", metavar="T"),
        "--threads": flag(2),
    },
    partial=True,
)
