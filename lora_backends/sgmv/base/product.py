"""Multiplies few rows by a base layer's weight beside a shrink: sizes, checks and arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_backends.sgmv.base.kernels import base_kernel
from lora_backends.sgmv.kernels.operands import BaseSizes
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.tiles.gpu import Gpu

MOST_ROWS = 64
"""Rows up to which the kernel is, on average, faster than cuBLAS on an H200; with 128 rows it takes
1.01 to 1.17 times as long."""

MULTIPROCESSORS_PER_PROGRAM = 3
"""The most multiprocessors for each program of the grid: with fewer programs cuBLAS is up to twice
as fast, because it splits the sum."""

ALIGNMENT = 16
"""Bytes to which TMA needs a matrix and its rows aligned."""


class BaseTiles(NamedTuple):
    """Sizes of the kernel."""

    block_c: int  # columns of y per program
    block_k: int  # inputs per loop step
    num_stages: int  # loop steps whose loads are in flight together


def base_tiles(rows: int, out_features: int, gpu: Gpu) -> BaseTiles | None:
    """Return the sizes for x of `rows` rows, or None if torch has to multiply.

    None: cuBLAS is faster, or the device has too little shared memory.

    Measured on an H200 with 41 weights from 3,072 x 1,024 to 28,672 x 4,096, as times cuBLAS's
    time: 0.93 on average with 8 and 32 rows, 0.96 with 64, and 0.82 to 1.07 for a single weight.

    >>> from lora_backends.sgmv.tiles.gpu import H200
    >>> base_tiles(8, 4096, H200), base_tiles(65, 4096, H200), base_tiles(8, 1024, H200)
    (BaseTiles(block_c=64, block_k=128, num_stages=6), None, None)
    """
    programs = -(-out_features // 64)
    if rows > MOST_ROWS or programs * MULTIPROCESSORS_PER_PROGRAM < gpu.multiprocessors:
        return None
    if programs <= gpu.multiprocessors:  # one program each, with all of its shared memory
        tiles = BaseTiles(64, 128, 6)
    elif programs > 2 * gpu.multiprocessors:
        tiles = BaseTiles(128, 64, 4)
    elif rows <= 32:
        tiles = BaseTiles(64, 128, 4)  # two programs each
    else:
        tiles = BaseTiles(128, 64, 6)
    step = (tiles.block_c + _block_t(rows)) * tiles.block_k * 2  # bytes
    stages = min(tiles.num_stages, (gpu.shared_bytes - 1024) // step)
    return tiles._replace(num_stages=stages) if stages > 1 else None


def _block_t(rows: int) -> int:
    return max(16, 1 << max(0, rows - 1).bit_length())


def base_kernel_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, gpu: Gpu, programmatic: bool
) -> SpecializedKernel | None:
    """Return the kernel for ``x @ weight.T + bias``, or None if torch has to multiply.

    x [rows, in_features] is checked as the x of a layer; weight is [out_features, in_features].
    """
    if not (_is_like(weight, x) and weight.layout is torch.strided and weight.ndim == 2):
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.shape[1] != x.shape[1]:
        return None
    if not (_is_aligned(x) and _is_aligned(weight)):
        return None
    if bias is not None and not (
        _is_like(bias, x) and bias.shape == weight.shape[:1] and bias.is_contiguous()
    ):
        return None
    rows, out_features = x.shape[0], weight.shape[0]
    tiles = base_tiles(rows, out_features, gpu) if rows else None
    if tiles is None:
        return None
    return _kernel(
        tiles, _block_t(rows), -(-out_features // tiles.block_c), bias is not None, programmatic
    )


def _is_like(tensor: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is plain, of x's dtype and device, and needs no gradient."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    learns = tensor.requires_grad and torch.is_grad_enabled()
    same = tensor.dtype == x.dtype and tensor.device == x.device
    return plain and same and not learns and not tensor.is_neg()


def _is_aligned(matrix: Tensor) -> bool:
    row, step = matrix.stride()
    return (
        step == 1
        and row >= matrix.shape[1]
        and row * matrix.itemsize % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
    )


@lru_cache(maxsize=1024)
def _kernel(
    tiles: BaseTiles, block_t: int, programs: int, has_bias: bool, programmatic: bool
) -> SpecializedKernel:
    sizes = BaseSizes(
        BLOCK_T=block_t,
        BLOCK_C=tiles.block_c,
        BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages,
        HAS_BIAS=has_bias,
        PRECISION="ieee",  # of operands of 16 bits
        INTERPRETED=INTERPRETED,
        PROGRAMMATIC=programmatic,
    )
    return specialized(base_kernel, programs, programmatic=programmatic, PROGRAMS=1, SIZES=sizes)


def base_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, kernel: SpecializedKernel
) -> Arguments:
    """Return the arguments with which `kernel` writes ``x @ weight.T + bias`` into contiguous y.

    The launch has one row of programs. A programmatic kernel must follow a shrink, which waits for
    all earlier kernels.
    """
    sizes = kernel.sizes
    descriptors = (
        _descriptor(x, sizes.BLOCK_T, sizes.BLOCK_K),
        _descriptor(weight, sizes.BLOCK_C, sizes.BLOCK_K),
    )
    numbers = (x.shape[0], x.shape[1], weight.shape[0])
    return Arguments((y, y if bias is None else bias), descriptors, numbers)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
