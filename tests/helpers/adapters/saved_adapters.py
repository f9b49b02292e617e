"""Random models, adapters that PEFT saves for them, and changes of the saved files."""

import copy
import json
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file


def with_seed(make):
    """Return the model that `make` builds, the same at each call, in eval mode."""
    torch.manual_seed(5)
    return make().eval()


def save_random(base, folder, std, **config):
    """Save an adapter whose trained tensors are random, and return PEFT's model with it."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += std * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model.eval()


def edit_tensors(folder, change):
    """Replace the tensors of a saved adapter by what `change` returns for them."""
    file = Path(folder, "adapter_model.safetensors")
    save_file(change(load_file(file)), file)


def edit_config(folder, **values):
    """Set values in the configuration of a saved adapter."""
    file = Path(folder, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
