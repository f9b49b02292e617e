# mypy: ignore-errors
"""The product of few rows with a base layer's weight, in a kernel that other kernels can overlap.

In decode the time is that of reading the weight once, so many loads must be in flight: a program
computes BLOCK_C columns of y for all rows, and TMA loads STAGES blocks of the weight ahead. The
weight is the left operand, because a wgmma has 64 rows of the left operand and as few as 8 columns
of the right one.

Axes are named as in `sgmv.kernels`: T (rows of x), C (columns of y), K (inputs).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.kernels.products import multiply, rounded


@triton.jit(do_not_specialize=["rows"])
def base_kernel(
    y_ptr,
    bias_ptr,
    x_tma,
    w_tma,
    rows,
    in_features,
    out_features,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Write ``x @ w.T + bias`` into y [rows, out_features], contiguous; sums are float32."""
    C: tl.constexpr = SIZES.BLOCK_C
    T: tl.constexpr = SIZES.BLOCK_T
    if SIZES.PROGRAMMATIC:
        # This kernel may start before the one in front has ended, and reads x at once. So the one
        # in front must wait for all earlier kernels before it lets this one start.
        gdc_launch_dependents()
    first = tl.program_id(0) * C
    c = first + tl.arange(0, C)  # [C]
    t = tl.arange(0, T)  # [T]
    acc = tl.zeros((C, T), dtype=tl.float32)
    for k in tl.range(0, in_features, SIZES.BLOCK_K, num_stages=SIZES.STAGES):
        # [C, K], [T, K]; beyond an end TMA loads zeros
        w, x = w_tma.load([first, k]), x_tma.load([0, k])
        acc = multiply(w, x.T, acc, SIZES)
    if SIZES.HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=c < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if SIZES.PROGRAMMATIC:
        gdc_wait()  # the next kernel waits for this one alone, but reads what both have written
    at = y_ptr + t.to(tl.int64)[None, :] * out_features + c[:, None]
    mask = (t < rows)[None, :] & (c < out_features)[:, None]
    tl.store(at, rounded(acc, y_ptr.dtype.element_ty, SIZES.INTERPRETED), mask=mask)
