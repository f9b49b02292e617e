"""Names of dtypes, and the dtype of sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    """Return the names in alphabetical order, separated by commas."""
    return ", ".join(sorted(dtype_name(dtype) for dtype in dtypes))


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over `dtype` are kept in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
