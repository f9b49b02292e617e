"""A step of the real vLLM on a CPU: LoRA off, vLLM's own operators and this library, in turns.

Run it where vLLM is installed: `make test-vllm` makes .venv-vllm for CPUs. OMP_NUM_THREADS is 1
unless it is set. `vllm_gpu` is for GPUs.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from engine_models import SMOLLM2, save_adapter
from engine_processes import cell_of
from measuring import ROOT, Measurement, Options, Result, Row, flag, median_ratio, middle_and_ends

from lora_backends.bench.results import versions

VARIABLE = "LORA_BACKENDS_VLLM"
METHOD = (
    "Engines of one process take turns, a prefill of every row's prompt in one step and then "
    "decode steps each round; row i uses adapter i mod the number of adapters, random ones on all "
    "linear layers. ms is the median over the rounds, of a round's median decode step or of its "
    "prefill; ratio is the median of each round's ratio to the first engine. The time is "
    "the CPU time of the process, on one thread, and the first engine is this library's serving "
    "requests without adapters."
)


def allow_a_second_engine() -> None:
    """Keep a search of vLLM 0.32 away from llvmlite, on whose library it fails.

    It looks into every module when it builds an engine, so it fails after numba was imported.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # another version
        return
    register = dispatcher.register_kernels

    def register_without_llvmlite(*args: Any, **kwargs: Any) -> Any:
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            return register(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    dispatcher.register_kernels = register_without_llvmlite


class Contender:
    """An engine with one setting of LoRA, and the requests that it is timed with."""

    def __init__(self, name: str, options: dict[str, Any], adapters: list[Path]) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        backend = {"off": "", "own": ""}.get(name, name)
        os.environ[VARIABLE] = backend
        if backend:
            from lora_backends.integrations.vllm import register

            register()
        if name == "off":
            options = {key: value for key, value in options.items() if "lora" not in key}
            adapters = []
        self.engine: Any = LLM(**options).llm_engine
        self.requests = [
            LoRARequest(f"adapter{index}", index + 1, str(folder))
            for index, folder in enumerate(adapters)
        ]
        self._count = 0

    def round(self, rows: int, adapters: int, prompt: int, steps: int) -> tuple[float, float]:
        """Return the milliseconds of a prefill and of a decode step (median)."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=steps + 1, ignore_eos=True, detokenize=False
        )
        for row in range(rows):
            self._count += 1
            ids = [(7919 * (row + 1) + 104729 * i * (row + 3)) % 40000 for i in range(prompt)]
            request = self.requests[row % adapters] if adapters and self.requests else None
            self.engine.add_request(
                str(self._count), {"prompt_token_ids": ids}, sampling, lora_request=request
            )
        times = [time.process_time()]
        gc.disable()
        while self.engine.has_unfinished_requests():
            self.engine.step()
            times.append(time.process_time())
        gc.enable()
        spans = [1e3 * (after - before) for before, after in zip(times, times[1:], strict=False)]
        return spans[0], statistics.median(spans[3:-2])


def measure(arguments: Options, dtype: str, folder: Path) -> list[dict[str, Any]]:
    """Build the engines, let them take turns, and return one row each."""
    adapters = [
        save_adapter(
            folder / f"adapter{index}", SMOLLM2, arguments.rank, index, getattr(torch, dtype)
        )
        for index in range(arguments.adapters)
    ]
    options = engine_options(arguments, dtype)
    contenders = {}
    for name in arguments.engines:
        print(f"building the engine {name!r} ...", flush=True)
        contenders[name] = Contender(name, options, adapters)
    # first, the engine of this library whose LoRA layers add nothing
    entries = {"adding nothing": (contenders[arguments.engines[-1]], False)}
    entries |= {name: (engine, True) for name, engine in contenders.items()}
    cells = arguments.cells
    times: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {
        cell: {name: [] for name in entries} for cell in cells
    }
    for turn in range(arguments.rounds + 1):  # the first compiles and warms up
        order = list(entries) if turn % 2 else list(entries)[::-1]
        for (rows, active), name in itertools.product(cells, order):
            engine, adds = entries[name]
            size = active if adds else 0, arguments.prompt, arguments.steps
            found = engine.round(rows, *size)
            if turn:
                times[rows, active][name].append(found)
        print(f"round {turn} of {arguments.rounds}", flush=True)
    return [row for cell in cells for row in rows_of(times[cell], dtype, cell, arguments)]


def engine_options(arguments: Options, dtype: str) -> dict[str, Any]:
    """Return vLLM's options, the same for every engine but for LoRA."""
    most = max(rows for rows, _ in arguments.cells)
    tokens = most * arguments.prompt
    options: dict[str, Any] = dict(
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=max(16, most),
        max_num_batched_tokens=max(tokens, 1024),
        enable_prefix_caching=False,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        seed=0,
        generation_config="vllm",
        enable_lora=True,
        max_loras=arguments.adapters,
        max_lora_rank=max(8, arguments.rank),
        max_cpu_loras=arguments.adapters,
    )
    model = os.environ.get("SMOLLM2", str(ROOT / ".venv-vllm" / "smollm2"))
    return options | {"model": model, "enforce_eager": True}


def rows_of(
    times: dict[str, list[tuple[float, float]]],
    dtype: str,
    cell: tuple[int, int],
    arguments: Options,
) -> Iterator[Row]:
    """Yield the rows of a cell, each contender's ratio to the first one included."""
    base, *_ = times.values()
    for index, step in enumerate(("prefill", "decode")):
        for name, series in times.items():
            ms = [each[index] for each in series]
            row = {"step": step, "contender": name, "dtype": dtype}
            row |= {"rows": cell[0], "adapters": cell[1]}
            row |= {"rank": arguments.rank, "prompt": arguments.prompt} | middle_and_ends(ms, 3)
            ratio = median_ratio(ms, [each[index] for each in base])
            yield row | {"ratio": round(ratio, 3)}


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per dtype, cell, step and contender."""
    if any(adapters > arguments.adapters for _, adapters in arguments.cells):
        raise SystemExit(f"a cell has more adapters than --adapters {arguments.adapters}")
    import vllm

    allow_a_second_engine()
    result["versions"] |= {"vllm": vllm.__version__, **versions("lora-backends")}
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(arguments, dtype, Path(folder))
        yield from rows
        gc.collect()  # the engines of a dtype end before those of the next are built
    result["load"] = round(os.getloadavg()[0], 1)  # other processes share caches and memory


def summary(result: Result) -> dict[str, float]:
    """Return the ratio of each row, by its name."""
    return {
        f"{row['dtype']} {row['step']} {row['contender']}": row["ratio"] for row in result["rows"]
    }


STEP = Measurement(
    rows=measure_all,
    file="vllm_step_cpu.json",
    method=METHOD,
    settings=lambda _: {"load": None},
    summary=summary,
    options={
        "--engines": flag(["off", "own", "auto"]),
        "--dtypes": flag(["float32", "bfloat16"]),
        "--cells": flag([(32, 8)], type=cell_of, metavar="ROWSxADAPTERS"),
        "--adapters": flag(8, "that engines have room for"),
        "--rank": flag(8),
        "--prompt": flag(32),
        "--steps": flag(10),
        "--rounds": flag(5),
    },
)
