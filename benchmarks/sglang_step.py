"""A step of the real SGLang: LoRA off, its own LoRA backends and this library, in turns.

Run it where SGLang is installed, on one GPU: python benchmarks/run.py sglang_step
The model has random weights, of the shape of an 8B Llama or, with --experts, of eight layers of
Qwen3-30B-A3B. On a CPU, where `make test-sglang` makes .venv-sglang, it is SmolLM2.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from measuring import ROOT, Measurement, Options, Result, Row, flag, median_ratio, middle_and_ends
from safetensors.torch import save_file
from vllm_step import LLAMA_8B, SMOLLM2, save_adapter, save_llama_config

from lora_backends.bench.results import versions

ON_GPU = torch.cuda.is_available()
VOCABULARY = 32000  # four engines of 8B share a card
QWEN3_MOE = {"hidden": 2048, "inner": 768, "layers": 8, "heads": 32, "kv_heads": 4, "head": 128}
EXPERTS, TOP_K = 128, 8
WARM = 12  # tokens before the timed ones, so that prefills and start do not count
METHOD = (
    "Engines in processes of their own on one device take turns. A decode step is the difference "
    "of two calls, of 12 tokens and of 12 and --steps, over --steps; a prefill is a call for one "
    "token. Row i uses adapter i mod the number of adapters, random ones on all linear layers, or "
    "on attention and experts. ms is the median over the rounds; ratio the median of each round's "
    "ratio to the first engine, whose LoRA is off. Wall time; the first round warms up. "
    "nearest: prompts whose log-probabilities are nearest to those of torch_ref with their own "
    "adapter among all adapters; distance: the mean of |difference| to torch_ref."
)


class Process:
    """A `sglang_worker` that runs one engine."""

    def __init__(self, name: str, options: dict[str, Any], adapters: dict[str, str]) -> None:
        own = {"off": "", "csgmv": "csgmv", "triton": "triton"}
        options = dict(options)
        if name == "off":
            adapters = {}
        else:
            options |= {"enable_lora": True, "lora_paths": adapters}
            options |= {"lora_backend": own.get(name) or ("csgmv" if ON_GPU else "torch_native")}
        if name == "torch_ref":
            options["disable_cuda_graph"] = True
        backend = "" if name in own or name == "torch_native" else name.removeprefix("ours:")
        spec = {"backend": backend, "options": options, "names": list(adapters)}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_worker.py")), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request, and return its answer."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """Return the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the engine and wait for its memory."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def save_weights(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Save random weights: SGLang's dummy weights would replace those of adapters, too.

    Args:
        folder: that holds config.json.
        shapes: of each weight by its name.
        dtype: of the weights.
    """
    device = "cuda" if ON_GPU else "cpu"
    parts = [dict(list(shapes.items())[i::8]) for i in range(8)]

    def save(index: int) -> dict[str, str]:
        generator = torch.Generator(device=device).manual_seed(index)
        tensors, file = {}, f"model-{index}.safetensors"
        for name, shape in parts[index].items():
            values = torch.empty(shape, dtype=dtype, device=device)
            values = (
                values.fill_(1) if "norm" in name else values.normal_(0, 0.02, generator=generator)
            )
            tensors[name] = values.cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        return dict.fromkeys(tensors, file)

    with ThreadPoolExecutor(8) as pool:
        index = {name: file for each in pool.map(save, range(8)) for name, file in each.items()}
    listed = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


def save_llama(folder: Path, dtype: torch.dtype) -> Path:
    """Save a Llama of the 8B shape with a small vocabulary."""
    save_llama_config(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    config |= {"max_position_embeddings": 16384}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, wide, kv = LLAMA_8B["hidden"], LLAMA_8B["intermediate"], LLAMA_8B["kv"]
    sites = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    sites |= {f"self_attn.{name}_proj": (kv, hidden) for name in "kv"}
    sites |= {f"mlp.{name}_proj": (wide, hidden) for name in ("gate", "up")}
    sites |= {"mlp.down_proj": (hidden, wide)}
    save_weights(folder, _shapes(sites, hidden, LLAMA_8B["layers"]), dtype)
    return folder


def save_qwen3_moe(folder: Path, dtype: torch.dtype) -> Path:
    """Save eight layers of the shape of Qwen3-30B-A3B."""
    s = QWEN3_MOE
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": s["hidden"],
        "intermediate_size": 3 * s["hidden"],
        "moe_intermediate_size": s["inner"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 16384,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    sites = {name: shape[::-1] for name, shape in _attention(s).items()}
    sites |= {"mlp.gate": (EXPERTS, s["hidden"])}
    sites |= {f"self_attn.{name}_norm": (s["head"],) for name in "qk"}
    sites |= {name: shape[::-1] for name, shape in _experts(s).items()}
    save_weights(folder, _shapes(sites, s["hidden"], s["layers"]), dtype)
    return folder


def save_moe_adapter(folder: Path, rank: int, seed: int, dtype: torch.dtype) -> Path:
    """Save a random PEFT adapter on attention and every expert of `save_qwen3_moe`'s model."""
    s, tensors = QWEN3_MOE, {}
    generator = torch.Generator().manual_seed(seed)
    for layer in range(s["layers"]):
        for site, (width, out) in (_attention(s) | _experts(s)).items():
            key = f"base_model.model.model.layers.{layer}.{site}"
            a = torch.randn(rank, width, generator=generator) / width**0.5
            b = torch.randn(out, rank, generator=generator) * 0.02
            tensors |= {f"{key}.lora_A.weight": a.to(dtype), f"{key}.lora_B.weight": b.to(dtype)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": names, "bias": "none", "base_model_name_or_path": "model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _attention(s: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the projections of attention."""
    hidden, q, kv = s["hidden"], s["heads"] * s["head"], s["kv_heads"] * s["head"]
    sites = {f"self_attn.{name}_proj": (hidden, kv) for name in "kv"}
    return {"self_attn.q_proj": (hidden, q), **sites, "self_attn.o_proj": (q, hidden)}


def _experts(s: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of every expert's projections."""
    return {
        f"mlp.experts.{expert}.{name}_proj": (s["inner"], s["hidden"])
        if name == "down"
        else (s["hidden"], s["inner"])
        for expert in range(EXPERTS)
        for name in ("gate", "up", "down")
    }


def _shapes(
    sites: dict[str, tuple[int, ...]], hidden: int, layers: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a whole model's weights by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "lm_head.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        place = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{place}.{name}.weight"] = (hidden,)
        shapes |= {f"{place}.{site}.weight": shape for site, shape in sites.items()}
    return shapes


def engine_options(arguments: Options, model: Path) -> dict[str, Any]:
    """Return SGLang's options, the same for every engine but for LoRA."""
    most = max(rows for rows, _ in arguments.cells)
    longest = max(arguments.prompt + WARM + arguments.steps, arguments.prefill + 1)
    options = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "attention_backend": "triton" if ON_GPU else "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.9 if ON_GPU else 0.6,  # of what is free
        "max_running_requests": max(16, most),
        "chunked_prefill_size": max(arguments.prefill, 1024),
        "max_prefill_tokens": max(arguments.prefill, 1024),
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


def measure(arguments: Options, result: Result, folder: Path) -> Iterator[Row]:
    """Build the engines, let them take turns, and yield a row per cell and contender."""
    dtype = getattr(torch, arguments.dtype)
    if not ON_GPU:
        model = Path(os.environ.get("SMOLLM2", str(ROOT / ".venv-sglang" / "smollm2")))
    else:
        save = save_qwen3_moe if arguments.experts else save_llama
        print("saving the model ...", flush=True)
        model = save(folder / "model", dtype)
    adapters = {}
    for index in range(arguments.adapters):
        place = folder / f"adapter{index}"
        if arguments.experts:
            save_moe_adapter(place, arguments.rank, index, dtype)
        else:
            shape = LLAMA_8B if ON_GPU else SMOLLM2
            save_adapter(place, shape, arguments.rank, index, dtype)
        adapters[f"adapter{index}"] = str(place)
    options = engine_options(arguments, model)
    print("building the engines ...", flush=True)
    processes = {name: Process(name, options, adapters) for name in arguments.engines}
    for name, process in processes.items():
        print(f"engine {name!r} is {process.answer()}", flush=True)
    yield from _timed(processes, arguments)
    prompts = [[(31 * row + 7 * i * i + i) % 31000 for i in range(64)] for row in range(8)]
    names = [f"adapter{row % arguments.adapters}" for row in range(len(prompts))]
    found = {
        name: process.ask("logprobs", prompts=prompts, names=names)
        for name, process in processes.items()
        if name != "off"
    }
    for process in processes.values():
        process.close()
    if arguments.check:
        reference = Process("torch_ref", options, adapters)
        reference.answer()
        every = [
            reference.ask("logprobs", prompts=prompts, names=[name] * len(prompts))
            for name in adapters
        ]
        reference.close()
        result["answers"] = {
            name: _agreement(answers, every, arguments.adapters) for name, answers in found.items()
        }


def _timed(processes: dict[str, Process], arguments: Options) -> Iterator[Row]:
    cells = [("decode", *cell) for cell in arguments.cells] + [("prefill", 1, 1)]
    times: dict[Any, dict[str, list[float]]] = {
        cell: {name: [] for name in processes} for cell in cells
    }
    for turn in range(arguments.rounds + 1):  # the first compiles and warms up
        order = list(processes) if turn % 2 else list(processes)[::-1]
        for (step, rows, adapters), name in itertools.product(cells, order):
            work = {"rows": rows, "adapters": adapters, "prompt": arguments.prompt}

            def seconds(name: str = name, **work: int) -> float:
                taken: float = processes[name].ask("seconds", **work)
                return taken

            if step == "prefill":
                found = seconds(**work | {"prompt": arguments.prefill, "tokens": 1})
            else:
                short = seconds(**work, tokens=WARM)
                found = seconds(**work, tokens=WARM + arguments.steps) - short
                found /= arguments.steps
            if turn:
                times[step, rows, adapters][name].append(1e3 * found)
        print(f"round {turn} of {arguments.rounds}", flush=True)
    for (step, rows, adapters), by_name in times.items():
        base, *_ = by_name.values()
        for name, ms in by_name.items():
            row = {"step": step, "contender": name, "rows": rows, "adapters": adapters}
            row |= {"rank": arguments.rank, "experts": arguments.experts}
            row |= {"prompt": arguments.prefill if step == "prefill" else arguments.prompt}
            yield row | middle_and_ends(ms, 3) | {"ratio": round(median_ratio(ms, base), 3)}


def _agreement(answers: list[Any], every: list[list[Any]], adapters: int) -> dict[str, float]:
    """Compare first tokens of each prompt with torch_ref's under each adapter."""
    nearest, distances, same = 0, [], 0
    for row, answer in enumerate(answers):
        apart = [_distance(answer, of_adapter[row]) for of_adapter in every]
        own = row % adapters
        nearest += apart[own] == min(apart)
        distances.append(apart[own])
        reference = every[own][row]
        same += max(answer, key=answer.get) == max(reference, key=reference.get)
    mean = round(statistics.fmean(distances), 5)
    return {"prompts": len(answers), "nearest": nearest, "same_token": same, "distance": mean}


def _distance(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the mean |difference| of two lists of log-probabilities; absent tokens count as 1."""
    every = one.keys() | other.keys()
    both = one.keys() & other.keys()
    apart = sum(abs(one[token] - other[token]) for token in both) + len(every - both)
    return apart / len(every)


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per cell and contender."""
    if any(adapters > arguments.adapters for _, adapters in arguments.cells):
        raise SystemExit(f"a cell has more adapters than --adapters {arguments.adapters}")
    result["versions"] |= versions("sglang", "lora-backends")
    with tempfile.TemporaryDirectory() as folder:
        yield from measure(arguments, result, Path(folder))
    result["load"] = round(os.getloadavg()[0], 1)  # other processes share caches and memory


def cell_of(text: str) -> tuple[int, int]:
    """Return the rows and the adapters of a cell such as 64x8."""
    rows, adapters = map(int, text.split("x"))
    return rows, adapters


def summary(result: Result) -> dict[str, Any]:
    """Return the ratio of each row, by its name."""
    return {
        f"{row['step']} {row['contender']} {row['rows']}x{row['adapters']}": row["ratio"]
        for row in result["rows"]
    }


STEP = Measurement(
    rows=measure_all,
    file=lambda o: f"sglang_{'experts' if o.experts else 'step'}_{'gpu' if ON_GPU else 'cpu'}.json",
    method=METHOD,
    settings=lambda o: {"device": "cuda" if ON_GPU else "cpu", "load": None},
    summary=summary,
    options={
        "--engines": flag(["off", "csgmv", "triton", "auto"] if ON_GPU else ["off", "auto"]),
        "--dtype": flag("bfloat16" if ON_GPU else "float32"),
        "--cells": flag(
            [(64, 8), (8, 8), (64, 1)] if ON_GPU else [(8, 4)],
            type=cell_of,
            metavar="ROWSxADAPTERS",
        ),
        "--adapters": flag(8 if ON_GPU else 4, "that engines have room for"),
        "--rank": flag(16 if ON_GPU else 8),
        "--prompt": flag(128 if ON_GPU else 32),
        "--prefill": flag(8192 if ON_GPU else 256, "tokens of the prefill that is timed"),
        "--steps": flag(96 if ON_GPU else 10),
        "--rounds": flag(5 if ON_GPU else 3),
        "--experts": flag(False, "a mixture of experts"),
        "--prefill-graphs": flag(False, "capture prefills, where this SGLang can"),
        "--check": flag(False, "compare answers with torch_ref's, after the timing"),
    },
)
