"""Shape and dtype of y, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lora_backends.dispatch.engine import Layer
from lora_backends.operations import Input, Operation

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def output_shape(
    operation: Operation,
    first: torch.Tensor,
    weights: Layer,
    plan: Any,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> tuple[int, ...]:
    """Return the shape of y for arguments that are checked."""
    if operation.input is Input.ROUTED_ROWS:
        pairs = (plan.num_tokens,) if options["reduce"] else (plan.num_tokens, plan.top_k)
        return (*pairs, weights.out_features)
    tokens = first.shape[1] if operation.input is Input.H else first.shape[0]
    return tokens, weights.out_features


def added_to(base_output: torch.Tensor | None, weights: Layer, num_tokens: int) -> torch.Tensor:
    """Return the y that an engine adds to: base_output, else zeros in the dtype of results."""
    if base_output is not None:
        return base_output
    shape = (num_tokens, weights.out_features)
    return torch.zeros(shape, dtype=weights.compute_dtype, device=weights.device)


def new_output(
    operation: Operation,
    first: torch.Tensor,
    weights: Layer,
    plan: Any,
    options: Mapping[str, Any] = NO_OPTIONS,
) -> torch.Tensor:
    """Return the zeros that a call without base_output adds to."""
    shape = output_shape(operation, first, weights, plan, options)
    return first.new_zeros(shape, dtype=weights.compute_dtype)
