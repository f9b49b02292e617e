"""`run_embedding` for every backend: `run_linear` of an identity and a column of A per token."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lora_backends.eight_bit import is_eight_bit
from lora_backends.weights import LoRAWeights


def columns_of_tokens(token_ids: torch.Tensor, weights: LoRAWeights) -> LoRAWeights:
    """Return the layer whose lora_a has the column of every token, side by side."""
    a, columns = weights.lora_a, weights.scale_block[1]
    picked = [_picked(part, token_ids) for part in (a if isinstance(a, tuple) else (a,))]
    changes: dict[str, Any] = {"lora_a": tuple(picked) if isinstance(a, tuple) else picked[0]}
    if weights.a_scales is not None and weights.b_scales is not None and columns is not None:
        # tokens of a batch are not adjacent in the vocabulary, so each column has its own scale
        groups = token_ids // columns if len(token_ids) else token_ids.new_zeros(1)
        ranks = torch.arange(weights.max_rank, device=weights.device) // columns
        changes["a_scales"] = weights.a_scales[..., groups]
        changes["b_scales"] = weights.b_scales[..., ranks]
        changes["scale_block"] = (weights.scale_block[0], 1)
    return dataclasses.replace(weights, **changes)


def _picked(a: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return columns of A; torch picks bytes, not float8."""
    stored = a.view(torch.int8) if is_eight_bit(a.dtype) else a
    return stored[..., token_ids].view(a.dtype)
