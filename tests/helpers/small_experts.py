"""Small experts, and a router's choice for seven tokens."""

import torch

from lora_backends import ExpertWeights


def small_experts(dtype=torch.float32, **changes):
    """Return gate and up of three experts, one A for both, 4 slots."""
    generator = torch.Generator().manual_seed(3)
    given = {
        "lora_a": torch.randn(4, 3, 1, 2, 5, generator=generator).to(dtype),
        "lora_b": torch.randn(4, 3, 6, 2, generator=generator).to(dtype),
        "ranks": torch.randint(1, 3, (4, 3, 1), generator=generator),
        "scalings": torch.randn(4, 3, 1, generator=generator),
        "output_slices": (3, 3),
        "num_experts": 3,
    }
    return ExpertWeights(**given | changes)


IDS = torch.tensor([[0, 2], [1, 1], [2, -1], [0, 1], [1, 2], [2, 0], [-1, -1]])
"""Two of three experts for each of seven tokens; -1: none."""

FACTORS = torch.arange(14).reshape(7, 2) / 8
"""The router's weights."""
