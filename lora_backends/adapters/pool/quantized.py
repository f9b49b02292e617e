"""8-bit slots: adapters quantised once, when they are loaded, and the error that it makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_backends.adapters.pool.stack_format import bytes_in
from lora_backends.adapters.specs import ExpertDelta, ExpertSpec
from lora_backends.eight_bit import COMPUTE_DTYPES, LARGEST, quantized, spread
from lora_backends.errors import InvalidInputError, shown
from lora_backends.experts import ExpertWeights
from lora_backends.weights import quantize_weights

PER_ROW = (1, None)
"""The block of elements that share a scale: the most exact at next to no bytes."""


@dataclass(frozen=True)
class AdapterReport:
    """How a loaded adapter is kept."""

    name: str
    slot: int
    dtype: torch.dtype  # of its matrices
    nbytes: int  # its matrices and their scales, at its own ranks
    stack_bytes: int  # the pool's stacks: every slot, at max_rank
    errors: Mapping[str, float]
    """Path to ||B A - stored|| / ||B A|| in the Frobenius norm, which is the relative error of the
    delta of a random x; empty where the matrices have the model's dtype."""

    @property
    def error(self) -> float:
        """The largest of `errors`, 0 without any."""
        return max(self.errors.values(), default=0.0)


@dataclass(frozen=True, eq=False)
class StagedExperts(ExpertDelta):
    """A delta as a slot takes it: in the dtype of the stacks, on their device."""

    a_scales: Tensor | None = None  # [num_experts or 1, num_a, rank, 1] float32, of 8 bits
    b_scales: Tensor | None = None  # [num_experts or 1, out_features, 1] float32, by slice
    error: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices and their scales."""
        return bytes_in(self)


def check_no_overflow(module: str, **tensors: Tensor) -> None:
    """Refuse tensors that a conversion to a narrower dtype has made infinite, by their names."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidInputError(
                f"{name} of {module} does not fit {tensor.dtype}: a value overflows\n"
                f"  to do: load the base model in bfloat16 or float32"
            )


def as_adapter_dtype(name: Any, model_dtype: torch.dtype) -> torch.dtype | None:
    """Return an 8-bit dtype, or None where adapters have the model's.

    Raises:
        InvalidInputError: another dtype, or a model whose dtype 8-bit adapters do not go with.
    """
    if name is None or name in ("auto", model_dtype):
        return None
    names = {str(dtype).removeprefix("torch."): dtype for dtype in LARGEST}
    dtype = names.get(name, name) if isinstance(name, str) else name
    if dtype not in LARGEST:
        raise InvalidInputError(
            f"adapter_dtype is {shown(name)}\n  allowed: {', '.join(names)}, or None for the "
            f"model's {model_dtype}"
        )
    if model_dtype not in COMPUTE_DTYPES:
        raise InvalidInputError(
            f"adapter_dtype is {shown(name)} for a model of {model_dtype}\n"
            f"  allowed: a model of float16, bfloat16 or float32"
        )
    eight_bits: torch.dtype = dtype
    return eight_bits


def quantized_pair(
    a: Tensor, b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Return A, its scales, B, its scales and the relative error of B A; values must be finite."""
    used = torch.ones((), dtype=torch.bool, device=a.device)
    stored_a, a_scales = quantized(a, used, dtype, PER_ROW)
    stored_b, b_scales = quantized(b, used, dtype, PER_ROW)
    error, size = _squares(a, b, _wide(stored_a, a_scales), _wide(stored_b, b_scales))
    return stored_a, a_scales, stored_b, b_scales, _ratio(error, size)


def quantized_experts(
    delta: ExpertDelta, spec: ExpertSpec, dtype: torch.dtype, device: torch.device
) -> StagedExperts:
    """Return the delta of experts in 8 bits, on a device; values must be finite."""
    wide = ExpertWeights(
        delta.lora_a[None].float(),
        delta.lora_b[None].float(),
        delta.ranks[None],
        delta.scalings[None],
        output_slices=spec.output_slices,
        num_experts=spec.num_experts,
        interleaved=spec.interleaved,
    )
    stored = quantize_weights(wide, dtype, PER_ROW)
    return StagedExperts(
        delta.module,
        stored.lora_a[0].to(device),
        stored.lora_b[0].to(device),
        delta.ranks.to(device, torch.int32),
        delta.scalings.to(device, torch.float32),
        stored.a_scales[0].to(device),
        stored.b_scales[0].to(device),
        _experts_error(wide, stored),
    )


def _experts_error(wide: ExpertWeights, stored: ExpertWeights) -> float:
    """Return the relative error of all experts and slices together."""
    assert stored.a_scales is not None and stored.b_scales is not None
    error = size = 0.0
    first = 0
    for s, width in enumerate(wide.output_slices):
        a = s if wide.num_a > 1 else 0
        columns, groups = wide.columns(s), slice(first, first + width)
        first += width
        for expert in range(wide.num_experts):
            # Index 0 where the experts share a matrix.
            e_a, e_b = (expert % part.shape[1] for part in (wide.lora_a, wide.lora_b))
            rank = int(wide.ranks[0, expert % wide.ranks.shape[1], a])
            factor = float(wide.scalings[0, expert % wide.scalings.shape[1], a]) ** 2
            stored_a = _wide(stored.lora_a[0, e_a, a], stored.a_scales[0, e_a, a])
            stored_b = _wide(stored.lora_b[0, e_b, columns], stored.b_scales[0, e_b, groups])
            terms = _squares(
                wide.lora_a[0, e_a, a, :rank],
                wide.lora_b[0, e_b, columns, :rank],
                stored_a[:rank],
                stored_b[:, :rank],
            )
            error, size = error + factor * terms[0], size + factor * terms[1]
    return _ratio(error, size)


def _wide(stored: Tensor, scales: Tensor) -> Tensor:
    return stored.float() * spread(scales, stored.shape[0], stored.shape[1], PER_ROW)


def _squares(a: Tensor, b: Tensor, stored_a: Tensor, stored_b: Tensor) -> tuple[float, float]:
    """Return ||B A - stored||^2 and ||B A||^2 by products of the width of the rank."""
    rank = a.shape[0]
    # ||L R||^2 is the sum of (L^T L) * (R R^T): numbers of rank^2, and L R is never made.
    # In float64, because B A and the stored product nearly cancel.
    left = torch.cat([b.double(), -stored_b.double()], 1)
    right = torch.cat([a.double(), stored_a.double()], 0)
    products = (left.T @ left) * (right @ right.T)
    return max(float(products.sum()), 0.0), float(products[:rank, :rank].sum())


def _ratio(error: float, size: float) -> float:
    return math.sqrt(error / size) if size > 0 else 0.0
