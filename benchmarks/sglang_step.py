"""A step of the real SGLang: LoRA off, its own LoRA backends and this library, in turns.

Run it where SGLang is installed, on one GPU: python benchmarks/run.py sglang_step
Models have random weights: one of the shape of an 8B Llama, and eight layers of Qwen3-30B-A3B. On
a CPU, where `make test-sglang` makes .venv-sglang, they are SmolLM2 and a tiny mixture. Before the
timing, each engine's answers are compared with torch_ref's under each adapter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_models import LLAMA_8B, QWEN3_MOE, SMOLLM2, TINY_MOE, save_adapters, save_model
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
from measuring import ROOT, Measurement, Options, Result, Row, flag

from lora_backends.bench.results import versions

ON_GPU = torch.cuda.is_available()
MODELS = {"dense": LLAMA_8B, "experts": QWEN3_MOE}
if not ON_GPU:
    MODELS = {"dense": SMOLLM2, "experts": TINY_MOE}
OWN = ["off", "csgmv", "triton", "torch_native"]
"""Engines without this library."""


def engine(name: str, options: dict[str, Any], adapters: dict[str, str], limit: float) -> Process:
    """Start SGLang with one setting of LoRA.

    Args:
        name: "off", one of SGLang's own LoRA backends, or the name of a backend of this library;
            "ours:triton" is this library's.
        options: SGLang's.
        adapters: folders by name.
        limit: seconds for an answer.
    """
    options = dict(options)
    if name == "off":
        adapters = {}
    else:
        options |= {"enable_lora": True, "lora_paths": adapters}
        options |= {"lora_backend": name if name in OWN else OWN[1 if ON_GPU else 3]}
    if name == "torch_ref":
        options["disable_cuda_graph"] = True
    backend = "" if name in OWN else name.removeprefix("ours:")
    spec = {"backend": backend, "options": options, "names": list(adapters)}
    return Process("sglang_worker.py", spec, limit)


def engine_options(arguments: Options, model: Path) -> dict[str, Any]:
    """Return SGLang's options, the same for every engine but for LoRA."""
    most = max(rows for rows, _ in arguments.cells)
    prefill = max(arguments.prefills)
    longest = max(arguments.prompt + WARM + arguments.steps, prefill + 1)
    options = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "attention_backend": "triton" if ON_GPU else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": arguments.memory,
        "max_running_requests": max(16, most),
        "chunked_prefill_size": max(prefill, 1024),
        "max_prefill_tokens": max(prefill, 1024),
        "max_total_tokens": max(most * (arguments.prompt + WARM + arguments.steps), 2 * longest),
        "context_length": longest + 64,
        "random_seed": 0,
        "log_level": "warning",
        "max_loras_per_batch": arguments.adapters + 1,
        "max_lora_rank": arguments.rank,
    }
    if not ON_GPU:
        return options | {"device": "cpu", "disable_cuda_graph": True}
    options["cuda_graph_bs_decode"] = sorted({rows for rows, _ in arguments.cells})
    if not arguments.prefill_graphs:
        options["disable_prefill_cuda_graph"] = True
    return options


def measure(
    arguments: Options, result: Result, folder: Path, kind: str, end: float
) -> Iterator[Row]:
    """Build the engines of one model, check their answers, and yield a row per cell and engine."""
    dtype, shape = getattr(torch, arguments.dtype), MODELS[kind]
    if shape is SMOLLM2:
        model = Path(os.environ.get("SMOLLM2", str(ROOT / ".venv-sglang" / "smollm2")))
    else:  # SGLang's dummy weights would also replace those of adapters
        print("saving the model ...", flush=True)
        model = save_model(folder / "model", shape, dtype, "cuda" if ON_GPU else "cpu")
    adapters = save_adapters(folder, arguments.adapters, shape, arguments.rank, dtype)
    options = engine_options(arguments, model)
    prompts, names = checks_of(arguments.adapters)
    reference = None
    if arguments.reference == "torch_ref":
        print("building the reference ...", flush=True)
        # it runs alone: one more engine would not fit beside those that are timed
        torch_ref = engine("torch_ref", options, adapters, arguments.limit)
        try:
            torch_ref.answer()
            reference = reference_of(torch_ref, list(adapters), prompts, names)
        except EngineFailed as error:
            raise SystemExit(f"the reference torch_ref failed: {error}") from error
        torch_ref.close()
    print("building the engines ...", flush=True)
    processes = {
        name: engine(name, options, adapters, arguments.limit) for name in arguments.engines
    }
    failed = result.setdefault("failed", {}).setdefault(kind, {})
    drop = dropper(processes, arguments.engines[0], failed)
    greet(processes, drop)
    if reference is None:
        reference = reference_of(processes[arguments.reference], list(adapters), prompts, names)
    answers = result.setdefault("answers", {}).setdefault(kind, {})
    compare(processes, drop, OWN, prompts, names, reference, answers)
    yield from timed(processes, drop, arguments, end, {"experts": kind == "experts"})
    for process in processes.values():
        process.close()


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per model, cell and engine."""
    result["versions"] |= versions("sglang", "lora-backends")
    yield from by_model(arguments, result, measure)


def summary(result: Result) -> dict[str, Any]:
    """Return the ratio of each row, by its name."""
    return {
        f"{'experts ' * row['experts']}{row['step']} {row['contender']} "
        f"{row['rows']}x{row['adapters']}": row["ratio"]
        for row in result["rows"]
    }


STEP = Measurement(
    rows=measure_all,
    file=f"sglang_step_{'gpu' if ON_GPU else 'cpu'}.json",
    method=f"{METHOD} The reference torch_ref runs in an engine without CUDA graphs.",
    settings=lambda o: {
        "device": "cuda" if ON_GPU else "cpu",
        "reference": o.reference,
        "load": None,
    },
    summary=summary,
    partial=True,
    options={
        "--models": flag(["dense", "experts"], choices=["dense", "experts"]),
        "--engines": flag(["off", "csgmv", "triton", "auto"] if ON_GPU else ["off", "auto"]),
        "--reference": flag("torch_ref", "or an engine: whose answers count"),
        "--dtype": flag("bfloat16" if ON_GPU else "float32"),
        "--cells": flag(
            [(64, 8), (8, 8), (64, 1)] if ON_GPU else [(8, 4)],
            type=cell_of,
            metavar="ROWSxADAPTERS",
        ),
        "--adapters": flag(8 if ON_GPU else 4, "that engines have room for"),
        "--rank": flag(16 if ON_GPU else 8),
        "--prompt": flag(128 if ON_GPU else 32),
        "--prefills": flag([8192 if ON_GPU else 256], "tokens of the prefills that are timed"),
        "--steps": flag(96 if ON_GPU else 10),
        "--rounds": flag(5 if ON_GPU else 3),
        "--seconds": flag(0, "after which no round begins; 0: all rounds"),
        "--memory": flag(0.95 if ON_GPU else 0.6, "SGLang's mem_fraction_static, of free memory"),
        "--limit": flag(300.0, "seconds for an engine to start, or to answer"),
        "--prefill-graphs": flag(False, "capture prefills, where this SGLang can"),
    },
)
