"""Training of modules with one input, which their leader computes together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lora_backends.hf.calls.running import RUNNING
from lora_backends.hf.layout.layout import Layout
from lora_backends.hf.training.products import is_frozen


def run_joined(
    layout: Layout, group: Any, call: Any, module: nn.Linear, x: torch.Tensor
) -> torch.Tensor | None:
    """Return the outputs of a group with LoRA, side by side, or None where each runs alone."""
    left, RUNNING.kept = RUNNING.kept, None
    if left is not None:
        left.group.apart = True  # its siblings got another input
    paths = group.paths
    weights = call.shared.get(paths[0])
    if (
        weights is None
        or group.apart
        # only the leader runs the group
        or module is not group.modules[0]
        or not call.joins
        or not call.touches(paths)
        or x.is_inference()
        # columns of one buffer: torch's elementwise kernels take three times as long on them, and
        # their gradients are copied into one tensor
        or x.is_cuda
        or torch.is_autocast_enabled(x.device.type)
        or not all(is_frozen(p) for m in group.modules for p in m._parameters.values())
        or not group.are_joined()
        or group.joined is None
    ):
        return None
    y: torch.Tensor = call.multiply(group.operation, paths, layout, x, weights, *group.joined)
    return y
