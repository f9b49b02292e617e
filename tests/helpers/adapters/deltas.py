"""Adapters made in memory, where neither PEFT nor pydantic need be there."""

from pathlib import Path

import torch

from lora_backends.adapters import Checkpoint, ModuleDelta


def random_checkpoint(base, targets, rank=4, seed=0, std=0.3, bias=False):
    """Return random LoRA for the linear layers of `base` whose names end in one of `targets`."""
    generator = torch.Generator().manual_seed(seed)
    modules = {}
    for path, module in base.named_modules():
        if path.endswith(tuple(targets)):
            modules[path] = ModuleDelta(
                module=path,
                kind="linear",
                rank=rank,
                scaling=0.5,
                lora_a=torch.randn(rank, module.in_features, generator=generator),
                lora_b=std * torch.randn(module.out_features, rank, generator=generator),
                bias=torch.randn(module.out_features, generator=generator) if bias else None,
            )
    return Checkpoint(Path("in memory"), modules, {})
