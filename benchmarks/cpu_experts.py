"""Measures `run_experts` of `numba_cpu` against a loop in torch, over both sites of a layer."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from cpu_cells import DTYPES, THREADS
from measuring import Measurement, Options, Result, Row, flag, mean_and_least, seconds

from lora_backends import ExpertWeights, LoRABatch
from lora_backends.dtypes import dtype_name
from lora_backends.numba_cpu import NumbaCPUBackend

HIDDEN, WIDTH, EXPERTS, TOP_K, RANK, SLOTS = 1024, 512, 32, 4, 16, 8
TOKENS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = 3
METHOD = (
    "A cell is one layer of experts in decode: the routing, then gate_up (a row of x per token), "
    "then down (a row per pair, weighted). Tokens are dealt to the slots in turn, and each "
    "chooses different experts at random. The loop groups the pairs once a layer, by a sort of "
    "their keys, then visits each active (slot, expert) pair: one product with both matrices A of "
    "gate and up, a product with each B, and an index_add_. It is warm and its rows are grouped "
    "for both sites at once, as the routing of `numba_cpu` is. Cells rotate over several layers "
    "and the contenders take turns; the best time of each layer counts, and the mean over the "
    "layers is reported."
)


def experts_of(inputs: int, slices: tuple[int, ...], dtype: torch.dtype) -> ExpertWeights:
    """Return one site with every slot and expert at the same rank."""
    table = (SLOTS, EXPERTS, len(slices))
    return ExpertWeights(
        lora_a=torch.randn(*table, RANK, inputs).to(dtype),
        lora_b=torch.randn(SLOTS, EXPERTS, sum(slices), RANK).to(dtype) * 1e-3,
        ranks=torch.full(table, RANK, dtype=torch.int32),
        scalings=torch.full(table, 0.5),
        output_slices=slices,
        num_experts=EXPERTS,
    )


class Cell:
    """One batch, the layers that it meets, and a function per contender that runs a layer."""

    def __init__(self, dtype: torch.dtype, tokens: int) -> None:
        self.layers = [
            (experts_of(HIDDEN, (WIDTH, WIDTH), dtype), experts_of(WIDTH, (HIDDEN,), dtype))
            for _ in range(LAYERS)
        ]
        self.slots = torch.arange(tokens) % SLOTS
        self.ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])
        self.factors = torch.rand(tokens, TOP_K).softmax(-1)
        self.x = torch.randn(tokens, HIDDEN).to(dtype)
        self.activated = torch.randn(tokens * TOP_K, WIDTH).to(dtype)
        self.y13 = torch.zeros(tokens, TOP_K, 2 * WIDTH, dtype=dtype)
        self.y2 = torch.zeros(tokens, TOP_K, HIDDEN, dtype=dtype)
        self.backend = NumbaCPUBackend()
        self.plan = self.backend.prepare_batch(LoRABatch(self.slots, SLOTS))
        choice = (self.plan, self.ids, self.factors, EXPERTS)
        self.routing = self.backend.prepare_experts(*choice)

    def numba_cpu(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        """Run a layer: the routing and both sites."""
        run, choice = self.backend.run_experts, (self.plan, self.ids, self.factors, EXPERTS)
        routing = self.backend.prepare_experts(*choice, out=self.routing)
        run(self.x, gate_up, routing, self.y13)
        run(self.activated, down, routing, self.y2, rows="pairs", weighted=True)

    def loop(self, gate_up: ExpertWeights, down: ExpertWeights) -> None:
        """Run a layer, one active (slot, expert) pair after the other."""
        keys, order = (self.slots[:, None] * EXPERTS + self.ids).flatten().sort(stable=True)
        active, counts = keys.unique_consecutive(return_counts=True)
        y13, y2, factors = self.y13.view(-1, 2 * WIDTH), self.y2.view(-1, HIDDEN), self.factors
        factors = factors.view(-1, 1).to(self.x.dtype)
        for key, pairs in zip(active.tolist(), order.split(counts.tolist()), strict=True):
            slot, expert = divmod(key, EXPERTS)
            a, b = gate_up.lora_a[slot, expert], gate_up.lora_b[slot, expert]
            h = self.x[pairs // TOP_K] @ a.view(2 * RANK, HIDDEN).T
            gate, up = h[:, :RANK] @ b[:WIDTH].T, h[:, RANK:] @ b[WIDTH:].T
            y13.index_add_(0, pairs, torch.cat([gate, up], 1), alpha=0.5)
            a, b = down.lora_a[slot, expert, 0], down.lora_b[slot, expert]
            delta = (self.activated[pairs] @ a.T) @ b.T
            y2.index_add_(0, pairs, delta * factors[pairs], alpha=0.5)

    def check(self) -> None:
        """Compare what both add."""
        results = []
        for contender in (self.loop, self.numba_cpu):
            for y in (self.y13, self.y2):
                y.zero_()
            contender(*self.layers[0])
            results.append(torch.cat([self.y13.flatten(), self.y2.flatten()]).double())
        error = (results[0] - results[1]).abs().max() / results[0].abs().max()
        if error > 4 * torch.finfo(self.x.dtype).eps:
            raise AssertionError(f"the contenders differ by {error:.2g} of the largest element")


def measure(dtype: torch.dtype, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the microseconds of a layer, by contender."""
    cell = Cell(dtype, tokens)
    cell.check()
    calls: dict[str, Callable[..., None]] = {"loop": cell.loop, "numba_cpu": cell.numba_cpu}
    best = {name: [math.inf] * LAYERS for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for y in (cell.y13, cell.y2):
                y.zero_()
            for i, sites in enumerate(cell.layers):
                best[name][i] = min(best[name][i], seconds(partial(call, *sites)))
    mean = {name: statistics.mean(times) for name, times in best.items()}
    keys = (cell.slots[:, None] * EXPERTS + cell.ids).unique().numel()
    return {
        "dtype": dtype_name(dtype),
        "tokens": tokens,
        "active_pairs": keys,
        "microseconds": {name: round(one * 1e6, 1) for name, one in mean.items()},
        "times_loop": round(mean["loop"] / mean["numba_cpu"], 2),
    }


def measure_all(options: Options, _: Result) -> Iterator[Row]:
    """Yield a row per dtype and number of tokens."""
    dtypes = [getattr(torch, name) for name in options.dtypes]
    for dtype, tokens in itertools.product(dtypes, options.tokens):
        yield measure(dtype, tokens, options.repeats)


def settings(_: Options) -> dict[str, Any]:
    """Return the sizes of the layer."""
    sizes = {"hidden": HIDDEN, "width": WIDTH, "experts": EXPERTS, "top_k": TOP_K}
    return sizes | {"rank": RANK, "slots": SLOTS, "layers": LAYERS}


def summary(result: Result) -> dict[str, Any]:
    """Return the least speed over the loop and the geometric mean, by dtype."""
    found = {}
    for dtype in dict.fromkeys(row["dtype"] for row in result["rows"]):
        speeds = [row["times_loop"] for row in result["rows"] if row["dtype"] == dtype]
        mean, least = mean_and_least(speeds)
        found[dtype] = {"least": least, "geometric_mean": mean}
    return found


CELLS = Measurement(
    rows=measure_all,
    file="cpu_experts.json",
    method=METHOD,
    settings=settings,
    summary=summary,
    options={
        "--dtypes": DTYPES,
        "--tokens": flag(TOKENS),
        "--repeats": flag(25),
        "--threads": THREADS,
    },
)
