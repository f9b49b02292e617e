"""A step of the real SGLang: LoRA off, its own LoRA backends and this library, in turns.

Run it where SGLang is installed, on one GPU: python benchmarks/run.py sglang_step
Models have random weights: one of the shape of an 8B Llama, and eight layers of Qwen3-30B-A3B. On
a CPU, where `make test-sglang` makes .venv-sglang, they are SmolLM2 and a tiny mixture. Before the
timing, each engine's answers are compared with torch_ref's under each adapter.
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
from collections.abc import Callable, Iterator
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
if not ON_GPU:
    QWEN3_MOE = {"hidden": 64, "inner": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16}
    EXPERTS, TOP_K = 8, 2
OWN = ("off", "csgmv", "triton", "torch_native")
"""Engines without this library."""
CHECKED = 4  # tokens of each answer: a prefill's, and then decode steps'
WARM = 12  # tokens before the timed ones, to leave prefills and the start out
METHOD = (
    "Engines in processes of their own on one device take turns. A decode step is the difference "
    "of two calls, of 12 tokens and of 12 and --steps, over --steps; a prefill is a call for one "
    "token. Row i uses adapter i mod the number of adapters, random ones on all linear layers, or "
    "on attention and experts. ms is the median over the rounds; ratio the median of each round's "
    "ratio to the first engine, whose LoRA is off. Wall time; the first round warms up. "
    "answers: before the timing, each engine with LoRA gives 4 greedy tokens per prompt. "
    "positions: tokens up to the first that differs from torch_ref's, which is included; steps: "
    "how many of them come from decode steps; nearest: how many have log-probabilities nearer to "
    "torch_ref's with their own adapter than with any other. distance: the mean |difference| to "
    "torch_ref's with the own adapter; next: with the nearest other one. An engine of this library "
    "is timed only if all its positions are nearest and some come from decode steps. "
    "failed: engines that ended or gave no answer in time; the others went on without them."
)


class EngineFailed(Exception):
    """An engine ended, or gave no answer in time."""


class Process:
    """A `sglang_worker` that runs one engine."""

    def __init__(
        self, name: str, options: dict[str, Any], adapters: dict[str, str], limit: float
    ) -> None:
        self._limit = limit  # seconds for an answer
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
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_worker.py")), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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


def save_weights(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Save random weights. SGLang's dummy weights would also replace those of adapters.

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
        "mem_fraction_static": arguments.memory,
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


def measure(
    arguments: Options, result: Result, folder: Path, experts: bool, end: float
) -> Iterator[Row]:
    """Build the engines of one model, check their answers, and yield a row per cell and engine."""
    dtype = getattr(torch, arguments.dtype)
    if experts or ON_GPU:
        print("saving the model ...", flush=True)
        model = (save_qwen3_moe if experts else save_llama)(folder / "model", dtype)
    else:
        model = Path(os.environ.get("SMOLLM2", str(ROOT / ".venv-sglang" / "smollm2")))
    adapters = {}
    for index in range(arguments.adapters):
        place = folder / f"adapter{index}"
        if experts:
            save_moe_adapter(place, arguments.rank, index, dtype)
        else:
            shape = LLAMA_8B if ON_GPU else SMOLLM2
            save_adapter(place, shape, arguments.rank, index, dtype)
        adapters[f"adapter{index}"] = str(place)
    options = engine_options(arguments, model)
    asked = [name for name in arguments.engines if name != "off"]
    prompts = [[(31 * row + 7 * i * i + i) % 31000 for i in range(64)] for row in range(8)]
    names = [f"adapter{row % arguments.adapters}" for row in range(len(prompts))]
    limit = arguments.limit
    torch_ref = Process("torch_ref", options, adapters, limit)
    try:
        reference = _reference(torch_ref, adapters, prompts, names)
    except EngineFailed as error:
        raise SystemExit(f"the reference torch_ref failed: {error}") from error
    print("building the engines ...", flush=True)
    processes = {name: Process(name, options, adapters, limit) for name in arguments.engines}
    failed = result.setdefault("failed", {})["experts" if experts else "dense"] = {}

    def drop(name: str, error: EngineFailed) -> None:
        print(f"engine {name!r} failed: {error}", flush=True)
        if name == arguments.engines[0]:
            raise SystemExit("the engine that the others are compared with failed") from error
        failed[name] = str(error)
        processes.pop(name)

    for name, process in list(processes.items()):
        try:
            print(f"engine {name!r} is {process.answer()}", flush=True)
        except EngineFailed as error:
            drop(name, error)
    answers = result.setdefault("answers", {})["experts" if experts else "dense"] = {}
    for name in [name for name in asked if name in processes]:
        try:
            found = processes[name].ask("answers", prompts=prompts, names=names, tokens=CHECKED)
        except EngineFailed as error:
            drop(name, error)
            continue
        answers[name] = agreement(found, reference, arguments.adapters)
        print(f"answers of {name!r}: {answers[name]}", flush=True)
        if name not in OWN and not is_right(answers[name]):
            processes.pop(name).close()
    yield from _timed(processes, drop, arguments, experts, end)
    for process in processes.values():
        process.close()


def _reference(
    process: Process,
    adapters: dict[str, str],
    prompts: list[list[int]],
    names: list[str],
) -> dict[str, Any]:
    """Return torch_ref's tokens, and its log-probabilities of each of them under each adapter.

    It runs alone: one more engine would not fit beside those that are timed.
    """
    print("building the reference ...", flush=True)
    process.answer()
    own = process.ask("answers", prompts=prompts, names=names, tokens=CHECKED)
    tokens = [answer["tokens"] for answer in own]
    longer = [prompts[row] + tokens[row][:k] for k in range(CHECKED) for row in range(len(prompts))]
    every = []  # by adapter, position and row
    for name in adapters:
        found = process.ask("answers", prompts=longer, names=[name] * len(longer), tokens=1)
        tops = [answer["tops"][0] for answer in found]
        every.append([tops[k * len(prompts) :][: len(prompts)] for k in range(CHECKED)])
    process.close()
    return {"tokens": tokens, "every": every}


def _timed(
    processes: dict[str, Process],
    drop: Callable[[str, EngineFailed], None],
    arguments: Options,
    experts: bool,
    end: float,
) -> Iterator[Row]:
    cells = [("decode", *cell) for cell in arguments.cells] + [("prefill", 1, 1)]
    times: dict[Any, dict[str, list[float]]] = {
        cell: {name: [] for name in processes} for cell in cells
    }
    for turn in range(arguments.rounds + 1):  # the first compiles and warms up
        began = time.monotonic()
        order = list(processes) if turn % 2 else list(processes)[::-1]
        for (step, rows, adapters), name in itertools.product(cells, order):
            if name not in processes:  # it failed in this round
                continue
            work = {"rows": rows, "adapters": adapters, "prompt": arguments.prompt}

            def seconds(name: str = name, **work: int) -> float:
                taken: float = processes[name].ask("seconds", **work)
                return taken

            try:
                if step == "prefill":
                    found = seconds(**work | {"prompt": arguments.prefill, "tokens": 1})
                else:
                    short = seconds(**work, tokens=WARM)
                    found = seconds(**work, tokens=WARM + arguments.steps) - short
                    found /= arguments.steps
            except EngineFailed as error:
                drop(name, error)
                for by_name in times.values():
                    del by_name[name]
                continue
            if turn:
                times[step, rows, adapters][name].append(1e3 * found)
        print(f"round {turn} of {arguments.rounds}", flush=True)
        if turn and 2 * time.monotonic() - began > end:  # the next round would end too late
            break
    for (step, rows, adapters), by_name in times.items():
        base, *_ = by_name.values()
        for name, ms in by_name.items():
            row = {"step": step, "contender": name, "rows": rows, "adapters": adapters}
            row |= {"rank": arguments.rank, "experts": experts, "rounds": len(ms)}
            row |= {"prompt": arguments.prefill if step == "prefill" else arguments.prompt}
            yield row | middle_and_ends(ms, 3) | {"ratio": round(median_ratio(ms, base), 3)}


def agreement(
    answers: list[dict[str, Any]], reference: dict[str, Any], adapters: int
) -> dict[str, Any]:
    """Compare answers with torch_ref's under each adapter, up to the first token that differs."""
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


def measure_all(arguments: Options, result: Result) -> Iterator[Row]:
    """Yield a row per model, cell and engine."""
    if any(adapters > arguments.adapters for _, adapters in arguments.cells):
        raise SystemExit(f"a cell has more adapters than --adapters {arguments.adapters}")
    result["versions"] |= versions("sglang", "lora-backends")
    start = time.monotonic()
    for number, model in enumerate(arguments.models, 1):
        # each model has its share of the time
        end = start + (arguments.seconds or float("inf")) * number / len(arguments.models)
        with tempfile.TemporaryDirectory() as folder:
            yield from measure(arguments, result, Path(folder), model == "experts", end)
    result["load"] = round(os.getloadavg()[0], 1)  # other processes share caches and memory


def cell_of(text: str) -> tuple[int, int]:
    """Return the rows and the adapters of a cell such as 64x8."""
    rows, adapters = map(int, text.split("x"))
    return rows, adapters


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
    method=METHOD,
    settings=lambda o: {"device": "cuda" if ON_GPU else "cpu", "load": None},
    summary=summary,
    partial=True,
    options={
        "--models": flag(["dense", "experts"], choices=["dense", "experts"]),
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
        "--seconds": flag(0, "after which no round begins; 0: all rounds"),
        "--memory": flag(0.95 if ON_GPU else 0.6, "SGLang's mem_fraction_static, of free memory"),
        "--limit": flag(300.0, "seconds for an engine to start, or to answer"),
        "--prefill-graphs": flag(False, "capture prefills, where this SGLang can"),
    },
)
