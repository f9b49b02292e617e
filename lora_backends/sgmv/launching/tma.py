"""Loads B through TMA, the tensor memory accelerator, straight into shared memory.

A block is addressed by its first row and rank. Values outside of the matrix load as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_backends.sgmv.launching.kernel import INTERPRETED, has_programmatic_launch
from lora_backends.sgmv.launching.slice_tables import Located

MAX_GRID_ROWS = 65535
"""The most rows of a grid of two axes, which kernels with TMA have."""

_ALIGNMENT = 16  # bytes, of the matrix and of its rows


def has_tma(device: torch.device) -> bool:
    """Return whether kernels on a device can use TMA: compute capability 9.0 and later."""
    return INTERPRETED or has_programmatic_launch(device)  # both came with capability 9.0


def allows_tma(lora_b: Located, max_rank: int, max_rows: int) -> bool:
    """Return whether B can be loaded through TMA by a grid of up to `max_rows` rows.

    B of all slots, and slices or experts, must form one matrix of 8- or 16-bit values with aligned
    rows; slots, slices and experts may lie at any distance.
    """
    base = lora_b.base
    *outer, row_stride, _ = base.stride()
    # If slices are separate tensors, a block must not reach beyond a slice, because the memory
    # after it may be unmapped: `launch` then takes TMA only where blocks divide the slices.
    return (
        max_rows <= MAX_GRID_ROWS
        and base.element_size() <= 2
        and max_rank % 8 == 0
        and row_stride >= max_rank
        and row_stride * base.element_size() % _ALIGNMENT == 0
        and not any([stride % row_stride for stride in outer])
        and base.data_ptr() % _ALIGNMENT == 0
        and 0 < _rows(lora_b) < 2**31
    )


def _rows(lora_b: Located) -> int:
    if lora_b.alignment:
        return lora_b.rows
    *outer, out_features, _ = lora_b.base.shape
    *strides, row_stride, _ = lora_b.base.stride()
    steps = [(n - 1) * stride for n, stride in zip(outer, strides, strict=True)]
    return sum(steps) // row_stride + out_features


def descriptor(lora_b: Located, max_rank: int, block_c: int, block_r: int) -> Any:
    """Return the TMA descriptor of a B that `allows_tma`, as one matrix [rows, max_rank].

    A load takes `block_c` columns of y and `block_r` ranks.
    """
    # column c of slot l is row ``l * (slot stride // row stride) + c``, and with a table of slices
    # their distance further on
    shape = [_rows(lora_b), max_rank]
    return TensorDescriptor(lora_b.base, shape, [lora_b.base.stride(-2), 1], [block_c, block_r])


@dataclass(frozen=True)
class _Address:
    """Stands for a descriptor's tensor: a launch asks it for no more than this."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def without_tensor(located: Any) -> Any:
    """Return a descriptor that holds B's address instead of B, so that it keeps no memory alive."""
    if located is None:
        return None
    return replace(located, base=_Address(located.base.data_ptr(), located.base.dtype))
