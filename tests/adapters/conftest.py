"""Tiny random models, adapters that PEFT saved for them, and folders written by hand."""

import json
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from lora_backends.adapters import ModuleSpec

VOCAB, DIM = 40, 16
Q_PROJ = "model.layers.0.self_attn.q_proj"


def _llama(tied=False, attention_bias=False):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=DIM, n_layer=2, n_head=2, n_positions=32
    )
    return transformers.GPT2LMHeadModel(config)


def _gemma():
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return transformers.Gemma3ForCausalLM(config)


_BUILDERS = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tied=True),
    "llama_bias": lambda: _llama(attention_bias=True),
    "gpt2": _gpt2,
    "gemma": _gemma,
}


@pytest.fixture
def make_base():
    """Return a function that builds the same tiny model at each call."""

    def make(name):
        torch.manual_seed(7)
        return _BUILDERS[name]().eval()

    return make


@pytest.fixture
def save_adapter(tmp_path, make_base):
    """Return a function that saves a PEFT adapter with random A, B and bias, and its folder."""

    def save(base="llama", *, safetensors=True, **config):
        folder = tmp_path / "adapter"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(make_base(base), peft.LoraConfig(**config))
            generator = torch.Generator().manual_seed(11)
            for name, parameter in model.named_parameters():
                if "lora_" in name and "monteclora" not in name:
                    values = torch.randn(parameter.shape, generator=generator)
                    parameter.data.copy_(values)
            model.save_pretrained(folder, safe_serialization=safetensors)
        return folder

    return save


@pytest.fixture
def load_in_peft(make_base):
    """Return a function that loads a folder in PEFT; it yields the layers with LoRA by path."""

    def load(folder, base="llama"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.PeftModel.from_pretrained(make_base(base), folder).eval()
        return {
            name.removeprefix("base_model.model."): module
            for name, module in model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }

    return load


@pytest.fixture
def specs_of():
    """Return a function that describes the modules of a model."""

    def describe(model):
        specs = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                specs[name] = ModuleSpec("linear", module.in_features, module.out_features)
            elif isinstance(module, Conv1D):
                specs[name] = ModuleSpec("linear", *module.weight.shape)
            elif isinstance(module, nn.Embedding):
                scale = float(getattr(module, "embed_scale", 1.0))
                sizes = (module.num_embeddings, module.embedding_dim)
                specs[name] = ModuleSpec("embedding", *sizes, embed_scale=scale)
        return specs

    return describe


@pytest.fixture
def lora():
    """Return a function that makes the tensors of one module by their names in a file."""

    def tensors(module=Q_PROJ, rank=4, wide=8, high=6, dtype=torch.float32):
        return {
            f"base_model.model.{module}.lora_A.weight": torch.ones(rank, wide, dtype=dtype),
            f"base_model.model.{module}.lora_B.weight": torch.ones(high, rank, dtype=dtype),
        }

    return tensors


@pytest.fixture
def write_adapter(tmp_path, lora):
    """Return a function that writes a folder by hand: configuration and tensors, no PEFT."""

    def write(tensors=None, **config):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        values = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **config}
        (folder / "adapter_config.json").write_text(json.dumps(values))
        content = lora() if tensors is None else tensors
        save_file(content, folder / "adapter_model.safetensors")
        return folder

    return write
