# mypy: ignore-errors
"""The expands that only experts have: of one pair, and of interleaved columns or long ranks.

Axes: T (pairs of a tile), R (rank), C (columns of y).
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_b_rows,
    load_h,
    load_h_row,
    load_scales,
    load_y,
    scales_of_b,
    wait_for_h,
)
from lora_backends.sgmv.kernels.products import (
    product_of_operands,
    right_operand,
    rounded,
    row_product,
)


@triton.jit
def expand_single(tile, ranks_at, scalings_at, SITE: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns for one pair."""
    SLICES: tl.constexpr = SITE.NUM_A if SITE.INTERLEAVED else 1
    CHUNKS: tl.constexpr = S.CHUNKS
    C: tl.constexpr = S.BLOCK_C
    r = tl.arange(0, S.ROW_RANKS)  # [R]
    c = tile.first + tl.arange(0, C)  # [C]
    written = tl.where(tile.rank > 0, tile.end, 0)  # the end of columns that the rank adds to
    # B goes from memory straight to the registers that multiply it, so more of it is in flight than
    # where it passes through shared memory for a product of 16 rows
    b, scales, y = _load_row_block(tile, c, r, S)
    wait_for_h(S)
    for chunk in tl.static_range(CHUNKS):
        c_now, y_now, b_now, scales_now = c, y, b, scales
        if chunk + 1 < CHUNKS:
            c = c + C
            b, scales, y = _load_row_block(tile, c, r, S)
        delta = tl.zeros((C,), dtype=tl.float32)
        touched = c_now < written  # [C]
        for s in tl.static_range(SLICES):
            used, scaling = tile.rank, 1.0
            if SITE.INTERLEAVED:
                used, scaling = tl.load(ranks_at + s), tl.load(scalings_at + s)
            h = load_h_row(tile.h + s * S.RANK_PAD, tile.plane, r, used, S)  # [R]
            sums = scaling * row_product(h, b_now, scales_now, r, used, S)  # [C]
            if SITE.INTERLEAVED:
                mine = c_now % SITE.NUM_A == s
                delta = tl.where(mine, sums, delta)
                touched = touched & (tl.where(mine, used, 1) > 0)
            else:
                delta = sums
        total = y_now.to(tl.float32) + tile.factor * delta
        tl.store(tile.y.at + c_now, rounded(total, y_now.dtype, S.INTERPRETED), mask=touched)


@triton.jit
def _load_row_block(tile, c, r, S: tl.constexpr):
    """Return a block of B as it lies in memory, its scales, and y [C] of the only pair."""
    C: tl.constexpr = c.shape[0]
    b = load_b_rows(tile, c, r, S)
    scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
    if S.FRESH:
        y = tl.zeros((C,), dtype=tile.y.at.dtype.element_ty)
    else:
        y = tl.load(tile.y.at + c, mask=c < tile.end, other=0.0)
    return b, scales, y


@triton.jit
def expand_general(tile, ranks_at, scalings_at, SITE: tl.constexpr, S: tl.constexpr):
    """Add one block of columns, BLOCK_R ranks at a time, each column with h of its own slice."""
    SLICES: tl.constexpr = SITE.NUM_A if SITE.INTERLEAVED else 1
    T: tl.constexpr = tile.y.at.shape[0]
    C: tl.constexpr = S.BLOCK_C
    c = tile.first + tl.arange(0, C)  # [C]
    scales_at = scales_of_b(tile, c, S)
    y = load_y(tile, tile.y, c, S)
    wait_for_h(S)
    delta = tl.zeros((T, C), dtype=tl.float32)
    ranks = tl.zeros((C,), dtype=tl.int32) + tile.rank  # [C]
    for s in tl.static_range(SLICES):
        rank, scaling = tile.rank, 1.0
        if SITE.INTERLEAVED:
            rank, scaling = tl.load(ranks_at + s), tl.load(scalings_at + s)
        acc = tl.zeros((T, C), dtype=tl.float32)
        # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
        # registers
        for done in tl.range(0, rank, S.BLOCK_R, num_stages=1):
            r = done + tl.arange(0, S.BLOCK_R)  # [R]
            b = load_b(tile, c, r, S)
            h = load_h(tile, tile.h + s * S.RANK_PAD, r, rank, S)
            scales = load_scales(tile, scales_at, c, r, rank, rank, S)
            b = right_operand(b, scales, r, rank, S)
            acc += product_of_operands(1.0, h, b, scales, S)
        if SITE.INTERLEAVED:
            mine = c % SITE.NUM_A == s
            ranks = tl.where(mine, rank, ranks)
            delta = tl.where(mine[None, :], scaling * acc, delta)
        else:
            delta = acc
    delta = tile.factor * delta
    mask = tile.y.written[:, None] & ((c < tile.end) & (ranks > 0))[None, :]
    total = y.to(tl.float32) + delta
    tl.store(tile.y.at[:, None] + c[None, :], rounded(total, y.dtype, S.INTERPRETED), mask=mask)
