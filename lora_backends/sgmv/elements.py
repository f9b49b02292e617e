# mypy: ignore-errors
"""Device functions on blocks of values: loads, stores, widening and products.

`blocks` makes tiles of them. Axes are named as there: T (rows of the tile), R (rank), C (columns of
y). Offsets that a stride multiplies are int64.
"""

import triton
import triton.language as tl


@triton.jit
def slice_entry(slices_ptr, s, mask, ALIGN: tl.constexpr):
    """Return the entry of slice s in a table of separate tensors, in elements.

    It has the distance of the slice's tensor from the base, and the strides of slots and rows, in
    units of ALIGN, so that loads stay wide.
    """
    at = slices_ptr + s * 3
    own = tl.load(at, mask=mask, other=0)
    slot_stride = tl.load(at + 1, mask=mask, other=0)
    row_stride = tl.load(at + 2, mask=mask, other=0)
    # a product, since Triton 3.9 forgets `tl.multiple_of` of a scalar and loads two bytes at a time
    return own * ALIGN, slot_stride * ALIGN, row_stride * ALIGN


@triton.jit
def prefetch_lines(pointers, wanted):
    """Bring the lines of 128 bytes at some addresses into L2; CUDA only."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointers.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_groups(r, rank, EVEN_R: tl.constexpr):
    """Return r < rank, rounded up to groups of 8 where max_rank is a multiple of 8.

    A mask that is constant over 8 neighbours keeps loads and stores 16 bytes wide; bytes take an
    EVEN_R of 16, for groups of 16.
    """
    if EVEN_R == 16:
        return r // 16 * 16 < rank
    elif EVEN_R:
        return r // 8 * 8 < rank
    else:
        return r < rank


@triton.jit
def load_h(h_rows, plane, r, rank, has_token, SPLIT_K: tl.constexpr, EVEN_R: tl.constexpr):
    """Return h, its planes summed in order, zero beyond the rank."""
    mask = has_token[:, None] & in_groups(r, rank, EVEN_R)[None, :]
    h = tl.load(h_rows[:, None] + r[None, :], mask=mask, other=0.0)  # [T, R]
    for k in tl.static_range(1, SPLIT_K):
        h += tl.load(h_rows[:, None] + k * plane + r[None, :], mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0)


@triton.jit
def load_h_row(h_at, plane, r, rank, SPLIT_K: tl.constexpr):
    """Return h of one row [R], its planes summed, zero beyond the rank.

    One load takes all planes: code for each of up to 32 would not stay in the caches.
    """
    PLANES: tl.constexpr = triton.next_power_of_2(SPLIT_K)
    k = tl.arange(0, PLANES)  # [planes]
    mask = (k < SPLIT_K)[:, None] & (r < rank)[None, :]
    h = tl.load(h_at + k[:, None] * plane + r[None, :], mask=mask, other=0.0)
    # The gather keeps the layout of this load from spreading to the product. So B is multiplied in
    # the registers that it was loaded to, instead of passing through shared memory.
    return tl.gather(tl.sum(h.to(tl.float32), axis=0), r, 0)


@triton.jit
def load_b_rows(b_key, b_stride_c, c, r, end, rank, EVEN_C: tl.constexpr, EVEN_R: tl.constexpr):
    """Return a block of B as it lies in memory; values beyond the rank are arbitrary."""
    mask = in_groups(r, rank, EVEN_R)[None, :]
    if not EVEN_C:
        mask = mask & (c < end)[:, None]
    offsets = c.to(tl.int64)[:, None] * b_stride_c + r[None, :]
    return tl.load(b_key + offsets, mask=mask, other=0.0)  # [C, R]


@triton.jit
def row_product(
    h,
    b,
    own,
    r,
    rank,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return b @ h [C] in float32 for one row h [R], with the scales of an 8-bit b [C, R].

    h is zero beyond the rank, where b may hold anything.
    """
    if not EXACT_H:
        if STORAGE == 0:
            h = rounded(h, b.dtype, INTERPRETED).to(tl.float32)
        else:
            h = rounded(h, WIDE, INTERPRETED).to(tl.float32)
    if STORAGE >= 5:
        b = only_bytes(b, (r < rank)[None, :])
    values = widened(b, tl.float32, STORAGE)
    if STORAGE > 0 and GROUP_R > 0:
        values *= tl.trans(own)
    # a byte of int8 is finite, all else may be NaN
    if GROUP_R > 0 or STORAGE == 0 or STORAGE == 2 or STORAGE == 3:
        values = tl.where((r < rank)[None, :], values, 0.0)
    sums = tl.sum(values * h[None, :], axis=1)  # [C]
    if STORAGE > 0 and GROUP_R == 0:
        sums *= own
    return sums


@triton.jit
def row_sums(
    x_row,
    a_rows,
    scale_rows,
    used,
    k_first,
    in_features,
    STORAGE: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Return x @ A.T of one row over STEPS blocks of inputs, [1, N], without a matrix product.

    A goes from memory straight to the registers that multiply it, all of a program's at once. It
    is loaded behind x: Triton lays out the product as its last load.
    """
    sums = tl.zeros((a_rows.shape[0],), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        k = k_first + step * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [1, K]
        if EVEN_K:
            x = tl.load(x_row + k)
            a = tl.load(a_rows[:, None] + k, mask=used[:, None], other=0.0)  # [N, K]
        else:
            inside = k < in_features
            x = tl.load(x_row + k, mask=inside, other=0.0)
            a = tl.load(a_rows[:, None] + k, mask=used[:, None] & inside, other=0.0)
        a = widened(a, tl.float32, STORAGE)
        if STORAGE > 0 and GROUP_K > 0:
            mask = used[:, None] & (k < in_features)
            a *= tl.load(scale_rows[:, None] + k // GROUP_K, mask=mask, other=0.0)
        sums += tl.sum(a * x.to(tl.float32), axis=1)
    return sums[None, :]


@triton.jit
def load_b(b_slot, b_stride_c, c, r, end, rank, EVEN_C: tl.constexpr, EVEN_R: tl.constexpr):
    """Return a block of B, transposed; values beyond the rank are arbitrary."""
    mask = in_groups(r, rank, EVEN_R)[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    offsets = c.to(tl.int64)[None, :] * b_stride_c + r[:, None]
    if EVEN_R == 16 and r.shape[0] == 16 and c.shape[0] <= 128:
        # Two threads a column: where each has one whole column, Triton lays the widened values out
        # by rank, and stores them one by one.
        offsets = tl.max_contiguous(offsets, (8, 1))
    return tl.load(b_slot + offsets, mask=mask, other=0.0)  # [R, C]


@triton.jit
def load_b_scales(
    group_rows,
    group_stride,
    s_group,
    s_start,
    c,
    r,
    end,
    rank,
    STORAGE: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
):
    """Return the scales of a block of B: per column [C], or [R, C] where they change with r."""
    if STORAGE == 0:
        return 0.0
    else:
        if GROUP_C == 1:  # groups of rows are numbered as columns of y are
            rows = group_rows + c.to(tl.int64) * group_stride  # [C]
        else:
            rows = group_rows + (s_group + group_of(c - s_start, GROUP_C)) * group_stride
        if GROUP_R == 0:
            return tl.load(rows, mask=c < tl.where(rank > 0, end, 0), other=0.0)
        else:
            mask = (r < rank)[:, None] & (c < end)[None, :]
            return tl.load(rows[None, :] + (r // GROUP_R)[:, None], mask=mask, other=0.0)


@triton.jit
def scaled_product(
    scaling,
    h,
    b,
    own,
    r,
    rank,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return scaling * (h @ b) in float32, with the scales of an 8-bit b, widened to WIDE.

    h is zero beyond the rank, where b may hold anything.
    """
    b = right_operand(b, own, r, rank, STORAGE, GROUP_R, WIDE)
    return product_of_operands(
        scaling, h, b, own, STORAGE, GROUP_R, EXACT_H, PRECISION, INTERPRETED
    )


@triton.jit
def right_operand(
    b, own, r, rank, STORAGE: tl.constexpr, GROUP_R: tl.constexpr, WIDE: tl.constexpr
):
    """Return a block of B as it is multiplied: finite beyond the rank, and 8 bits widened to WIDE.

    Scales that change along the sum are multiplied in: then it is float32.
    """
    if STORAGE >= 5:
        b = only_bytes(b, (r < rank)[:, None])
    elif STORAGE == 0 or STORAGE == 2 or STORAGE == 3:  # int8 is finite anyway
        b = within(b, r, rank)
    if STORAGE == 0:
        return b
    elif GROUP_R == 0:
        return widened(b, WIDE, STORAGE, True)
    else:
        return widened(b, tl.float32, STORAGE) * own


@triton.jit
def product_of_operands(
    scaling,
    h,
    b,
    own,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return `scaled_product` of a `right_operand`."""
    if STORAGE > 0 and GROUP_R == 0:
        scaling = scaling * own[None, :]
    EXACT: tl.constexpr = EXACT_H or (STORAGE > 0 and GROUP_R > 0)
    return scaling * product(h, b, EXACT, PRECISION, INTERPRETED)


@triton.jit
def group_of(index, SIZE: tl.constexpr):
    """Return the group that an index belongs to, int64; a SIZE of 0 makes one group of all."""
    if SIZE == 0:
        return index.to(tl.int64) * 0
    else:
        return index.to(tl.int64) // SIZE


@triton.jit
def widened(raw, dtype: tl.constexpr, STORAGE: tl.constexpr, IN_PLACE: tl.constexpr = False):
    """Return stored values in a wider dtype, exactly.

    STORAGE is 0 for values that are not widened; 1 for int8, 2 for float8_e4m3fn and 3 for
    float8_e5m2 on any device; 4, 5 and 6 for the same on CUDA devices of capability 9.0 and later,
    where inline PTX converts four values at a time. float8 comes as int8. 2 and 3 decode its bits,
    because not every device converts it: e5m2 is the upper half of a float16, and e4m3fn becomes a
    float16 whose exponent is 8 too low.

    IN_PLACE widens in the layout of the load, before Triton lays the values out for the product.
    Behind a load from global memory Triton does that through shared memory, where single bytes are
    slow to store and load.
    """
    if STORAGE == 0:
        return raw.to(dtype)
    elif STORAGE == 4 and dtype == tl.bfloat16:
        return _bfloat16_of_int8(raw, not IN_PLACE)
    elif STORAGE == 4 and dtype == tl.float16:
        return _float16_of_int8(raw, not IN_PLACE)
    elif STORAGE == 4 and dtype == tl.float32:
        return _float32_of_int8(raw, not IN_PLACE)
    elif STORAGE == 5 or STORAGE == 6:
        return _of_float8(raw, dtype, STORAGE, not IN_PLACE)
    elif STORAGE == 1:
        return raw.to(tl.float32).to(dtype)  # the interpreter converts integers to no bfloat16
    bits = raw.to(tl.int16)
    if STORAGE == 3:
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    else:
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def _bfloat16_of_int8(raw, PURE: tl.constexpr):
    """Convert four at a time by bit operations: the conversion unit has an eighth of their rate.

    With the byte v below 0x43, the bits 0x4300 | (v & 127) are 128 + (v & 127), and
    0x4300 | (v & 128) are 128, or 256 where v is negative: their difference is v. No instruction
    takes two constants: ptxas would move one of them to a register each time.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, base;
        prmt.b32 low, $2, 0x43434343, 0x4140;
        prmt.b32 high, $2, 0x43434343, 0x4342;
        and.b32 base, low, 0xFF80FF80;
        and.b32 low, low, 0xFF7FFF7F;
        sub.rn.bf16x2 $0, low, base;
        and.b32 base, high, 0xFF80FF80;
        and.b32 high, high, 0xFF7FFF7F;
        sub.rn.bf16x2 $1, high, base;
        }
        """,
        "=r,=r,r",
        [raw],
        dtype=tl.bfloat16,
        is_pure=PURE,
        pack=4,
    )


@triton.jit
def _float16_of_int8(raw, PURE: tl.constexpr):
    """Convert four at a time: 0x6400 | (v + 128) is 1152 + v."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 biased, low, high;
        xor.b32 biased, $2, 0x80808080;
        prmt.b32 low, biased, 0x64646464, 0x4140;
        prmt.b32 high, biased, 0x64646464, 0x4342;
        mov.b32 biased, 0xE480E480;
        add.rn.f16x2 $0, low, biased;
        add.rn.f16x2 $1, high, biased;
        }
        """,
        "=r,=r,r",
        [raw],
        dtype=tl.float16,
        is_pure=PURE,
        pack=4,
    )


@triton.jit
def _float32_of_int8(raw, PURE: tl.constexpr):
    """Convert four at a time: the bits 0x4B000000 | (v + 128) are 2**23 + 128 + v."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 biased, one;
        xor.b32 biased, $4, 0x80808080;
        prmt.b32 one, biased, 0x4B000000, 0x7540;
        add.rn.f32 $0, one, 0fCB000080;
        prmt.b32 one, biased, 0x4B000000, 0x7541;
        add.rn.f32 $1, one, 0fCB000080;
        prmt.b32 one, biased, 0x4B000000, 0x7542;
        add.rn.f32 $2, one, 0fCB000080;
        prmt.b32 one, biased, 0x4B000000, 0x7543;
        add.rn.f32 $3, one, 0fCB000080;
        }
        """,
        "=f,=f,=f,=f,r",
        [raw],
        dtype=tl.float32,
        is_pure=PURE,
        pack=4,
    )


def _asm_of_float8(halves: str, outputs: int, steps: str) -> tl.constexpr:
    """Return PTX that makes float16 pairs `low` and `high` of four bytes, then takes `steps`."""
    registers = ".reg .b16 one, two; .reg .b32 low, high; .reg .f32 f, g;"
    return tl.constexpr(f"{{ {registers} {halves.format(f'${outputs}')} {steps} }}")


_E4M3_HALVES = (
    "mov.b32 {{one, two}}, {0}; cvt.rn.f16x2.e4m3x2 low, one; cvt.rn.f16x2.e4m3x2 high, two;"
)
_E5M2_HALVES = "prmt.b32 low, {0}, 0, 0x1404; prmt.b32 high, {0}, 0, 0x3424;"
_TO_FLOAT16 = "mov.b32 $0, low; mov.b32 $1, high;"
_TO_FLOAT32 = (
    "mov.b32 {one, two}, low; cvt.f32.f16 $0, one; cvt.f32.f16 $1, two;"
    "mov.b32 {one, two}, high; cvt.f32.f16 $2, one; cvt.f32.f16 $3, two;"
)
_TO_BFLOAT16 = (
    "mov.b32 {one, two}, low; cvt.f32.f16 f, one; cvt.f32.f16 g, two;"
    "cvt.rn.bf16x2.f32 $0, g, f;"
    "mov.b32 {one, two}, high; cvt.f32.f16 f, one; cvt.f32.f16 g, two;"
    "cvt.rn.bf16x2.f32 $1, g, f;"
)
_FLOAT16_OF_E4M3 = _asm_of_float8(_E4M3_HALVES, 2, _TO_FLOAT16)
_FLOAT16_OF_E5M2 = _asm_of_float8(_E5M2_HALVES, 2, _TO_FLOAT16)
_BFLOAT16_OF_E4M3 = _asm_of_float8(_E4M3_HALVES, 2, _TO_BFLOAT16)
_BFLOAT16_OF_E5M2 = _asm_of_float8(_E5M2_HALVES, 2, _TO_BFLOAT16)
_FLOAT32_OF_E4M3 = _asm_of_float8(_E4M3_HALVES, 4, _TO_FLOAT32)
_FLOAT32_OF_E5M2 = _asm_of_float8(_E5M2_HALVES, 4, _TO_FLOAT32)


@triton.jit
def _of_float8(raw, dtype: tl.constexpr, STORAGE: tl.constexpr, PURE: tl.constexpr):
    """Convert four at a time by way of float16, which holds every value of both formats."""
    if dtype == tl.float32:
        ASM: tl.constexpr = _FLOAT32_OF_E4M3 if STORAGE == 5 else _FLOAT32_OF_E5M2
        return tl.inline_asm_elementwise(
            ASM, "=f,=f,=f,=f,r", [raw], dtype=tl.float32, is_pure=PURE, pack=4
        )
    elif dtype == tl.float16:
        ASM: tl.constexpr = _FLOAT16_OF_E4M3 if STORAGE == 5 else _FLOAT16_OF_E5M2
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [raw], dtype=tl.float16, is_pure=PURE, pack=4
        )
    else:
        ASM: tl.constexpr = _BFLOAT16_OF_E4M3 if STORAGE == 5 else _BFLOAT16_OF_E5M2
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [raw], dtype=tl.bfloat16, is_pure=PURE, pack=4
        )


@triton.jit
def only_bytes(raw, keep):
    """Return bytes where `keep`, broadcast to them, is true, else 0: four at a time."""
    mask = tl.broadcast_to(tl.where(keep, -1, 0).to(tl.int8), raw.shape)
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, $2;", "=r,r,r", [raw, mask], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def within(b, r, rank):
    """Return b, zero beyond the rank."""
    return tl.where((r < rank)[:, None], b, 0)  # 0.0 would make floats of bytes


@triton.jit
def load_y(y_rows, c, has_token, end, EVEN_C: tl.constexpr):
    """Return a block of y."""
    mask = has_token[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    return tl.load(y_rows[:, None] + c[None, :], mask=mask, other=0.0)  # [T, C]


@triton.jit
def load_columns(row, c, end, IS_GIVEN: tl.constexpr, EVEN_C: tl.constexpr):
    """Return a value per column [C]; 0 where the layer has none."""
    if not IS_GIVEN:
        return 0.0
    elif EVEN_C:
        return tl.load(row + c)
    else:
        return tl.load(row + c, mask=c < end, other=0.0)


@triton.jit
def store_y(
    y_rows,
    c,
    y,
    delta,
    bias_row,
    scales,
    has_token,
    end,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    EVEN_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store output_scale * (y + delta) + bias; each element is rounded once."""
    mask = has_token[:, None]
    if not EVEN_C:
        mask = mask & (c < end)[None, :]
    total = y.to(tl.float32) + delta
    if HAS_OUTPUT_SCALES:
        total *= scales[None, :]
    if HAS_BIAS:
        bias = load_columns(bias_row, c, end, HAS_BIAS, EVEN_C)
        total += bias.to(tl.float32)[None, :]
    tl.store(y_rows[:, None] + c[None, :], rounded(total, y.dtype, INTERPRETED), mask=mask)


@triton.jit
def product(h, b, EXACT_H: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return h @ b: h rounded to the dtype of b, or with EXACT_H both in float32."""
    if EXACT_H:
        return multiply(h, b.to(tl.float32), None, PRECISION, INTERPRETED)
    return multiply(rounded(h, b.dtype, INTERPRETED), b, None, PRECISION, INTERPRETED)


@triton.jit
def multiply(left, right, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return ``left @ right + acc`` in float32; acc may be None."""
    if INTERPRETED:  # its tl.dot multiplies the bit patterns of bfloat16
        # numpy sums in an order that depends on the tile and the machine: float64 hides it
        part = tl.dot(left.to(tl.float64), right.to(tl.float64), out_dtype=tl.float64)
        part = part.to(tl.float32)
        return part if acc is None else acc + part
    else:
        return tl.dot(left, right, acc, input_precision=PRECISION)


@triton.jit
def rounded(value, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 values in `dtype`, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # its cast truncates
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = tl.where(value == value, nearest.to(tl.float32, bitcast=True), value)
    return value.to(dtype)
