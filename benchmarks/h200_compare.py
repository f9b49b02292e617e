"""Compares two source trees of the package on one GPU, cell by cell.

Each tree runs in a process of its own, with that tree first in sys.path. Within a cell the trees
take turns (old, new, old, new), so a clock that drifts meets both alike. The time of a cell is that
of one `run_linear` into an existing y, replayed from a CUDA graph that runs the call over many
layers with different weights (240 MB or more in all); medians of timings of 10 replays. Both trees
get the same seeds, and each result is compared with float32 products before it is timed.

    python3 benchmarks/h200_compare.py ../old ../new --backend triton --backend csgmv \
        --output compare.json

Needs torch and Triton; the package need not be installed. A cell that fails is recorded, and its
process is replaced if the error has ended it. Efficiency = modelled minimum time / measured time.
Each tree makes its cells and its clock with its `lora_backends.bench`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compare_worker import serve

PEERS = Path(__file__).parent / "peers" / "h200.json"
TREES = ("old", "new")
DECODE_TOKENS = 256  # batches of at most as many tokens count as decode
SLOWER = 1.03  # new over old from which a cell is listed, after a second look
REPLY_SECONDS = 60.0  # a worker that takes longer is replaced
FORMAT = "lora-backends results 2"  # of lora_backends.bench.results, which old trees lack

Request = dict[str, Any]
Reply = dict[str, Any]


class WorkerError(Exception):
    """A request failed; the message says why."""


class Process:
    """A worker process, started anew after it has died.

    Args:
        tree: its source tree.
        device: where its cells run.
    """

    def __init__(self, tree: Path, device: str) -> None:
        self._given = tree, device
        self._process: Any = None

    def ask(self, op: str, **request: Any) -> Reply:
        """Return the reply to a request.

        Raises:
            WorkerError: the request failed, or the process died or did not answer in time.
        """
        if self._process is None or not self._process.is_alive():
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            self._process = spawn.Process(target=serve, args=(*self._given, other), daemon=True)
            self._process.start()
            other.close()  # so that the worker's end closes with the worker
        try:
            self._pipe.send((op, request))
            if not self._pipe.poll(REPLY_SECONDS):
                self.close()
                raise WorkerError(f"no reply in {REPLY_SECONDS:.0f} s")
            reply: Reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            status = self._process.exitcode
            self.close()
            raise WorkerError(f"the process has ended: exit status {status}") from error
        if "error" in reply:
            if reply["fatal"]:
                self.close()
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None


def warm(trees: dict[str, Path], todo: Sequence[Request], device: str, most: int) -> str:
    """Compile the kernels of all cells into Triton's cache, several processes a tree."""
    start = time.perf_counter()
    failed: list[str] = []  # met again, and recorded, when the cell is timed
    jobs = [(tree, todo[i::most]) for tree in set(trees.values()) for i in range(most)]

    def run(job: tuple[Path, Sequence[Request]]) -> None:
        tree, requests = job
        if not requests:
            return
        process = Process(tree, device)
        for request in requests:
            try:
                process.ask("warm", **request)
            except WorkerError as error:
                failed.append(str(error))
        process.close()

    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        list(pool.map(run, jobs))
    seconds = time.perf_counter() - start
    text = f"compiled ahead in {seconds:.0f} s"
    return text + (f", {len(failed)} failed, first: {failed[0]}" if failed else "")


def compare_cell(
    processes: dict[str, Process], request: Request, timings: int, replays: int
) -> dict[str, Any]:
    """Return both trees' times of a cell, or their errors."""
    found: dict[str, Any] = {}
    digests: dict[str, str] = {}
    times: dict[str, list[float]] = {name: [] for name in TREES}

    def turns(rounds: int) -> None:
        for _, name in itertools.product(range(rounds), TREES):
            if f"{name}_error" in found:
                continue
            try:
                reply = processes[name].ask("cell", timings=timings, replays=replays, **request)
                times[name] += reply["us"]
                digests[name] = reply["digest"]
            except WorkerError as error:
                found[f"{name}_error"] = str(error)

    turns(2)
    if not found and _ratio(times) > SLOWER:
        turns(3)  # a second look, for both
    for name, series in times.items():
        if f"{name}_error" not in found:
            found[f"{name}_us"] = round(statistics.median(series), 3)
    if all(f"{name}_us" in found for name in TREES):
        found["ratio"] = round(_ratio(times), 4)
        found["timings"] = len(times["old"])
        found["same_bits"] = digests["old"] == digests["new"]
    return found


def _ratio(times: dict[str, list[float]]) -> float:
    return statistics.median(times["new"]) / statistics.median(times["old"])


def compare_host(
    processes: dict[str, Process], request: Request, rounds: int, calls: int
) -> dict[str, Any]:
    """Return medians of host times of both trees, timed in turns, or the error."""
    series: dict[str, list[Reply]] = {name: [] for name in TREES}
    try:
        for _ in range(rounds):
            for name in TREES:
                series[name].append(processes[name].ask("host", calls=calls, **request))
    except WorkerError as error:
        return {"error": str(error)}
    return {
        key: {
            name: round(statistics.median(reply[key] for reply in series[name]), 2)
            for name in TREES
        }
        for key in series["old"][0]
    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return geometric means of efficiency, the worst ratio, and the cells over `SLOWER`."""
    both = [row for row in rows if "ratio" in row]
    summary: dict[str, Any] = {
        "cells": len(rows),
        "compared": len(both),
        "same_bits": sum(row["same_bits"] for row in both),
    }
    for phase in ("decode", "prefill"):
        mine = [row for row in both if (row["tokens"] <= DECODE_TOKENS) is (phase == "decode")]
        if mine:
            means = {
                name: statistics.geometric_mean(row["limit_us"] / row[f"{name}_us"] for row in mine)
                for name in TREES
            }
            summary[phase] = {
                "cells": len(mine),
                **{name: round(mean, 4) for name, mean in means.items()},
                "new_over_old": round(means["new"] / means["old"], 4),
                "worst_ratio": max(row["ratio"] for row in mine),
            }
    keys = ("projection", "tokens", "adapters", "rank", "mix", "ratio")
    slower = sorted((r for r in both if r["ratio"] > SLOWER), key=lambda r: -r["ratio"])
    summary["slower"] = [{key: row[key] for key in keys} for row in slower]
    summary["failed"] = [
        {key: row.get(key) for key in keys[:5]}
        | {key: row[key] for key in row if key.endswith("error") and isinstance(row[key], str)}
        for row in rows
        if "ratio" not in row
    ]
    return summary


def read_cells(peers: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Return the cells of the peers' file and their limits, those of one layer together."""
    cells = []
    for row in peers["rows"]:
        width, slices = peers["projections"][row["projection"]]
        cell = {"projection": row["projection"], "in_features": width, "output_slices": slices}
        cell |= {"tokens": row["tokens"], "adapters": row["active_adapters"]}
        cells.append((cell | {"rank": row["rank"], "mix": row["mix"]}, row["limit_us"]))
    return sorted(cells, key=lambda pair: _layers_first(pair[0]))


def _layers_first(cell: dict[str, Any]) -> tuple[Any, ...]:
    slots = max(8, cell["adapters"])  # of a stack
    return cell["projection"], slots, cell["rank"], cell["tokens"]


def parse_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return BACKEND.KEY=VALUE as a dict per backend; a value is JSON, else a string."""
    options: dict[str, dict[str, Any]] = {}
    for item in given:
        key, equals, value = item.partition("=")
        backend, dot, option = key.partition(".")
        if not (backend and dot and option and equals):
            raise SystemExit(f"--option {item!r}: allowed: BACKEND.KEY=VALUE")
        try:
            options.setdefault(backend, {})[option] = json.loads(value)
        except ValueError:
            options.setdefault(backend, {})[option] = value
    return options


def run(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Fill `result`, cell by cell."""
    end = time.monotonic() + arguments.budget
    backends, options = arguments.backend or ["triton"], parse_options(arguments.option)
    trees = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    cells = read_cells(json.loads(arguments.peers.read_text()))
    requests = {name: {"backend": name, "options": options.get(name, {})} for name in backends}
    processes = {name: Process(tree, arguments.device) for name, tree in trees.items()}
    try:
        result["trees"] = {name: str(tree) for name, tree in trees.items()}
        result["options"] = options
        result |= processes["old"].ask("hello")
        processes["new"].ask("hello")
        limits = [limit for _, limit in cells for _ in requests]
        todo = [{**request, "cell": cell} for cell, _ in cells for request in requests.values()]
        if arguments.jobs:
            result["compiling"] = warm(trees, todo, arguments.device, arguments.jobs)
            print(result["compiling"], flush=True)
        for name in backends:  # the first call of a backend loads and allocates
            result["host_us"][name] = compare_host(
                processes, requests[name], arguments.host_rounds, arguments.host_calls
            )
        for request, limit in zip(todo, limits, strict=True):
            row = {"backend": request["backend"], **request["cell"], "limit_us": limit}
            result["rows"].append(row)
            if time.monotonic() > end:
                row["error"] = "not run: the budget is used up"
                continue
            row |= compare_cell(processes, request, arguments.timings, arguments.replays)
            print(row_text(row), flush=True)
    finally:
        for process in processes.values():
            process.close()


def row_text(row: dict[str, Any]) -> str:
    """Return a cell as a line."""
    batch = f"{row['backend']:10}{row['projection']:8}{row['tokens']:5}{row['adapters']:4}"
    text = f"{batch}{row['rank']:4} {row['mix']:8}"
    if "ratio" in row:
        bits = "same bits" if row["same_bits"] else ""
        return f"{text}{row['old_us']:9.2f}{row['new_us']:9.2f} us{row['ratio']:7.3f}  {bits}"
    return text + "  ".join(f"{k}: {v}" for k, v in row.items() if k.endswith("error"))


def print_table(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"\n{'':10}{'':8}{'cells':>6}{'old':>8}{'new':>8}{'new/old':>9}{'worst time ratio':>18}")
    for backend, found in result["summary"].items():
        for phase in ("decode", "prefill"):
            if phase in found:
                one = found[phase]
                print(
                    f"{backend:10}{phase:8}{one['cells']:6}{one['old']:8.4f}{one['new']:8.4f}"
                    f"{one['new_over_old']:9.4f}{one['worst_ratio']:18.4f}"
                )
        print(f"{backend:10}same bits in {found['same_bits']} of {found['compared']} cells")
        for row in found["slower"]:
            print(f"{backend:10}over {SLOWER}: {row}")
        for row in found["failed"]:
            print(f"{backend:10}failed: {row}")
    for backend, times in result["host_us"].items():
        print(f"{backend:10}host us: {json.dumps(times)}")


def main() -> None:
    """Compare, print a table last, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="the source tree to compare with")
    parser.add_argument("new", type=Path, help="the source tree under test")
    parser.add_argument("--backend", action="append", help="may be repeated; triton if left out")
    parser.add_argument("--option", action="append", default=[], metavar="BACKEND.KEY=VALUE")
    parser.add_argument("--output", type=Path, default=Path("h200_compare.json"))
    parser.add_argument("--peers", type=Path, default=PEERS, help="cells and limits")
    parser.add_argument("--device", default="cuda", help="cpu tries the script out")
    parser.add_argument("--budget", type=float, default=225.0, help="seconds; later cells are left")
    parser.add_argument("--timings", type=int, default=5)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--host-rounds", type=int, default=3)
    parser.add_argument("--host-calls", type=int, default=1000)
    jobs = max(1, min(8, (os.cpu_count() or 2) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help="compiling processes a tree; or 0")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "method": " ".join((__doc__ or "").split("\n\n")[1].split()),
        "rows": [],
        "summary": {},
        "host_us": {},
    }
    try:
        run(arguments, result)
    finally:  # keeps the rows measured before an interruption
        names = dict.fromkeys(row["backend"] for row in result["rows"])
        result["summary"] = {
            name: summarize([row for row in result["rows"] if row["backend"] == name])
            for name in names
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
        print_table(result)
        print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
