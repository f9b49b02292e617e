"""The y that an operation adds to where its caller passes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import NO_OPTIONS, Operation


def added_to(
    base_output: torch.Tensor | None, weights: LayerWeights, num_tokens: int
) -> torch.Tensor:
    """Return the y that an engine adds to: base_output, else zeros in the dtype of results."""
    if base_output is not None:
        return base_output
    shape = (num_tokens, weights.out_features)
    return torch.zeros(shape, dtype=weights.compute_dtype, device=weights.device)


def new_output(
    operation: Operation,
    first: torch.Tensor,
    weights: LayerWeights,
    plan: Any,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> torch.Tensor:
    """Return the zeros that a call without base_output adds to."""
    shape = operation.output_shape(first, weights, plan, options)
    return first.new_zeros(shape, dtype=weights.compute_dtype)
