"""How the values of A and B are stored, and what kernels widen them to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lora_backends.eight_bit import ScaleBlock


class Storage(NamedTuple):
    """How the values of A and B are stored, and what they are widened to."""

    kind: int = 0  # as `widened` in elements numbers it; 0: as they are
    block: ScaleBlock = (None, None)  # of scales
    wide: torch.dtype | None = None  # of products with B


PLAIN = Storage()
_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
_BY_PTX = 3  # from a kind to the same with conversions in PTX
WIDE = {None: 0, torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Numbers of dtypes of products: a compile hook of Triton takes no dtype in a bundle."""


def storage_kind(stored: torch.dtype, programmatic: bool = False) -> int:
    """Return how a launch decodes values of a dtype, as `widened` in elements numbers it.

    `programmatic`: the device is of CUDA capability 9.0 or later.
    """
    kind = _KINDS.get(stored, 0)
    return kind + _BY_PTX if kind and programmatic else kind


def stored_bytes(stack: torch.Tensor) -> torch.Tensor:
    """Return an 8-bit stack as int8: kernels load bytes, and `widened` converts them."""
    return stack.view(torch.int8) if stack.dtype in _KINDS else stack
