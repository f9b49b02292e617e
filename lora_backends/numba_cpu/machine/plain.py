"""The plain twin of every operation in `vectors`: numpy on single addresses, for debugging.

They run where NUMBA_DISABLE_JIT is set. Products are not fused with sums here, so results agree
with the compiled ones within rounding, not bit for bit.
"""

# ruff: noqa: D103 (each is documented by the operation of its name)

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import count
from typing import Any, TypeAlias, get_type_hints

import numpy as np
import numpy.typing as npt
import torch

Vector: TypeAlias = npt.NDArray[np.float32]  # [16]
Vectors: TypeAlias = tuple[Vector, ...]
Addresses: TypeAlias = tuple[int, ...]
Marker: TypeAlias = np.float32 | np.uint16 | np.int16 | np.float64 | np.int8 | np.uint8 | np.bool_

_LANES = 16


def _table(dtype: torch.dtype) -> Vector:
    table: Vector = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float().numpy()
    return table


_FLOAT8 = {np.uint8: _table(torch.float8_e4m3fn), np.bool_: _table(torch.float8_e5m2)}


def zeros(a: tuple[Any, ...], x: tuple[Any, ...]) -> Vectors:
    return tuple(np.zeros(_LANES, np.float32) for _ in range(len(a) * len(x)))


def size(kind: Marker) -> int:
    return kind.itemsize


def load_rows(kind: Marker, rows: Addresses, first: int) -> Vectors:
    pairs = [_elements(kind, row + first * kind.itemsize, 2 * _LANES) for row in rows]
    return tuple(p[:_LANES] for p in pairs) + tuple(p[_LANES:] for p in pairs)


def load_wide(kind: Marker, rows: Addresses, first: int, like: tuple[Any, ...]) -> Vectors:
    if len(like) == 2:
        return load_rows(kind, rows, first)
    wide = [_elements(kind, row + first * kind.itemsize, 2 * _LANES) for row in rows]
    return tuple((row.view(np.uint32) >> 16).astype(np.uint16).view(np.float32) for row in wide)


def load_some(kind: Marker, rows: Addresses, first: int, count: int) -> Vectors:
    size = kind.itemsize
    short = [_elements(kind, row + first * size, count) for row in rows]
    return tuple(np.pad(row, (0, _LANES - count)) for row in short)


def load_column(kind: Marker, address: int, stride: int) -> Vector:
    return np.concatenate([_elements(kind, address + lane * stride, 1) for lane in range(_LANES)])


def load_columns(kind: Marker, address: int, stride: int) -> Vectors:
    count = 16 // kind.itemsize
    rows = [_elements(kind, address + lane * stride, count) for lane in range(_LANES)]
    return tuple(np.stack(rows, axis=1))


def load_square(kind: Marker, address: int) -> Vectors:
    rows = [
        _elements(kind, address + row * _LANES * kind.itemsize, _LANES) for row in range(_LANES)
    ]
    return tuple(np.stack(rows, axis=1))


def load_four(kind: Marker, address: int, stride: int) -> Vectors:
    rows = [_elements(kind, address + lane * stride, 4) for lane in range(_LANES)]
    return tuple(np.stack(rows, axis=1))


def splat(value: np.float32) -> Vector:
    return np.full(_LANES, value, np.float32)


def multiply(vectors: Vectors, factor: Vector) -> Vectors:
    return tuple(vector * factor for vector in vectors)


def shifted(addresses: Addresses, offset: int) -> Addresses:
    return tuple(address + offset for address in addresses)


def add_products(sums: Vectors, a: Vectors, x: Vectors) -> Vectors:
    steps = round((len(a) * len(x) / len(sums)) ** 0.5)
    a_rows, x_rows = len(a) // steps, len(x) // steps
    totals = list(sums)
    for step in range(steps):
        for t in range(x_rows):
            for j in range(a_rows):
                totals[t * a_rows + j] = (
                    totals[t * a_rows + j] + a[step * a_rows + j] * x[step * x_rows + t]
                )
    return tuple(totals)


def add_wide(sums: Vectors, a: Vectors, x: Vectors, like: tuple[Any, ...]) -> Vectors:
    if len(like) == 2:
        return add_products(sums, a, x)
    lefts, rights = ([_from_bfloat16(v.view(np.uint16)) for v in side] for side in (a, x))
    products = [left * right for right in rights for left in lefts]
    return tuple(s + p[1::2] + p[::2] for s, p in zip(sums, products, strict=True))


def add_columns(sums: Vectors, columns: Vectors, rows: Addresses, first: int) -> Vectors:
    factors = [_elements(np.float32(0), row + 4 * first, len(columns)) for row in rows]
    totals = list(sums)
    for c, column in enumerate(columns):
        for t, h in enumerate(factors):
            totals[2 * t + c % 2] = totals[2 * t + c % 2] + column * h[c]
    return tuple(totals)


def add_interleaved(sums: Vectors, columns: Vectors, address: int) -> Vectors:
    totals, rows = list(sums), len(sums) // 2
    factors = _elements(np.float32(0), address, len(columns) * rows).reshape(-1, rows)
    for c, column in enumerate(columns):
        for t in range(rows):
            totals[2 * t + c % 2] = totals[2 * t + c % 2] + column * factors[c, t]
    return tuple(totals)


def write_totals(rows: Addresses, count: int, sums: Vectors) -> None:
    width = len(sums) // len(rows)
    for t, row in enumerate(rows):
        for j in range(min(count, width)):
            _memory(row + 4 * j, np.dtype(np.float32), 1)[0] = _sum_lanes(sums[t * width + j])


def update_rows(
    kind: Marker,
    rows: Addresses,
    first: int,
    sums: Vectors,
    factors: tuple[np.float32, ...],
    added: Vectors,
    multiplied: Vectors,
) -> None:
    width = len(added)
    for n, (even, odd) in enumerate(zip(sums[::2], sums[1::2], strict=True)):
        (t, i), delta = divmod(n, width), (even + odd) * factors[n // width]
        at = rows[t] + (first + i * _LANES) * kind.itemsize
        y = _elements(kind, at, _LANES)
        if multiplied:
            y = (y + delta) * multiplied[i] + added[i]
        else:
            y = y + (delta + added[i])
        _memory(at, kind.dtype, _LANES)[:] = _narrow(kind, y)


def update_scaled(
    kind: Marker, rows: Addresses, first: int, sums: Vectors, factor: Vector, added: Vector
) -> None:
    for row, even, odd in zip(rows, sums[::2], sums[1::2], strict=True):
        at = row + first * kind.itemsize
        y = _elements(kind, at, _LANES) + ((even + odd) * factor + added)
        _memory(at, kind.dtype, _LANES)[:] = _narrow(kind, y)


def store_all(address: int, step: int, vectors: Vectors) -> None:
    for i, vector in enumerate(vectors):
        _memory(address + step * i, np.dtype(np.float32), _LANES)[:] = vector


def store(kind: Marker, address: int, vector: Vector) -> None:
    _memory(address, kind.dtype, _LANES)[:] = _narrow(kind, vector)


def load_all(address: int, like: tuple[Any, ...]) -> Vectors:
    return tuple(load(np.float32(0), address + 4 * _LANES * i) for i in range(len(like)))


def add_stored(
    sums: Vectors, columns: Vectors, rows: Addresses, first: int, parity: tuple[Any, ...]
) -> Vectors:
    totals, odd = list(sums), len(parity)
    for t, row in enumerate(rows):
        factor = read(np.float32(0), row + 4 * (first + odd))
        for i, column in enumerate(columns):
            item = 2 * (t * len(columns) + i) + odd
            totals[item] = totals[item] + column * factor
    return tuple(totals)


def load(kind: Marker, address: int) -> Vector:
    return _elements(kind, address, _LANES)


def multiply_add(left: np.float32, right: np.float32, added: np.float32) -> np.float32:
    return left * right + added


def write(kind: Marker, address: int, value: np.float32) -> None:
    _memory(address, kind.dtype, 1)[:] = _narrow(kind, np.array([value], np.float32))


def prefetch(rows: Addresses, offset: int) -> None:
    del rows, offset


def read(kind: Marker, address: int) -> np.float32:
    value: np.float32 = _elements(kind, address, 1)[0]
    return value


def read_scaled(rows: Addresses, factor: np.float32) -> tuple[np.float32, ...]:
    return tuple(read(np.float32(0), row) * factor for row in rows)


def read_int(address: int) -> int:
    return int(_memory(address, np.dtype(np.int32), 1)[0])


def read_id(address: int) -> int:
    return int(_memory(address, np.dtype(np.int64), 1)[0])


def _memory(address: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(int(address))
    return np.frombuffer(memoryview(buffer), dtype)


def _elements(kind: Marker, address: int, count: int) -> Vector:
    if type(kind) in _FLOAT8:
        wide: Vector = _FLOAT8[type(kind)][_memory(address, np.dtype(np.uint8), count)]
        return wide
    raw = _memory(address, kind.dtype, count)
    if kind.dtype == np.uint16:
        return _from_bfloat16(raw)
    if kind.dtype == np.int16:  # float16
        raw = raw.view(np.float16)
    return raw.astype(np.float32)


def _from_bfloat16(raw: npt.NDArray[Any]) -> Vector:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _narrow(kind: Marker, vector: Vector) -> npt.NDArray[Any]:
    if kind.dtype == np.int16:  # float16
        return vector.astype(np.float16).view(np.int16)
    if kind.dtype == np.float32:
        return vector
    bits = vector.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(vector), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _sum_lanes(vector: Vector) -> np.float32:
    while vector.size > 1:
        half = vector.size // 2
        vector = vector[:half] + vector[half:]
    total: np.float32 = vector[0]
    return total


def write_id(address: int, value: int) -> None:
    _memory(address, np.dtype(np.int64), 1)[0] = value


def ints(address: int) -> Any:
    return ctypes.cast(int(address), ctypes.POINTER(ctypes.c_int64))


def call(address: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(int(address))())


def invoke(function: int, record: Any) -> None:
    items = list(_leaves(record))
    memory = (ctypes.c_int64 * len(items))(*items)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(int(function))(ctypes.addressof(memory))


def _leaves(record: Any) -> Iterator[int]:
    for item in record:
        if isinstance(item, tuple):
            yield from _leaves(item)
        else:
            yield int(item)


def fields(kind: Any, address: int) -> Any:
    return _fields(kind, count(address, 8))


def _fields(kind: Any, addresses: Iterator[int]) -> Any:
    hints = get_type_hints(kind)
    return kind(
        *[
            read_id(next(addresses)) if hints[name] is int else _fields(hints[name], addresses)
            for name in kind._fields
        ]
    )


def rows(base: tuple[int, int, int], t: int, like: tuple[Any, ...]) -> Addresses:
    return tuple(base[0] + read_id(base[2] + 8 * (t + i)) * base[1] for i in range(len(like)))


def rows_until(base: tuple[int, int, int], t: int, last: int, like: tuple[Any, ...]) -> Addresses:
    places = [min(t + i, last) for i in range(len(like))]
    return tuple(base[0] + read_id(base[2] + 8 * place) * base[1] for place in places)


def steps_until(start: int, step: int, first: int, last: int, like: tuple[Any, ...]) -> Addresses:
    return tuple(start + min(first + i, last) * step for i in range(len(like)))


def load_first(kind: Marker, address: int, count: int) -> Vector:
    row = _elements(kind, address, min(count, _LANES))
    return np.pad(row, (0, _LANES - len(row)))


def add_outer(kind: Marker, sums: Vectors, rows: Addresses, k: int, vectors: Vectors) -> Vectors:
    factors = [read(kind, row + k * kind.itemsize) for row in rows]
    products = [factor * vector for factor in factors for vector in vectors]
    return tuple(total + product for total, product in zip(sums, products, strict=True))


def update_first(
    rows: Addresses,
    first: int,
    count: int,
    sums: Vectors,
    factors: tuple[np.float32, ...],
    begun: int,
) -> None:
    width = len(sums) // len(rows)
    at = [_memory(row + 4 * first, np.dtype(np.float32), count) for row in rows]
    new = []
    for t, row in enumerate(at):
        total = np.concatenate(sums[t * width : (t + 1) * width])[:count] * factors[t]
        new.append(row + total if begun else total)
    for row, total in zip(at, new, strict=True):
        row[:] = total
