# mypy: ignore-errors
"""The expand of one tile: y += h @ B.T, with the factors and terms of a layer.

Axes: T (rows of the tile), R (rank), C (columns of y).
"""

import triton
import triton.language as tl

from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_block,
    load_h,
    load_h_row,
    load_output_scales,
    load_scales,
    load_y,
    scales_of_b,
    store_y,
    wait_for_h,
)
from lora_backends.sgmv.kernels.indexing import entry, slice_entry
from lora_backends.sgmv.kernels.operands import Block, RowsOfY, Tile
from lora_backends.sgmv.kernels.prefetch import prefetch_y
from lora_backends.sgmv.kernels.products import (
    product_of_operands,
    right_operand,
    row_product,
    within,
)


@triton.jit
def expand_tile(h, b, b_tma, y, rows, columns, S: tl.constexpr):
    """y[tokens, c] = output_scale * (y[tokens, c] + factor * (h[s, rows.h, :r] @ b.T)) + bias.

    b is b[slot, c, :r], and the factor scaling * token_scale; scales that are not given are 1.

    c runs over CHUNKS blocks of columns from `columns.first`; h is the sum of its planes.
    """
    slot, s, rank = rows.slot, columns.s, columns.rank
    scaling = tl.where(rank > 0, tl.load(y.scalings + slot * S.NUM_SLICES + s), 0.0)
    has_token = rows.tokens >= 0  # [T]
    if S.HAS_TOKEN_SCALES:
        token_scales = tl.load(y.token_scales + rows.tokens, mask=has_token, other=0.0)
        scaling *= token_scales[:, None]  # [T, 1]
    h_rows = h.ptr + s.to(tl.int64) * h.stride_s + rows.h * h.stride_t  # [T]
    y_rows = RowsOfY(at=y.ptr + rows.tokens * y.stride_t, read=has_token, written=has_token)
    # Computed here, not passed: ptxas then keeps the loads of all planes in flight. With a stride
    # that it can fold into the addresses it adds plane after plane, 1.5 times the time of a call
    # with 16 planes.
    plane = S.NUM_SLICES * h.rows.to(tl.int64) * h.stride_t
    if S.SLICE_ALIGN > 0:
        distance, slot_stride, b_stride = slice_entry(b.slices, s, True, S.SLICE_ALIGN)
        b_slot = b.ptr + distance + slot * slot_stride
    else:
        b_slot, b_stride = b.ptr + slot * b.stride_l, b.stride_c
    bias = y.bias + slot * y.bias_stride_l
    output_scales = y.scales + slot * y.scales_stride_l
    scales = b.scales + slot * b.scales_stride_l
    group, start = s * 0, s * 0
    if S.STORAGE > 0:
        SLICES: tl.constexpr = len(S.FIRST_GROUPS)
        for i in tl.static_range(SLICES):
            group = tl.where(s == i, S.FIRST_GROUPS[i], group)
            start = tl.where(s == i, S.STARTS[i], start)
    tile = Tile(
        h=h_rows, plane=plane, y=y_rows, factor=scaling, b=b_slot, b_stride=b_stride, read=rank,
        rank=rank, scales=scales, scales_stride=b.scales_stride_c, first=columns.first,
        end=columns.end, group=group, start=start, bias=bias, output_scales=output_scales,
    )  # fmt: skip
    # A low rank in a small tile takes 16 lanes instead of BLOCK_R: decode waits on products.
    NARROW: tl.constexpr = rows.tokens.shape[0] <= 32 and S.RANK_PAD > 16
    if S.STAGES == 0:
        h_slice = h.ptr + s.to(tl.int64) * h.stride_s
        _expand_rows(tile, h_slice, h.stride_t, y, rows, S)
    elif S.STAGES > 1:
        if S.SLICE_ALIGN > 0:
            b_row = ((distance + slot * slot_stride) // b_stride).to(tl.int32)
        else:
            b_row = (slot * (b.stride_l // b.stride_c)).to(tl.int32)
        expand_tma(tile, b_tma, b_row, S)
    elif NARROW and rank <= 16:
        expand_columns(tile, 16, S)
    elif S.RANK_PAD == S.BLOCK_R:
        expand_columns(tile, S.BLOCK_R, S)
    else:
        _expand_long_ranks(tile, S)


@triton.jit
def expand_columns(tile, BLOCK_R: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns, all ranks in one product; loads run one block ahead."""
    CHUNKS: tl.constexpr = S.CHUNKS
    r = tl.arange(0, BLOCK_R)  # [R]
    c = tile.first + tl.arange(0, S.BLOCK_C)  # [C]
    block, y = load_block(tile, tile.y, c, r, False, not S.LATE_Y, S)
    if S.EARLY_B:
        operand = right_operand(block.b, block.scales, r, tile.rank, S)
    wait_for_h(S)
    if S.LATE_Y:
        y = load_y(tile, tile.y, c, S)
    h = load_h(tile, tile.h, r, tile.rank, S)  # [T, R]
    for chunk in tl.static_range(CHUNKS):
        if not S.EARLY_B or chunk > 0:
            operand = right_operand(block.b, block.scales, r, tile.rank, S)
        delta = product_of_operands(tile.factor, h, operand, block.scales, S)  # [T, C]
        now, y_now = block, y
        if chunk + 1 < CHUNKS:
            c = c + S.BLOCK_C
            block, y = load_block(tile, tile.y, c, r, False, True, S)
        store_y(tile, tile.y, now, y_now, delta, S)


@triton.jit
def _expand_rows(tile, h_slice, h_stride, y, rows, S: tl.constexpr):
    """Add CHUNKS blocks of columns token by token, without a matrix product.

    The compiler may form other FMAs for the first token than for later ones, so batch-invariant
    engines never take this path.
    """
    CHUNKS: tl.constexpr = S.CHUNKS
    r = tl.arange(0, S.ROW_RANKS)  # [R]
    t = tl.arange(0, rows.tokens.shape[0])  # [T]
    last = tl.max(tl.where(rows.tokens >= 0, t + 1, 0))
    first = _row_of_y(y, _token(rows.tokens, 0))
    c = tile.first + tl.arange(0, S.BLOCK_C)  # [C]
    # B goes from memory straight to the registers that multiply it; loads run one block ahead. Most
    # tiles on this path have one token: its h is loaded once for all blocks, its y with B. Later
    # tokens load both again for each block.
    block, y_block = load_block(tile, first, c, r, True, not S.LATE_Y, S)  # y is [1, C]
    wait_for_h(S)
    if S.LATE_Y:
        y_block = load_y(tile, first, c, S)
    h = load_h_row(h_slice + entry(rows.h, t, 0) * h_stride, tile.plane, r, tile.rank, S)
    for chunk in tl.static_range(CHUNKS):
        now, y_now = block, y_block
        if chunk + 1 < CHUNKS:
            c = c + S.BLOCK_C
            block, y_block = load_block(tile, first, c, r, True, True, S)
        delta = _delta_of_row(tile, now, h, r, t == 0, S)
        store_y(tile, first, now, y_now, delta, S)
        for i in tl.range(1, last, num_stages=1):  # few tiles have a second token
            y_row = _row_of_y(y, _token(rows.tokens, i))
            h_at = h_slice + entry(rows.h, t, i) * h_stride
            h_now = load_h_row(h_at, tile.plane, r, tile.rank, S)
            y_now = load_y(tile, y_row, now.c, S)
            delta = _delta_of_row(tile, now, h_now, r, t == i, S)
            store_y(tile, y_row, now, y_now, delta, S)


@triton.jit
def _token(tokens, i):
    """Return token i of a tile [1]."""
    t = tl.arange(0, tokens.shape[0])  # [T]
    return entry(tokens, t, i) + tl.zeros((1,), dtype=tl.int64)


@triton.jit
def _row_of_y(y, token):
    """Return the row of y of one token [1]."""
    return RowsOfY(at=y.ptr + token * y.stride_t, read=token >= 0, written=token >= 0)


@triton.jit
def _delta_of_row(tile, block, h, r, is_row, S: tl.constexpr):
    """Return factor * (h @ b.T) [1, C] for h [R] of the row of the tile that `is_row` [T]."""
    sums = row_product(h, block.b, block.scales, r, tile.rank, S)  # [C]
    if S.HAS_TOKEN_SCALES:
        factor = tl.sum(tl.where(is_row[:, None], tile.factor, 0.0))
    else:
        factor = tile.factor
    return (factor * sums)[None, :]


@triton.jit
def _expand_long_ranks(tile, S: tl.constexpr):
    """Add one block of columns, BLOCK_R ranks at a time."""
    T: tl.constexpr = tile.y.at.shape[0]
    C: tl.constexpr = S.BLOCK_C
    c = tile.first + tl.arange(0, C)  # [C]
    if not S.LATE_Y:
        y = load_y(tile, tile.y, c, S)
    output_scales = load_output_scales(tile, c, S)
    wait_for_h(S)
    if S.LATE_Y:
        y = load_y(tile, tile.y, c, S)
    acc = tl.zeros((T, C), dtype=tl.float32)
    # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in registers
    for done in tl.range(0, tile.rank, S.BLOCK_R, num_stages=1):
        r = done + tl.arange(0, S.BLOCK_R)  # [R]
        b = load_b(tile, c, r, S)
        h = load_h(tile, tile.h, r, tile.rank, S)
        scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
        b = right_operand(b, scales, r, tile.rank, S)
        acc += product_of_operands(1.0, h, b, scales, S)
    block = Block(c=c, b=None, scales=None, output_scales=output_scales)
    store_y(tile, tile.y, block, y, tile.factor * acc, S)


@triton.jit
def expand_tma(tile, b_tma, b_row, S: tl.constexpr):
    """Add CHUNKS blocks of columns with STAGES loads of B through TMA in flight."""
    if S.PREFETCH > 0:
        prefetch_y(tile, S)
    wait_for_h(S)
    h = load_h(tile, tile.h, tl.arange(0, S.BLOCK_R), tile.rank, S)
    if S.STORAGE == 0 and tile.rank < S.BLOCK_R:
        _add_tma_blocks(tile, b_tma, b_row, h, True, S)
    else:  # a block of full rank needs no mask, so it is multiplied straight from shared memory
        _add_tma_blocks(tile, b_tma, b_row, h, False, S)


@triton.jit
def _add_tma_blocks(tile, b_tma, b_row, h, MASKED: tl.constexpr, S: tl.constexpr):
    """Add the blocks. MASKED: the rank ends inside a block, beyond it B may hold anything."""
    r = tl.arange(0, S.BLOCK_R)  # [R]
    for chunk in tl.range(0, S.CHUNKS, num_stages=S.STAGES):
        c_first = tile.first + chunk * S.BLOCK_C
        c = c_first + tl.arange(0, S.BLOCK_C)  # [C]
        y = load_y(tile, tile.y, c, S)
        b = b_tma.load([b_row + c_first, 0]).T  # [R, C]; beyond the end another slice's columns
        scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
        if S.STORAGE > 0:
            b = right_operand(b, scales, r, tile.rank, S)
        elif MASKED:
            b = within(b, r, tile.rank)
        delta = product_of_operands(tile.factor, h, b, scales, S)  # [T, C]
        # here, not with y: among the pipelined loads it costs a stage of shared memory
        output_scales = load_output_scales(tile, c, S)
        block = Block(c=c, b=None, scales=None, output_scales=output_scales)
        store_y(tile, tile.y, block, y, delta, S)
