"""What all measurements share: `Measurement`, and how one is run from the command line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lora_backends.bench.results import new_result, write_result

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"

Options = argparse.Namespace
Row = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A measurement of one kind: its cells, the call that is timed, and the file it writes.

    Args:
        rows: yields the rows of the result; it may fill other keys of the result too.
        file: of the result under results/, or a function of the options.
        method: how it is measured, a key of the result.
        options: of the command line: the settings of argparse by flag.
        settings: arguments of `new_result`; a `method` among them comes first. None: `rows` starts
            the result.
        summary: makes the summary of a result; None: `rows` does, or there is none.
        partial: write the file after every row, and after an error.
    """

    rows: Callable[[Options, Result], Iterable[Row]]
    file: str | Callable[[Options], str]
    method: str = ""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Callable[[Options], dict[str, Any]] | None = lambda _: {}
    summary: Callable[[Result], Any] | None = None
    partial: bool = False

    def run(self, name: str, arguments: Sequence[str]) -> None:
        """Measure, print every row and write the result file."""
        parser = argparse.ArgumentParser(prog=f"run.py {name}")
        for flag, settings in self.options.items():
            parser.add_argument(flag, **settings)
        parser.add_argument("--output", type=Path)
        options = parser.parse_args(arguments)
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        if "threads" in options:
            torch.set_num_threads(options.threads)
        result: Result = {}
        if self.settings is not None:
            result = new_result(**{"method": self.method, **self.settings(options)})
        output = options.output or RESULTS / self._file(options)
        try:
            with torch.no_grad():
                for row in self.rows(options, result):
                    result["rows"].append(row)
                    print(json.dumps(row), flush=True)
                    if self.partial:
                        self._write(output, result)
        except BaseException:
            if self.partial and result.get("rows"):
                self._write(output, result)
            raise
        self._write(output, result)
        print(f"{json.dumps(result['summary'], indent=1)}\nwritten to {output}")

    def _file(self, options: Options) -> str:
        return self.file if isinstance(self.file, str) else self.file(options)

    def _write(self, output: Path, result: Result) -> None:
        if self.summary is not None:
            result["summary"] = self.summary(result)
        write_result(output, result)


def flag(default: Any, text: str = "", **settings: Any) -> dict[str, Any]:
    """Return the settings of an option whose values have the type of its default."""
    if isinstance(default, list | tuple):
        return {"default": default, "nargs": "+", "type": type(default[0]), "help": text} | settings
    if isinstance(default, bool):
        return {"action": "store_true", "help": text} | settings
    return {"default": default, "type": type(default), "help": text} | settings


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call on the CPU."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(
    clocks: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 0
) -> dict[str, list[float]]:
    """Return what each clock shows in every round; the first rounds do not count."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    for turn in range(rounds + warmup):
        for name, clock in clocks.items():
            taken = clock()
            if turn >= warmup:
                times[name].append(taken)
    return times


def middle_and_ends(ms: Sequence[float], digits: int) -> dict[str, float]:
    """Return the median, least and largest of some milliseconds."""
    found = {"ms": statistics.median(ms), "ms_min": min(ms), "ms_max": max(ms)}
    return {key: round(value, digits) for key, value in found.items()}


def median_ratio(series: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios to another series, round by round."""
    return statistics.median(one / other for one, other in zip(series, base, strict=True))


def mean_and_least(values: Sequence[float]) -> tuple[float, float]:
    """Return the geometric mean and the least."""
    return round(statistics.geometric_mean(values), 2), min(values)


def by_backend(
    summarize: Callable[[list[Row]], Any],
) -> Callable[[Result], dict[str, Any]]:
    """Return a function that makes a summary of each backend's rows."""

    def summary(result: Result) -> dict[str, Any]:
        names = dict.fromkeys(row["backend"] for row in result["rows"])
        return {
            name: summarize([row for row in result["rows"] if row["backend"] == name])
            for name in names
        }

    return summary
