"""Vectors of 16 float32 for kernels: loads that widen, stores that round, products, sums.

LLVM sees whole vectors, so nothing depends on what a loop vectoriser decides, and no flag allows
it to reorder sums: a result is the same however many rows a kernel handles at once. Memory is
named by its address, an int. What lies there is told by a marker, an (otherwise unused) value
whose type says how the bits are read: `FLOAT32`, `BFLOAT16`, `FLOAT16`, `INT8` and so on.

Every operation stands beside its plain twin, which runs where NUMBA_DISABLE_JIT is set.
"""

# ruff: noqa: D402 (an operation is documented by an example of its use)
# mypy: disable-error-code="misc"

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from lora_backends.numba_cpu.machine import lowering, plain
from lora_backends.numba_cpu.machine.compiling import operation

LANES = lowering.LANES
FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.uint16(0), np.int16(0)
FLOAT64 = np.float64(0)  # may be loaded, rounded to float32; not stored
INT8, E4M3, E5M2 = np.int8(0), np.uint8(0), np.bool_(False)  # may be loaded; not stored


class Float32x16(types.Type):
    """The type of a vector in a kernel; it lives in one register where the CPU has AVX-512."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


VECTOR = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, lowering.VECTOR)


@operation(plain.zeros)
def zeros(typing: Any, a: Any, x: Any) -> Any:
    """zeros(a, x): a zero vector for every pair of items of two tuples."""
    result = types.UniTuple(VECTOR, a.count * x.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_tuple(builder, result, [lowering.ZEROS] * result.count)

    return result(a, x), codegen


@operation(plain.size)
def size(typing: Any, kind: Any) -> Any:
    """size(kind): bytes of an element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lowering.integer(lowering.size_of(kind))

    return types.int64(kind), codegen


@operation(plain.load_rows)
def load_rows(typing: Any, kind: Any, rows: Any, first: Any) -> Any:
    """load_rows(kind, addresses, k): two vectors a row, elements k to k + 31.

    All first vectors come first. In bfloat16 they hold the even elements and the second vectors
    the odd ones, which costs one instruction a vector; a dot product does not mind.
    """
    result = types.UniTuple(VECTOR, 2 * rows.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, k = args
        offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
        pairs = [
            lowering.load_pair(builder, kind, builder.add(address, offset))
            for address in cgutils.unpack_tuple(builder, addresses)
        ]
        return context.make_tuple(builder, result, [p[0] for p in pairs] + [p[1] for p in pairs])

    return result(kind, rows, types.int64), codegen


@operation(plain.load_bfloat16)
def load_bfloat16(typing: Any, kind: Any, rows: Any, first: Any) -> Any:
    """load_bfloat16(kind, addresses, k): a vector a row, 32 bfloat16 from k on, for `add_dots`."""
    result = types.UniTuple(VECTOR, rows.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, k = args
        offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
        starts = [builder.add(at, offset) for at in cgutils.unpack_tuple(builder, addresses)]
        vectors = [lowering.load_bfloat16(builder, kind, start) for start in starts]
        return context.make_tuple(builder, result, vectors)

    return result(kind, rows, types.int64), codegen


@operation(plain.load_some)
def load_some(typing: Any, kind: Any, rows: Any, first: Any, count: Any) -> Any:
    """load_some(kind, addresses, k, n): a vector a row, elements k to k + n - 1, then zeros."""
    result = types.UniTuple(VECTOR, rows.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, k, count = args
        offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
        starts = [builder.add(at, offset) for at in cgutils.unpack_tuple(builder, addresses)]
        vectors = lowering.load_lanes(builder, kind, starts, count)
        return context.make_tuple(builder, result, vectors)

    return result(kind, rows, types.int64, types.int64), codegen


@operation(plain.load_column)
def load_column(typing: Any, kind: Any, address: Any, stride: Any) -> Any:
    """load_column(kind, address, stride): 16 elements, `stride` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, step = args
        raw = lowering.undefined(lowering.raw_vector(kind))
        for lane in range(LANES):
            item = lowering.load_value(builder, at, lowering.raw_type(kind), lowering.size_of(kind))
            raw = builder.insert_element(raw, item, lowering.lane(lane))
            at = builder.add(at, step)
        return lowering.widen(builder, kind, raw)

    return VECTOR(kind, types.int64, types.int64), codegen


@operation(plain.load_columns)
def load_columns(typing: Any, kind: Any, address: Any, stride: Any) -> Any:
    """load_columns(kind, address, stride): the columns of 16 rows, `stride` bytes apart.

    16 bytes of every row: 4 columns of float32, 8 of a 16-bit type, 16 of 8 bits. Lanes are rows.
    """
    count = 16 // lowering.size_of(kind)
    result = types.UniTuple(VECTOR, count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, base, step = args
        columns = lowering.transpose_16_by_4(builder, base, step)  # of 32 bits
        return context.make_tuple(builder, result, lowering.split_words(builder, kind, columns))

    return result(kind, types.int64, types.int64), codegen


@operation(plain.load_square)
def load_square(typing: Any, kind: Any, address: Any) -> Any:
    """load_square(kind, address): all columns of 16 rows of 16 without gaps, in less time."""
    result = types.UniTuple(VECTOR, LANES)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row, columns = LANES * lowering.size_of(kind), []  # of 32 bits
        if row == 16:
            columns = lowering.transpose_64_words(builder, args[1])
        else:
            for at in range(0, row, 32):
                start = builder.add(args[1], lowering.integer(at))
                columns += lowering.transpose_16_by_8(builder, start, row)
        return context.make_tuple(builder, result, lowering.split_words(builder, kind, columns))

    return result(kind, types.int64), codegen


@operation(plain.load_four)
def load_four(typing: Any, kind: Any, address: Any, stride: Any) -> Any:
    """load_four(kind, address, stride): `load_columns` for 4 columns of an 8-bit type."""
    result = types.UniTuple(VECTOR, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, at, step = args
        words = lowering.undefined(ir.VectorType(lowering.I32, LANES))
        for lane in range(LANES):
            word = lowering.load_value(builder, at, lowering.I32, 1)
            words = builder.insert_element(words, word, lowering.lane(lane))
            at = builder.add(at, step)
        return context.make_tuple(builder, result, lowering.split_words(builder, kind, [words]))

    return result(kind, types.int64, types.int64), codegen


@operation(plain.splat)
def splat(typing: Any, value: Any) -> Any:
    """splat(value): 16 times a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lowering.splat(builder, args[0])

    return VECTOR(types.float32), codegen


@operation(plain.multiply)
def multiply(typing: Any, vectors: Any, factor: Any) -> Any:
    """multiply(vectors, factor): every vector times one vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        items = cgutils.unpack_tuple(builder, args[0])
        products = [builder.fmul(item, args[1]) for item in items]
        return context.make_tuple(builder, vectors, products)

    return vectors(vectors, factor), codegen


@operation(plain.shifted)
def shifted(typing: Any, addresses: Any, offset: Any) -> Any:
    """shifted(addresses, n): the addresses n bytes on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        items = [builder.add(at, args[1]) for at in cgutils.unpack_tuple(builder, args[0])]
        return context.make_tuple(builder, addresses, items)

    return addresses(addresses, types.int64), codegen


@operation(plain.add_products)
def add_products(typing: Any, sums: Any, a: Any, x: Any) -> Any:
    """add_products(sums, a, x): ``sums[t, j] + a[j] * x[t]``, for one or more vectors a row.

    a and x are as `load_rows` or `load_some` returned them; sums has an item per pair of rows.
    """
    repeats = _vectors_a_row(sums.count, a.count, x.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, lefts, rights = (cgutils.unpack_tuple(builder, arg) for arg in args)
        a_rows, x_rows = len(lefts) // repeats, len(rights) // repeats
        pairs = [(t, j) for t in range(x_rows) for j in range(a_rows)]
        if a_rows > x_rows:  # the fewer stay in registers
            pairs.sort(key=lambda pair: pair[1])
        for step in range(repeats):
            for t, j in pairs:
                left, right = lefts[step * a_rows + j], rights[step * x_rows + t]
                item = t * a_rows + j
                totals[item] = lowering.multiply_add(builder, left, right, totals[item])
        return context.make_tuple(builder, sums, totals)

    return sums(sums, a, x), codegen


@operation(plain.add_dots)
def add_dots(typing: Any, sums: Any, a: Any, x: Any) -> Any:
    """add_dots(sums, a, x): `add_products` of what `load_bfloat16` returned, lane by lane of pairs.

    It is one instruction, which reads denormal numbers as 0 and returns 0 instead of them.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, lefts, rights = (cgutils.unpack_tuple(builder, arg) for arg in args)
        pairs = [(left, right) for right in rights for left in lefts]
        added = [
            lowering.add_pairs(builder, left, right, total)
            for total, (left, right) in zip(totals, pairs, strict=True)
        ]
        return context.make_tuple(builder, sums, added)

    return sums(sums, a, x), codegen


@operation(plain.add_columns)
def add_columns(typing: Any, sums: Any, columns: Any, rows: Any, first: Any) -> Any:
    """add_columns(sums, columns, addresses, j): ``sums[t] + sum_c columns[c] * h[t, j + c]``.

    The addresses are of rows of float32. A row has two sums, of even and of odd c, so that one
    product need not wait for the last; `update_rows` adds them up.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vectors, addresses = (cgutils.unpack_tuple(builder, arg) for arg in args[:3])
        offset = builder.mul(args[3], lowering.integer(4))
        bases = [builder.add(address, offset) for address in addresses]
        for c, vector in enumerate(vectors):
            for t, base in enumerate(bases):
                at = builder.add(base, lowering.integer(4 * c))
                factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
                item = 2 * t + c % 2
                totals[item] = lowering.multiply_add(builder, vector, factor, totals[item])
        return context.make_tuple(builder, sums, totals)

    return sums(sums, columns, rows, types.int64), codegen


@operation(plain.add_interleaved)
def add_interleaved(typing: Any, sums: Any, columns: Any, address: Any) -> Any:
    """add_interleaved(sums, columns, address): `add_columns` for interleaved rows of h.

    At the address lies the first element of every row, then the second of every row, and so on.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vectors = (cgutils.unpack_tuple(builder, arg) for arg in args[:2])
        rows = len(totals) // 2
        for c, vector in enumerate(vectors):
            for t in range(rows):
                at = builder.add(args[2], lowering.integer(4 * (c * rows + t)))
                factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
                item = 2 * t + c % 2
                totals[item] = lowering.multiply_add(builder, vector, factor, totals[item])
        return context.make_tuple(builder, sums, totals)

    return sums(sums, columns, types.int64), codegen


@operation(plain.update_scaled)
def update_scaled(
    typing: Any, kind: Any, rows: Any, first: Any, sums: Any, factor: Any, added: Any
) -> Any:
    """update_scaled(kind, addresses, k, sums, factor, added): 16 elements of every row from k on.

    They become ``row + ((even + odd) * factor + added)``, rounded once; factor and added are
    vectors.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, k, totals, factor, added = args
        size, vectors = lowering.size_of(kind), cgutils.unpack_tuple(builder, totals)
        offset = builder.mul(k, lowering.integer(size))
        for t, address in enumerate(cgutils.unpack_tuple(builder, addresses)):
            at = builder.add(address, offset)
            raw = lowering.load_value(builder, at, lowering.raw_vector(kind), size)
            total = builder.fadd(vectors[2 * t], vectors[2 * t + 1])
            total = lowering.multiply_add(builder, total, factor, added)
            y = builder.fadd(lowering.widen(builder, kind, raw), total)
            lowering.store_value(builder, at, lowering.narrow(builder, kind, y), size)
        return context.get_dummy_value()

    return types.void(kind, rows, types.int64, sums, factor, added), codegen


@operation(plain.add_stored)
def add_stored(typing: Any, sums: Any, columns: Any, rows: Any, first: Any, parity: Any) -> Any:
    """add_stored(sums, columns, addresses, j, odd): ``sums[t, i] + columns[i] * h[t, j]``.

    The addresses are of rows of float32. A row has an even and an odd sum for each column vector,
    one pair after the other; `odd`, a tuple of one item or none, says to which is added.
    """
    odd = parity.count

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        totals, vectors, addresses = (cgutils.unpack_tuple(builder, arg) for arg in args[:3])
        offset = builder.add(builder.mul(args[3], lowering.integer(4)), lowering.integer(4 * odd))
        for t, address in enumerate(addresses):
            at = builder.add(address, offset)
            factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
            for i, vector in enumerate(vectors):
                item = 2 * (t * len(vectors) + i) + odd
                totals[item] = lowering.multiply_add(builder, vector, factor, totals[item])
        return context.make_tuple(builder, sums, totals)

    return sums(sums, columns, rows, types.int64, parity), codegen


@operation(plain.write_totals)
def write_totals(typing: Any, rows: Any, count: Any, sums: Any) -> Any:
    """write_totals(addresses, n, sums): the sums over lanes, the first n of every row of float32.

    `sums` has as many vectors for every row, a power of two, in order of the rows.
    """
    width = sums.count // rows.count

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = cgutils.unpack_tuple(builder, args[2])
        whole = builder.icmp_signed(">=", args[1], lowering.integer(width))
        for t, address in enumerate(cgutils.unpack_tuple(builder, args[0])):
            totals = lowering.sum_lanes(builder, vectors[t * width : (t + 1) * width])
            with builder.if_else(whole) as (all_of_them, some):
                with all_of_them:
                    lowering.store_value(builder, address, totals, 4)
                with some:
                    for j in range(width):
                        at = builder.add(address, lowering.integer(4 * j))
                        total = builder.extract_element(totals, lowering.lane(j))
                        with builder.if_then(
                            builder.icmp_signed(">", args[1], lowering.integer(j))
                        ):
                            lowering.store_value(builder, at, total, 4)
        return context.get_dummy_value()

    return types.void(rows, types.int64, sums), codegen


@operation(plain.update_rows)
def update_rows(
    typing: Any,
    kind: Any,
    rows: Any,
    first: Any,
    sums: Any,
    factors: Any,
    added: Any,
    multiplied: Any,
) -> Any:
    """update_rows(kind, addresses, k, sums, factors, added, multiplied): elements from k on.

    `added` has as many vectors as 16 elements of a row are updated, `multiplied` as many or none.
    Row t becomes ``row + ((even + odd) * factors[t] + added)``, rounded once, or with `multiplied`
    ``(row + (even + odd) * factors[t]) * multiplied + added``; sums has the even and the odd sum
    of 16 elements, then those of the next 16, then of the next row.
    """
    width = added.count

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, addresses, k, *rest = args
        vectors, scalars, biases, scales = (cgutils.unpack_tuple(builder, arg) for arg in rest)
        size = lowering.size_of(kind)
        offset = builder.mul(k, lowering.integer(size))
        for t, address in enumerate(cgutils.unpack_tuple(builder, addresses)):
            factor = lowering.splat(builder, scalars[t])
            for i, bias in enumerate(biases):
                even, odd = vectors[2 * (t * width + i) : 2 * (t * width + i) + 2]
                at = builder.add(address, builder.add(offset, lowering.integer(LANES * size * i)))
                raw = lowering.load_value(builder, at, lowering.raw_vector(kind), size)
                y, total = lowering.widen(builder, kind, raw), builder.fadd(even, odd)
                if scales:
                    y = lowering.multiply_add(builder, total, factor, y)
                    y = lowering.multiply_add(builder, y, scales[i], bias)
                else:
                    y = builder.fadd(y, lowering.multiply_add(builder, total, factor, bias))
                lowering.store_value(builder, at, lowering.narrow(builder, kind, y), size)
        return context.get_dummy_value()

    return types.void(kind, rows, types.int64, sums, factors, added, multiplied), codegen


@operation(plain.store_all)
def store_all(typing: Any, address: Any, step: Any, vectors: Any) -> Any:
    """store_all(address, step, vectors): vectors of float32, `step` bytes apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = args[0]
        for vector in cgutils.unpack_tuple(builder, args[2]):
            lowering.store_value(builder, at, vector, 4)
            at = builder.add(at, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vectors), codegen


@operation(plain.store)
def store(typing: Any, kind: Any, address: Any, vector: Any) -> Any:
    """store(kind, address, vector): 16 neighbours, rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = lowering.narrow(builder, kind, args[2])
        lowering.store_value(builder, args[1], rounded, lowering.size_of(kind))
        return context.get_dummy_value()

    return types.void(kind, types.int64, vector), codegen


@operation(plain.load_all)
def load_all(typing: Any, address: Any, like: Any) -> Any:
    """load_all(address, like): the float32 vectors that lie there, as many as `like` has items."""
    result = types.UniTuple(VECTOR, like.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = []
        for i in range(result.count):
            at = builder.add(args[0], lowering.integer(4 * LANES * i))
            vectors.append(lowering.load_value(builder, at, lowering.VECTOR))
        return context.make_tuple(builder, result, vectors)

    return result(types.int64, like), codegen


@operation(plain.load)
def load(typing: Any, kind: Any, address: Any) -> Any:
    """load(kind, address): 16 neighbours."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = lowering.load_value(
            builder, args[1], lowering.raw_vector(kind), lowering.size_of(kind)
        )
        return lowering.widen(builder, kind, raw)

    return VECTOR(kind, types.int64), codegen


@operation(plain.multiply_add)
def multiply_add(typing: Any, left: Any, right: Any, added: Any) -> Any:
    """multiply_add(left, right, added): ``left * right + added``, three float32, as in vectors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lowering.multiply_add(builder, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@operation(plain.write)
def write(typing: Any, kind: Any, address: Any, value: Any) -> Any:
    """write(kind, address, value): one float32, rounded."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lowering.store_value(
            builder, args[1], lowering.narrow(builder, kind, args[2]), lowering.size_of(kind)
        )
        return context.get_dummy_value()

    return types.void(kind, types.int64, types.float32), codegen


@operation(plain.prefetch)
def prefetch(typing: Any, rows: Any, offset: Any) -> Any:
    """prefetch(addresses, n): ask for the cache lines n bytes on; any address is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for address in cgutils.unpack_tuple(builder, args[0]):
            lowering.prefetch_line(builder, builder.add(address, args[1]))
        return context.get_dummy_value()

    return types.void(rows, types.int64), codegen


@operation(plain.read)
def read(typing: Any, kind: Any, address: Any) -> Any:
    """read(kind, address): one element as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lowering.widen(
            builder,
            kind,
            lowering.load_value(builder, args[1], lowering.raw_type(kind), lowering.size_of(kind)),
        )

    return types.float32(kind, types.int64), codegen


@operation(plain.read_scaled)
def read_scaled(typing: Any, rows: Any, factor: Any) -> Any:
    """read_scaled(addresses, factor): the float32 at every address, times a factor."""
    result = types.UniTuple(types.float32, rows.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        products = [
            builder.fmul(lowering.load_value(builder, address, lowering.F32), args[1])
            for address in cgutils.unpack_tuple(builder, args[0])
        ]
        return context.make_tuple(builder, result, products)

    return result(rows, types.float32), codegen


@operation(plain.rows)
def rows(typing: Any, base: Any, t: Any, like: Any) -> Any:
    """rows(base, t, like): the addresses of the rows at positions t, t + 1, ...

    As many as `like` has items; base is (address, bytes from row to row, address of the row of
    each position).
    """
    result = types.UniTuple(types.int64, like.count)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, step, order = cgutils.unpack_tuple(builder, args[0])
        first = builder.add(order, builder.mul(args[1], lowering.integer(8)))
        items = []
        for i in range(result.count):
            at = builder.add(first, lowering.integer(8 * i))
            row = lowering.load_value(builder, at, lowering.I64, 8)
            items.append(builder.add(start, builder.mul(row, step)))
        return context.make_tuple(builder, result, items)

    return result(base, types.int64, like), codegen


def _vectors_a_row(sums: int, a: int, x: int) -> int:
    return math.isqrt(a * x // sums)
