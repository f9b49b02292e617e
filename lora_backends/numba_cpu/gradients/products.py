"""Routines of the backward: products of a segment's rows with weights, and sums over these rows.

The order of a sum depends on neither the other segments nor the threads: it goes along the inputs
or outputs, or along the rows of a segment and then from segment to segment. Elements of one operand
are broadcast to all lanes and multiply rows of the other, so nothing is transposed. Rows are
computed in groups; the last row fills up the last group, and is computed and stored more than once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.kernels.arguments import RowPointers
from lora_backends.numba_cpu.kernels.short import EIGHT, ONE, TWO
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import compiled
from lora_backends.numba_cpu.machine.records import fields

LANES = v.LANES
ROWS = len(EIGHT)  # at a time; with two vectors of columns, 16 vectors of sums


class WithWeights(NamedTuple):
    """``c[t] += scaling * scales[t] * a[t] @ b`` for rows t of a segment."""

    a: RowPointers
    depth: int  # columns of a, rows of b
    b: int
    b_row: int
    width: int  # columns of b and c
    c: RowPointers  # float32
    scaling: int  # address of a float32
    scales: RowPointers  # float32
    start: int  # positions
    stop: int


class OverRows(NamedTuple):
    """``c[m] = scaling * sum over rows t of a segment of scales[t] * a[t, m] * b[t]``."""

    a: RowPointers
    first: int  # columns of a and rows of c from here
    last: int  # up to here, exclusive
    b: RowPointers
    width: int  # columns of b and c
    c: int  # float32
    c_row: int
    begun: int  # whether c has sums of earlier segments, to be added to
    scaling: int
    scales: RowPointers
    scaled: int  # whether some scale is not 1
    start: int
    stop: int


def with_weights(kind_a: Any, kind_b: Any) -> Any:
    """Compile products of rows with weights: dh from dL/dy and B, dx from dh and A."""

    def run(address):
        of = fields(WithWeights, address)
        scaling = v.read(v.FLOAT32, of.scaling)
        for t in range(of.start, of.stop, ROWS):
            a_rows = v.rows_until(of.a, t, of.stop - 1, EIGHT)
            c_rows = v.rows_until(of.c, t, of.stop - 1, EIGHT)
            factors = v.read_scaled(v.rows_until(of.scales, t, of.stop - 1, EIGHT), scaling)
            n = 0
            while n + 2 * LANES <= of.width:
                b, sums = of.b + n * v.size(kind_b), v.zeros(EIGHT, TWO)
                for k in range(of.depth):
                    pair = (v.load(kind_b, b), v.load(kind_b, b + LANES * v.size(kind_b)))
                    sums = v.add_outer(kind_a, sums, a_rows, k, pair)
                    b += of.b_row
                v.update_first(c_rows, n, 2 * LANES, sums, factors, 1)
                n += 2 * LANES
            while n < of.width:
                b, part = of.b + n * v.size(kind_b), v.zeros(EIGHT, ONE)
                count = min(of.width - n, LANES)
                for k in range(of.depth):
                    part = v.add_outer(kind_a, part, a_rows, k, (v.load_first(kind_b, b, count),))
                    b += of.b_row
                v.update_first(c_rows, n, count, part, factors, 1)
                n += LANES

    return compiled(run)


def over_rows(kind_a: Any, kind_b: Any) -> Any:
    """Compile the sums over rows: dB from dL/dy and h, dA from dh and x."""

    def run(address):
        of = fields(OverRows, address)
        factors = v.read_scaled(v.steps_until(of.scaling, 0, 0, 0, EIGHT), np.float32(1))
        for n in range(0, of.width, 2 * LANES):
            count = of.width - n
            for m in range(of.first, of.last, ROWS):
                offsets = v.steps_until(0, v.size(kind_a), m, of.last - 1, EIGHT)
                c_rows = v.steps_until(of.c, of.c_row, m, of.last - 1, EIGHT)
                if count > LANES:
                    sums = v.zeros(EIGHT, TWO)
                    for t in range(of.start, of.stop):
                        (a,), (b,) = v.rows(of.a, t, ONE), v.rows(of.b, t, ONE)
                        b += n * v.size(kind_b)
                        pair = (
                            v.load(kind_b, b),
                            v.load_first(kind_b, b + LANES * v.size(kind_b), count - LANES),
                        )
                        if of.scaled:
                            (at,) = v.rows(of.scales, t, ONE)
                            pair = v.multiply(pair, v.splat(v.read(v.FLOAT32, at)))
                        sums = v.add_outer(kind_a, sums, v.shifted(offsets, a), 0, pair)
                    v.update_first(c_rows, n, count, sums, factors, of.begun)
                else:
                    part = v.zeros(EIGHT, ONE)
                    for t in range(of.start, of.stop):
                        (a,), (b,) = v.rows(of.a, t, ONE), v.rows(of.b, t, ONE)
                        one = (v.load_first(kind_b, b + n * v.size(kind_b), count),)
                        if of.scaled:
                            (at,) = v.rows(of.scales, t, ONE)
                            one = v.multiply(one, v.splat(v.read(v.FLOAT32, at)))
                        part = v.add_outer(kind_a, part, v.shifted(offsets, a), 0, one)
                    v.update_first(c_rows, n, count, part, factors, of.begun)

    return compiled(run)
