# mypy: ignore-errors
"""The operands of [x | c_1 h | ... | c_n h] @ [W | B_1 | ... | B_n].T, a kernel for each.

Axes: T (rows of x), C (columns of y), K (inputs), N (rows of an adapter's A, all slices stacked). A
slice has EACH columns of an operand, a multiple of 8. `groups_k` is in_features / 8, so that Triton
knows that rows of an operand begin at multiples of 8 values.
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.indexing import rows_of_a, slice_entry
from lora_backends.sgmv.kernels.operands import AStack
from lora_backends.sgmv.kernels.products import multiply, rounded


@triton.jit(do_not_specialize=["rows", "count"])
def left_kernel(
    wide_ptr,
    x_ptr,
    token_slots_ptr,
    slots_ptr,
    a_ptr,
    a_slices_ptr,
    ranks_ptr,
    scalings_ptr,
    rows,
    count,
    groups_k,
    x_stride,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Copy x, and write scaling * (x @ A.T) into the columns of a row's adapter, else zeros.

    Each pass takes the rows of one slot. A tile reads x once, and A once for each of its slots.
    """
    S: tl.constexpr = SIZES
    features = groups_k * 8
    COLUMNS: tl.constexpr = S.NUM_SLICES * S.EACH  # of an adapter
    T: tl.constexpr = S.BLOCK_T
    N: tl.constexpr = S.BLOCK_N
    t = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    n = tl.arange(0, N)  # [N]
    s, r = n // S.EACH, n % S.EACH
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=a_slices_ptr, scales=0, stride_l=a_stride_l,
        stride_s=a_stride_s, stride_r=a_stride_r, scales_stride_l=0, scales_stride_s=0,
        scales_stride_r=0,
    )  # fmt: skip
    x_rows = x_ptr + t * x_stride  # [T]
    wide_rows = wide_ptr + t * (features + count * COLUMNS)  # [T]
    places = tl.arange(0, S.PLACES)
    listed = tl.load(slots_ptr + places, mask=places < count, other=-1)
    # [T]; -1: no adapter, -2: beyond x
    slots = tl.load(token_slots_ptr + t, mask=t < rows, other=-2)
    slot = tl.max(slots)
    while slot > -2:
        own = slots == slot  # [T]
        place = tl.max(tl.where((listed == slot) & (slot >= 0), places, -1))
        row = tl.maximum(slot, 0).to(tl.int64)
        ranks_at = ranks_ptr + row * S.NUM_SLICES + s
        rank = tl.load(ranks_at, mask=s < S.NUM_SLICES, other=0)  # [N]
        rank = tl.where(place >= 0, rank, 0)
        # the scaling of rank 0 may be anything
        used, scalings_at = r < rank, scalings_ptr + row * S.NUM_SLICES + s
        scaling = tl.load(scalings_at, mask=used, other=0.0)  # [N]
        a_rows = rows_of_a(a, row, s, r, S)  # [N]
        acc = tl.zeros((T, N), dtype=tl.float32)
        for first in range(0, features, S.BLOCK_K):
            k = first + tl.arange(0, S.BLOCK_K)  # [K]
            if S.EVEN_K:
                mask, a_mask = own[:, None], used[None, :]
            else:
                mask = own[:, None] & (k < features)[None, :]
                a_mask = used[None, :] & (k < features)[:, None]
            x = tl.load(x_rows[:, None] + k[None, :], mask=mask, other=0.0)
            values = tl.load(a_rows[None, :] + k[:, None], mask=a_mask, other=0.0)
            tl.store(wide_rows[:, None] + k[None, :], x, mask=mask)
            acc = multiply(x, values, acc, S)
        # beyond the rank A is loaded as 0, and 0 times infinity is NaN
        h = tl.where(used[None, :], acc * scaling[None, :], 0.0)
        h = rounded(h, wide_ptr.dtype.element_ty, S.INTERPRETED)
        columns = wide_rows[:, None] + features + n[None, :]
        mask = own[:, None] & (n < COLUMNS)[None, :]
        for each in range(count):
            tl.store(columns + each * COLUMNS, tl.where(each == place, h, 0.0), mask=mask)
        slot = tl.max(tl.where(slots < slot, slots, -2))


@triton.jit(do_not_specialize=["count", "out_features"])
def right_kernel(
    wide_ptr,
    w_ptr,
    b_ptr,
    b_slices_ptr,
    slots_ptr,
    ranks_ptr,
    count,
    out_features,
    groups_k,
    w_stride,
    b_stride_l,
    b_stride_c,
    PROGRAMS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Copy W, and beside it B of each adapter in `slots`, zero beyond a rank.

    A row of W belongs to one slice. It is zero in the columns of other slices.
    """
    S: tl.constexpr = SIZES
    features = groups_k * 8
    COLUMNS: tl.constexpr = S.NUM_SLICES * S.EACH  # of an adapter
    C: tl.constexpr = S.BLOCK_C
    SLICES: tl.constexpr = S.NUM_SLICES
    c = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)  # [C]
    within = (c < out_features)[:, None]
    wide_rows = wide_ptr + c[:, None] * (features + count * COLUMNS)  # [C, 1]
    w_rows = w_ptr + c[:, None] * w_stride
    for first in range(0, features, S.BLOCK_K):
        k = (first + tl.arange(0, S.BLOCK_K))[None, :]
        mask = within & (k < features)
        tl.store(wide_rows + k, tl.load(w_rows + k, mask=mask), mask=mask)
    n = tl.arange(0, S.BLOCK_N)[None, :]
    s, r = n // S.EACH, n % S.EACH
    slice_of_c = tl.zeros((C,), dtype=tl.int32)
    for i in tl.static_range(1, SLICES):
        slice_of_c += (c >= S.STARTS[i]).to(tl.int32)
    is_slice = within & (slice_of_c[:, None] == s)  # [C, N]
    for each in range(count):
        slot = tl.load(slots_ptr + each).to(tl.int64)
        rank = tl.load(ranks_ptr + slot * S.NUM_SLICES + s, mask=s < S.NUM_SLICES, other=0)
        if S.SLICE_ALIGN > 0:
            distance, slot_stride, row_stride = slice_entry(
                b_slices_ptr, slice_of_c, slice_of_c >= 0, S.SLICE_ALIGN
            )
            b_rows = b_ptr + distance + slot * slot_stride + c * row_stride
        else:
            b_rows = b_ptr + slot * b_stride_l + c * b_stride_c
        b = tl.load(b_rows[:, None] + r, mask=is_slice & (r < rank), other=0.0)
        columns = wide_rows + features + each * COLUMNS + n
        tl.store(columns, b, mask=within & (n < COLUMNS))
