"""Which modules are one product with a frozen weight, so that the LoRA's node can hold it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_torch

from lora_backends.hf.hooks.overrides import is_ours


def is_product(module: Any, x: torch.Tensor, output: torch.Tensor) -> bool:
    """Return whether ``output`` is ``linear(x, weight, bias)``, and neither needs a gradient."""
    return (
        # no quantised layer, nor one whose output other code may have changed
        type(module) is nn.Linear
        and (is_ours(module) or ("forward" not in vars(module) and _has_one_hook(module)))
        and not torch.is_autocast_enabled(x.device.type)
        and all(map(is_frozen, module._parameters.values()))
        and x.dtype == output.dtype == module.weight.dtype
    )


def is_frozen(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter is a plain one without a gradient, or None."""
    return parameter is None or (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and not parameter.requires_grad
    )


def _has_one_hook(module: nn.Module) -> bool:
    """Return whether no other hook than ours has seen the output."""
    return len(module._forward_hooks) == 1 and not of_torch._global_forward_hooks
