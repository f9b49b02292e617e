"""The whole base weight of one module, with the shape that it had in training.

vLLM fuses q, k and v, and gate and up, shards them over processes, and on CPUs packs them into
another layout. DoRA needs norms of whole rows; PiSSA and OLoRA need the whole matrix.
"""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.adapters.peft.dora import BaseLayer
from lora_backends.errors import UnsupportedInputError
from lora_backends.integrations.vllm.adapters.targets import Target

UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
CUT = ("ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
"""Layers of vLLM that shard their outputs in a way that is implemented here."""

BLOCK = 512
"""Rows of an identity matrix that a packed weight is multiplied by at once."""


def base_layer_of(manager: Any, target: Target) -> BaseLayer:
    """Return the whole weight [out_features, in_features] and bias of a module.

    It gathers the shards, so every process of a tensor-parallel group must call it for the same
    modules in the same order. An embedding's weight is transposed.

    Raises:
        UnsupportedInputError: the weight is quantized, or the layer fuses in an unknown way.
    """
    module = manager.modules[target.layer]
    if hasattr(module, "sharded_to_full_mapping"):  # a head, which is kept beside its processor
        head = manager.model.get_submodule(target.layer)
        return BaseLayer(_of_vocabulary(getattr(head, "base_layer", head), target), None)
    base = module.base_layer
    if hasattr(base, "org_vocab_size"):
        return BaseLayer(_of_vocabulary(base, target).T, None)
    weight, bias = _local_weight(base, target.layer), getattr(base, "bias", None)
    if getattr(base, "skip_bias_add", False):
        bias = None  # the model adds it after the layer
    if any(kind.__name__ == "ReplicatedLinear" for kind in type(base).__mro__):
        return BaseLayer(weight, bias)  # whole on every process
    if (
        hasattr(base, "input_size_per_partition")
        and base.input_size_per_partition != base.input_size
    ):
        return BaseLayer(_gathered(weight, 1, base), bias)
    widths = list(getattr(base, "output_partition_sizes", ())) or [weight.shape[0]]
    if (
        sum(widths) != weight.shape[0]
        or target.piece is not None
        and len(widths) != module.n_slices
    ):
        raise _unknown(target, f"output widths {widths} of a weight {list(weight.shape)}")
    if base.tp_size > 1 and type(base).__name__ not in CUT:
        raise _unknown(target, f"{type(base).__name__} over {base.tp_size} processes")
    chosen = range(len(widths)) if target.piece is None else [target.piece]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    rows = [slice(starts[i], starts[i] + widths[i]) for i in chosen]
    copies = [getattr(base, "num_kv_head_replicas", 1) if i else 1 for i in chosen]

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        pieces = [_gathered(tensor[part], 0, base, n) for part, n in zip(rows, copies, strict=True)]
        return torch.cat(pieces)

    return BaseLayer(whole(weight), None if bias is None else whole(bias))


def _gathered(part: torch.Tensor, axis: int, base: Any, copies: int = 1) -> torch.Tensor:
    """Return the shards of all processes, joined; `copies` neighbours hold the same one."""
    if base.tp_size == 1:
        return part
    from vllm.distributed import tensor_model_parallel_all_gather

    every: torch.Tensor = tensor_model_parallel_all_gather(part.contiguous(), axis)
    return torch.cat(every.chunk(base.tp_size, axis)[::copies], axis)


def _of_vocabulary(base: Any, target: Target) -> torch.Tensor:
    """Return the weight [vocabulary, dim] of an embedding or a head."""
    weight = _local_weight(base, target.layer)
    if base.tp_size > 1:
        weight = _gathered(weight, 0, base)
        order = base.get_sharded_to_full_mapping()
        weight = weight[torch.tensor(order, device=weight.device)]
    return weight[: base.org_vocab_size]


def _local_weight(base: Any, name: str) -> torch.Tensor:
    method: Any = getattr(base, "quant_method", None)
    if type(method).__name__ not in UNQUANTIZED:
        raise UnsupportedInputError(
            f"the base weight of {name!r} cannot be read: it is quantized\n"
            f"  given: {type(method).__name__}\n"
            f"  allowed: DoRA, PiSSA, OLoRA and trainable tokens on unquantized weights"
        )
    weight: torch.Tensor = base.weight.data
    if weight.numel():
        return weight
    # vLLM kept only a packed weight; its product with the identity is exact
    wide = base.input_size_per_partition if hasattr(base, "input_size_per_partition") else None
    wide = wide or getattr(base, "input_size", None) or base.embedding_dim
    dtype = getattr(base, "params_dtype", weight.dtype)
    columns = []
    for first in range(0, wide, BLOCK):
        rows = min(BLOCK, wide - first)
        part = torch.zeros(rows, wide, dtype=dtype, device=weight.device)
        part[:, first : first + rows].fill_diagonal_(1)
        columns.append(method.apply(base, part, None))
    return torch.cat(columns).T.contiguous()


def _unknown(target: Target, given: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"the base weight of {target.layer!r} cannot be read: vLLM fuses its modules in a way that "
        f"is not known here\n  given: {given}"
    )
