"""Times a Llama of 8B shape whose rows use different adapters, beside the same base model.

Decode steps of 1, 8 and 64 rows and a prefill of 2048 tokens; adapters of rank 16 and 64, 8 and 64
of them; called eagerly, replayed from a CUDA graph and compiled; with --peft, PEFT's mixed batch
too. A cell's logits are checked before it is timed, and a cell that fails does not stop the others.

    python benchmarks/whole_model.py --rows 64 --ranks 16 --adapters 8 --modes eager graph compiled
"""

from __future__ import annotations

import argparse
import statistics
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import llama
import torch
from llama import Pass, distance

from lora_backends.bench.results import new_result, write_result
from lora_backends.bench.timing import measure_limits
from lora_backends.hf import MultiLoRAModel

RESULT = Path(__file__).parent / "results" / "h200_whole_model.json"
MODES = ("eager", "graph", "compiled")
ROUNDING = 5e-2  # the most that logits of 16 layers in bfloat16 differ by
PREFILL_ROWS = 8
COMPOSITIONS = 4


class Shape(NamedTuple):
    """One batch."""

    rows: int
    tokens: int  # per row; 1 is a decode step


def main() -> None:
    """Check, measure, write the result file and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64], help="of decode steps")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens; 0 leaves it out")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=12, help="timings of each contender")
    parser.add_argument("--peft", action="store_true", help="time PEFT's mixed batch too")
    parser.add_argument(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        help="q, k, v in one call, gate and up too; on a GPU unless --no-fuse is given",
    )
    parser.add_argument("--tiny", action="store_true", help="a small model; on the CPU no graphs")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        Benchmark(arguments).run()


class Benchmark:
    """The base model, the same never wrapped, and the results so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu" and not arguments.tiny:
            raise SystemExit("needs a GPU; --tiny runs a small model on the CPU")
        self.modes = [m for m in arguments.modes if m != "graph" or self.device.type == "cuda"]
        self.base = llama.make_base(self.device, arguments.layers, arguments.tiny)
        self.plain = llama.make_base(self.device, arguments.layers, arguments.tiny)
        self.shapes = [Shape(rows, 1) for rows in arguments.rows]
        if arguments.prefill:
            self.shapes.append(Shape(PREFILL_ROWS, arguments.prefill // PREFILL_ROWS))
        limits = measure_limits(self.device, self.base.dtype)
        self.result = new_result(
            f"A Llama of 8B shape with {arguments.layers} layers and random weights; random "
            f"adapters on {', '.join(llama.TARGETS)}; row i uses adapter i modulo their number. A "
            f"decode step has a static cache of {llama.PAST} to {llama.PAST + llama.STEPS} tokens, "
            f"a prefill no cache and {PREFILL_ROWS} rows. A sample is the wall time of "
            f"{llama.STEPS} consecutive passes over their number; contenders take turns; "
            f"milliseconds are medians, ratios those of medians. The base model is a copy with the "
            f"same weights that was never wrapped. bytes_ms is the time of a copy of the active "
            f"adapters' A and B.",
            self.device,
            backend=arguments.backend,
            limits=limits.describe(),
        )
        self.result |= {"checks": [], "failed": {}}
        self.copy_bytes_per_ms = limits.copy_gb_per_s * 1e6

    def run(self) -> None:
        """Run every cell, and write the results after each."""
        for rank in self.arguments.ranks:
            for count in self.arguments.adapters:
                Adapted(self, rank, count).run()
        self.print_table()

    def add(self, where: dict[str, Any], times: dict[str, list[float]], moved: int) -> None:
        """Add a row per contender, and write the file."""
        base = statistics.median(times["base"])
        for name, series in times.items():
            middle = statistics.median(series)
            row = where | {"contender": name, "ms": round(middle, 4)}
            row |= {"ms_min": round(min(series), 4), "ms_max": round(max(series), 4)}
            row["ratio_to_base"] = round(middle / base, 3)
            if name == "ours":
                row["bytes_ms"] = round(moved / self.copy_bytes_per_ms, 4)
            self.result["rows"].append(row)
        self.write()

    def write(self) -> None:
        """Write the results so far."""
        self.result["summary"] = {
            f"{_name(row)}, {row['mode']}, {row['contender']}": row["ratio_to_base"]
            for row in self.result["rows"]
            if row["contender"] != "base"
        }
        write_result(self.arguments.output, self.result)

    def print_table(self) -> None:
        """Print times, checks and failures."""
        for row in self.result["rows"]:
            print(
                f"{_name(row):52}{row['mode']:9}{row['contender']:6}{row['ms']:9.3f} ms "
                f"({row['ms_min']:.3f} to {row['ms_max']:.3f})  x {row['ratio_to_base']:.3f}"
            )
        for check in self.result["checks"]:
            print(check)
        print("failed", self.result["failed"])


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

    def run(self) -> None:
        """Run the cells; one that fails is recorded, and the others still run."""
        arguments = self.benchmark.arguments
        oracle = self.wrapped("torch_ref", fuse=False)
        self.expected = {s: self.reference(oracle, s) for s in self.benchmark.shapes}
        oracle.detach()
        self.model = self.wrapped(arguments.backend, fuse=arguments.fuse)
        cells = [(s, mode) for s in self.benchmark.shapes for mode in self.benchmark.modes]
        for shape, mode in cells:
            self.attempt(shape, mode, lambda s=shape, m=mode: self.measure(s, m))
        self.model.detach()
        if arguments.peft:
            run = llama.peft_model(self.benchmark.base, self.names, self.rank)
            for shape in self.benchmark.shapes:
                self.attempt(shape, "peft", lambda s=shape: self.measure_peft(run, s))
            self.benchmark.base = run.unload()

    def wrapped(self, backend: str, fuse: bool | None) -> MultiLoRAModel:
        """Return the base model with the adapters of this cell on a backend."""
        base, engine = self.benchmark.base, llama.make_backend(backend, self.benchmark.device)
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

    def attempt(self, shape: Shape, mode: str, part: Any) -> None:
        """Measure a cell; one that fails is recorded."""
        try:
            part()
        except Exception as error:  # the other cells are still worth timing
            traceback.print_exc()
            name = f"{_name(self.where(shape, mode))}, {mode}"
            self.benchmark.result["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
            self.benchmark.write()

    def where(self, shape: Shape, mode: str) -> dict[str, Any]:
        """Return the keys of a cell."""
        sizes = {"rank": self.rank, "adapters": len(self.names)}
        return {"rows": shape.rows, "tokens": shape.tokens, **sizes, "mode": mode}

    def measure(self, shape: Shape, mode: str) -> None:
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
            self.time(shape, mode, {"base": base, "ours": ours})
        if mode == "compiled":
            torch.compiler.reset()

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

    def measure_peft(self, run: Any, shape: Shape) -> None:
        """Time the mixed batch of PEFT, called eagerly; its adapters have other values."""
        plain, names = self.benchmark.plain, self.composition(shape.rows)
        mixed = Pass(plain, run, *shape, adapter_names=names)
        contenders = {"base": Pass(plain, plain, *shape), "peft": mixed}
        self.time(shape, "peft", contenders, samples=3)

    def time(
        self, shape: Shape, mode: str, contenders: dict[str, Pass], samples: int | None = None
    ) -> None:
        """Let contenders take turns; the first two samples of each do not count."""
        samples = samples or self.benchmark.arguments.samples
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(samples + 2):
            for name, run in contenders.items():
                sample = run.time()
                if turn >= 2:
                    times[name].append(sample)
        active = min(shape.rows, len(self.names))
        moved = active * llama.adapter_bytes(self.benchmark.plain, self.rank)
        self.benchmark.add(self.where(shape, mode), times, moved)


def _name(where: dict[str, Any]) -> str:
    phase = "decode" if where["tokens"] == 1 else f"prefill of {where['tokens']}"
    return f"{phase}, {where['rows']} rows, {where['adapters']} adapters of rank {where['rank']}"


if __name__ == "__main__":
    main()
