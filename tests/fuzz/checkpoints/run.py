"""Reads one random checkpoint folder, and judges the result or the refusal."""

import json
import math
import re
import resource
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lora_backends import LoRABackendError
from lora_backends.adapters import AdapterPool, Checkpoint, read_checkpoint

from ..running import Ran, RunCase, ending_hangs, fault_of_message, untyped
from ..simulation.adapters import faults
from .cases import Case
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

GROWTH_BYTES = 2**30  # of the process, while one case is read


@contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    """Yield a function that reads one case, into a pool too."""
    with tempfile.TemporaryDirectory() as root:
        pool, kept = _pool(Path(root))
        yield lambda number: _read(Case(Path(root) / "case", seed, number), pool, kept)


def _pool(root: Path) -> tuple[AdapterPool, Checkpoint]:
    """Return a pool with an adapter that has to stay as it is."""
    number = next(n for n in range(1000) if Case(root / "kept", -1, n).is_valid)
    kept = read_checkpoint(Case(root / "kept", -1, number).folder, SPECS, MAX_RANK)
    pool = AdapterPool(SPECS, max_adapters=3, max_rank=MAX_RANK)
    pool.add("kept", kept)
    pool.slots.pin("kept")
    return pool, kept


def _read(case: Case, pool: AdapterPool, kept: Checkpoint) -> Ran:
    """Read one case; return what happened and what is wrong with it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        with ending_hangs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = read_checkpoint(case.folder, SPECS, MAX_RANK, case.limits)
            loaded = pool.add("case", checkpoint)
    except LoRABackendError as error:
        outcome, fault = f"refused: {type(error).__name__}", _fault_of_refusal(case, error)
    except BaseException as error:
        return untyped(error, case.steps)
    else:
        outcome, fault = _compare(case, checkpoint)
        fault = fault or next(iter(faults(pool, {"case": checkpoint, "kept": kept})), None)
        if loaded.name in pool.slots:
            pool.unload("case")
    fault = fault or next(iter(faults(pool, {"kept": kept})), None)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if after - before > GROWTH_BYTES:
        fault = f"took {after - before} bytes; {fault}"
    return Ran(outcome, fault, case.steps)


def _fault_of_refusal(case: Case, error: LoRABackendError) -> str | None:
    message = str(error)
    if case.is_valid:
        return f"a valid folder is refused: {message}"
    if str(case.folder) not in message:
        return f"a message that does not name the folder: {message[:300]}"
    return fault_of_message(message)


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
    tensors = {_without_name(key, tensors): tensor for key, tensor in tensors.items()}
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


def _without_name(key: str, tensors: Any) -> str:
    """Return a key as `save_pretrained` writes it: without the name that a model gives it."""
    short = re.sub(r"(\.lora_\w+)\.default(?=\.weight$|\.bias$|$)", r"\1", key)
    return key if short in tensors else short


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
