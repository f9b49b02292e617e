"""A step of the real vLLM: LoRA off, vLLM's own operators and this library, in turns.

Run it where vLLM is installed: `make test-vllm` makes .venv-vllm for CPUs. On a GPU the model is a
Llama of the 8B shape with random weights. OMP_NUM_THREADS is 1 unless it is set.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measuring import ROOT, Measurement, Options, Result, Row, flag, median_ratio, middle_and_ends
from safetensors.torch import save_file

from lora_backends.bench.results import versions

VARIABLE = "LORA_BACKENDS_VLLM"
ON_GPU = torch.cuda.is_available()
LLAMA_8B = {"hidden": 4096, "intermediate": 14336, "layers": 32, "kv": 1024}
SMOLLM2 = {"hidden": 576, "intermediate": 1536, "layers": 30, "kv": 192}
METHOD = (
    "Engines of one process take turns, a prefill of every row's prompt in one step and then "
    "decode steps each round; row i uses adapter i mod the number of adapters, random ones on all "
    "linear layers. ms is the median over the rounds, of a round's median decode step or of its "
    "prefill; ratio is the median of each round's ratio to the first engine. On a CPU the time is "
    "the CPU time of the process, on one thread, and the first engine is this library's serving "
    "requests without adapters; on a GPU it is wall time, LoRA is off in the first engine, and "
    "prefills are left out, since vLLM returns from a step before the GPU has run it."
)


def save_adapter(folder: Path, shape: dict[str, int], rank: int, seed: int, dtype: Any) -> Path:
    """Save a random PEFT adapter on all linear layers of a Llama, and return its folder."""
    hidden, wide, kv = shape["hidden"], shape["intermediate"], shape["kv"]
    sites = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    sites |= {f"self_attn.{name}_proj": (hidden, kv) for name in "kv"}
    sites |= {f"mlp.{name}_proj": (hidden, wide) for name in ("gate", "up")}
    sites |= {"mlp.down_proj": (wide, hidden)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(shape["layers"]):
        for site, (width, out) in sites.items():
            key = f"base_model.model.model.layers.{layer}.{site}"
            a = torch.randn(rank, width, generator=generator) / width**0.5
            b = torch.randn(out, rank, generator=generator) * 0.02
            tensors |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [site.split(".")[1] for site in sites]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": names, "bias": "none", "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_llama_config(folder: Path) -> Path:
    """Save the configuration of a Llama of the 8B shape, whose weights vLLM makes up."""
    shape = LLAMA_8B
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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

    def draw_weights(self) -> None:
        """Draw dummy weights anew: as vLLM makes them, all logits are equal."""
        model = self.engine.model_executor.driver_worker.worker.model_runner.model
        while not hasattr(model, "named_parameters"):
            model = model.runnable
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                seed = zlib.crc32(name.replace(".base_layer", "").encode())
                generator = torch.Generator(device=weight.device).manual_seed(seed)
                if "norm" in name:
                    weight.data.fill_(1)
                else:
                    weight.data.normal_(0, 0.02, generator=generator)

    def round(
        self, clock: Callable[[], float], rows: int, adapters: int, prompt: int, steps: int
    ) -> tuple[float, float]:
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
        times = [clock()]
        gc.disable()
        while self.engine.has_unfinished_requests():
            self.engine.step()
            times.append(clock())
        gc.enable()
        spans = [1e3 * (after - before) for before, after in zip(times, times[1:], strict=False)]
        return spans[0], statistics.median(spans[3:-2])


def measure(arguments: Options, dtype: str, folder: Path) -> list[dict[str, Any]]:
    """Build the engines, let them take turns, and return one row each."""
    shape = LLAMA_8B if ON_GPU else SMOLLM2
    adapters = [
        save_adapter(
            folder / f"adapter{index}", shape, arguments.rank, index, getattr(torch, dtype)
        )
        for index in range(arguments.adapters)
    ]
    options = engine_options(arguments, dtype, folder)
    contenders = {}
    for name in arguments.engines:
        print(f"building the engine {name!r} ...", flush=True)
        contenders[name] = Contender(name, options, adapters)
        if ON_GPU:
            contenders[name].draw_weights()
    entries = {name: (engine, True) for name, engine in contenders.items()}
    if not ON_GPU:  # the engine of this library, whose LoRA layers then add nothing
        entries = {"adding nothing": (contenders[arguments.engines[-1]], False), **entries}
    clock = time.perf_counter if ON_GPU else time.process_time
    cells = arguments.cells
    times: dict[tuple[int, int], dict[str, list[tuple[float, float]]]] = {
        cell: {name: [] for name in entries} for cell in cells
    }
    for turn in range(arguments.rounds + 1):  # the first compiles and warms up
        order = list(entries) if turn % 2 else list(entries)[::-1]
        for (rows, active), name in itertools.product(cells, order):
            engine, adds = entries[name]
            size = active if adds else 0, arguments.prompt, arguments.steps
            found = engine.round(clock, rows, *size)
            if turn:
                times[rows, active][name].append(found)
        print(f"round {turn} of {arguments.rounds}", flush=True)
    return [row for cell in cells for row in rows_of(times[cell], dtype, cell, arguments)]


def cell_of(text: str) -> tuple[int, int]:
    """Return the rows and the adapters of a cell such as 64x8."""
    rows, adapters = map(int, text.split("x"))
    return rows, adapters


def engine_options(arguments: Options, dtype: str, folder: Path) -> dict[str, Any]:
    """Return vLLM's options, the same for every engine but for LoRA."""
    most = max(rows for rows, _ in arguments.cells)
    tokens = most * arguments.prompt
    options = dict(
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
    if not ON_GPU:
        model = os.environ.get("SMOLLM2", str(ROOT / ".venv-vllm" / "smollm2"))
        return options | {"model": model, "enforce_eager": True}
    kv_bytes = 2 * 2**30
    options |= {"model": str(save_llama_config(folder / "model")), "load_format": "dummy"}
    options |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": kv_bytes}
    if arguments.mode == "eager":
        options["enforce_eager"] = True
    elif arguments.mode == "graph":
        sizes = {"cudagraph_capture_sizes": [8, 64]}
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} | sizes
    return options


def rows_of(
    times: dict[str, list[tuple[float, float]]],
    dtype: str,
    cell: tuple[int, int],
    arguments: Options,
) -> Iterator[Row]:
    """Yield the rows of a cell, each contender's ratio to the first one included."""
    base, *_ = times.values()
    for index, step in enumerate(("prefill", "decode")):
        if step == "prefill" and ON_GPU:
            continue  # vLLM returns from a step before the GPU has run it
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
        f"{row['dtype']} {row['step']} {row['contender']}"
        + f" {row['rows']}x{row['adapters']}" * ON_GPU: row["ratio"]
        for row in result["rows"]
    }


STEP = Measurement(
    rows=measure_all,
    file=f"vllm_step_{'gpu' if ON_GPU else 'cpu'}.json",
    method=METHOD,
    settings=lambda o: {"device": "cuda" if ON_GPU else "cpu", "mode": o.mode, "load": None},
    summary=summary,
    options={
        "--engines": flag(["off", "own", "auto"]),
        "--dtypes": flag(["bfloat16"] if ON_GPU else ["float32", "bfloat16"]),
        "--cells": flag(
            [(64, 8), (8, 8), (64, 1)] if ON_GPU else [(32, 8)],
            type=cell_of,
            metavar="ROWSxADAPTERS",
        ),
        "--adapters": flag(8, "that engines have room for"),
        "--rank": flag(16 if ON_GPU else 8),
        "--prompt": flag(128 if ON_GPU else 32),
        "--steps": flag(40 if ON_GPU else 10),
        "--rounds": flag(5),
        "--mode": flag("compile", choices=["compile", "graph", "eager"]),
    },
)
