"""Adapters loaded by PEFT itself, and folders written by hand."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from lora_backends.adapters import ModuleSpec

Q_PROJ = "model.layers.0.self_attn.q_proj"


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
