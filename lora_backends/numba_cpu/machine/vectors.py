"""Vectors of 16 float32 for kernels: loads that widen, stores that round, products, sums.

LLVM sees whole vectors, so nothing depends on what a loop vectoriser decides, and no flag allows
it to reorder sums: a result is the same however many rows a kernel handles at once. Memory is
named by its address, an int. A marker, a value that is otherwise unused, names the dtype that lies
there by its type: `FLOAT32`, `BFLOAT16`, `FLOAT16`, `INT8` and so on.
"""

# ruff: noqa: D402 (an operation is documented by an example of its use)
# mypy: disable-error-code="misc"

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from lora_backends.numba_cpu.machine import lowering, plain
from lora_backends.numba_cpu.machine.operations import operation

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


def many(count: int) -> Any:
    """Return the type of a tuple of vectors."""
    return types.UniTuple(VECTOR, count)


@operation(plain.zeros, lambda a, x: many(a.count * x.count))
def zeros(builder: Any, a: Any, x: Any) -> Any:
    """zeros(a, x): a zero vector for every pair of items of two tuples."""
    return [lowering.ZEROS] * (len(a) * len(x))


@operation(plain.size, types.int64)
def size(builder: Any, kind: Any) -> Any:
    """size(kind): bytes of an element."""
    return lowering.integer(lowering.size_of(kind))


@operation(plain.load_rows, lambda kind, rows, k: many(2 * rows.count))
def load_rows(builder: Any, kind: Any, addresses: Any, k: Any) -> Any:
    """load_rows(kind, addresses, k): two vectors a row, elements k to k + 31, first ones first."""
    offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
    # in bfloat16 even elements come first, which costs one instruction a vector
    pairs = [
        lowering.load_pair(builder, kind, builder.add(address, offset)) for address in addresses
    ]
    return [p[0] for p in pairs] + [p[1] for p in pairs]


@operation(plain.load_wide, lambda kind, rows, k, like: many(rows.count * like.count))
def load_wide(builder: Any, kind: Any, addresses: Any, k: Any, like: Any) -> Any:
    """load_wide(kind, addresses, k, like): elements k to k + 31 of every row, for `add_wide`.

    If `like` has one item, as bfloat16, a vector a row; if it has two, as float32, two vectors a
    row in the order of memory, first ones first.
    """
    offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
    starts = [builder.add(at, offset) for at in addresses]
    if len(like) == 1:
        return [lowering.load_bfloat16(builder, kind, start) for start in starts]
    pairs = [lowering.load_halves(builder, kind, start) for start in starts]
    return [p[0] for p in pairs] + [p[1] for p in pairs]


@operation(plain.load_some, lambda kind, rows, *rest: many(rows.count))
def load_some(builder: Any, kind: Any, addresses: Any, k: Any, count: Any) -> Any:
    """load_some(kind, addresses, k, n): a vector a row, elements k to k + n - 1, then zeros."""
    offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
    starts = [builder.add(at, offset) for at in addresses]
    return lowering.load_lanes(builder, kind, starts, count)


@operation(plain.load_column, VECTOR)
def load_column(builder: Any, kind: Any, at: Any, step: Any) -> Any:
    """load_column(kind, address, stride): 16 elements, `stride` bytes apart."""
    raw = lowering.undefined(lowering.raw_vector(kind))
    for lane in range(LANES):
        item = lowering.load_value(builder, at, lowering.raw_type(kind), lowering.size_of(kind))
        raw = builder.insert_element(raw, item, lowering.lane(lane))
        at = builder.add(at, step)
    return lowering.widen(builder, kind, raw)


@operation(plain.load_columns, lambda kind, at, step: many(16 // lowering.size_of(kind)))
def load_columns(builder: Any, kind: Any, base: Any, step: Any) -> Any:
    """load_columns(kind, address, stride): the columns of 16 rows, `stride` bytes apart.

    16 bytes of every row: 4 columns of float32, 8 of a 16-bit type, 16 of 8 bits. Lanes are rows.
    """
    columns = lowering.transpose_16_by_4(builder, base, step)  # of 32 bits
    return lowering.split_words(builder, kind, columns)


@operation(plain.load_square, many(LANES))
def load_square(builder: Any, kind: Any, address: Any) -> Any:
    """load_square(kind, address): all columns of 16 rows of 16 without gaps, in less time."""
    row, columns = LANES * lowering.size_of(kind), []  # of 32 bits
    if row == 16:
        columns = lowering.transpose_64_words(builder, address)
    else:
        for at in range(0, row, 32):
            start = builder.add(address, lowering.integer(at))
            columns += lowering.transpose_16_by_8(builder, start, row)
    return lowering.split_words(builder, kind, columns)


@operation(plain.load_four, many(4))
def load_four(builder: Any, kind: Any, at: Any, step: Any) -> Any:
    """load_four(kind, address, stride): `load_columns` for 4 columns of an 8-bit type."""
    words = lowering.undefined(ir.VectorType(lowering.I32, LANES))
    for lane in range(LANES):
        word = lowering.load_value(builder, at, lowering.I32, 1)
        words = builder.insert_element(words, word, lowering.lane(lane))
        at = builder.add(at, step)
    return lowering.split_words(builder, kind, [words])


@operation(plain.splat, VECTOR)
def splat(builder: Any, value: Any) -> Any:
    """splat(value): 16 times a float32."""
    return lowering.splat(builder, value)


@operation(plain.multiply, lambda items, factor: items)
def multiply(builder: Any, vectors: Any, factor: Any) -> Any:
    """multiply(vectors, factor): every vector times one vector."""
    items = vectors
    return [builder.fmul(item, factor) for item in items]


@operation(plain.shifted, lambda addresses, offset: addresses)
def shifted(builder: Any, addresses: Any, offset: Any) -> Any:
    """shifted(addresses, n): the addresses n bytes on."""
    return [builder.add(at, offset) for at in addresses]


@operation(plain.add_products, lambda sums, *others: sums)
def add_products(builder: Any, sums: Any, a: Any, x: Any) -> Any:
    """add_products(sums, a, x): ``sums[t, j] + a[j] * x[t]``, for one or more vectors a row.

    a and x are as `load_rows` or `load_some` returned them; sums has an item per pair of rows.
    """
    return products(builder, sums, a, x)


def products(builder: Any, sums: list[Any], a: list[Any], x: list[Any]) -> list[Any]:
    """Return what `add_products` and `add_wide` do for float32."""
    repeats = math.isqrt(len(a) * len(x) // len(sums))  # vectors a row
    a_rows, x_rows = len(a) // repeats, len(x) // repeats
    pairs = [(t, j) for t in range(x_rows) for j in range(a_rows)]
    if a_rows > x_rows:  # the fewer stay in registers
        pairs.sort(key=lambda pair: pair[1])
    for step in range(repeats):
        for t, j in pairs:
            left, right = a[step * a_rows + j], x[step * x_rows + t]
            item = t * a_rows + j
            sums[item] = lowering.multiply_add(builder, left, right, sums[item])
    return sums


@operation(plain.add_wide, lambda sums, *others: sums)
def add_wide(builder: Any, sums: Any, a: Any, x: Any, like: Any) -> Any:
    """add_wide(sums, a, x, like): `add_products` of what `load_wide` returned for `like`."""
    if len(like) == 2:
        return products(builder, sums, a, x)
    # one instruction, which reads denormal numbers as 0 and returns 0 instead of them
    pairs = [(left, right) for right in x for left in a]
    added = [
        lowering.add_pairs(builder, left, right, total)
        for total, (left, right) in zip(sums, pairs, strict=True)
    ]
    return added


@operation(plain.add_columns, lambda sums, *others: sums)
def add_columns(builder: Any, sums: Any, columns: Any, rows: Any, first: Any) -> Any:
    """add_columns(sums, columns, addresses, j): ``sums[t] + sum_c columns[c] * h[t, j + c]``.

    The addresses are of rows of float32.
    """
    offset = builder.mul(first, lowering.integer(4))
    bases = [builder.add(address, offset) for address in rows]
    for c, vector in enumerate(columns):
        for t, base in enumerate(bases):
            at = builder.add(base, lowering.integer(4 * c))
            factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
            # an even and an odd sum, so that one product need not wait for the last; `update_rows`
            # adds them
            item = 2 * t + c % 2
            sums[item] = lowering.multiply_add(builder, vector, factor, sums[item])
    return sums


@operation(plain.add_interleaved, lambda sums, *others: sums)
def add_interleaved(builder: Any, sums: Any, columns: Any, address: Any) -> Any:
    """add_interleaved(sums, columns, address): `add_columns` for interleaved rows of h.

    At the address lies the first element of every row, then the second of every row, and so on.
    """
    rows = len(sums) // 2
    for c, vector in enumerate(columns):
        for t in range(rows):
            at = builder.add(address, lowering.integer(4 * (c * rows + t)))
            factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
            item = 2 * t + c % 2
            sums[item] = lowering.multiply_add(builder, vector, factor, sums[item])
    return sums


@operation(plain.update_scaled, types.void)
def update_scaled(
    builder: Any, kind: Any, addresses: Any, k: Any, totals: Any, factor: Any, added: Any
) -> Any:
    """update_scaled(kind, addresses, k, sums, factor, added): 16 elements of every row from k on.

    They become ``row + ((even + odd) * factor + added)``, rounded once; factor and added are
    vectors.
    """
    size, vectors = lowering.size_of(kind), totals
    offset = builder.mul(k, lowering.integer(size))
    for t, address in enumerate(addresses):
        at = builder.add(address, offset)
        raw = lowering.load_value(builder, at, lowering.raw_vector(kind), size)
        total = builder.fadd(vectors[2 * t], vectors[2 * t + 1])
        total = lowering.multiply_add(builder, total, factor, added)
        y = builder.fadd(lowering.widen(builder, kind, raw), total)
        lowering.store_value(builder, at, lowering.narrow(builder, kind, y), size)


@operation(plain.add_stored, lambda sums, *others: sums)
def add_stored(builder: Any, sums: Any, columns: Any, rows: Any, first: Any, parity: Any) -> Any:
    """add_stored(sums, columns, addresses, j, odd): ``sums[t, i] + columns[i] * h[t, j]``.

    The addresses are of rows of float32.
    """
    odd = len(parity)
    offset = builder.add(builder.mul(first, lowering.integer(4)), lowering.integer(4 * odd))
    for t, address in enumerate(rows):
        at = builder.add(address, offset)
        factor = lowering.splat(builder, lowering.load_value(builder, at, lowering.F32))
        for i, vector in enumerate(columns):
            # an even and an odd sum for each column vector; `odd`, a tuple of one item or none,
            # chooses
            item = 2 * (t * len(columns) + i) + odd
            sums[item] = lowering.multiply_add(builder, vector, factor, sums[item])
    return sums


@operation(plain.write_totals, types.void)
def write_totals(builder: Any, rows: Any, count: Any, sums: Any) -> Any:
    """write_totals(addresses, n, sums): the sums over lanes, the first n of every row of float32.

    `sums` has as many vectors for every row, a power of two, in order of the rows.
    """
    width = len(sums) // len(rows)
    whole = builder.icmp_signed(">=", count, lowering.integer(width))
    for t, address in enumerate(rows):
        totals = lowering.sum_lanes(builder, sums[t * width : (t + 1) * width])
        with builder.if_else(whole) as (all_of_them, some):
            with all_of_them:
                lowering.store_value(builder, address, totals, 4)
            with some:
                for j in range(width):
                    at = builder.add(address, lowering.integer(4 * j))
                    total = builder.extract_element(totals, lowering.lane(j))
                    with builder.if_then(builder.icmp_signed(">", count, lowering.integer(j))):
                        lowering.store_value(builder, at, total, 4)


@operation(plain.update_rows, types.void)
def update_rows(
    builder: Any,
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
    size, width = lowering.size_of(kind), len(added)
    offset = builder.mul(first, lowering.integer(size))
    for t, address in enumerate(rows):
        factor = lowering.splat(builder, factors[t])
        for i, bias in enumerate(added):
            even, odd = sums[2 * (t * width + i) : 2 * (t * width + i) + 2]
            at = builder.add(address, builder.add(offset, lowering.integer(LANES * size * i)))
            raw = lowering.load_value(builder, at, lowering.raw_vector(kind), size)
            y, total = lowering.widen(builder, kind, raw), builder.fadd(even, odd)
            if multiplied:
                y = lowering.multiply_add(builder, total, factor, y)
                y = lowering.multiply_add(builder, y, multiplied[i], bias)
            else:
                y = builder.fadd(y, lowering.multiply_add(builder, total, factor, bias))
            lowering.store_value(builder, at, lowering.narrow(builder, kind, y), size)


@operation(plain.store_all, types.void)
def store_all(builder: Any, address: Any, step: Any, items: Any) -> Any:
    """store_all(address, step, vectors): vectors of float32, `step` bytes apart."""
    for item in items:
        lowering.store_value(builder, address, item, 4)
        address = builder.add(address, step)


@operation(plain.store, types.void)
def store(builder: Any, kind: Any, address: Any, vector: Any) -> Any:
    """store(kind, address, vector): 16 neighbours, rounded."""
    rounded = lowering.narrow(builder, kind, vector)
    lowering.store_value(builder, address, rounded, lowering.size_of(kind))


@operation(plain.load_all, lambda address, like: many(like.count))
def load_all(builder: Any, address: Any, like: Any) -> Any:
    """load_all(address, like): the float32 vectors that lie there, as many as `like` has items."""
    vectors = []
    for i in range(len(like)):
        at = builder.add(address, lowering.integer(4 * LANES * i))
        vectors.append(lowering.load_value(builder, at, lowering.VECTOR))
    return vectors


@operation(plain.load, VECTOR)
def load(builder: Any, kind: Any, address: Any) -> Any:
    """load(kind, address): 16 neighbours."""
    raw = lowering.load_value(builder, address, lowering.raw_vector(kind), lowering.size_of(kind))
    return lowering.widen(builder, kind, raw)


@operation(plain.multiply_add, types.float32)
def multiply_add(builder: Any, left: Any, right: Any, added: Any) -> Any:
    """multiply_add(left, right, added): ``left * right + added``, three float32, as in vectors."""
    return lowering.multiply_add(builder, left, right, added)


@operation(plain.write, types.void)
def write(builder: Any, kind: Any, address: Any, value: Any) -> Any:
    """write(kind, address, value): one float32, rounded."""
    lowering.store_value(
        builder, address, lowering.narrow(builder, kind, value), lowering.size_of(kind)
    )


@operation(plain.prefetch, types.void)
def prefetch(builder: Any, rows: Any, offset: Any) -> Any:
    """prefetch(addresses, n): ask for the cache lines n bytes on; any address is allowed."""
    for address in rows:
        lowering.prefetch_line(builder, builder.add(address, offset))


@operation(plain.read, types.float32)
def read(builder: Any, kind: Any, address: Any) -> Any:
    """read(kind, address): one element as float32."""
    return lowering.widen(
        builder,
        kind,
        lowering.load_value(builder, address, lowering.raw_type(kind), lowering.size_of(kind)),
    )


@operation(plain.read_scaled, lambda rows, factor: types.UniTuple(types.float32, rows.count))
def read_scaled(builder: Any, rows: Any, factor: Any) -> Any:
    """read_scaled(addresses, factor): the float32 at every address, times a factor."""
    products = [
        builder.fmul(lowering.load_value(builder, address, lowering.F32), factor)
        for address in rows
    ]
    return products


@operation(plain.rows, lambda base, t, like: types.UniTuple(types.int64, like.count))
def rows(builder: Any, base: Any, t: Any, like: Any) -> Any:
    """rows(base, t, like): the addresses of the rows at positions t, t + 1, ...

    As many as `like` has items; base is (address, bytes from row to row, address of the row of
    each position).
    """
    start, step, order = base
    first = builder.add(order, builder.mul(t, lowering.integer(8)))
    items = []
    for i in range(len(like)):
        at = builder.add(first, lowering.integer(8 * i))
        row = lowering.load_value(builder, at, lowering.I64, 8)
        items.append(builder.add(start, builder.mul(row, step)))
    return items


@operation(plain.rows_until, lambda base, t, last, like: types.UniTuple(types.int64, like.count))
def rows_until(builder: Any, base: Any, t: Any, last: Any, like: Any) -> Any:
    """rows_until(base, t, last, like): as `rows`, but positions after `last` become `last`."""
    start, step, order = base
    items = []
    for position in _until(builder, t, last, like):
        at = builder.add(order, builder.mul(position, lowering.integer(8)))
        row = lowering.load_value(builder, at, lowering.I64, 8)
        items.append(builder.add(start, builder.mul(row, step)))
    return items


@operation(plain.steps_until, lambda *args: types.UniTuple(types.int64, args[-1].count))
def steps_until(builder: Any, start: Any, step: Any, first: Any, last: Any, like: Any) -> Any:
    """steps_until(address, stride, i, last, like): the addresses of items i, i + 1, ...

    As many as `like` has items; items after `last` become `last`.
    """
    places = _until(builder, first, last, like)
    return [builder.add(start, builder.mul(place, step)) for place in places]


def _until(builder: Any, first: Any, last: Any, like: Any) -> list[Any]:
    """Return first, first + 1, ... but none after `last`."""
    places = [builder.add(first, lowering.integer(i)) for i in range(len(like))]
    return [builder.select(builder.icmp_signed("<", place, last), place, last) for place in places]


@operation(plain.load_first, VECTOR)
def load_first(builder: Any, kind: Any, address: Any, count: Any) -> Any:
    """load_first(kind, address, n): up to 16 neighbours, then zeros; no other memory is read."""
    return lowering.load_masked(builder, kind, address, lowering.mask_of(builder, count))


@operation(plain.add_outer, lambda kind, sums, *others: sums)
def add_outer(builder: Any, kind: Any, sums: Any, addresses: Any, k: Any, vectors: Any) -> Any:
    """add_outer(kind, sums, addresses, k, vectors): ``sums[t, i] + a[t, k] * vectors[i]``.

    `addresses` holds the address of each row of a.
    """
    offset = builder.mul(k, lowering.integer(lowering.size_of(kind)))
    for t, address in enumerate(addresses):
        at = builder.add(address, offset)
        raw = lowering.load_value(builder, at, lowering.raw_type(kind), lowering.size_of(kind))
        factor = lowering.splat(builder, lowering.widen(builder, kind, raw))
        for i, vector in enumerate(vectors):
            item = t * len(vectors) + i
            sums[item] = lowering.multiply_add(builder, factor, vector, sums[item])
    return sums


@operation(plain.update_first, types.void)
def update_first(
    builder: Any, rows: Any, first: Any, count: Any, sums: Any, factors: Any, begun: Any
) -> Any:
    """update_first(addresses, k, n, sums, factors, begun): n float32 of every row from k on.

    Row t becomes ``sums[t] * factors[t]``, plus its old value if `begun` is not 0.
    """
    width, masks = len(sums) // len(rows), []
    offset = builder.mul(first, lowering.integer(4))
    for i in range(width):
        left = builder.sub(count, lowering.integer(LANES * i))
        masks.append(lowering.mask_of(builder, left))
    adds = builder.icmp_signed("!=", begun, lowering.integer(0))
    results = []
    for t, address in enumerate(rows):
        factor = lowering.splat(builder, factors[t])
        for i, mask in enumerate(masks):
            at = builder.add(address, builder.add(offset, lowering.integer(4 * LANES * i)))
            total = builder.fmul(sums[t * width + i], factor)
            read = builder.and_(mask, lowering.mask_all(builder, adds))
            row = lowering.load_masked(builder, types.float32, at, read)
            results.append((at, builder.select(read, builder.fadd(row, total), total), mask))
    # equal addresses must have equal sums
    for at, total, mask in results:  # last: rows may be equal
        lowering.store_masked(builder, at, total, mask)
