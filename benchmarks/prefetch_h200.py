"""Times a decode step with a new adapter that is in its slot, prefetched, or in memory.

python benchmarks/prefetch_h200.py [--layers 16] [--output FILE]

--tiny runs a small model on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from lora_backends.adapters import Checkpoint, ModuleDelta
from lora_backends.bench.results import new_result, write_result
from lora_backends.hf import MultiLoRAModel

ROWS, SLOTS, ADAPTERS, RANK = 16, 8, 24, 16
KINDS = ("in its slot", "prefetched", "from memory")


def make_base(layers: int, device: str) -> Any:
    """Return a model of random weights, of the shape of Llama 3 8B on a GPU."""
    large = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    }
    config = LlamaConfig(num_hidden_layers=layers, **(small if device == "cpu" else large))
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def checkpoint_of(base: Any, seed: int) -> Checkpoint:
    """Return random LoRA of all linear layers."""
    generator = torch.Generator().manual_seed(seed)
    deltas = {}
    for path, module in base.named_modules():
        if isinstance(module, torch.nn.Linear) and path != "lm_head":
            wide, high = module.in_features, module.out_features
            a = torch.randn(RANK, wide, generator=generator) / wide**0.5
            b = torch.randn(high, RANK, generator=generator) / 100
            deltas[path] = ModuleDelta(path, "linear", RANK, 1.0, a, b, None)
    return Checkpoint(Path("in memory"), deltas, {})


def measure(model: MultiLoRAModel, names: list[str], steps: int) -> dict[str, list[float]]:
    """Time decode steps of `ROWS` rows, of which the first may have another adapter; in ms."""
    device = model.backend.device
    ids = torch.randint(0, 60, (ROWS, 1), device=device)
    store, times = model.store, {kind: [] for kind in KINDS}
    assert store is not None

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step(name: str) -> float:
        rows = [name] + [names[1 + row % (SLOTS - 2)] for row in range(ROWS - 1)]
        wait()
        start = time.perf_counter()
        model(adapters=rows, input_ids=ids)
        wait()
        return 1e3 * (time.perf_counter() - start)

    others = [names[0], *names[SLOTS - 1 :]]  # the other rows' adapters stay in their slots
    for turn in range(steps + 3):
        for kind in KINDS:
            following = others[(3 * turn + KINDS.index(kind)) % len(others)]
            if kind == "prefetched":
                store.prefetch([following])
            for _ in range(3):  # batches beside which the copies go on
                taken = step(names[1])
            if kind == "in its slot":
                following = names[1]
            taken = step(following)
            if turn >= 3:
                times[kind].append(taken)
    return times


def main() -> None:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backend", default="auto")
    default = Path(__file__).parent / "results" / "h200_prefetch.json"
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    base = make_base(2 if arguments.tiny else arguments.layers, device)
    model = MultiLoRAModel(base, arguments.backend, SLOTS, RANK)
    model.keep_adapters(cpu_bytes=64 * 2**30)
    names = [f"adapter{index}" for index in range(ADAPTERS)]
    for seed, name in enumerate(names):
        model.add_adapter(name, checkpoint_of(base, seed))
    times = measure(model, names, arguments.steps)
    result = new_result(
        f"A pass of {ROWS} rows of one token, eager, 7 or 8 adapters of rank {RANK} on all linear "
        f"layers of {base.config.num_hidden_layers} layers; the adapter of the first row lies in "
        f"its slot, was prefetched into a slot during the 3 passes before, or comes from memory at "
        f"that moment. Milliseconds from a synchronised start to the end, medians.",
        device,
        dtype=str(base.dtype).removeprefix("torch."),
        backend=model.backend.name,
    )
    result["rows"] = [
        {"kind": kind, "ms": round(statistics.median(series), 3), "ms_min": round(min(series), 3)}
        for kind, series in times.items()
    ]
    result["summary"] = {row["kind"]: row["ms"] for row in result["rows"]}
    write_result(arguments.output, result)
    Console(stderr=True).print(result["summary"], f"written to {arguments.output}")


if __name__ == "__main__":
    main()
