"""Row by row, a mixed batch is what PEFT computes with that row's adapter alone, in float32."""

import warnings

import peft
import pytest
import torch

from lora_backends import backend_names, get_backend, unavailable_reasons
from lora_backends.features import OUTPUT_SCALES
from lora_backends.hf import MultiLoRAModel

BOUND = 2e-5  # absolute, on logits of tiny random models

BACKENDS = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]

KINDS = {
    "plain": ("llama", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("llama", {"r": 5, "use_rslora": True, "target_modules": ["o_proj", "up_proj"]}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 7, "down_proj": 1},
            "alpha_pattern": {"k_proj": 3},
        },
    ),
    "some layers": ("llama", {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1, 2]}),
    "every linear layer": ("llama", {"r": 8, "target_modules": "all-linear"}),
    "bias": ("llama_bias", {"r": 4, "target_modules": ["q_proj", "k_proj"], "lora_bias": True}),
    "embedding": ("llama", {"r": 4, "target_modules": ["embed_tokens"]}),
    "head": ("llama", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "tied embedding": ("llama_tied", {"r": 4, "target_modules": ["embed_tokens"]}),
    "tied head": ("llama_tied", {"r": 4, "target_modules": ["lm_head"]}),
    "Conv1D": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2 embedding": ("gpt2", {"r": 4, "target_modules": ["wte"]}),
    "DoRA": ("llama", {"r": 4, "target_modules": "all-linear", "use_dora": True}),
    "DoRA, rslora, patterns": (
        "llama",
        {
            "r": 4,
            "target_modules": ["k_proj", "up_proj"],
            "rank_pattern": {"layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"k_proj": 3},
            "use_rslora": True,
            "use_dora": True,
        },
    ),
    "DoRA with base biases": (
        "llama_bias",
        {"r": 4, "target_modules": ["q_proj", "o_proj"], "use_dora": True},
    ),
    "DoRA, embedding and head": (
        "llama",
        {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    ),
    "DoRA, tied embedding": (
        "llama_tied",
        {"r": 4, "target_modules": ["embed_tokens"], "use_dora": True},
    ),
    "DoRA, tied head": ("llama_tied", {"r": 4, "target_modules": ["lm_head"], "use_dora": True}),
    "DoRA, Conv1D": (
        "gpt2",
        {
            "r": 4,
            "target_modules": ["c_attn", "c_proj", "wte"],
            "fan_in_fan_out": True,
            "use_dora": True,
        },
    ),
    "DoRA, scaled embedding": (
        "gemma",
        {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    ),
    "scaled embedding": ("gemma", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
}


def can_run(kind, backend):
    return OUTPUT_SCALES in get_backend(backend).features or not KINDS[kind][1].get("use_dora")


def peft_logits(base, folder, inputs):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = base if folder is None else peft.PeftModel.from_pretrained(base, folder).eval()
        return model(**inputs).logits


def padded_inputs(rows, length=9):
    ids = torch.randint(0, 40, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 4] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_supported_kind_of_adapter(kind, backend, make_base, save_adapter):
    base_name, config = KINDS[kind]
    if not can_run(kind, backend):
        pytest.skip(f"{backend} lacks {OUTPUT_SCALES}")
    folders = {
        "first": save_adapter(base_name, name="first", std=0.4, seed=1, **config),
        "second": save_adapter(base_name, name="second", std=0.4, seed=2, **config),
    }
    model = MultiLoRAModel(make_base(base_name), backend, max_adapters=2, max_rank=9)
    for name, folder in folders.items():
        model.load_adapter(name, folder)
    rows = ["first", None, "second", "first", "second"]
    inputs = padded_inputs(len(rows))
    logits = model(adapters=rows, **inputs).logits
    alone = {
        name: peft_logits(make_base(base_name), folders.get(name), inputs)
        for name in (None, "first", "second")
    }
    plain = alone[None]
    for row, name in enumerate(rows):
        expected = alone[name][row]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=BOUND)
        if name is None:
            assert torch.equal(logits[row], plain[row])
        else:
            assert (expected - plain[row]).abs().max() > 100 * BOUND, "the adapter does nothing"


@pytest.mark.parametrize("backend", BACKENDS)
def test_kinds_mix_in_one_batch(backend, make_base, save_adapter):
    kinds = [k for k, (base, _) in KINDS.items() if base == "llama" and can_run(k, backend)]
    model = MultiLoRAModel(make_base("llama"), backend, max_adapters=len(kinds), max_rank=8)
    folders = {}
    for seed, kind in enumerate(kinds):
        folders[kind] = save_adapter("llama", name=kind, std=0.4, seed=seed, **KINDS[kind][1])
        model.load_adapter(kind, folders[kind])
    inputs = padded_inputs(len(kinds))
    logits = model(adapters=kinds, **inputs).logits
    for row, kind in enumerate(kinds):
        expected = peft_logits(make_base("llama"), folders[kind], inputs)[row]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=BOUND)
