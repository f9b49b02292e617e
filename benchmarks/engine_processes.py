"""Serving engines in processes of their own that take turns on one device.

`vllm_gpu` and `sglang_step` share this: engines keep state per process, so several of them in one
process would not be what people run.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from measuring import Options, Result, Row, median_ratio, middle_and_ends

CHECKED = 4  # tokens of each answer: a prefill's, and then decode steps'
PREFILLS = 6  # timed in a row; people's prompts differ in length
WARM = 12  # tokens before the timed ones, to leave prefills and the start out
METHOD = (
    "Engines in processes of their own on one device take turns, each of which begins with a call "
    "that is not counted. A decode step is the difference of two calls, of 12 tokens and of 12 and "
    "--steps, over --steps; a prefill is a call for one token: the median of six that follow each "
    "other, each 16 tokens shorter than the one before. Row i uses adapter i mod the number of "
    "adapters, random ones on all linear layers, or on attention and experts. ms is the median "
    "over the rounds; ratio the median of each round's ratio to the first engine, whose LoRA is "
    "off. Wall time; the first round warms up. "
    "answers: before the timing, each engine with LoRA gives 4 greedy tokens per prompt. "
    "positions: tokens up to the first that differs from the reference's, which is included; "
    "steps: how many of them come from decode steps; nearest: how many have log-probabilities "
    "nearer to the reference's with their own adapter than with any other. distance: the mean "
    "|difference| to the reference's with the own adapter; next: with the nearest other one. An "
    "engine of this library is timed only if all its positions are nearest and some come from "
    "decode steps. failed: engines that ended or gave no answer in time; the others went on."
)

Drop = Callable[[str, "EngineFailed"], None]
"""Takes an engine that failed out of those that are timed."""


class EngineFailed(Exception):
    """An engine ended, or gave no answer in time."""


class Process:
    """A worker that runs one engine: JSON in and out, line by line.

    Args:
        worker: the script's name, beside this file.
        spec: its first argument.
        limit: seconds for an answer.
        environment: variables that it gets besides those of this process.
    """

    def __init__(
        self, worker: str, spec: Any, limit: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self._limit = limit
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(worker)), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request, and return its answer; errors as of `answer`."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        except OSError as error:
            raise EngineFailed(f"ended with status {self._process.wait()}") from error
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer.

        Raises:
            EngineFailed: the engine ended, or no answer came in time.
        """
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit)[0]:
            self._process.terminate()  # its own processes end with it
            try:
                self._process.wait(30)  # it holds memory that the others may need
            except subprocess.TimeoutExpired:
                self._process.kill()
            raise EngineFailed(f"no answer in {self._limit:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailed(f"ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the engine and wait for its memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(make: Callable[[Any], Any]) -> None:
    """Make the engine that the first argument describes, then answer each line: a worker's main."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # engines print to the rest
    os.dup2(2, 1)
    contender = make(json.loads(sys.argv[1]))
    print(json.dumps(contender.greeting), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(contender, asked.pop("do"))(**asked)), file=answers)
    contender.close()


def prompts_of(rows: int, length: int) -> list[list[int]]:
    """Return token ids of requests that share nothing."""
    return [
        [(7919 * (row + 1) + 104729 * i * (row + 3)) % 31000 for i in range(length)]
        for row in range(rows)
    ]


def by_model(
    arguments: Options,
    result: Result,
    measure: Callable[[Options, Result, Path, str, float], Iterator[Row]],
) -> Iterator[Row]:
    """Yield the rows of each of `arguments.models`, which share `arguments.seconds` evenly.

    `measure` takes the options, the result, a folder for files, the model's name, and the
    `time.monotonic()` after which it begins no round.
    """
    if any(adapters > arguments.adapters for _, adapters in arguments.cells):
        raise SystemExit(f"a cell has more adapters than --adapters {arguments.adapters}")
    start = time.monotonic()
    for number, kind in enumerate(arguments.models, 1):
        end = start + (arguments.seconds or float("inf")) * number / len(arguments.models)
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(arguments, result, Path(folder), kind, end)
    result["load"] = round(os.getloadavg()[0], 1)  # other processes share caches and memory


def greet(processes: dict[str, Process], drop: Drop) -> dict[str, Any]:
    """Wait until the engines are ready, and return their greetings by name."""
    greetings = {}
    for name, process in list(processes.items()):
        try:
            greetings[name] = process.answer()
            print(f"engine {name!r} is ready: {greetings[name]}", flush=True)
        except EngineFailed as error:
            drop(name, error)
    return greetings


def dropper(processes: dict[str, Process], first: str, failed: dict[str, str]) -> Drop:
    """Return a function that takes out an engine that failed; without the first, nothing goes on.

    Args:
        processes: by the engine's name.
        first: the engine that the others are compared with.
        failed: gets the error by the engine's name.
    """

    def drop(name: str, error: EngineFailed) -> None:
        print(f"engine {name!r} failed: {error}", flush=True)
        if name == first:
            raise SystemExit("the engine that the others are compared with failed") from error
        failed[name] = str(error)
        processes.pop(name)

    return drop


def timed(
    processes: dict[str, Process],
    drop: Drop,
    arguments: Options,
    end: float,
    more: Mapping[str, Any],
) -> Iterator[Row]:
    """Let engines take turns, and yield a row per cell and engine.

    Args:
        processes: by the engine's name; the first is the base of the ratios.
        drop: takes out an engine that fails.
        arguments: `cells` of (rows, adapters), `prefills` of tokens, `prompt`, `steps`, `rounds`
            and `rank`.
        end: `time.monotonic()` after which no round begins.
        more: keys of every row.
    """
    cells = [("decode", *cell, arguments.prompt) for cell in arguments.cells]
    cells += [("prefill", 1, 1, tokens) for tokens in arguments.prefills]
    times: dict[Any, dict[str, list[float]]] = {
        cell: {name: [] for name in processes} for cell in cells
    }
    for turn in range(arguments.rounds + 1):  # the first compiles and warms up
        began = time.monotonic()
        order = list(processes) if turn % 2 else list(processes)[::-1]
        for cell, name in itertools.product(cells, order):
            if name not in processes:  # it failed in this round
                continue
            step, rows, adapters, prompt = cell
            work = {"rows": rows, "adapters": adapters, "prompt": prompt}

            def seconds(
                tokens: int,
                length: int = prompt,
                name: str = name,
                work: dict[str, int] = work,
            ) -> float:
                asked = work | {"prompt": length, "tokens": tokens}
                taken: float = processes[name].ask("seconds", **asked)
                return taken

            try:
                # after the turns of other engines the caches hold nothing of this one
                seconds(1 if step == "prefill" else WARM)
                if step == "prefill":
                    found = statistics.median(
                        [seconds(1, prompt - 16 * i) for i in range(PREFILLS)]
                    )
                else:
                    short = seconds(WARM)
                    found = (seconds(WARM + arguments.steps) - short) / arguments.steps
            except EngineFailed as error:
                drop(name, error)
                for by_name in times.values():
                    del by_name[name]
                continue
            if turn:
                times[cell][name].append(1e3 * found)
        print(f"round {turn} of {arguments.rounds}", flush=True)
        if turn and 2 * time.monotonic() - began > end:  # the next round would end too late
            break
    for (step, rows, adapters, prompt), by_name in times.items():
        base, *_ = by_name.values()
        for name, ms in by_name.items():
            row = {"step": step, "contender": name, "rows": rows, "adapters": adapters}
            row |= {"rank": arguments.rank, "prompt": prompt, "rounds": len(ms), **more}
            yield row | middle_and_ends(ms, 3) | {"ratio": round(median_ratio(ms, base), 3)}


def reference_of(
    process: Process, adapters: list[str], prompts: list[list[int]], names: list[str]
) -> dict[str, Any]:
    """Return an engine's tokens, and its log-probabilities of each of them under each adapter."""
    own = process.ask("answers", prompts=prompts, names=names, tokens=CHECKED)
    tokens = [answer["tokens"] for answer in own]
    longer = [prompts[row] + tokens[row][:k] for k in range(CHECKED) for row in range(len(prompts))]
    every = []  # by adapter, position and row
    for name in adapters:
        found = process.ask("answers", prompts=longer, names=[name] * len(longer), tokens=1)
        tops = [answer["tops"][0] for answer in found]
        every.append([tops[k * len(prompts) :][: len(prompts)] for k in range(CHECKED)])
    return {"tokens": tokens, "every": every}


def compare(
    processes: dict[str, Process],
    drop: Drop,
    others: list[str],
    prompts: list[list[int]],
    names: list[str],
    reference: dict[str, Any],
    found: dict[str, Any],
) -> None:
    """Compare engines' answers with the reference's; an engine that is wrong is not timed.

    Args:
        processes: by the engine's name.
        drop: takes out an engine that fails.
        others: names of engines without this library, which are timed in any case.
        prompts: token ids.
        names: the adapter of each prompt.
        reference: as `reference_of` returns it.
        found: gets the comparison by the engine's name.
    """
    adapters = len(reference["every"])
    for name in [name for name in processes if not name.startswith("off")]:
        try:
            answers = processes[name].ask("answers", prompts=prompts, names=names, tokens=CHECKED)
        except EngineFailed as error:
            drop(name, error)
            continue
        found[name] = agreement(answers, reference, adapters)
        print(f"answers of {name!r}: {found[name]}", flush=True)
        if name not in others and not is_right(found[name]):
            processes.pop(name).close()


def agreement(
    answers: list[dict[str, Any]], reference: dict[str, Any], adapters: int
) -> dict[str, Any]:
    """Compare answers with a reference's under each adapter, up to the first other token."""
    compared, steps, nearest, distances, others = 0, 0, 0, [], []
    for row, answer in enumerate(answers):
        for k, top in enumerate(answer["tops"]):
            if answer["tokens"][:k] != reference["tokens"][row][:k]:
                break
            apart = [_distance(top, of_adapter[k][row]) for of_adapter in reference["every"]]
            own = apart.pop(row % adapters)
            compared += 1
            steps += k > 0
            nearest += own < min(apart, default=float("inf"))
            distances.append(own)
            others.append(min(apart, default=float("nan")))
    found = {"positions": compared, "steps": steps, "nearest": nearest}
    means = {"distance": distances, "next": others}
    return found | {key: round(statistics.fmean(each), 5) for key, each in means.items()}


def is_right(answer: dict[str, Any]) -> bool:
    """Return whether all positions are nearest to their own adapter, and include decode steps."""
    return bool(answer["steps"] > 0 and answer["nearest"] == answer["positions"])


def _distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the mean |difference| of two lists of log-probabilities; absent tokens count as 1."""
    every = one.keys() | other.keys()
    both = one.keys() & other.keys()
    apart = sum(abs(one[token] - other[token]) for token in both) + len(every - both)
    return apart / len(every)


def cell_of(text: str) -> tuple[int, int]:
    """Return the rows and the adapters of a cell such as 64x8."""
    rows, adapters = map(int, text.split("x"))
    return rows, adapters


def checks_of(adapters: int) -> tuple[list[list[int]], list[str]]:
    """Return prompts whose answers are compared, and the adapter of each."""
    prompts = [[(31 * row + 7 * i * i + i) % 31000 for i in range(64)] for row in range(8)]
    return prompts, [f"adapter{row % adapters}" for row in range(len(prompts))]
