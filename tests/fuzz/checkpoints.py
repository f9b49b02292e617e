"""Reads random checkpoint folders: the right result or a typed error, soon, and nothing else.

    python -m tests.fuzz.checkpoints --cases 20000 --seed 0 --result fuzz.json

The same command goes on where the last one ended. A case is made anew from its number alone:
`--only NUMBER` repeats one, with its traceback.
"""

import argparse
import json
import math
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lora_backends import LoRABackendError
from lora_backends.adapters import AdapterPool, Checkpoint, read_checkpoint

from .checkpoint_cases import Case
from .folders import (
    CONFIG,
    MAX_RANK,
    PICKLE,
    PREFIX,
    SAFETENSORS,
    SPECS,
    alpha_of,
    is_targeted,
    rank_of,
)
from .interrupts import faults

SLOW_SECONDS, HANG_SECONDS = 5.0, 60.0
GROWTH_BYTES = 2**30  # of the process, while one case is read
MOST_BYTES = 2**34  # address space of the process
BETWEEN_WRITES = 200


class HangError(BaseException):
    """A case took so long that it was ended."""


def read_all(
    cases: int, seed: int, result: dict[str, Any], tell: Callable[[dict[str, Any]], None]
) -> None:
    """Read the cases that a result does not have yet; `tell` is called now and then."""
    counts = Counter(result["outcomes"])
    with tempfile.TemporaryDirectory() as root:
        pool, kept = _pool(Path(root))
        for number in range(result["done"], cases):
            case = Case(Path(root) / "case", seed, number)
            start = time.perf_counter()
            outcome, fault = _read(case, pool, kept)
            seconds = time.perf_counter() - start
            counts[outcome] += 1
            if seconds > SLOW_SECONDS:
                fault = f"took {seconds:.1f} s; {fault}"
            if fault:
                result["faults"].append({"case": number, "steps": case.steps, "fault": fault})
            slowest = max((seconds, number), tuple(result["slowest"]))
            result |= {"done": number + 1, "outcomes": dict(counts), "slowest": list(slowest)}
            if (number + 1) % BETWEEN_WRITES == 0:
                tell(result)
    tell(result)


def _pool(root: Path) -> tuple[AdapterPool, Checkpoint]:
    """Return a pool with an adapter that has to stay as it is."""
    number = next(n for n in range(1000) if Case(root / "kept", -1, n).is_valid)
    kept = read_checkpoint(Case(root / "kept", -1, number).folder, SPECS, MAX_RANK)
    pool = AdapterPool(SPECS, max_adapters=3, max_rank=MAX_RANK)
    pool.add("kept", kept)
    pool.slots.pin("kept")
    return pool, kept


def _read(case: Case, pool: AdapterPool, kept: Checkpoint) -> tuple[str, str | None]:
    """Read one case, into a pool too; return what happened and what is wrong with it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with _ending_hangs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = read_checkpoint(case.folder, SPECS, MAX_RANK, case.limits)
            loaded = pool.add("case", checkpoint)
    except LoRABackendError as error:
        outcome, fault = f"refused: {type(error).__name__}", _fault_of_refusal(case, error)
    except HangError:
        return "hang", f"no answer within {HANG_SECONDS:.0f} s"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "untyped", f"{type(error).__name__}: {str(error)[:300]}\n{traceback.format_exc()}"
    else:
        outcome, fault = _compare(case, checkpoint)
        fault = fault or next(faults(pool, {"case": checkpoint, "kept": kept}), None)
        if loaded.name in pool.slots:
            pool.unload("case")
    fault = fault or next(faults(pool, {"kept": kept}), None)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if after - before > GROWTH_BYTES:
        fault = f"took {after - before} bytes; {fault}"
    return outcome, fault


@contextmanager
def _ending_hangs() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise HangError

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _fault_of_refusal(case: Case, error: LoRABackendError) -> str | None:
    message = str(error)
    if case.is_valid:
        return f"a valid folder is refused: {message}"
    if not 20 < len(message) < 10_000:
        return f"a message of {len(message)} characters"
    if str(case.folder) not in message:
        return f"a message that does not name the folder: {message[:300]}"
    return None


def _compare(case: Case, checkpoint: Checkpoint) -> tuple[str, str | None]:
    """Compare with what the libraries that wrote the files read, and with PEFT's rules.

    torch reads records of an archive that say nothing about tensors, and may stumble over them.
    """
    config = json.loads((case.folder / CONFIG).read_bytes())
    path = case.folder / SAFETENSORS
    if path.exists():
        return "read", _fault_of_result(config, load_file(path), checkpoint)
    try:
        tensors = torch.load(case.folder / PICKLE, weights_only=True, map_location="cpu")
    except Exception as error:
        return f"read, torch: {type(error).__name__}", None
    return "read", _fault_of_result(config, tensors, checkpoint)


def _fault_of_result(config: dict[str, Any], tensors: Any, checkpoint: Checkpoint) -> str | None:
    expected = {}
    for key, tensor in tensors.items():
        for part in ("lora_A.weight", "lora_embedding_A"):
            if key.endswith(f".{part}"):
                expected[key.removeprefix(PREFIX).removesuffix(f".{part}")] = tensor
    if set(expected) != set(checkpoint.modules):
        return f"modules {sorted(checkpoint.modules)}, expected {sorted(expected)}"
    for module, delta in checkpoint.modules.items():
        fault = _fault_of_delta(config, tensors, module, delta)
        if fault:
            return f"{module}: {fault}"
    return None


def _fault_of_delta(config: dict[str, Any], tensors: Any, module: str, delta: Any) -> str | None:
    spec, root = SPECS[module], f"{PREFIX}{module}.lora_"
    parts = ("A.weight", "B.weight") if spec.kind == "linear" else ("embedding_A", "embedding_B")
    rank = rank_of(config, module)
    scaling = alpha_of(config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    whole = scaling * (spec.embed_scale if spec.kind == "embedding" else 1.0)
    bias = tensors.get(f"{root}B.bias")
    if not is_targeted(config, module):
        return "not targeted"
    if delta.rank != rank or delta.scaling != whole:
        return f"rank {delta.rank} and scaling {delta.scaling}, expected {rank} and {whole}"
    for part, mine in zip(parts, (delta.lora_a, delta.lora_b), strict=True):
        if not torch.equal(tensors[root + part].detach(), mine):
            return f"{part} differs"
    if (bias is None) != (delta.bias is None):
        return "a bias is lost or made up"
    if bias is not None and not torch.equal(bias.detach().float() * scaling, delta.bias):
        return "the bias differs"
    return None


def new_result(seed: int) -> dict[str, Any]:
    """Return the result before the first case."""
    return {"seed": seed, "done": 0, "outcomes": {}, "slowest": [0.0, -1], "faults": []}


def main() -> int:
    """Read cases until there are as many as asked for; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--only", type=int, help="the number of one case to repeat")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(ValueError, OSError):  # what takes all memory shall end here, not the machine
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    if given.only is not None:
        return repeat(given.seed, given.only)
    result = new_result(given.seed)
    if given.result is not None and given.result.exists():
        result = json.loads(given.result.read_text())
        if result["seed"] != given.seed:
            parser.error(f"{given.result} is of seed {result['seed']}")

    def tell(found: dict[str, Any]) -> None:
        if given.result is not None:
            given.result.write_text(json.dumps(found, indent=1))
        print(found["done"], found["outcomes"], f"{len(found['faults'])} faults", flush=True)

    read_all(given.cases, given.seed, result, tell)
    return bool(result["faults"])


def repeat(seed: int, number: int) -> int:
    """Read one case again, with the traceback of what it raises."""
    with tempfile.TemporaryDirectory() as root:
        case = Case(Path(root) / "case", seed, number)
        print(case.steps, case.limits, case.config, sep="\n")
        print(read_checkpoint(case.folder, SPECS, MAX_RANK, case.limits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
