"""B by the tensor memory accelerator: whole boxes of rows and ranks, without registers on the way.

A box is addressed by its first row and rank. What lies outside of the matrix reads as zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_backends.gpu.launching import INTERPRETED, has_programmatic_launch
from lora_backends.gpu.tiles import ExpandTiles

MOST_ROWS = 65535
"""Rows that a grid of two axes can have: kernels that copy boxes have such grids."""

_ALIGNMENT = 16  # bytes, of the matrix and of its rows


def has_boxes(device: torch.device) -> bool:
    """Return whether kernels on a device can copy boxes: compute capability 9.0 and later."""
    return INTERPRETED or has_programmatic_launch(device)  # which came with the same devices


def without_boxes(tiles: ExpandTiles) -> ExpandTiles:
    """Return the sizes for a launch that cannot copy boxes."""
    return replace(tiles, num_stages=1) if tiles.num_stages > 1 else tiles


def fits_boxes(lora_b: torch.Tensor, most_rows: int) -> bool:
    """Return whether boxes of B can be copied for a plan of at most so many rows of the grid.

    B of all slots has to be one matrix of aligned 16-bit rows, however far apart.
    """
    num_slots, out_features, max_rank = lora_b.shape
    slot_stride, row_stride, _ = lora_b.stride()
    return (
        most_rows <= MOST_ROWS
        and lora_b.element_size() == 2
        and max_rank % 8 == 0
        and row_stride >= max_rank
        and row_stride * 2 % _ALIGNMENT == 0
        and slot_stride % row_stride == 0
        and lora_b.data_ptr() % _ALIGNMENT == 0
        and num_slots * slot_stride // row_stride + out_features < 2**31
    )


@dataclass(frozen=True)
class _Address:
    """All that a descriptor asks of its tensor when it is launched again."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def by_address(boxes: Any) -> Any:
    """Return what `boxes_of` did, without the tensor: who keeps it does not keep B."""
    if boxes is None:
        return None
    return replace(boxes, base=_Address(boxes.base.data_ptr(), boxes.base.dtype))


def boxes_of(lora_b: torch.Tensor, block_c: int, block_r: int) -> Any:
    """Return what a kernel loads boxes of [block_c, block_r] from: B as [rows, max_rank].

    Column c of slot l is row ``l * (slot stride // row stride) + c``.

    Args:
        lora_b: [num_slots, out_features, max_rank] that `fits_boxes`.
        block_c: columns of y per box.
        block_r: ranks per box.
    """
    num_slots, out_features, max_rank = lora_b.shape
    slot_stride, row_stride, _ = lora_b.stride()
    rows = (num_slots - 1) * (slot_stride // row_stride) + out_features
    return TensorDescriptor(lora_b, [rows, max_rank], [row_stride, 1], [block_c, block_r])
