"""Measures what 8-bit adapters cost in quality: random layers, and SmolLM2's three adapters.

    python benchmarks/eight_bit_quality.py [--output FILE]

"layers": the relative error of B A x, 1024 inputs and outputs, rank 32, normal weights, 64 rows of
normal x, against float64. "adapters": logits of the prompts of examples/quickstart.toml in float32,
every row with its adapter; "distance" is ||logits - logits of the float32 adapter|| over ||effect
of the float32 adapter||, the largest of the rows, "same_tokens" the share of the prompts' positions
whose most likely next token stays, and "error" the largest of `adapter_report`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import torch

from lora_backends import LoRABatch, LoRAWeights, get_backend, quantize_weights
from lora_backends.bench.results import new_result, write_result
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.generation import encode

EXAMPLES = Path(__file__).parents[1] / "examples"
RESULT = Path(__file__).parent / "results" / "eight_bit_quality.json"
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")
BLOCKS = {"row": (1, None), "matrix": (None, None), "block of 128": (1, 128)}


def layer_errors() -> list[dict[str, Any]]:
    """Return the relative error of a delta for every dtype and block."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 1, 32, 1024, generator=generator)
    b = torch.randn(1, 1024, 32, generator=generator)
    x = torch.randn(64, 1024, generator=generator)
    weights = LoRAWeights(a, b, torch.tensor([[32]]), torch.ones(1, 1), output_slices=(1024,))
    exact = x.double() @ a[0, 0].double().T @ b[0].double().T
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0] * 64, 1))
    rows = []
    for stored in STORED:
        for name, block in BLOCKS.items():
            quantized = quantize_weights(weights, getattr(torch, stored), block)
            error = (backend.run_linear(x, quantized, plan) - exact).norm() / exact.norm()
            rows.append({"dtype": stored, "scale_per": name, "error": round(float(error), 4)})
    return rows


def adapter_errors() -> list[dict[str, Any]]:
    """Return how far the logits of every adapter of the example move."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = tomllib.loads((EXAMPLES / "quickstart.toml").read_text())
    model = settings["model"]
    found = importlib.util.find_spec(model["package"])
    assert found is not None and found.submodule_search_locations
    folder, file = found.submodule_search_locations[0], {"gguf_file": model["gguf_file"]}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **file).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **file)
    prompts = settings["prompts"]
    names = [prompt.get("adapter") for prompt in prompts]
    texts = [prompt["text"] for prompt in prompts]
    inputs = encode(tokenizer, texts, True, torch.device("cpu")).inputs(1)
    inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    logits, reports = {}, {}
    for stored in (None, *STORED):
        wrapped = MultiLoRAModel(base, "torch_ref", max_rank=8, adapter_dtype=stored)
        for name, path in settings["adapters"].items():
            wrapped.load_adapter(name, EXAMPLES / path)
        logits[stored] = wrapped(adapters=names, **inputs).logits
        if stored is None:
            plain = wrapped(adapters=[None] * len(names), **inputs).logits
        reports[stored] = {name: wrapped.adapter_report(name) for name in settings["adapters"]}
        wrapped.detach()
    mask = inputs["attention_mask"].bool()
    rows = []
    for stored in STORED:
        for name in settings["adapters"]:
            own = [i for i, adapter in enumerate(names) if adapter == name]
            distances, same = [], []
            for i in own:
                exact, moved, start = (t[i][mask[i]] for t in (logits[None], logits[stored], plain))
                distances.append(float((moved - exact).norm() / (exact - start).norm()))
                same.append(float((moved.argmax(-1) == exact.argmax(-1)).float().mean()))
            kept, wide = reports[stored][name], reports[None][name]
            row: dict[str, Any] = {"dtype": stored, "adapter": name}
            row |= {"distance": round(max(distances), 4), "same_tokens": round(min(same), 3)}
            row |= {"error": round(kept.error, 4), "bytes_of_float32": kept.nbytes / wide.nbytes}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    method = " ".join((__doc__ or "").split("\n\n")[2].split())
    result = new_result(method) | {"rows": [*layer_errors(), *adapter_errors()]}
    write_result(options.output, result)
    print(json.dumps(result["rows"], indent=1))


if __name__ == "__main__":
    main()
