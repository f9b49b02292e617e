"""The checks of every tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lora_backends.errors import InvalidInputError, shown

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Refusal = Callable[[str, str, str, str], InvalidInputError]
"""Makes an error from the problem, the given value, the allowed ones and the remedy."""


def described(key: str, tensor: Tensor) -> str:
    """Return the name and shape of a tensor."""
    return f"{shown(key, 1100)} {shown(list(tensor.shape))}"


def typed(key: str, tensor: Tensor) -> str:
    """Return the name, shape and dtype of a tensor."""
    return f"tensor {described(key, tensor)} {str(tensor.dtype).removeprefix('torch.')}"


def check_dtype(refusal: Refusal, key: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not dense, in memory and of a floating dtype."""
    # A meta tensor has no values, and a sparse one no strides.
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        what, to_do = "a tensor is not of a floating dtype", "save the adapter again"
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            what = "a tensor has 8 bits (fp8), and the file does not hold its scale"
            to_do = "save the adapter in bfloat16; adapter_dtype quantises it when it is loaded"
        raise refusal(what, typed(key, tensor), f"dense, {names}", to_do)


def check_finite(refusal: Refusal, key: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity."""
    if not all(_finite_rows(tensor)):
        to_do = "train the adapter again: its training diverged"
        allowed = "finite float32 values"
        raise refusal("a tensor holds NaN or infinity", typed(key, tensor), allowed, to_do)


def _finite_rows(tensor: Tensor) -> Iterator[bool]:
    # In pieces: the mask of a vocabulary's matrix is as large as the matrix.
    for start in range(0, len(tensor), 1024):
        yield bool(torch.isfinite(tensor[start : start + 1024].float()).all())
