"""Makes the operands of a widened product: sizes, checks and launches."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from lora_backends.sgmv.kernels.operands import WideSizes
from lora_backends.sgmv.launch import stacks_of
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.wide.kernels import left_kernel, right_kernel
from lora_backends.weights import LoRAWeights

MOST_COLUMNS = 256
"""The most columns of an adapter: blocks of two steps fit into 64 KB of shared memory."""

ROWS = 8
"""Rows of W per program of the right operand."""


def takes(x: Tensor, weight: Tensor, weights: LoRAWeights, rank: int) -> bool:
    """Return whether the kernels can make the operands.

    x is [rows, in_features], weight [out_features, in_features]; rank is the largest of the batch.
    in_features must be a multiple of 8, rows contiguous, and the columns of an adapter 1 to
    `MOST_COLUMNS`. False for wrong shapes, dtypes or devices, too: `run_linear` raises the error.
    """
    return (
        x.dtype == weight.dtype == weights.dtype
        and x.device == weight.device == weights.device
        and x.shape[1] == weight.shape[1] == weights.in_features
        and x.shape[1] % 8 == 0
        and 0 < weights.num_slices * columns_of(rank) <= MOST_COLUMNS
        and x.stride(1) == weight.stride(1) == 1
    )


def columns_of(rank: int) -> int:
    """Return the columns of an adapter's slice: the rank rounded up to 8, 16 bytes in 16 bits."""
    return -(-rank // 8) * 8


def wide_left(
    x: Tensor, weights: LoRAWeights, token_slots: Tensor, slots: Tensor, rank: int
) -> Tensor:
    """Return [x | c_1 h | ... | c_n h], contiguous, in one launch.

    Args:
        x: [rows, in_features], float32, float16 or bfloat16.
        weights: of the layer, of x's dtype, without scales.
        token_slots: slot of every row or -1, [rows or more] int32.
        slots: of the n adapters, [n] int32, no two alike.
        rank: the largest of their ranks.

    Returns:
        [rows, in_features + n * num_slices * `columns_of(rank)`].
    """
    (rows, features), stacks, count = x.shape, stacks_of(weights), slots.numel()
    a, each = stacks.a, columns_of(rank)
    assert a is not None
    places = 1 << (count - 1).bit_length()
    kernel = left_kernel_of(each, weights.num_slices, a.alignment, places, features % 128 == 0)
    left = x.new_empty(rows, features + count * weights.num_slices * each)
    if rows:
        tensors = left, x, token_slots, slots, a.base, a.table, stacks.ranks, stacks.scalings
        numbers = rows, count, features // 8, x.stride(0), *a.strides
        kernel.launch(-(-rows // kernel.sizes.BLOCK_T), Arguments(tensors, (), numbers))
    return left


def wide_right(weight: Tensor, weights: LoRAWeights, slots: Tensor, rank: int) -> Tensor:
    """Return [W | B_1 | ... | B_n], contiguous, in one launch.

    Args:
        weight: W, [out_features, in_features], of the weights' dtype.
        weights: as in `wide_left`.
        slots: as there.
        rank: as there.

    Returns:
        [out_features, in_features + n * num_slices * `columns_of(rank)`].
    """
    (out_features, features), stacks, count = weight.shape, stacks_of(weights), slots.numel()
    b, each = stacks.b, columns_of(rank)
    assert b is not None
    kernel = right_kernel_of(each, weights.slice_offsets[:-1], b.alignment)
    right = weight.new_empty(out_features, features + count * weights.num_slices * each)
    tensors = right, weight, b.base, b.table, slots, stacks.ranks
    numbers = count, out_features, features // 8, weight.stride(0), *b.strides
    kernel.launch(-(-out_features // ROWS), Arguments(tensors, (), numbers))
    return right


@lru_cache(maxsize=1024)
def left_kernel_of(
    each: int, num_slices: int, slice_align: int, places: int, even_k: bool
) -> SpecializedKernel:
    """Return the kernel of the left operand.

    Args:
        each: columns of an adapter's slice.
        num_slices: of the layer.
        slice_align: of the table of A; 0: none is read.
        places: adapters, rounded up to a power of two.
        even_k: whether in_features is a multiple of 128.
    """
    block_n = _block_n(each, num_slices)
    # small blocks: several programs fit on a multiprocessor and hide each other's loads of x
    sizes = WideSizes(
        EACH=each,
        NUM_SLICES=num_slices,
        SLICE_ALIGN=slice_align,
        BLOCK_N=block_n,
        BLOCK_K=128 if block_n <= 32 else 64 if block_n <= 128 else 32,
        INTERPRETED=INTERPRETED,
        PLACES=places,
        BLOCK_T=min(64, 8192 // block_n),
        EVEN_K=even_k,
        PRECISION="ieee",
    )
    return specialized(left_kernel, 1, num_stages=3, SIZES=sizes)


@lru_cache(maxsize=1024)
def right_kernel_of(each: int, starts: tuple[int, ...], slice_align: int) -> SpecializedKernel:
    """Return the kernel of the right operand for slices that begin at columns `starts`."""
    sizes = WideSizes(
        EACH=each,
        NUM_SLICES=len(starts),
        SLICE_ALIGN=slice_align,
        BLOCK_N=_block_n(each, len(starts)),
        BLOCK_K=256,
        INTERPRETED=INTERPRETED,
        BLOCK_C=ROWS,
        STARTS=starts,
    )
    return specialized(right_kernel, 1, SIZES=sizes)


def _block_n(each: int, num_slices: int) -> int:
    return max(16, 1 << (each * num_slices - 1).bit_length())
