"""Sites for LoRA in a Transformers model: its linear layers and its token embedding."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.pytorch_utils import Conv1D

from lora_backends.adapters.peft.dora import BaseLayer
from lora_backends.adapters.specs import Checkpoint, ModuleSpec
from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.layout.fused import parts_of
from lora_backends.hf.layout.quantized_base import (
    dequantized,
    embedding_size,
    is_plain,
    packed_size,
)


@dataclass(frozen=True)
class ModuleSite:
    """One module of the base model that a checkpoint may adapt."""

    path: str
    module: nn.Module
    spec: ModuleSpec
    refusal: str | None  # why its LoRA cannot be reproduced row by row

    @property
    def is_convolution(self) -> bool:
        """Whether it is a Conv2d: one image per row, and LoRA as of a linear layer on patches."""
        return isinstance(self.module, nn.Conv2d)


def find_sites(
    base: nn.Module, dtype: torch.dtype, device: torch.device, convolutions: bool = False
) -> dict[str, ModuleSite]:
    """Return every Linear, Conv1D and Embedding of `base`, quantised or not, by its path.

    They come in the order of `named_modules`, for stacks of this dtype and device; `convolutions`
    includes every Conv2d.
    """
    # Other embeddings take positions or types, not tokens of rows.
    token_embedding = token_embedding_of(base)
    sites = {}
    modules = dict(base.named_modules())
    for path, module in modules.items():
        spec = _spec(module)
        if convolutions and isinstance(module, nn.Conv2d):
            patch = module.in_channels // module.groups * math.prod(module.kernel_size)
            spec = ModuleSpec("linear", patch, module.out_channels)
        if module is token_embedding and spec is None and (sizes := embedding_size(module)):
            spec = ModuleSpec("embedding", *sizes)
        if spec is not None and spec.kind == "linear":
            parent, _, name = path.rpartition(".")
            parts = parts_of(modules[parent], name, spec.out_features)
            spec = replace(spec, parts=parts)
        if spec is not None:
            embeds = module is token_embedding or _shares_weight(module, token_embedding)
            refusal = _refusal(path, module, embeds, dtype, device)
            sites[path] = ModuleSite(path, module, spec, refusal)
    return sites


def _shares_weight(module: nn.Module, other: nn.Module | None) -> bool:
    """Return whether two embeddings are one: an encoder's and a decoder's for instance."""
    weight = getattr(module, "weight", None)
    return isinstance(other, nn.Embedding) and other.weight is weight


def token_embedding_of(base: nn.Module) -> nn.Module | None:
    """Return the token embedding of a model, or None where it names none."""
    try:
        embedding: nn.Module | None = cast(Any, base).get_input_embeddings()
    except (AttributeError, NotImplementedError):  # no model of text, or none of Transformers
        return None
    return embedding


def vocabulary_of(base: nn.Module) -> int:
    """Return how many tokens the embedding of a model of text has."""
    embedding: Any = token_embedding_of(base)
    size = embedding_size(embedding)
    return len(embedding.weight) if size is None else size[0]


def base_layer(sites: Mapping[str, ModuleSite], path: str) -> BaseLayer:
    """Return the weight and bias of a module, as DoRA reads them.

    Raises:
        UnsupportedInputError: the values of its weight are unknown, or the module is none that
            PEFT has DoRA for.
    """
    module: Any = sites[path].module
    bias = getattr(module, "bias", None)
    stored = getattr(module, "weight", None)
    weight = stored.detach() if is_plain(stored) else dequantized(module)
    if weight is None:
        raise UnsupportedInputError(
            f"DoRA (use_dora) cannot scale module {path}: its base weight is quantized, and "
            f"its values are unknown\n  given: {type(module).__name__}, "
            f"{type(stored).__name__} {getattr(stored, 'dtype', '')}\n"
            f"  allowed: a weight of float16, bfloat16 or float32, or quantized by torchao, "
            f"quanto, hqq or bitsandbytes (4 bits: unless repacked for a CPU)\n"
            f"  to do: load the base model without quantization, or merge the adapter into it"
        )
    # Both store the transpose of a linear layer's weight.
    if isinstance(module, (Conv1D, nn.Embedding)):
        return BaseLayer(weight.T, bias)
    if isinstance(module, nn.Linear) or packed_size(module) is not None:
        return BaseLayer(weight, bias)
    raise UnsupportedInputError(
        f"DoRA (use_dora) cannot scale module {path}, a {type(module).__name__}\n"
        f"  allowed: Linear, Conv1D and the token embedding"
    )


def check_start(
    checkpoint: Checkpoint, sites: Mapping[str, ModuleSite], unreached: Container[str]
) -> None:
    """Refuse PiSSA and OLoRA where LoRA cannot take their start off the base weight.

    `unreached` are paths that the model was not seen to call, as the `out_proj` of torch's
    `MultiheadAttention`: PEFT's change of a weight acts there, and its LoRA does not.

    Raises:
        UnsupportedInputError: the weight is quantised or parametrized, so the start is a part of
            other weights, or its module is unreached.
    """
    for path, delta in checkpoint.modules.items():
        if delta.init is None or path not in sites:
            continue
        if not is_plain(getattr(sites[path].module, "weight", None)):
            raise UnsupportedInputError(
                f"{checkpoint.folder} has init_lora_weights = {delta.init!r} for {path}, whose "
                f"base weight is quantized\n  to do: load the base model without quantization, or "
                f"save the adapter with path_initial_model_for_weight_conversion"
            )
        if is_parametrized(sites[path].module, "weight"):
            raise UnsupportedInputError(
                f"{checkpoint.folder} has init_lora_weights = {delta.init!r} for {path}, whose "
                f"base weight torch computes in each pass (parametrize), so PEFT's change is lost"
                f"\n  to do: save the adapter with path_initial_model_for_weight_conversion"
            )
        if path in unreached:
            raise UnsupportedInputError(
                f"{checkpoint.folder} has init_lora_weights = {delta.init!r} for {path}, whose "
                f"weight the model may read without calling the module\n"
                f"  to do: leave the module out of target_modules, or save the adapter with "
                f"path_initial_model_for_weight_conversion"
            )


def _spec(module: nn.Module) -> ModuleSpec | None:
    if isinstance(module, nn.Linear):
        return ModuleSpec("linear", module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        wide, high = module.weight.shape
        return ModuleSpec("linear", wide, high, transposed=True)
    if isinstance(module, nn.Embedding):
        # PEFT asks for the same name, so without it LoRA is not scaled there either
        scale = float(getattr(module, "embed_scale", 1.0))
        return ModuleSpec("embedding", module.num_embeddings, module.embedding_dim, scale)
    if (packed := packed_size(module)) is not None:
        return ModuleSpec("linear", *packed)
    return None


def _refusal(
    path: str, module: nn.Module, is_token_embedding: bool, dtype: torch.dtype, device: torch.device
) -> str | None:
    if isinstance(module, nn.Embedding) and not is_token_embedding:
        return "it is not the token embedding, so its input has no rows of the batch"
    if is_token_embedding and not isinstance(module, nn.Embedding | nn.Linear):
        return f"it is a {type(module).__name__}, an embedding that is quantized"
    if isinstance(module, nn.Conv2d) and not _is_plain_convolution(module):
        return (
            f"it is {module}, which has groups, dilation, or padding other than a number of zeros"
        )
    if "experts" in path.split("."):
        return "it is an expert, whose tokens are routed and no longer in rows of the batch"
    weight = getattr(module, "weight", None) if packed_size(module) is None else None
    if is_plain(weight) and weight.dtype != dtype:
        return f"its weight is {weight.dtype}, the model's dtype is {dtype}"
    for tensor in (weight, *module._parameters.values(), *module._buffers.values()):
        if isinstance(tensor, torch.Tensor) and tensor.device != device:
            return f"its weight is on {tensor.device}, the model on {device}"
    return None


def _is_plain_convolution(module: nn.Conv2d) -> bool:
    """Return whether every output sees one patch of all channels, with zeros around the image."""
    return (
        module.groups == 1
        and module.padding_mode == "zeros"
        and module.dilation == (1, 1)
        and not isinstance(module.padding, str)
    )
