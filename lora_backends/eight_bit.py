"""8-bit stacks: quantisation, and the groups of elements that share a scale.

The value of an element is its stored value times the scale of its group. A group is a block of
`scale_block` = (rows, columns) of one matrix, A or B of one slot and slice; None means all of
them, and the last block of an axis may be narrower. (1, None), a scale per row, is the default.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch

from lora_backends.errors import InvalidInputError, shown

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest value that each storage dtype is used for."""

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of x, base_output and results of a layer of 8-bit stacks."""

ScaleBlock: TypeAlias = tuple[int | None, int | None]


def is_eight_bit(dtype: torch.dtype) -> bool:
    """Return whether stacks of a dtype have scales."""
    return dtype in LARGEST


def checked_block(scale_block: Any) -> ScaleBlock:
    """Return (rows, columns), each an int of at least 1 or None."""
    try:
        rows, columns = (None if n is None else operator.index(n) for n in scale_block)
    except (TypeError, ValueError):
        rows, columns = 0, 0
    if min(1 if rows is None else rows, 1 if columns is None else columns) < 1:
        raise InvalidInputError(
            f"scale_block is not a pair of sizes\n  given: {shown(scale_block)}\n"
            f"  allowed: (rows, columns), each an int of at least 1, or None for all"
        )
    return rows, columns


def groups_of(size: int, per_group: int | None) -> int:
    """Return how many groups an axis has.

    >>> groups_of(10, 4), groups_of(10, None), groups_of(0, None)
    (3, 1, 1)
    """
    return 1 if per_group is None else max(1, -(-size // per_group))


def b_row_groups(widths: tuple[int, ...], block: ScaleBlock) -> tuple[int, ...]:
    """Return the groups of rows of B for each slice: a group never crosses slices."""
    return tuple(groups_of(width, block[0]) for width in widths)


def spread(scales: torch.Tensor, rows: int, columns: int, block: ScaleBlock) -> torch.Tensor:
    """Return the scale of every element: [..., rows, columns] from [..., row groups, groups]."""
    row_groups = torch.arange(rows, device=scales.device) // (block[0] or max(rows, 1))
    column_groups = torch.arange(columns, device=scales.device) // (block[1] or max(columns, 1))
    return scales[..., row_groups, :][..., column_groups]


def quantized(
    values: torch.Tensor, used: torch.Tensor, dtype: torch.dtype, block: ScaleBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored values and scales of matrices [..., rows, columns].

    scale = largest magnitude of the group / the largest of the dtype, 1 for a group of zeros.
    int8 rounds to nearest, half to even; float8 as torch rounds.

    Args:
        values: floating point.
        used: bool, broadcast to values; where false the value may be anything and is stored as 0.
        dtype: a key of `LARGEST`.
        block: (rows, columns) of a group.

    Raises:
        InvalidInputError: a used value is not finite.
    """
    wide = torch.where(used, values.to(torch.float32), 0)
    if not bool(wide.isfinite().all()):
        raise InvalidInputError(
            "weights to be quantised hold NaN or infinity within a rank\n"
            "  to do: quantise finite weights"
        )
    rows, columns = wide.shape[-2:]
    largest = _group_maximum(_group_maximum(wide.abs(), -2, block[0]), -1, block[1])
    scales = largest / LARGEST[dtype]
    scales = torch.where(scales > 0, scales, 1)  # zeros, or too small for a float32 scale
    stored = wide / spread(scales, rows, columns, block)
    stored = stored.clamp(-LARGEST[dtype], LARGEST[dtype])
    return (stored.round() if dtype == torch.int8 else stored).to(dtype), scales


def _group_maximum(magnitudes: torch.Tensor, axis: int, per_group: int | None) -> torch.Tensor:
    """Return the largest of each group along an axis, -1 or -2; an empty axis has one of 0."""
    size = magnitudes.shape[axis]
    if size == 0:
        shape = list(magnitudes.shape)
        shape[axis] = 1
        return magnitudes.new_zeros(shape)
    step = min(per_group or size, size)
    whole = size - size % step
    groups = torch.unflatten(magnitudes.narrow(axis, 0, whole), axis, (whole // step, step))
    parts = [groups.amax(axis)]
    # the last group may be narrower
    if whole < size:
        parts.append(magnitudes.narrow(axis, whole, size - whole).amax(axis, keepdim=True))
    return torch.cat(parts, axis)
