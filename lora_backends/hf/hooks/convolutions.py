"""LoRA of a convolution, computed as that of a linear layer on patches.

A is a convolution with the kernel size, stride and padding of the base, and B a 1x1 convolution of
its output. As matrices, A multiplies the flat patch of each output position,
[in_channels * kernel height * kernel width] in the order of `torch.nn.functional.unfold`, and B
the result, [rank].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from lora_backends.hf.calls.running import RUNNING, check_thread
from lora_backends.hf.hooks.linear import Hook, Served, check_fit, first_argument
from lora_backends.hf.layout.sites import ModuleSite


def convolution_hook(served: Served, site: ModuleSite, add: Callable[..., torch.Tensor]) -> Hook:
    """Return the hook that adds the running call's LoRA to the output of one convolution.

    Its input is [rows, channels, height, width]; `add` adds LoRA to y, made by `adder` for
    `run_linear`.
    """
    model, layout = served.model, served.layouts[site.path]
    path, paths = site.path, (site.path,)
    convolution = cast(nn.Conv2d, site.module)

    def add_lora(
        module: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        call = RUNNING.call
        if call.model != model:
            check_thread(model)
            return None
        weights = call.stacks.get(path)
        if weights is None:
            return None
        x = first_argument(args, f"module {path}")
        try:
            patches = patches_of(convolution, x, output)
            rows_last = output.movedim(1, -1)  # [rows, height, width, channels]
        except (AttributeError, TypeError):  # perhaps x or output is no tensor
            check_fit(path, module, args, output)
            raise
        plan = call.plan(patches.shape[:-1], layout, paths)
        # Added to zeros and then to the output, whose channels are not on the last axis. A row
        # without an adapter gets zeros, and keeps its values.
        delta = add(patches, weights, plan, torch.zeros_like(rows_last, memory_format=CONTIGUOUS))
        return output + delta.movedim(-1, 1)

    return add_lora


CONTIGUOUS = torch.contiguous_format


def patches_of(module: nn.Conv2d, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return the input patch of every output position.

    The convolution has zero padding, one group and no dilation. x is [rows, channels, height,
    width], its output [rows, out_channels, output height, output width]; the result is contiguous,
    [rows, output height, output width, channels * kernel height * kernel width].
    """
    if module.kernel_size == (1, 1) and module.padding == (0, 0):
        high, wide = module.stride
        return x[:, :, ::high, ::wide].movedim(1, -1).contiguous()
    padding = cast(tuple[int, int], module.padding)
    patches = functional.unfold(x, module.kernel_size, padding=padding, stride=module.stride)
    rows, _, high, wide = output.shape
    return patches.transpose(1, 2).reshape(rows, high, wide, -1)
