"""Measures what 8-bit adapters cost in quality: random layers, and SmolLM2's three adapters.

"layers": the relative error of B A x, 1024 inputs and outputs, rank 32, normal weights, 64 rows of
normal x, against float64. "adapters": logits of the prompts of examples/quickstart.toml in float32,
every row with its adapter; "distance" is ||logits - logits of the float32 adapter|| over ||effect
of the float32 adapter||, the largest of the rows, "same_tokens" the share of the prompts' positions
whose most likely next token stays, and "error" the largest of `adapter_report`.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator

import torch
from measuring import ROOT, Measurement, Row
from smollm2 import load_base
from transformers import AutoTokenizer

from lora_backends import LoRABatch, LoRAWeights, get_backend, quantize_weights
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.generating.greedy import encode

EXAMPLES = ROOT / "examples"
STORED = ("int8", "float8_e4m3fn", "float8_e5m2")
BLOCKS = {"row": (1, None), "matrix": (None, None), "block of 128": (1, 128)}

METHOD = " ".join((__doc__ or "").split("\n\n")[1].split())


def layer_errors() -> Iterator[Row]:
    """Yield the relative error of a delta for every dtype and block."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 1, 32, 1024, generator=generator)
    b = torch.randn(1, 1024, 32, generator=generator)
    x = torch.randn(64, 1024, generator=generator)
    weights = LoRAWeights(a, b, torch.tensor([[32]]), torch.ones(1, 1), output_slices=(1024,))
    exact = x.double() @ a[0, 0].double().T @ b[0].double().T
    backend = get_backend("torch_ref", device="cpu")
    plan = backend.prepare_batch(LoRABatch([0] * 64, 1))
    for stored, (name, block) in itertools.product(STORED, BLOCKS.items()):
        quantized = quantize_weights(weights, getattr(torch, stored), block)
        error = (backend.run_linear(x, quantized, plan) - exact).norm() / exact.norm()
        yield {"dtype": stored, "scale_per": name, "error": round(float(error), 4)}


def adapter_errors() -> Iterator[Row]:
    """Yield how far the logits of every adapter of the example move."""
    settings = tomllib.loads((EXAMPLES / "quickstart.toml").read_text())
    base = load_base()
    files = {"gguf_file": settings["model"]["gguf_file"]}
    tokenizer = AutoTokenizer.from_pretrained(base.name_or_path, **files)
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
    for stored, name in itertools.product(STORED, settings["adapters"]):
        distances, same = [], []
        for i in [i for i, adapter in enumerate(names) if adapter == name]:
            exact, moved, start = (t[i][mask[i]] for t in (logits[None], logits[stored], plain))
            distances.append(float((moved - exact).norm() / (exact - start).norm()))
            same.append(float((moved.argmax(-1) == exact.argmax(-1)).float().mean()))
        kept, wide = reports[stored][name], reports[None][name]
        row: Row = {"dtype": stored, "adapter": name}
        row |= {"distance": round(max(distances), 4), "same_tokens": round(min(same), 3)}
        yield row | {"error": round(kept.error, 4), "bytes_of_float32": kept.nbytes / wide.nbytes}


QUALITY = Measurement(
    rows=lambda *_: itertools.chain(layer_errors(), adapter_errors()),
    file="eight_bit_quality.json",
    method=METHOD,
)
