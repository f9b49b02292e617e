"""A step of the real vLLM on GPUs: LoRA off, vLLM's own operators and this library, in turns.

Run it where vLLM is installed: python benchmarks/run.py vllm_gpu
Weights are random. Before the timing, each engine's answers are compared with those of vLLM's own
operators under each adapter.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_models import LLAMA_8B, MIXTRAL, QWEN3_MOE, Shape, save_adapters, save_config
from engine_processes import (
    METHOD,
    WARM,
    EngineFailed,
    Process,
    by_model,
    cell_of,
    checks_of,
    compare,
    dropper,
    greet,
    reference_of,
    timed,
)
from measuring import Measurement, Options, Result, Row, flag

from lora_backends.bench.results import versions

MODELS: dict[str, Shape] = {
    "dense": replace(LLAMA_8B, vocabulary=128256),
    "fp8": replace(LLAMA_8B, vocabulary=128256),
    "qwen3-moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
}
OWN = ["off", "own", "own_replicated"]
"""Engines without this library; own_replicated: vLLM's operators, not fully sharded."""
GRAPHS = "+graphs"
"""Ends the name of an engine that captures CUDA graphs of the timed prefills, too."""
FIRST_ROWS = [1, 7, 40]
FIRST_PROMPTS = [24, 300, 700, 3000]
"""Sizes of batches whose first run is compared with the second, to find stalls."""


def engine(
    name: str,
    options: dict[str, Any],
    adapters: dict[str, str],
    limit: float,
    prefills: Sequence[int],
) -> Process:
    """Start vLLM with one setting of LoRA.

    Args:
        name: "off", "own", "own_replicated" or the name of a backend of this library; `GRAPHS`
            may follow.
        options: vLLM's.
        adapters: folders by name.
        limit: seconds for an answer.
        prefills: tokens of the timed prefills.
    """
    options, captured = dict(options), options["compilation_config"]
    if name.endswith(GRAPHS):
        sizes = {*captured["cudagraph_capture_sizes"], *prefills}
        options["compilation_config"] = captured | {"cudagraph_capture_sizes": sorted(sizes)}
    name = name.removesuffix(GRAPHS)
    backend = "" if name in OWN else name
    if name == "off":
        options = {key: value for key, value in options.items() if "lora" not in key}
        adapters = {}
    if name == "own_replicated":
        options["fully_sharded_loras"] = False
    place = Path(tempfile.mkdtemp())  # kernels and programs that no other engine has compiled
    environment = {
        "VLLM_CACHE_ROOT": str(place / "vllm"),
        "TRITON_CACHE_DIR": str(place / "triton"),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if options["tensor_parallel_size"] == 1:  # steps without messages between processes
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    spec = {"backend": backend, "options": options, "adapters": adapters}
    return Process("vllm_worker.py", spec, limit, environment)


def engine_options(arguments: Options, kind: str, folder: Path) -> dict[str, Any]:
    """Return vLLM's options, the same for every engine but for LoRA and graphs of prefills."""
    tokens = arguments.prompt + WARM + arguments.steps
    most = max(rows for rows, _ in arguments.cells)
    longest = max(*arguments.prefills, *FIRST_PROMPTS, tokens)
    options = {
        "model": str(save_config(folder / "model", MODELS[kind])),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": longest + 16,
        "max_num_seqs": max(16, most),
        "max_num_batched_tokens": max(8192, *arguments.prefills),
        "gpu_memory_utilization": arguments.memory,
        "kv_cache_memory_bytes": int(arguments.kv_gib * 2**30),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "generation_config": "vllm",
        "tensor_parallel_size": arguments.tensor_parallel,
        "enable_lora": True,
        "max_loras": arguments.adapters,
        "max_lora_rank": arguments.rank,
        "max_cpu_loras": arguments.adapters,
        "fully_sharded_loras": arguments.fully_sharded,
        "compilation_config": {
            "cudagraph_capture_sizes": sorted({rows for rows, _ in arguments.cells})
        },
    }
    if arguments.tensor_parallel > 1:
        options["distributed_executor_backend"] = "mp"
    return options | ({"quantization": "fp8"} if kind == "fp8" else {})


def measure(
    arguments: Options, result: Result, folder: Path, kind: str, end: float
) -> Iterator[Row]:
    """Build the engines of one model, check their answers, and yield a row per cell and engine."""
    import torch

    adapters = save_adapters(
        folder, arguments.adapters, MODELS[kind], arguments.rank, torch.bfloat16
    )
    options = engine_options(arguments, kind, folder)
    print("building the engines ...", flush=True)
    processes = {
        name: engine(name, options, adapters, arguments.limit, arguments.prefills)
        for name in arguments.engines
    }
    failed = result.setdefault("failed", {}).setdefault(kind, {})
    drop = dropper(processes, arguments.engines[0], failed)
    found = greet(processes, drop)
    result.setdefault("start_s", {})[kind] = {name: each["start_s"] for name, each in found.items()}
    stalls = result.setdefault("stalls", {})[kind] = {}
    for name in list(processes):
        try:
            stalls[name] = processes[name].ask("stalls", rows=FIRST_ROWS, prompts=FIRST_PROMPTS)
        except EngineFailed as error:
            drop(name, error)
    print(f"stalls of first batches: {stalls}", flush=True)
    if "own" in processes:
        prompts, names = checks_of(arguments.adapters)
        reference = reference_of(processes["own"], list(adapters), prompts, names)
        answers = result.setdefault("answers", {}).setdefault(kind, {})
        others = [*OWN, *(name + GRAPHS for name in OWN)]
        compare(processes, drop, others, prompts, names, reference, answers)
    yield from timed(processes, drop, arguments, end, {"model": kind})
    for process in processes.values():
        process.close()


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per model, cell and engine."""
    import vllm

    result["versions"] |= {"vllm": vllm.__version__, **versions("lora-backends")}
    yield from by_model(arguments, result, measure)


def summary(result: Result) -> dict[str, float]:
    """Return the ratio of each row, by its name."""
    names = {
        "prefill": "{model} prefill {contender} {prompt}",
        "decode": "{model} decode {contender} {rows}x{adapters}",
    }
    return {names[row["step"]].format(**row): row["ratio"] for row in result["rows"]}


STEP = Measurement(
    rows=measure_all,
    file=lambda o: f"vllm_step_gpu{'_' * bool(o.name)}{o.name}.json",
    method=(
        f"{METHOD} NAME{GRAPHS}: the engine also captures CUDA graphs of the timed prefills. "
        "The reference is vLLM's own operators. start_s: seconds until an engine is "
        "ready, with empty caches of kernels and programs. stalls: the most seconds by which a "
        "first batch of some size takes longer than the second one."
    ),
    settings=lambda o: {
        "device": "cuda",
        "tensor_parallel": o.tensor_parallel,
        "fully_sharded": o.fully_sharded,
        "load": None,
    },
    summary=summary,
    partial=True,
    options={
        "--models": flag(["dense"], choices=list(MODELS)),
        "--name": flag("", "ends the name of the result file"),
        "--engines": flag(
            ["off", "own", "auto"],
            "the first is the base of the ratios; NAME+graphs captures graphs of the prefills",
        ),
        "--cells": flag([(64, 8), (8, 8), (64, 1)], type=cell_of, metavar="ROWSxADAPTERS"),
        "--adapters": flag(8, "that engines have room for"),
        "--rank": flag(16),
        "--prompt": flag(128),
        "--prefills": flag([1024, 8192], "tokens of the prefills that are timed"),
        "--steps": flag(96),
        "--rounds": flag(5),
        "--seconds": flag(0, "after which no round begins; 0: all rounds"),
        "--memory": flag(0.2, "vLLM's gpu_memory_utilization"),
        "--kv-gib": flag(2.5, "memory of the caches of keys and values"),
        "--limit": flag(300.0, "seconds for an engine to start, or to answer"),
        "--tensor-parallel": flag(1, "GPUs of an engine"),
        "--fully-sharded": flag(False, "vLLM's fully_sharded_loras"),
    },
)
