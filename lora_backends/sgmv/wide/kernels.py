# mypy: ignore-errors
"""The operands of [x | c_1 h | ... | c_n h] @ [W | B_1 | ... | B_n].T, a kernel for each.

Axes: T (rows of x), C (columns of y), K (inputs), R (ranks of one adapter). An adapter has EACH
columns, a multiple of 8. Inputs are passed in groups of 8, so that Triton knows that rows of an
operand begin at multiples of 16 bytes.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.products import multiply, rounded


@triton.jit(do_not_specialize=["rows", "count"])
def left_kernel(
    wide_ptr,
    x_ptr,
    token_slots_ptr,
    slots_ptr,
    a_ptr,
    ranks_ptr,
    scalings_ptr,
    rows,
    count,
    groups_k,
    x_stride,
    a_stride_l,
    a_stride_r,
    ranks_stride,
    scalings_stride,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Copy x, and write scaling * (x @ A.T) into the columns of a row's adapter, else zeros.

    Each pass takes the rows of one slot: where a tile has one, x is read once.
    """
    S: tl.constexpr = SIZES
    features = groups_k * 8
    width = features + count * S.EACH
    t = tl.program_id(0).to(tl.int64) * S.BLOCK_T + tl.arange(0, S.BLOCK_T)  # [T]
    r = tl.arange(0, S.BLOCK_R)  # [R]
    x_rows = x_ptr + t * x_stride  # [T]
    wide_rows = wide_ptr + t * width  # [T]
    places = tl.arange(0, S.PLACES)
    listed = tl.load(slots_ptr + places, mask=places < count, other=-1)
    slots = tl.load(token_slots_ptr + t, mask=t < rows, other=-2)  # [T], -1: no adapter
    slot = tl.max(slots)
    while slot > -2:
        own = slots == slot  # [T]
        place = tl.max(tl.where((listed == slot) & (slot >= 0), places, -1))
        row = tl.maximum(slot, 0).to(tl.int64)
        rank = tl.load(ranks_ptr + row * ranks_stride, mask=place >= 0, other=0)
        # the scaling of rank 0 may be anything
        scaling = tl.load(scalings_ptr + row * scalings_stride, mask=rank > 0, other=0.0)
        a_rows = a_ptr + row * a_stride_l + r * a_stride_r.to(tl.int64)  # [R]
        acc = tl.zeros((S.BLOCK_T, S.BLOCK_R), dtype=tl.float32)
        for first in range(0, features, S.BLOCK_K):
            k = first + tl.arange(0, S.BLOCK_K)  # [K]
            if S.EVEN_K:
                mask, a_mask = own[:, None], (r < rank)[None, :]
            else:
                mask = own[:, None] & (k < features)[None, :]
                a_mask = (r < rank)[None, :] & (k < features)[:, None]
            x = tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)
            a = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
            tl.store(wide_rows[:, None] + k[None, :], x, mask=mask)
            acc = multiply(x, a, acc, S)
        # beyond the rank there are zeros, though x may be infinite
        h = tl.where((r < rank)[None, :], acc * scaling, 0.0)
        h = rounded(h, wide_ptr.dtype.element_ty, S.INTERPRETED)
        columns = wide_rows[:, None] + features + r[None, :]
        mask = own[:, None] & (r < S.EACH)[None, :]
        for each in range(count):
            tl.store(columns + each * S.EACH, tl.where(each == place, h, 0.0), mask=mask)
        slot = tl.max(tl.where(slots < slot, slots, -2))


@triton.jit(do_not_specialize=["count", "out_features"])
def right_kernel(
    wide_ptr,
    w_ptr,
    b_ptr,
    slots_ptr,
    ranks_ptr,
    count,
    out_features,
    groups_k,
    w_stride,
    b_stride_l,
    b_stride_c,
    ranks_stride,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Copy W, and beside it B of each adapter in `slots`, zero beyond its rank."""
    S: tl.constexpr = SIZES
    features = groups_k * 8
    c = tl.program_id(0).to(tl.int64) * S.BLOCK_C + tl.arange(0, S.BLOCK_C)  # [C]
    within = (c < out_features)[:, None]
    wide_rows = wide_ptr + c[:, None] * (features + count * S.EACH)  # [C, 1]
    w_rows = w_ptr + c[:, None] * w_stride
    for first in range(0, features, S.BLOCK_K):
        k = (first + tl.arange(0, S.BLOCK_K))[None, :]
        mask = within & (k < features)
        tl.store(wide_rows + k, tl.load(w_rows + k, mask=mask), mask=mask)
    r = tl.arange(0, S.BLOCK_R)[None, :]
    b_rows = b_ptr + c[:, None] * b_stride_c + r
    for each in range(count):
        slot = tl.load(slots_ptr + each).to(tl.int64)
        rank = tl.load(ranks_ptr + slot * ranks_stride)
        b = tl.load(b_rows + slot * b_stride_l, mask=within & (r < rank), other=0.0)
        tl.store(wide_rows + features + each * S.EACH + r, b, mask=within & (r < S.EACH))
