"""Quantised layers of a base model: what tells them, their sizes, and their values where known.

A layer that stands in for a linear one takes and returns what that did, so LoRA is added to its
output as usual. Only DoRA needs the values of its weight.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from lora_backends.weights import DTYPES


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor holds the values of a weight: no subclass, no bits, no scales."""
    return (
        tensor is not None
        and type(tensor.data) is torch.Tensor
        and tensor.dtype in DTYPES
        and not tensor.is_meta
    )


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return in_features and out_features of a layer with a packed weight, or None.

    Its class is that of a package, e.g. hqq's `HQQLinear`, and no `nn.Linear`. A class with sizes
    and a plain matrix as weight is none: it may compute anything.
    """
    if _holds_matrix(module):
        return None
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
    if isinstance(module, nn.Embedding):
        count, width = module.weight.shape
        return count, width
    sizes = tuple(getattr(module, name, None) for name in ("num_embeddings", "embedding_dim"))
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def dequantized(module: Any) -> torch.Tensor | None:
    """Return the values of a quantised weight [out_features, in_features], or None if unknown.

    They are those that PEFT takes for DoRA.
    """
    weight: Any = getattr(module, "weight", None)
    if hasattr(module, "W_q"):  # hqq
        values = module.dequantize()
    elif type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        if getattr(state, "packing_format_for_cpu", False):  # laid out for another product
            return None
        from bitsandbytes.functional import dequantize_4bit

        values = dequantize_4bit(weight.data, state)
    elif type(weight).__name__ == "Int8Params":
        scales = weight.SCB if module.state.SCB is None else module.state.SCB
        values = weight.data * (scales[:, None] / 127)
    elif weight is not None and type(weight.data).dequantize is not torch.Tensor.dequantize:
        values = weight.dequantize()  # torchao, quanto
    else:
        return None
    return values.detach() if is_plain(values) else None


def _holds_matrix(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return is_plain(weight) and weight.ndim == 2
