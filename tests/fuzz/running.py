"""What the fuzzers share: cases by number, their time limits, result files and command lines."""

import argparse
import fcntl
import json
import os
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lora_backends.adapters.files import folders
from lora_backends.bench.results import new_result as new_measurement
from lora_backends.bench.results import write_whole

SLOW_SECONDS, HANG_SECONDS = 5.0, 60.0
MOST_BYTES = 2**34  # address space of the process
BETWEEN_WRITES = 200
MOST_LINES, MOST_CHARACTERS = 60, 6_000  # of a message: a screen

Result = dict[str, Any]


class HangError(BaseException):
    """A case took so long that it was ended."""


class Ran(NamedTuple):
    """One case after its run."""

    outcome: str
    fault: str | None  # None: it behaved
    steps: list[str]  # what was done to it


RunCase = Callable[[int], Ran]
OpenFuzzer = Callable[[int], AbstractContextManager[RunCase]]  # from a seed


def new_result(seed: int) -> Result:
    """Return the result before the first case."""
    return {"seed": seed, "done": 0, "outcomes": {}, "slowest": [0.0, -1], "faults": []}


def run_cases(run: RunCase, cases: int, result: Result, tell: Callable[[Result], None]) -> None:
    """Run the cases that a result does not have yet; `tell` is called now and then."""
    counts = Counter(result["outcomes"])
    for number in range(result["done"], cases):
        start, delay = time.perf_counter(), _delay()
        ran = run(number)
        seconds = time.perf_counter() - start - (_delay() - delay)
        counts[ran.outcome] += 1
        fault = ran.fault
        if seconds > SLOW_SECONDS:
            fault = f"took {seconds:.1f} s; {fault}"
        if fault:
            result["faults"].append({"case": number, "steps": ran.steps, "fault": fault})
        slowest = max((seconds, number), tuple(result["slowest"]))
        result |= {"done": number + 1, "outcomes": dict(counts), "slowest": list(slowest)}
        if (number + 1) % BETWEEN_WRITES == 0:
            tell(result)
    tell(result)


def _delay() -> float:
    """Return the seconds that this thread has waited for a core: other programs' fault."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@contextmanager
def ending_hangs() -> Iterator[None]:
    """Raise HangError inside the block when it takes too long."""

    def end(*_: Any) -> None:
        raise HangError

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def untyped(error: BaseException, steps: list[str]) -> Ran:
    """Return the outcome of an error that is not the library's own."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, HangError):
        return Ran("hang", f"no answer within {HANG_SECONDS:.0f} s", steps)
    text = f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()[-3000:]}"
    return Ran("untyped", text, steps)


def fault_of_message(message: str) -> str | None:
    """Return why a message does not help its reader: too short, beyond a screen, or unprintable."""
    lines = message.splitlines()
    if len(message) < 20:
        return f"a message of {len(message)} characters: {message!r}"
    if len(message) > MOST_CHARACTERS or len(lines) > MOST_LINES:
        return f"a message of {len(message)} characters, {len(lines)} lines: {message[:600]}"
    if "Traceback (most recent call last)" in message:
        return f"a traceback: {message[-600:]}"
    controls = {character for character in message if character < " "} - set("\n\t")
    if controls:
        return f"control characters {controls} in a message: {message[:600]!r}"
    return None


def main(name: str, about: str | None, opens: OpenFuzzer) -> int:
    """Run the cases that a command line asks for; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--only", type=int, help="the number of one case to repeat")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folders.TICK_S = 0.0  # as in tests/conftest.py
    with suppress(ValueError, OSError):  # what takes all memory shall end here, not the machine
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with opens(given.seed) as run:
        if given.only is not None:
            print(*run(given.only), sep="\n")
            return 0
        result = kept(given.result, name) or new_result(given.seed)
        if result["seed"] != given.seed:
            parser.error(f"{given.result} is of seed {result['seed']}")

        def tell(found: Result) -> None:
            if given.result is not None:
                keep(given.result, name, found)
            print(found["done"], found["outcomes"], f"{len(found['faults'])} faults", flush=True)

        run_cases(run, given.cases, result, tell)
    return bool(result["faults"])


def kept(path: Path | None, name: str) -> Result | None:
    if path is None or not path.exists():
        return None
    found: Result | None = json.loads(path.read_text()).get(name)
    return found


def keep(path: Path, name: str, result: Result) -> None:
    """Write the part of a result file that is one fuzzer's; several may run at once."""
    where = new_measurement(f"python -m tests.fuzz.{name}")
    told = {key: where[key] for key in ("method", "device", "versions", "date")}
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        whole = json.loads(path.read_text()) if path.exists() else {}
        whole[name] = told | result
        write_whole(path, json.dumps(whole, indent=1) + "\n")
    finally:
        os.close(folder)
