"""The kernels of the backward: each thread computes its share of the products over all segments.

A thread owns rows of dh and dB, and columns of dx and dA, so no two threads write the same element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lora_backends.numba_cpu.gradients.products import ROWS, OverRows, WithWeights
from lora_backends.numba_cpu.kernels.arguments import RowPointers
from lora_backends.numba_cpu.kernels.shares import (
    rank_of,
    segment_at,
    slice_of,
    units_of,
)
from lora_backends.numba_cpu.layer import LayerPointers
from lora_backends.numba_cpu.machine.compiling import compiled, function
from lora_backends.numba_cpu.machine.records import call as call_function
from lora_backends.numba_cpu.machine.records import invoke, read_id, record
from lora_backends.numba_cpu.machine.vectors import LANES


class BackwardCall(NamedTuple):
    """The arguments of a kernel; strides are in bytes.

    `rows` is dL/dy for `b_entry`, and x for `a_entry`. Only `b_entry` reads h.
    """

    thread_num: int  # addresses of OpenMP's functions
    num_threads: int
    threads: int  # 1: no call of OpenMP
    layer: int  # address of the fields of a `LayerPointers`
    num_segments: int
    segments: int
    order: int  # address of the row of each position
    places: int  # address of the place of each slot in `out`, int64; negative: not wanted
    scales: int  # address of the scale of each row
    scales_row: int  # stride; 0: every row reads the same scale, 1
    one: int  # address of 1.0
    with_weights: int  # addresses of routines
    over_rows: int
    rows: int
    rows_row: int
    rows_size: int  # bytes of an element
    weight_size: int
    dh: int  # [num_slices, rows, max_rank] float32; 0: not wanted
    dh_slice: int
    dh_row: int
    h: int
    h_slice: int
    h_row: int
    dx: int  # float32; 0: not wanted
    dx_row: int
    out: int  # float32: dB [slots, out_features, max_rank] or dA [slots, num_slices, max_rank, in]
    out_slot: int
    out_slice: int
    out_row: int


@function
def part_of(args):
    """Return the number of this thread and how many there are."""
    if args.threads == 1:
        return 0, 1
    return call_function(args.thread_num), call_function(args.num_threads)


@function
def range_of(part, parts, count, block):
    """Return the start and the end of this part's share of `count` items, in whole blocks."""
    blocks = (count + block - 1) // block
    first, last = blocks * part // parts, blocks * (part + 1) // parts
    return first * block, min(last * block, count)


@function
def begins(args, i):
    """Return whether a segment is the first of its slot."""
    return i == 0 or segment_at(args.segments, i - 1).key != segment_at(args.segments, i).key


def b_entry() -> Any:
    """Compile the kernel of dh and dB; it takes a `BackwardCall`'s address."""

    def run(address):
        args = record(BackwardCall, address)
        layer = record(LayerPointers, args.layer)
        part, parts = part_of(args)
        scales = RowPointers(args.scales, args.scales_row, args.order)
        total, before, cost = np.int64(0), np.int64(0), np.int64(1)  # literals compile once more
        for i in range(args.num_segments):
            segment = segment_at(args.segments, i)
            total += (segment.stop - segment.start + ROWS - 1) // ROWS
        for i in range(args.num_segments):
            segment = segment_at(args.segments, i)
            tiles = (segment.stop - segment.start + ROWS - 1) // ROWS
            low, high = units_of(part, parts, total, before, tiles, cost)
            before += tiles
            start = segment.start + low * ROWS
            stop = min(segment.start + high * ROWS, segment.stop)
            place = read_id(args.places + 8 * segment.key)
            begun = 0 if begins(args, i) else 1
            for s in range(layer.num_slices):
                item, rank = slice_of(layer, s), rank_of(layer, segment.key, s)
                width = item.last - item.first
                if rank == 0 or width == 0:
                    continue
                scaling = (
                    layer.scalings + segment.key * layer.scalings_slot + s * layer.scalings_slice
                )
                g = RowPointers(args.rows + item.first * args.rows_size, args.rows_row, args.order)
                if args.dh != 0 and start < stop:
                    b = item.b + segment.key * item.b_slot
                    dh = RowPointers(args.dh + s * args.dh_slice, args.dh_row, args.order)
                    invoke(
                        args.with_weights,
                        WithWeights(
                            g, width, b, item.b_row, rank, dh, scaling, scales, start, stop
                        ),
                    )
                first, last = range_of(part, parts, width, LANES)
                if args.out != 0 and place >= 0 and first < last:
                    h = RowPointers(args.h + s * args.h_slice, args.h_row, args.order)
                    out = args.out + place * args.out_slot + item.first * args.out_row
                    invoke(
                        args.over_rows,
                        OverRows(
                            g, first, last, h, rank, out, args.out_row, begun, scaling, scales,
                            args.scales_row, segment.start, segment.stop,
                        ),
                    )  # fmt: skip

    return compiled(run)


def a_entry() -> Any:
    """Compile the kernel of dx and dA; it takes a `BackwardCall`'s address."""

    def run(address):
        args = record(BackwardCall, address)
        layer = record(LayerPointers, args.layer)
        part, parts = part_of(args)
        scales = RowPointers(args.one, 0, args.order)
        first, last = range_of(part, parts, layer.in_features, 2 * LANES)
        if first >= last:
            return
        for i in range(args.num_segments):
            segment = segment_at(args.segments, i)
            place = read_id(args.places + 8 * segment.key)
            begun = 0 if begins(args, i) else 1
            for s in range(layer.num_slices):
                item, rank = slice_of(layer, s), rank_of(layer, segment.key, s)
                if rank == 0:
                    continue
                dh = RowPointers(args.dh + s * args.dh_slice, args.dh_row, args.order)
                if args.dx != 0:
                    a = item.a + segment.key * item.a_slot + first * args.weight_size
                    dx = RowPointers(args.dx + 4 * first, args.dx_row, args.order)
                    invoke(
                        args.with_weights,
                        WithWeights(
                            dh, rank, a, item.a_row, last - first, dx, args.one, scales,
                            segment.start, segment.stop,
                        ),
                    )  # fmt: skip
                if args.out != 0 and place >= 0:
                    x = RowPointers(args.rows + first * args.rows_size, args.rows_row, args.order)
                    out = args.out + place * args.out_slot + s * args.out_slice + 4 * first
                    invoke(
                        args.over_rows,
                        OverRows(
                            dh, 0, rank, x, last - first, out, args.out_row, begun, args.one,
                            scales, 0, segment.start, segment.stop,
                        ),
                    )  # fmt: skip

    return compiled(run)
