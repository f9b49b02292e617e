"""LoRA files for tiny pipelines, and images as diffusers makes them with these files."""

import torch
from torch import nn

from helpers.tiny_pipelines import PIPELINES, run

RANK = 3


def modules_of(pipe, component):
    """Return the paths and modules that a file may adapt in a component."""
    linear = (
        (path, module)
        for path, module in getattr(pipe, component).named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    )
    encodes = component.startswith("text_encoder")
    return {path: m for path, m in linear if not encodes or ".layers." in path}


def tensors_of(pipe, components, seed, rank=RANK, strength=0.3):
    """Return random LoRA of all modules of components, by diffusers' own names."""
    torch.manual_seed(seed)
    tensors = {}
    for component in components:
        for path, module in modules_of(pipe, component).items():
            out, *patch = module.weight.shape
            scale = strength * patch[0] ** -0.5
            ones = [1] * (len(patch) - 1)
            key = f"{component}.{path}"
            tensors[f"{key}.lora_A.weight"] = scale * torch.randn(rank, *patch)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, *ones)
    return tensors


class Reference:
    """Images of one pipeline by diffusers' own adapters, one image at a time."""

    def __init__(self, name, files):
        self.pipe = PIPELINES[name]()
        for adapter, file in files.items():
            self.pipe.load_lora_weights(file, adapter_name=adapter)

    def image(self, prompt, entry, images=1, **changes):
        """Return the latents of the images of one prompt, with the adapters of its entry."""
        if entry is None:
            self.pipe.disable_lora()
        else:
            blend = entry if isinstance(entry, dict) else {entry: 1.0}
            self.pipe.enable_lora()
            self.pipe.set_adapters(list(blend), list(blend.values()))
        return run(self.pipe, [prompt], images, **changes)
