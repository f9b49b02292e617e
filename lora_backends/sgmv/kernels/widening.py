# mypy: ignore-errors
"""Device functions that widen 8-bit values, exactly."""

import triton
import triton.language as tl


@triton.constexpr_function
def wide_dtype(number):
    """Return the dtype of a number of `sgmv.storage.WIDE`."""
    return (tl.float32, tl.float16, tl.bfloat16)[number]


@triton.jit
def widened(raw, dtype: tl.constexpr, STORAGE: tl.constexpr, IN_PLACE: tl.constexpr = False):
    """Return stored values in a wider dtype, exactly.

    STORAGE is 0 for values that are not widened; 1 for int8, 2 for float8_e4m3fn and 3 for
    float8_e5m2 on any device; 4, 5 and 6 for the same on CUDA devices of capability 9.0 and later,
    where inline PTX converts four values at a time. float8 comes as int8.

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
    # decoded, because not every device converts float8
    bits = raw.to(tl.int16)
    if STORAGE == 3:
        # e5m2 is the upper half of a float16
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    else:
        # e4m3fn becomes a float16 whose exponent is 8 too low
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
