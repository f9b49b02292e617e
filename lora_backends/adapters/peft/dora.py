"""DoRA: the scale of each output, computed from the base weight once, when an adapter is loaded.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353, as PEFT
computes it in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lora_backends.adapters.specs import ModuleDelta, ModuleSpec
from lora_backends.errors import InvalidInputError, UnsupportedInputError

BLOCK = 2**22
"""Elements of W + scaling B A that are there at once: 16 MiB of float32."""


@dataclass(frozen=True, eq=False)
class BaseLayer:
    """The weight and bias of one module of the base model, which DoRA reads."""

    weight: Tensor  # [out_features, in_features], floating, any strides; an embedding's transposed
    bias: Tensor | None  # [out_features]; None where the module has none


BaseLayers: TypeAlias = Callable[[str], BaseLayer]
"""Returns the base layer at a module path."""


def dora_terms(
    delta: ModuleDelta, spec: ModuleSpec, base_layers: BaseLayers | None
) -> tuple[Tensor, Tensor | None]:
    """Return the terms that make base(x) = W x + b DoRA: `scales * (base(x) + delta(x)) + bias`.

        scales = magnitude / ||W + scaling B A||    the norm of each output's row
        bias   = (1 - scales) * b

    Args:
        delta: with a magnitude. Its A and B are those of the file, not yet rounded.
        spec: of its module. The norm leaves out the scale of a scaled embedding, as PEFT does.
        base_layers: of the model.

    Returns:
        scales [out_features], and bias [out_features], or None where the module has none.

    Raises:
        UnsupportedInputError: `base_layers` is None, or cannot tell what the weight is.
        InvalidInputError: the weight has another shape, or a norm is not above 0 and finite.
    """
    if base_layers is None or delta.magnitude is None:
        raise UnsupportedInputError(
            f"the adapter uses DoRA (use_dora), which needs the weights of the base model\n"
            f"  given: a magnitude for {delta.module!r}, and a pool that knows no base weights\n"
            f"  to do: make the pool with base_layers=..., a function of a module's path"
        )
    base = base_layers(delta.module)
    shape = (spec.out_features, spec.in_features)
    if base.weight.shape != shape:
        raise InvalidInputError(
            f"the base weight of {delta.module!r} has the wrong shape\n"
            f"  given: {list(base.weight.shape)}\n  allowed: {list(shape)}"
        )
    norms = _row_norms(base.weight.detach(), delta, delta.scaling / spec.embed_scale)
    scales = delta.magnitude.to(norms) / norms
    wrong = ~(scales.isfinite() & norms.isfinite() & (norms > 0))
    if bool(wrong.any()):
        output = int(wrong.nonzero()[0])
        raise InvalidInputError(
            f"DoRA cannot scale {delta.module!r}: W + scaling B A has no norm to divide by\n"
            f"  given: norm {float(norms[output])} and magnitude {float(delta.magnitude[output])} "
            f"of output {output}\n  allowed: a finite norm above 0, and a finite quotient"
        )
    if base.bias is None:
        return scales, None
    return scales, (1 - scales) * base.bias.detach().to(scales)


def _row_norms(weight: Tensor, delta: ModuleDelta, scaling: float) -> Tensor:
    """Return the norm of each row of W + scaling B A, in blocks of rows."""
    high, wide = weight.shape
    # At least float32: a norm in bfloat16 would have two digits.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (tensor.to(weight.device, dtype) for tensor in (delta.lora_a, delta.lora_b))
    norms = torch.empty(high, dtype=dtype, device=weight.device)
    step = max(1, BLOCK // wide)
    for first in range(0, high, step):
        rows = slice(first, first + step)
        merged = torch.addmm(weight[rows].to(dtype), b[rows], a, alpha=scaling)
        norms[rows] = torch.linalg.vector_norm(merged, dim=1)
    return norms
