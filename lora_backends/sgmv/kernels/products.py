# mypy: ignore-errors
"""Device functions that multiply blocks of values.

Axes: T (rows of the tile), R (rank), C (columns of y). h is zero beyond the rank, where B may hold
anything.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.widening import only_bytes, wide_dtype, widened


@triton.jit
def right_operand(b, scales, r, rank, S: tl.constexpr):
    """Return a block of B as it is multiplied: finite beyond the rank, and 8 bits widened."""
    if S.STORAGE >= 5:
        b = only_bytes(b, (r < rank)[:, None])
    elif S.STORAGE == 0 or S.STORAGE == 2 or S.STORAGE == 3:  # int8 is finite anyway
        b = within(b, r, rank)
    if S.STORAGE == 0:
        return b
    elif S.GROUP_R == 0:
        return widened(b, wide_dtype(S.WIDE), S.STORAGE, True)
    else:
        # scales that change along the sum are multiplied in
        return widened(b, tl.float32, S.STORAGE) * scales


@triton.jit
def product_of_operands(factor, h, b, scales, S: tl.constexpr):
    """Return factor * (h @ b) in float32, with the scales of b, a `right_operand`."""
    if S.STORAGE > 0 and S.GROUP_R == 0:
        factor = factor * scales[None, :]
    if S.EXACT_H or (S.STORAGE > 0 and S.GROUP_R > 0):
        return factor * multiply(h, b.to(tl.float32), None, S)
    else:
        h = rounded(h, b.dtype, S.INTERPRETED)
        return factor * multiply(h, b, None, S)


@triton.jit
def row_product(h, b, scales, r, rank, S: tl.constexpr):
    """Return b @ h [C] in float32 for one row h [R], with the scales of b [C, R]."""
    if not S.EXACT_H:
        if S.STORAGE == 0:
            h = rounded(h, b.dtype, S.INTERPRETED).to(tl.float32)
        else:
            h = rounded(h, wide_dtype(S.WIDE), S.INTERPRETED).to(tl.float32)
    if S.STORAGE >= 5:
        b = only_bytes(b, (r < rank)[None, :])
    values = widened(b, tl.float32, S.STORAGE)
    if S.STORAGE > 0 and S.GROUP_R > 0:
        values *= tl.trans(scales)
    # a byte of int8 is finite, all else may be NaN
    if S.GROUP_R > 0 or S.STORAGE == 0 or S.STORAGE == 2 or S.STORAGE == 3:
        values = tl.where((r < rank)[None, :], values, 0.0)
    sums = tl.sum(values * h[None, :], axis=1)  # [C]
    if S.STORAGE > 0 and S.GROUP_R == 0:
        sums *= scales
    return sums


@triton.jit
def within(b, r, rank):
    """Return b, zero beyond the rank."""
    return tl.where((r < rank)[:, None], b, 0)  # 0.0 would make floats of bytes


@triton.jit
def multiply(left, right, acc, S: tl.constexpr):
    """Return ``left @ right + acc`` in float32; acc may be None."""
    if S.INTERPRETED:  # its tl.dot multiplies the bit patterns of bfloat16
        # numpy sums in an order that depends on the tile and the machine: float64 hides it
        part = tl.dot(left.to(tl.float64), right.to(tl.float64), out_dtype=tl.float64)
        part = part.to(tl.float32)
        return part if acc is None else acc + part
    else:
        return tl.dot(left, right, acc, input_precision=S.PRECISION)


@triton.jit
def rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # its cast truncates
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, nearest.to(tl.float32, bitcast=True), value)
    return value.to(dtype)
