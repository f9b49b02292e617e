# mypy: ignore-errors
"""Device functions that are right on a GPU and in Triton's interpreter."""

import triton
import triton.language as tl


@triton.jit
def rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values in `dtype`, rounded to nearest; the interpreter truncates bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, nearest.to(tl.float32, bitcast=True), value)
    return value.to(dtype)


@triton.jit
def multiply(left, right, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right`` in float32; the interpreter would multiply the bits of bfloat16."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def multiply_add(left, right, added, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right + added``, as `multiply`."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, added, input_precision=PRECISION)
