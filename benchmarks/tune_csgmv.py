"""Times tile sizes of `csgmv` on one GPU, cell by cell, and writes the best of each.

For every cell of benchmarks/h200_cells.py: first groups of segments (with the chosen tiles), then
the sizes that `csgmv.config.candidates` lists, then the best shrink with the best expand. Kernels
are compiled beforehand by a pool of processes that share Triton's cache. A time is that of a call
replayed from a CUDA graph over many layers, as in h200_cells.py but with fewer replays; results
are written after every cell.

    python benchmarks/tune_csgmv.py --output tune_csgmv.json --seconds 240
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from h200_cells import PEERS, cell_of

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.bench.cells import deal
from lora_backends.bench.layers import make_layers, reference
from lora_backends.bench.timing import graph_times
from lora_backends.csgmv import CsgmvBackend
from lora_backends.csgmv import plan as plans
from lora_backends.csgmv.config import Problem, candidates, choose_tiles, segment_and_group
from lora_backends.gpu.tiles import TileConfig

TOLERANCE = 1e-2
Cell = dict[str, Any]  # a row of the peers' file


def main() -> None:
    """Compile, time, write; print a table last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=PEERS, help="cells, limits and peers")
    parser.add_argument("--output", type=Path, default=Path("tune_csgmv.json"))
    parser.add_argument("--segment-size", default="16", help='a number or "auto"')
    parser.add_argument("--seconds", type=float, default=240.0, help="budget, compiling included")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument(
        "--only", default="", help="cells whose name contains this, e.g. qkv or /64/"
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    size = arguments.segment_size
    segment_size = size if size == "auto" else int(size)
    peers = json.loads(arguments.peers.read_text())
    rows = [row for row in peers["rows"] if arguments.only in name_of(row)]
    # neighbours share their layers
    rows.sort(key=lambda row: (row["projection"], max(8, row["active_adapters"]), row["rank"]))
    if arguments.processes > 1:
        compile_all(rows, peers["projections"], segment_size, arguments, deadline)
    results: list[Cell] = []
    layers: list[LoRAWeights] = []
    made_for: tuple[Any, ...] = ()
    for place, row in enumerate(rows):
        left = (deadline - time.monotonic()) / (len(rows) - place)
        if left <= 0:
            print(f"out of time: {len(rows) - place} cells left out")
            break
        slots = max(8, row["active_adapters"])
        if made_for != (row["projection"], slots, row["rank"]):
            made_for = (row["projection"], slots, row["rank"])
            layers.clear()
            cell = cell_of(row, peers["projections"][row["projection"]])
            layers += make_layers(cell, "cuda", torch.bfloat16)
        try:
            results.append(tune(row, layers, segment_size, time.monotonic() + left))
        except Exception as error:  # one cell must not lose the others
            print(name_of(row), type(error).__name__, error)
            continue
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
        print(line_of(results[-1]), flush=True)
    print_summary(results)


def tune(row: Cell, layers: list[LoRAWeights], segment_size: Any, until: float) -> Cell:
    """Return a cell with the times of everything that was tried before `until`, best first."""
    batch = batch_of(row)
    timer = Timer(batch, layers)
    chosen_group = segment_and_group(segment_size, row["tokens"], row["active_adapters"])
    tried: list[dict[str, Any]] = []

    def attempt(group: tuple[int, int], tiles: TileConfig) -> float:
        entry: dict[str, Any] = {"segment_group": group, "tiles": asdict(tiles)}
        try:
            entry["us"] = timer.microseconds(group, tiles)
        except Exception as error:  # sizes that do not fit are what a search meets
            entry["fails"] = f"{type(error).__name__}: {error}"[:200]
        if entry not in tried:
            tried.append(entry)
        return float(entry.get("us", float("inf")))

    times: dict[tuple[tuple[int, int], TileConfig], float] = {}
    for group in dict.fromkeys([chosen_group, *groups_of(row, segment_size)]):
        tiles = choose_tiles(problem_of(row, layers[0], group))
        times[group, tiles] = attempt(group, tiles)
    rules_us = times[next(iter(times))]
    group = min(times, key=lambda key: times[key])[0]
    for tiles in candidates(problem_of(row, layers[0], group)):
        if time.monotonic() > until:
            break
        if (group, tiles) not in times:
            times[group, tiles] = attempt(group, tiles)
    mine = {tiles: us for (at, tiles), us in times.items() if at == group}
    base = choose_tiles(problem_of(row, layers[0], group))
    shrink = min((t for t in mine if t.expand == base.expand), key=mine.__getitem__).shrink
    expand = min((t for t in mine if t.shrink == base.shrink), key=mine.__getitem__).expand
    attempt(group, TileConfig(shrink, expand))
    tried.sort(key=lambda entry: float(entry.get("us", float("inf"))))
    keys = ("projection", "active_adapters", "rank", "tokens", "mix", "limit_us", "best_peer_us")
    return {key: row[key] for key in keys} | {"rules_us": rules_us, "tried": tried}


class Timer:
    """Times a batch over layers with any sizes; the first layer's result is checked."""

    def __init__(self, batch: LoRABatch, layers: list[LoRAWeights]) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.batch, self.layers = batch, layers
        self.backend = CsgmvBackend("cuda")
        self.x = torch.randn(batch.num_tokens, layers[0].in_features, **options)
        self.y = torch.zeros(batch.num_tokens, layers[0].out_features, **options)
        self.expected = reference(self.x, layers[0], batch)

    def microseconds(self, group: tuple[int, int], tiles: TileConfig) -> float:
        """Return the time of one call."""
        plan = plan_of(self.batch, group)
        self.backend.use_tiles(tiles)
        self.y.zero_()
        self.backend.run_linear(self.x, self.layers[0], plan, self.y)
        error = float((self.y.float() - self.expected).norm() / self.expected.norm())
        if not error < TOLERANCE:
            raise ValueError(f"wrong result: relative error {error}")

        def call(layer: int) -> None:
            self.backend.run_linear(self.x, self.layers[layer], plan, self.y)

        times = graph_times(call, len(self.layers), timings=3, replays=5)
        return round(statistics.median(times), 2)


def batch_of(row: Cell) -> LoRABatch:
    slots = deal(row["tokens"], row["active_adapters"], row["mix"] == "skewed")
    return LoRABatch(slots, max(8, row["active_adapters"]))


def plan_of(batch: LoRABatch, group: tuple[int, int]) -> plans.CsgmvPlan:
    active = int((plans.count_tokens(batch.token_slots.numpy(), batch.num_slots) > 0).sum())
    return plans.make_plan(batch, *group, active, torch.device("cuda", torch.cuda.current_device()))


def groups_of(row: Cell, segment_size: Any) -> Iterator[tuple[int, int]]:
    """Yield segments and groups worth trying: rows of the grid of 16, 32, 64 and 128 tokens."""
    average = max(16, row["tokens"] // row["active_adapters"])
    for tokens in (16, 32, 64, 128):
        if tokens <= average and (segment_size == "auto" or tokens >= segment_size):
            yield (tokens, 1) if segment_size == "auto" else (segment_size, tokens // segment_size)


def problem_of(row: Cell, layer: LoRAWeights, group: tuple[int, int]) -> Problem:
    return Problem(
        num_tokens=row["tokens"],
        active_slots=row["active_adapters"],
        row_tokens=group[0] * group[1],
        num_slices=layer.num_slices,
        max_rank=layer.max_rank,
        in_features=layer.in_features,
        out_features=layer.out_features,
        item_bytes=layer.lora_a.element_size(),
    )


def compile_all(
    rows: list[Cell],
    projections: dict[str, Any],
    segment_size: Any,
    arguments: argparse.Namespace,
    deadline: float,
) -> None:
    """Fill Triton's cache: every process runs the sizes of one cell after another once."""
    started = time.monotonic()
    until = started + 0.4 * (deadline - started)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        tasks = [
            pool.submit(compile_cell, row, projections[row["projection"]], segment_size, until)
            for row in sorted(rows, key=lambda row: row["tokens"] * row["rank"])
        ]
        done = 0
        for task in as_completed(tasks):
            try:
                done += task.result()
            except Exception as error:  # the timing compiles what is missing
                print("compiling:", type(error).__name__, error)
    print(f"{done} sizes compiled in {time.monotonic() - started:.0f} s", flush=True)


def compile_cell(row: Cell, projection: Any, segment_size: Any, until: float) -> int:
    """Run every size of a cell once on one layer and return how many ran."""
    in_features, output_slices = projection
    slots, rank = max(8, row["active_adapters"]), row["rank"]
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    layer = LoRAWeights(
        lora_a=torch.zeros(slots, len(output_slices), rank, in_features, **options),
        lora_b=torch.zeros(slots, sum(output_slices), rank, **options),
        ranks=torch.full((slots, len(output_slices)), rank, dtype=torch.int32),
        scalings=torch.ones(slots, len(output_slices)),
        output_slices=tuple(output_slices),
    )
    batch = batch_of(row)
    x = torch.zeros(row["tokens"], in_features, **options)
    y = torch.zeros(row["tokens"], sum(output_slices), **options)
    backend, ran = CsgmvBackend("cuda"), 0
    chosen = segment_and_group(segment_size, row["tokens"], row["active_adapters"])
    for group in dict.fromkeys([chosen, *groups_of(row, segment_size)]):
        problem = problem_of(row, layer, group)
        plan = plan_of(batch, group)
        for tiles in candidates(problem) if group == chosen else [choose_tiles(problem)]:
            if time.monotonic() > until:
                return ran
            backend.use_tiles(tiles)
            try:
                backend.run_linear(x, layer, plan, y)
                ran += 1
            except Exception:  # sizes that do not fit are met again, and told, by the timing
                continue
    torch.cuda.synchronize()
    return ran


def name_of(row: Cell) -> str:
    parts = ("projection", "tokens", "active_adapters", "rank")
    return "/".join(str(row[part]) for part in parts) + "/"


def line_of(cell: Cell) -> str:
    best = cell["tried"][0]
    us, shrink, expand = best.get("us"), best["tiles"]["shrink"], best["tiles"]["expand"]
    sizes = (*best["segment_group"], *shrink.values(), "|", *expand.values())
    return (
        f"{name_of(cell):22} rules {cell['rules_us']:8.2f}  best {us:8.2f} us  "
        f"efficiency {cell['limit_us'] / us:.2f}  of best peer {us / cell['best_peer_us']:.2f}  "
        f"{' '.join(map(str, sizes))}"
    )


def print_summary(cells: list[Cell]) -> None:
    """Print geometric means of the efficiency by phase, of the rules and of the best sizes."""
    for phase, belongs in (("decode", lambda n: n <= 256), ("prefill", lambda n: n > 256)):
        found = [cell for cell in cells if belongs(cell["tokens"])]
        for name, us_of in (
            ("rules", lambda cell: cell["rules_us"]),
            ("best", lambda cell: cell["tried"][0]["us"]),
        ):
            ratios = torch.tensor([cell["limit_us"] / us_of(cell) for cell in found])
            if found:
                mean, low = float(ratios.log().mean().exp()), float(ratios.min())
                print(f"{phase:8} {name:6} {len(found)} cells  mean {mean:.3f}  lowest {low:.3f}")


if __name__ == "__main__":
    main()
