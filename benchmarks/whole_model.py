"""Times a Llama of 8B shape whose rows use different adapters, beside the same base model.

Decode steps of 1, 8 and 64 rows and a prefill of 2048 tokens; adapters of rank 16 and 64, 8 and 64
of them; called eagerly, replayed from a CUDA graph and compiled; with --peft, PEFT's mixed batch
too. A cell's logits are checked before it is timed, and a cell that fails does not stop the others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import llama
import torch
from h200 import create
from llama import Pass, distance
from measuring import Measurement, Options, Result, Row, flag, in_turns, middle_and_ends

from lora_backends.bench.timing import measure_limits
from lora_backends.hf import MultiLoRAModel

MODES = ("eager", "graph", "compiled")
ROUNDING = 5e-2  # the most that logits of 16 layers in bfloat16 differ by
PREFILL_ROWS = 8
COMPOSITIONS = 4


class Shape(NamedTuple):
    """One batch."""

    rows: int
    tokens: int  # per row; 1 is a decode step


class Benchmark:
    """The base model, the same never wrapped, and the result so far."""

    def __init__(self, arguments: Options, result: Result) -> None:
        self.arguments, self.result, self.device = arguments, result, device()
        if self.device.type == "cpu" and not arguments.tiny:
            raise SystemExit("needs a GPU; --tiny runs a small model on the CPU")
        self.modes = [m for m in arguments.modes if m != "graph" or self.device.type == "cuda"]
        self.base = llama.make_base(self.device, arguments.layers, arguments.tiny)
        self.plain = llama.make_base(self.device, arguments.layers, arguments.tiny)
        self.shapes = [Shape(rows, 1) for rows in arguments.rows]
        if arguments.prefill:
            self.shapes.append(Shape(PREFILL_ROWS, arguments.prefill // PREFILL_ROWS))
        result["limits"] = measure_limits(self.device, self.base.dtype).describe()


class Adapted:
    """The base model wrapped with adapters of one rank, and the cells of every shape.

    Args:
        benchmark: what has the models and takes the results.
        rank: of the adapters.
        count: adapters.
    """

    def __init__(self, benchmark: Benchmark, rank: int, count: int) -> None:
        self.benchmark, self.rank = benchmark, rank
        self.names = [f"adapter{i}" for i in range(count)]

    def run(self) -> Iterator[Row]:
        """Yield the rows of the cells; one that fails is recorded, and the others still run."""
        arguments = self.benchmark.arguments
        oracle = self.wrapped("torch_ref", fuse=False)
        self.expected = {s: self.reference(oracle, s) for s in self.benchmark.shapes}
        oracle.detach()
        self.model = self.wrapped(arguments.backend, fuse=arguments.fuse)
        cells = [(s, mode) for s in self.benchmark.shapes for mode in self.benchmark.modes]
        for shape, mode in cells:
            yield from self.attempt(shape, mode, lambda s=shape, m=mode: self.measure(s, m))
        self.model.detach()
        if arguments.peft:
            run = llama.peft_model(self.benchmark.base, self.names, self.rank)
            for shape in self.benchmark.shapes:
                yield from self.attempt(shape, "peft", lambda s=shape: self.measure_peft(run, s))
            self.benchmark.base = run.unload()

    def wrapped(self, backend: str, fuse: bool | None) -> MultiLoRAModel:
        """Return the base model with the adapters of this cell on a backend."""
        base, engine = self.benchmark.base, create(backend, {}, self.benchmark.device)
        model = MultiLoRAModel(base, engine, len(self.names), self.rank, fuse=fuse)
        for seed, name in enumerate(self.names):
            model.add_adapter(name, llama.random_adapter(base, self.rank, seed))
        return model

    def reference(self, oracle: MultiLoRAModel, shape: Shape) -> list[torch.Tensor]:
        """Return the logits of each composition, with plans of their own."""
        every = [self.composition(shape.rows, turn) for turn in range(COMPOSITIONS)]
        plain = self.benchmark.plain
        return [Pass(plain, oracle, *shape, adapters=rows).logits() for rows in every]

    def composition(self, rows: int, turn: int = 0) -> list[str | None]:
        """Return the adapters of all rows: mixed, without some, skewed, or none at all."""
        mixed: list[str | None] = [self.names[row % len(self.names)] for row in range(rows)]
        some = [None if row % 3 else name for row, name in enumerate(reversed(mixed))]
        skewed = [self.names[-1]] * (rows - 1) + [self.names[0]]
        return [mixed, some, skewed, [None] * rows][turn % COMPOSITIONS]

    def attempt(self, shape: Shape, mode: str, part: Callable[[], list[Row]]) -> list[Row]:
        """Measure a cell; one that fails is recorded."""
        try:
            return part()
        except Exception as error:  # the other cells are still worth timing
            traceback.print_exc()
            name = f"{_name(self.where(shape, mode))}, {mode}"
            self.benchmark.result["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
            return []

    def where(self, shape: Shape, mode: str) -> dict[str, Any]:
        """Return the keys of a cell."""
        sizes = {"rank": self.rank, "adapters": len(self.names)}
        return {"rows": shape.rows, "tokens": shape.tokens, **sizes, "mode": mode}

    def measure(self, shape: Shape, mode: str) -> list[Row]:
        """Check and time the base model and ours in one mode."""
        benchmark, rows = self.benchmark, self.composition(shape.rows)
        with self.model.prepare(rows, tokens=shape.tokens) as step:
            eager = Pass(benchmark.plain, self.model, *shape, adapters=step)
            base = Pass(benchmark.plain, benchmark.plain, *shape)
            ours = eager
            if mode != "eager":
                ours = Pass(benchmark.plain, self.model, *shape, adapters=step)
            if mode == "graph":
                base.capture()
                ours.capture()
            elif mode == "compiled":
                self.compile(base, ours)
            self.check(shape, mode, step, ours, eager)
            step.update(rows)
            contenders = {"base": base, "ours": ours}
            found = self.time(shape, mode, contenders, self.benchmark.arguments.samples)
        if mode == "compiled":
            torch.compiler.reset()
        return found

    def compile(self, base: Pass, ours: Pass) -> None:
        """Let both run programs of `torch.compile`."""
        options: dict[str, Any] = {"mode": "reduce-overhead"}
        if self.benchmark.device.type == "cpu":
            options = {"backend": "aot_eager"}
        base.run = torch.compile(self.benchmark.plain, fullgraph=True, dynamic=False, **options)
        program = torch.compile(self.benchmark.base, fullgraph=True, dynamic=False, **options)

        def with_step(adapters: Any, **inputs: Any) -> Any:
            with self.model.using(adapters):
                return program(**inputs)

        ours.run = with_step

    def check(self, shape: Shape, mode: str, step: Any, ours: Pass, eager: Pass) -> None:
        """Compare the logits of several compositions, and see that they follow updates.

        An eager pass is compared with torch_ref, the others with the eager one. Bits may differ:
        even the base model's eager step does not always repeat its bits.
        """
        errors, apart = [], []
        previous: torch.Tensor | None = None
        for turn in (0, 1, 2, 3, 1, 0):
            step.update(self.composition(shape.rows, turn))
            found = ours.logits()
            expected = self.expected[shape][turn] if mode == "eager" else eager.logits()
            errors.append(distance(found, expected))
            if previous is not None and shape.rows > 1:
                apart.append(distance(found, previous))
            previous = found
        found_check = {"relative_error": max(errors), "least_change": min(apart, default=None)}
        self.benchmark.result["checks"].append(self.where(shape, mode) | found_check)
        if max(errors) > ROUNDING or max(errors) > min(apart, default=1) / 3:
            raise AssertionError(f"logits are wrong: {found_check}")

    def measure_peft(self, run: Any, shape: Shape) -> list[Row]:
        """Time the mixed batch of PEFT, called eagerly; its adapters have other values."""
        plain, names = self.benchmark.plain, self.composition(shape.rows)
        mixed = Pass(plain, run, *shape, adapter_names=names)
        contenders = {"base": Pass(plain, plain, *shape), "peft": mixed}
        return self.time(shape, "peft", contenders, samples=3)

    def time(self, shape: Shape, mode: str, contenders: dict[str, Pass], samples: int) -> list[Row]:
        """Let contenders take turns; return a row each."""
        clocks = {name: one.time for name, one in contenders.items()}
        times = in_turns(clocks, samples, warmup=2)
        base, rows = statistics.median(times["base"]), []
        for name, series in times.items():
            ratio = round(statistics.median(series) / base, 3)
            row = self.where(shape, mode) | {"contender": name} | middle_and_ends(series, 4)
            rows.append(row | {"ratio_to_base": ratio})
            if name == "ours":
                active = min(shape.rows, len(self.names))
                moved = active * llama.adapter_bytes(self.benchmark.plain, self.rank)
                copied = self.benchmark.result["limits"]["copy_gb_per_s"] * 1e6  # bytes a ms
                rows[-1]["bytes_ms"] = round(moved / copied, 4)
        return rows


def _name(where: dict[str, Any]) -> str:
    phase = "decode" if where["tokens"] == 1 else f"prefill of {where['tokens']}"
    return f"{phase}, {where['rows']} rows, {where['adapters']} adapters of rank {where['rank']}"


def device() -> torch.device:
    """Return where the model is."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per cell and contender."""
    benchmark = Benchmark(arguments, result)
    for rank, count in itertools.product(arguments.ranks, arguments.adapters):
        yield from Adapted(benchmark, rank, count).run()
    print("failed", result["failed"])


def settings(arguments: Options) -> dict[str, Any]:
    """Return what the result says besides its rows."""
    method = (
        f"A Llama of 8B shape with {arguments.layers} layers and random weights; random adapters "
        f"on {', '.join(llama.TARGETS)}; row i uses adapter i modulo their number. A decode step "
        f"has a static cache of {llama.PAST} to {llama.PAST + llama.STEPS} tokens, a prefill no "
        f"cache and {PREFILL_ROWS} rows. A sample is the wall time of {llama.STEPS} consecutive "
        f"passes over their number; contenders take turns; milliseconds are medians, ratios those "
        f"of medians. The base model is a copy with the same weights that was never wrapped. "
        f"bytes_ms is the time of a copy of the active adapters' A and B."
    )
    found: dict[str, Any] = {"method": method, "device": device(), "backend": arguments.backend}
    return found | {"limits": {}, "checks": [], "failed": {}}


def summary(result: Result) -> dict[str, float]:
    """Return the ratio of each cell and contender to the base model."""
    return {
        f"{_name(row)}, {row['mode']}, {row['contender']}": row["ratio_to_base"]
        for row in result["rows"]
        if row["contender"] != "base"
    }


WHOLE_MODEL = Measurement(
    rows=measure_all,
    file="h200_whole_model.json",
    settings=settings,
    summary=summary,
    partial=True,
    options={
        "--backend": flag("triton"),
        "--rows": flag([1, 8, 64], "of decode steps", nargs="*"),
        "--prefill": flag(2048, "tokens; 0 leaves it out"),
        "--ranks": flag([16, 64]),
        "--adapters": flag([8, 64]),
        "--modes": flag(list(MODES), choices=MODES),
        "--layers": flag(16),
        "--samples": flag(12, "timings of each contender"),
        "--peft": flag(False, "time PEFT's mixed batch too"),
        "--fuse": {
            "action": argparse.BooleanOptionalAction,
            "help": "q, k, v in one call, gate and up too; on a GPU unless --no-fuse is given",
        },
        "--tiny": flag(False, "a small model; on the CPU no graphs"),
    },
)
