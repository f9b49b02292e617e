"""SmolLM2, 64 requests of different lengths over 8 adapters: continuous batching, fixed batches.

python benchmarks/continuous_smollm2.py [--rounds 3] [--output FILE]

--tiny takes a small random model and few requests, to try the script.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from decode_smollm2 import ADAPTERS, RANK, load_base, save_random_adapters
from rich.console import Console
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lora_backends.bench.results import new_result, write_result
from lora_backends.hf import MultiLoRAModel

ROWS = 8
"""Of a fixed batch."""

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
    """Answer the requests in batches of `ROWS`, each until its last row has ended."""
    answers: Answers = []
    for start in range(0, len(requests), ROWS):
        batch = requests[start : start + ROWS]
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


def measure(
    contenders: dict[str, Callable[[], Answers]], expected: Answers, rounds: int
) -> list[dict[str, Any]]:
    """Let the contenders take turns; return one row each."""
    total = sum(map(len, expected))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    equal: dict[str, int] = dict.fromkeys(contenders, len(expected))
    for turn in range(rounds):
        for name, run in list(contenders.items())[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            answers = run()
            seconds[name].append(time.perf_counter() - start)
            same = sum(a == b for a, b in zip(answers, expected, strict=True))
            equal[name] = min(equal[name], same)
    return [
        {
            "contender": name,
            "tokens": total,
            "seconds": [round(s, 2) for s in series],
            "tokens_per_s": round(total / statistics.median(series), 1),
            "answers_as_alone": equal[name],
        }
        for name, series in seconds.items()
    ]


def main() -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backend", default="auto")
    default = Path(__file__).parent / "results" / "continuous_smollm2_cpu.json"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console, sizes = Console(stderr=True), TINY if arguments.tiny else REAL
    with tempfile.TemporaryDirectory() as folder:
        base = tiny_base() if arguments.tiny else load_base()
        # greedy, and only the length ends an answer
        base.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        folders = save_random_adapters(base, Path(folder))
        model = MultiLoRAModel(base, arguments.backend, ADAPTERS, RANK)
        for name, each in folders.items():
            model.load_adapter(name, each)
    requests = make_requests(sizes, base.config.vocab_size, list(folders))
    console.print("answering every request alone ...")
    expected = alone(model, requests)
    contenders = {
        f"generate, batches of {ROWS}": lambda: in_fixed_batches(model, requests),
        "continuous batching": lambda: continuously(model, requests, sizes.at_once),
    }
    console.print(f"measuring {', '.join(contenders)} ...")
    rows = measure(contenders, expected, arguments.rounds)
    fixed, continuous = (row["seconds"] for row in rows)
    result = new_result(method(sizes), dtype="float32", backend=model.backend.name)
    result["rows"] = rows
    result["summary"] = {
        "speedup": round(
            statistics.median(f / c for f, c in zip(fixed, continuous, strict=True)), 2
        ),
        "requests": len(requests),
        "answers_as_alone": rows[1]["answers_as_alone"],
    }
    write_result(arguments.output, result)
    console.print(result["summary"], f"written to {arguments.output}")


def method(sizes: Sizes) -> str:
    """Return how it was measured."""
    return (
        f"{sizes.requests} requests that are all there from the start, prompts of "
        f"{sizes.prompt[0]} to {sizes.prompt[1]} random tokens and {sizes.new[0]} to "
        f"{sizes.new[1]} new tokens, both uniform; request i uses adapter i mod {ADAPTERS}, "
        f"random adapters of rank {RANK} on all linear layers. Fixed batches take {ROWS} requests "
        f"in their order, padded on the left, and end with the longest. Continuous batching runs "
        f"at most {sizes.at_once} requests at a time. Greedy, only the length ends an answer. The "
        f"two take turns; tokens that were asked for by the median of the seconds, and the median "
        f"of each round's ratio."
    )


if __name__ == "__main__":
    main()
