"""Quantised layers of a base model: how they are known, their sizes, their values where possible.

A layer that stands in for a linear one takes and returns what that did, so LoRA is added to its
output as usual. Only DoRA needs the values of its weight.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from lora_backends.layer_weights import DTYPES


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor holds values: floats of 16 bits or more, of torch's own class."""
    return (
        tensor is not None
        # bitsandbytes may keep its bits in a float dtype (`bnb_4bit_quant_storage`)
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and type(tensor.data) is torch.Tensor
        and tensor.dtype in DTYPES
        and not tensor.is_meta
    )


def packed_size(module: nn.Module) -> tuple[int, int] | None:
    """Return in_features and out_features of a layer with a packed weight, or None."""
    # Such a layer, e.g. hqq's `HQQLinear`, need be no `nn.Linear`. Any other class with sizes may
    # compute anything.
    if not _holds_bits(module):
        return None
    # Packages of quantisation name the sizes differently.
    for wide, high in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        sizes = (getattr(module, wide, None), getattr(module, high, None))
        if all(isinstance(size, int) and size > 0 for size in sizes):
            return sizes  # type: ignore[return-value]
    if type(module).__name__ == "EetqLinear":  # Transformers' own has no sizes
        weight: Any = module.weight
        return weight.shape[0], weight.shape[1]
    return None


def embedding_size(module: nn.Module | None) -> tuple[int, int] | None:
    """Return tokens and width of an embedding, packed or not, or None."""
    if isinstance(module, nn.Embedding) and is_plain(module.weight):
        count, width = module.weight.shape
        return count, width
    sizes = tuple(getattr(module, name, None) for name in ("num_embeddings", "embedding_dim"))
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def dequantized(module: Any) -> torch.Tensor | None:
    """Return the values of a quantised weight that PEFT takes for DoRA, or None if unknown."""
    weight: Any = getattr(module, "weight", None)
    if hasattr(module, "W_q"):  # hqq
        values = module.dequantize()
    # By the name of the class: bitsandbytes need not be installed.
    elif type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        # no state: not quantised yet; packing_format_for_cpu: repacked for the CPU
        if state is None or getattr(state, "packing_format_for_cpu", False):
            return None
        from bitsandbytes.functional import dequantize_4bit

        values = dequantize_4bit(weight.data, state)
    elif type(weight).__name__ == "Int8Params":
        scales = weight.SCB if module.state.SCB is None else module.state.SCB
        if scales is None:  # not quantised
            return None
        values = weight.data * (scales[:, None] / 127)
    elif weight is not None and type(weight.data).dequantize is not torch.Tensor.dequantize:
        values = weight.dequantize()  # torchao, quanto
    else:
        return None
    return values.detach() if is_plain(values) else None


def _holds_bits(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if is_plain(weight) and weight.ndim > 1:
        return False
    if hasattr(module, "W_q"):  # hqq's bits, whose dtype may be a float (`view_as_float`)
        return True
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and not is_plain(tensor) for tensor in tensors)
