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


def wide_operands(
    x: Tensor,
    weight: Tensor,
    weights: LoRAWeights,
    token_slots: Tensor,
    slots: Tensor,
    rank: int,
) -> tuple[Tensor, Tensor] | None:
    """Return [x | c_1 h | ... | c_n h] and [W | B_1 | ... | B_n], contiguous, in two launches.

    Args:
        x: [rows, in_features], its last axis contiguous.
        weight: W, [out_features, in_features], likewise.
        weights: of the layer: one slice, of x's dtype, without scales.
        token_slots: slot of every row or -1, [rows or more] int32.
        slots: of the n adapters, [n] int32, no two alike.
        rank: the largest of their ranks.

    Returns:
        [rows, in_features + n * each] and [out_features, in_features + n * each], where `each` is
        `rank` rounded up to 8. None if nothing was launched: rows of the operands would begin at no
        multiple of 16 bytes, or the rank is beyond `MOST_RANK`.
    """
    (rows, features), (out_features, _), count = x.shape, weight.shape, slots.numel()
    a, b = weights.a_of(0), weights.b_of(0)
    steps = x.stride(1), weight.stride(1), a.stride(2), b.stride(2)
    if features % 8 or rank > MOST_RANK or steps != (1, 1, 1, 1):
        return None
    each = -(-rank // 8) * 8
    width = features + count * each
    left, right = x.new_empty(rows, width), weight.new_empty(out_features, width)
    places = 1 << (count - 1).bit_length()
    of_left, of_right = kernels_of(each, places, features % 128 == 0)
    ranks, scalings = weights.ranks, weights.scalings
    if rows:
        of_left.launch(
            -(-rows // of_left.sizes.BLOCK_T),
            Arguments(
                (left, x, token_slots, slots, a, ranks, scalings),
                (),
                (rows, count, features // 8, x.stride(0), *a.stride()[:2])
                + (ranks.stride(0), scalings.stride(0)),
            ),
        )
    of_right.launch(
        -(-out_features // COLUMNS),
        Arguments(
            (right, weight, b, slots, ranks),
            (),
            (count, out_features, features // 8, weight.stride(0), *b.stride()[:2])
            + (ranks.stride(0),),
        ),
    )
    return left, right


@lru_cache(maxsize=1024)
def kernels_of(
    each: int, places: int, even_k: bool
) -> tuple[SpecializedKernel, SpecializedKernel]:
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
