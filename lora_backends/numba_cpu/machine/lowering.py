"""Lowers operations on vectors to LLVM: each function lets a builder add instructions."""

# mypy: disable-error-code="import-untyped, misc"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from lora_backends.numba_cpu.machine.cpu import has_bfloat16


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no type for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


LANES = 16
F32, I8, I16 = ir.FloatType(), ir.IntType(8), ir.IntType(16)
I32, I64 = ir.IntType(32), ir.IntType(64)
BF16 = BFloat()
VECTOR = ir.VectorType(F32, LANES)
ZEROS = ir.Constant(VECTOR, None)
BIAS, BIAS_BITS = 2.0**23 + 128, 0x4B000080  # the second ^ a byte: the bits of BIAS + its int8
EIGHT_BIT = (types.int8, types.uint8, types.boolean)  # int8, float8_e4m3fn, float8_e5m2


def integer(value: int) -> Any:
    """Return a constant int64."""
    return ir.Constant(I64, value)


def lane(index: int) -> Any:
    """Return a constant that names a lane."""
    return ir.Constant(I32, index)


def undefined(shape: Any) -> Any:
    """Return a value that is about to be filled."""
    return ir.Constant(shape, ir.Undefined)


def size_of(kind: Any) -> int:
    """Return the bytes of an element."""
    sizes: dict[Any, int] = {types.float64: 8, types.float32: 4} | dict.fromkeys(EIGHT_BIT, 1)
    return sizes.get(kind, 2)


def raw_type(kind: Any) -> Any:
    """Return the type of an element as it lies in memory."""
    if kind in EIGHT_BIT:
        return I8
    return {types.float64: ir.DoubleType(), types.float32: F32}.get(kind, I16)


def raw_vector(kind: Any) -> Any:
    """Return the type of 16 elements as they lie in memory."""
    return ir.VectorType(raw_type(kind), LANES)


def load_value(builder: Any, address: Any, element: Any, align: int = 4) -> Any:
    """Return the value of type `element` at an address."""
    return builder.load(builder.inttoptr(address, element.as_pointer()), align=align)


def store_value(builder: Any, address: Any, value: Any, align: int) -> None:
    """Store a value at an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def with_element(shape: Any, element: Any) -> Any:
    """Return the type of `shape`, a scalar's or a vector's, with another element."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element


def constant(shape: Any, value: float) -> Any:
    """Return a constant of the type of `shape`, the same in every lane."""
    if isinstance(shape, ir.VectorType):
        return ir.Constant(shape, [value] * shape.count)
    return ir.Constant(shape, value)


def widen(builder: Any, kind: Any, raw: Any) -> Any:
    """Return elements as they lie in memory, a scalar or a vector, as float32: exact."""
    if kind == types.float32:
        return raw
    if kind == types.float64:
        return builder.fptrunc(raw, with_element(raw.type, F32))
    if kind == types.int8:
        return builder.sitofp(raw, with_element(raw.type, F32))
    if kind in (types.uint8, types.boolean):
        return widen_float8(builder, kind, raw)
    if kind == types.int16:  # float16
        return builder.fpext(
            builder.bitcast(raw, with_element(raw.type, ir.HalfType())), with_element(raw.type, F32)
        )
    words = builder.zext(raw, with_element(raw.type, I32))
    words = builder.shl(words, constant(words.type, 16))
    return builder.bitcast(words, with_element(raw.type, F32))


def widen_float8(builder: Any, kind: Any, raw: Any) -> Any:
    """Return bytes of float8 as float32, by way of float16, which has no slow denormal values."""
    bits = builder.sext(raw, with_element(raw.type, I16))
    half, single = with_element(raw.type, ir.HalfType()), with_element(raw.type, F32)
    if kind == types.boolean:  # float8_e5m2: the upper byte of a float16
        bits = builder.shl(bits, constant(bits.type, 8))
        return builder.fpext(builder.bitcast(bits, half), single)
    # sign 15, exponent 13 to 10, mantissa 9 to 7: 2**-8 of the value
    bits = builder.and_(builder.shl(bits, constant(bits.type, 7)), constant(bits.type, 0xBFFF))
    carry = builder.add(bits, constant(bits.type, 0x80))  # reaches bit 14 for NaN alone
    bits = builder.or_(bits, builder.and_(carry, constant(bits.type, 0x4000)))
    wide = builder.fpext(builder.bitcast(bits, half), single)
    return builder.fmul(wide, constant(wide.type, 256.0))


def narrow(builder: Any, kind: Any, vector: Any) -> Any:
    """Round float32 to the nearest element of `kind`, ties to even; NaN stays NaN."""
    if kind == types.float32:
        return vector
    half = ir.HalfType() if kind == types.int16 else BF16
    is_vector = isinstance(vector.type, ir.VectorType)
    if kind == types.int16 or (is_vector and has_bfloat16()):
        # the instruction for vectors of bfloat16 returns 0 for results below 2**-126
        rounded = builder.fptrunc(vector, with_element(vector.type, half))
        return builder.bitcast(rounded, with_element(vector.type, I16))
    bits = builder.bitcast(vector, with_element(vector.type, I32))
    upper = builder.lshr(bits, constant(bits.type, 16))
    odd = builder.and_(upper, constant(bits.type, 1))
    rounded = builder.add(bits, builder.add(odd, constant(bits.type, 0x7FFF)))
    rounded = builder.lshr(rounded, constant(bits.type, 16))
    quiet = builder.or_(upper, constant(bits.type, 0x40))
    chosen = builder.select(builder.fcmp_unordered("uno", vector, vector), quiet, rounded)
    return builder.trunc(chosen, with_element(vector.type, I16))


def load_pair(builder: Any, kind: Any, address: Any) -> tuple[Any, Any]:
    """Return 32 neighbours as two vectors; bfloat16 as the even and the odd ones."""
    if kind == types.uint16:  # bfloat16: 16 words of an even and an odd element
        words = load_value(builder, address, ir.VectorType(I32, LANES), 2)
        even, odd = split_bfloat16(builder, words)
        return even, odd
    return load_halves(builder, kind, address)


def load_halves(builder: Any, kind: Any, address: Any) -> tuple[Any, Any]:
    """Return 32 neighbours as two vectors, the first 16 and the last 16."""
    size = LANES * size_of(kind)
    addresses = address, builder.add(address, integer(size))
    low, high = (
        widen(builder, kind, load_value(builder, at, raw_vector(kind), size_of(kind)))
        for at in addresses
    )
    return low, high


def load_bfloat16(builder: Any, kind: Any, address: Any) -> Any:
    """Return 32 neighbours of bfloat16 or int8 as bfloat16, in the bits of a vector: exact."""
    if kind == types.uint16:
        return load_value(builder, address, VECTOR, 2)
    raw = load_value(builder, address, ir.VectorType(I8, 2 * LANES), 1)
    wide = builder.sitofp(raw, ir.VectorType(F32, 2 * LANES))
    words = ir.VectorType(I16, 2 * LANES)
    low, high = (
        builder.bitcast(shuffle(builder, wide, undefined(wide.type), lanes), words)
        for lanes in (list(range(LANES)), list(range(LANES, 2 * LANES)))
    )
    upper = ir.Constant(words, list(range(1, 4 * LANES, 2)))  # the lower halves are 0 in 8 bits
    # With AVX512-FP16, LLVM takes a shuffle of these halves apart, element by element.
    permute = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(words, [words] * 3), "llvm.x86.avx512.vpermi2var.hi.512"
    )
    return builder.bitcast(builder.call(permute, [low, upper, high]), VECTOR)


def add_pairs(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """Return ``left[2 i] * right[2 i] + left[2 i + 1] * right[2 i + 1] + added[i]`` of bfloat16."""
    words = ir.VectorType(I32, LANES)  # LLVM 15 knows no other type, later ones take it
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, words, words]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    pairs = builder.bitcast(left, words), builder.bitcast(right, words)
    return builder.call(function, [added, *pairs])


def split_bfloat16(builder: Any, words: Any) -> tuple[Any, Any]:
    """Return the lower and the upper halves of words, widened."""
    even = builder.shl(words, constant(words.type, 16))
    odd = builder.and_(words, constant(words.type, 0xFFFF0000))
    return builder.bitcast(even, VECTOR), builder.bitcast(odd, VECTOR)


def split_words(builder: Any, kind: Any, columns: list[Any]) -> list[Any]:
    """Return columns of 32 bits as columns of `kind`, widened."""
    if kind == types.float32:
        return [builder.bitcast(column, VECTOR) for column in columns]
    split: list[Any] = []
    for words in columns:
        if kind == types.uint16:
            split += split_bfloat16(builder, words)
        elif kind == types.int8:
            for shift in (0, 8, 16, 24):
                low = builder.and_(
                    builder.lshr(words, constant(words.type, shift)), constant(words.type, 0xFF)
                )
                biased = builder.xor(low, constant(words.type, BIAS_BITS))
                split.append(builder.fsub(builder.bitcast(biased, VECTOR), constant(VECTOR, BIAS)))
        elif kind in EIGHT_BIT:
            for shift in (0, 8, 16, 24):
                low = builder.lshr(words, constant(words.type, shift))
                split.append(widen(builder, kind, builder.trunc(low, raw_vector(kind))))
        else:
            halves = (words, builder.lshr(words, constant(words.type, 16)))
            raw = [builder.trunc(half, with_element(words.type, I16)) for half in halves]
            split += [widen(builder, kind, item) for item in raw]
    return split


def load_lanes(builder: Any, kind: Any, rows: list[Any], count: Any) -> list[Any]:
    """Return a vector a row: `count` (at most 16) neighbours, then zeros."""
    shape, vectors = raw_vector(kind), []
    for row in rows:
        buffer = cgutils.alloca_once(builder, shape)
        builder.store(ir.Constant(shape, None), buffer)
        start = builder.inttoptr(row, I8.as_pointer())
        # by the C library: LLVM would turn a loop into much code
        cgutils.raw_memcpy(builder, buffer, start, count, size_of(kind))
        vectors.append(widen(builder, kind, builder.load(buffer)))
    return vectors


def mask_of(builder: Any, count: Any) -> Any:
    """Return which of 16 lanes come before `count`, an int64."""
    indices = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    limit = builder.insert_element(undefined(indices.type), builder.trunc(count, I32), lane(0))
    limit = shuffle(builder, limit, undefined(indices.type), [0] * LANES)
    return builder.icmp_signed("<", indices, limit)


def mask_all(builder: Any, bit: Any) -> Any:
    """Return a mask of 16 times one bit."""
    shape = ir.VectorType(bit.type, LANES)
    first = builder.insert_element(undefined(shape), bit, lane(0))
    return shuffle(builder, first, undefined(shape), [0] * LANES)


def load_masked(builder: Any, kind: Any, address: Any, mask: Any) -> Any:
    """Return 16 neighbours, widened; those that the mask leaves out are 0 and are not read."""
    shape = raw_vector(kind)
    pointer = builder.inttoptr(address, shape.as_pointer())
    signature = ir.FunctionType(shape, [pointer.type, I32, mask.type, shape])
    function = cgutils.get_or_insert_function(
        builder.module, signature, f"llvm.masked.load.v{LANES}{element_name(kind)}.p0"
    )
    align = ir.Constant(I32, size_of(kind))
    return widen(builder, kind, builder.call(function, [pointer, align, mask, zeros_of(shape)]))


def store_masked(builder: Any, address: Any, vector: Any, mask: Any) -> None:
    """Store the lanes of a vector of float32 that the mask names."""
    pointer = builder.inttoptr(address, VECTOR.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [VECTOR, pointer.type, I32, mask.type])
    function = cgutils.get_or_insert_function(
        builder.module, signature, f"llvm.masked.store.v{LANES}f32.p0"
    )
    builder.call(function, [vector, pointer, ir.Constant(I32, 4), mask])


def element_name(kind: Any) -> str:
    """Return how LLVM names elements in memory."""
    return "f32" if kind == types.float32 else f"i{8 * size_of(kind)}"


def zeros_of(shape: Any) -> Any:
    """Return a vector of zeros."""
    return ir.Constant(shape, None)


def transpose_16_by_4(builder: Any, base: Any, step: Any) -> list[Any]:
    """Return four <16 x i32>: words 0 to 3 of 16 rows that lie `step` bytes apart."""
    quad = ir.VectorType(I32, 4)
    addresses = [base]
    for _ in range(LANES - 1):
        addresses.append(builder.add(addresses[-1], step))
    rows = [load_value(builder, address, quad, 2) for address in addresses]
    # lane group g of vector i is row 4 g + i, so that transposing stays within lane groups
    v = [
        join(builder, join(builder, rows[i], rows[4 + i]), join(builder, rows[8 + i], rows[12 + i]))
        for i in range(4)
    ]
    return transpose_groups(builder, v)


def transpose_16_by_8(builder: Any, base: Any, step: int) -> list[Any]:
    """Return eight <16 x i32>: words 0 to 7 of 16 rows that lie `step` bytes apart."""
    half = ir.VectorType(I32, 8)
    rows = [
        load_value(builder, builder.add(base, integer(step * row)), half, 2) for row in range(LANES)
    ]
    pairs = [join(builder, rows[i], rows[8 + i]) for i in range(8)]  # groups: i, i, 8 + i, 8 + i
    low = [*range(4), *range(16, 20), *range(8, 12), *range(24, 28)]
    columns = []
    for first in (0, 4):
        lanes = [lane + first for lane in low]  # lane group g: words of row 4 g + i
        v = [shuffle(builder, pairs[i], pairs[4 + i], lanes) for i in range(4)]
        columns += transpose_groups(builder, v)
    return columns


def transpose_groups(builder: Any, v: list[Any]) -> list[Any]:
    """Return four vectors: lane group g of vector j holds word j of group g of each of `v`."""
    low01, low23 = (
        shuffle_groups(builder, v[0], v[1], 0, 16, 1, 17),
        shuffle_groups(builder, v[2], v[3], 0, 16, 1, 17),
    )
    high01, high23 = (
        shuffle_groups(builder, v[0], v[1], 2, 18, 3, 19),
        shuffle_groups(builder, v[2], v[3], 2, 18, 3, 19),
    )
    return [
        shuffle_groups(builder, low01, low23, 0, 1, 16, 17),
        shuffle_groups(builder, low01, low23, 2, 3, 18, 19),
        shuffle_groups(builder, high01, high23, 0, 1, 16, 17),
        shuffle_groups(builder, high01, high23, 2, 3, 18, 19),
    ]


def transpose_64_words(builder: Any, base: Any) -> list[Any]:
    """Do what `transpose_16_by_4` does for rows without gaps, with 4 loads instead of 16."""
    whole = ir.VectorType(I32, LANES)
    v = [load_value(builder, builder.add(base, integer(64 * i)), whole, 2) for i in range(4)]
    order = [4 * g + i for i in range(4) for g in range(4)]  # lane group g of vector i: row 4 i + g
    columns = transpose_groups(builder, v)
    return [shuffle(builder, column, undefined(whole), order) for column in columns]


def shuffle(builder: Any, left: Any, right: Any, indices: list[int]) -> Any:
    """Return the lanes of two vectors that `indices` names."""
    mask = ir.Constant(ir.VectorType(I32, len(indices)), indices)
    return builder.shuffle_vector(left, right, mask)


def join(builder: Any, left: Any, right: Any) -> Any:
    """Return the lanes of one vector, then those of another."""
    return shuffle(builder, left, right, list(range(2 * left.type.count)))


def shuffle_groups(builder: Any, left: Any, right: Any, *pattern: int) -> Any:
    """Shuffle two vectors of 16 by the same pattern in every group of four lanes."""
    return shuffle(builder, left, right, [g + p for g in range(0, LANES, 4) for p in pattern])


def splat(builder: Any, scalar: Any) -> Any:
    """Return a vector of 16 times a scalar."""
    zero = lane(0)
    first = builder.insert_element(undefined(VECTOR), scalar, zero)
    return shuffle(builder, first, undefined(VECTOR), [0] * LANES)


def multiply_add(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """Return ``left * right + added``: one rounding where the CPU fuses, never another order."""
    suffix = "v16f32" if isinstance(left.type, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(left.type, [left.type] * 3), f"llvm.fmuladd.{suffix}"
    )
    return builder.call(function, [left, right, added])


def sum_lanes(builder: Any, vectors: list[Any]) -> Any:
    """Return a vector of the sums over the lanes, halves added to halves, of 2**n vectors."""
    each = LANES  # lanes of each sum
    while each > 1:
        half = each // 2
        # joined two by two while they are halved, so that few lanes stay idle
        pairs = list(zip(vectors[::2], vectors[1::2], strict=True)) if len(vectors) > 1 else []
        pairs = pairs or [(vectors[0], undefined(vectors[0].type))]
        lanes = vectors[0].type.count * min(2, len(vectors))
        low = [lane for lane in range(lanes) if lane % each < half]
        high = [lane + half for lane in low]
        vectors = [
            builder.fadd(shuffle(builder, *pair, low), shuffle(builder, *pair, high))
            for pair in pairs
        ]
        each = half
    return vectors[0]


def prefetch_line(builder: Any, address: Any) -> None:
    """Bring the cache line of an address into the first-level cache."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (0, 3, 1))])


def call_function(builder: Any, address: Any, result: Any, *args: Any) -> Any:
    """Call the C function at an address with these arguments; return its result."""
    signature = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(builder.inttoptr(address, signature.as_pointer()), args)
