"""Makes the operands of a widened product: sizes, checks and launches."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from lora_backends.sgmv.kernels.operands import WideSizes
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.wide.kernels import left_kernel, right_kernel
from lora_backends.weights import LoRAWeights

MOST_RANK = 256
"""The largest rank whose blocks fit into 64 KB of shared memory, two steps at a time."""

COLUMNS = 8
"""Rows of W per program of the right operand."""


def takes(x: Tensor, weight: Tensor, weights: LoRAWeights, rank: int) -> bool:
    """Return whether the kernels make the operands for such tensors, which `wide_left` describes.

    Rows of the operands begin at multiples of 16 bytes, and `rank` is up to `MOST_RANK`.
    """
    matrices = x, weight, weights.a_of(0), weights.b_of(0)
    return (
        x.shape[1] % 8 == 0
        and 0 < rank <= MOST_RANK
        and all(matrix.stride(-1) == 1 for matrix in matrices)
    )


def wide_left(
    x: Tensor, weights: LoRAWeights, token_slots: Tensor, slots: Tensor, rank: int
) -> Tensor:
    """Return [x | c_1 h | ... | c_n h], contiguous, in one launch.

    Args:
        x: [rows, in_features].
        weights: of the layer: one slice, of x's dtype, without scales.
        token_slots: slot of every row or -1, [rows or more] int32.
        slots: of the n adapters, [n] int32, no two alike.
        rank: the largest of their ranks.

    Returns:
        [rows, in_features + n * each], where `each` is `rank` rounded up to 8.
    """
    (rows, features), a = x.shape, weights.a_of(0)
    kernel, _ = _kernels(rank, slots, features)
    count, each = slots.numel(), kernel.sizes.EACH
    left = x.new_empty(rows, features + count * each)
    if rows:
        tensors = left, x, token_slots, slots, a, weights.ranks, weights.scalings
        strides = *a.stride()[:2], weights.ranks.stride(0), weights.scalings.stride(0)
        numbers = rows, count, features // 8, x.stride(0), *strides
        kernel.launch(-(-rows // kernel.sizes.BLOCK_T), Arguments(tensors, (), numbers))
    return left


def wide_right(weight: Tensor, weights: LoRAWeights, slots: Tensor, rank: int) -> Tensor:
    """Return [W | B_1 | ... | B_n], contiguous, in one launch; arguments as of `wide_left`.

    weight is W, [out_features, in_features].
    """
    (out_features, features), b = weight.shape, weights.b_of(0)
    _, kernel = _kernels(rank, slots, features)
    count, each = slots.numel(), kernel.sizes.EACH
    right = weight.new_empty(out_features, features + count * each)
    tensors = right, weight, b, slots, weights.ranks
    strides = weight.stride(0), *b.stride()[:2], weights.ranks.stride(0)
    numbers = count, out_features, features // 8, *strides
    kernel.launch(-(-out_features // kernel.sizes.BLOCK_C), Arguments(tensors, (), numbers))
    return right


def _kernels(
    rank: int, slots: Tensor, features: int
) -> tuple[SpecializedKernel, SpecializedKernel]:
    places = 1 << (slots.numel() - 1).bit_length()
    return kernels_of(-(-rank // 8) * 8, places, features % 128 == 0)


@lru_cache(maxsize=1024)
def kernels_of(each: int, places: int, even_k: bool) -> tuple[SpecializedKernel, SpecializedKernel]:
    """Return the kernels of both operands.

    Args:
        each: columns of an adapter.
        places: adapters, rounded up to a power of two.
        even_k: whether in_features is a multiple of 128.
    """
    block_r = max(16, 1 << (each - 1).bit_length())
    # Little enough shared memory for several programs on a multiprocessor: they only wait for x.
    block_t = min(64, 8192 // block_r)
    block_k = 128 if block_r <= 32 else 64 if block_r <= 128 else 32
    shared = {"EACH": each, "PLACES": places, "BLOCK_R": block_r, "INTERPRETED": INTERPRETED}
    left = WideSizes(BLOCK_T=block_t, BLOCK_K=block_k, EVEN_K=even_k, PRECISION="ieee", **shared)
    right = WideSizes(BLOCK_C=COLUMNS, BLOCK_K=256, **shared)
    return (
        specialized(left_kernel, 1, num_stages=3, SIZES=left),
        specialized(right_kernel, 1, SIZES=right),
    )
