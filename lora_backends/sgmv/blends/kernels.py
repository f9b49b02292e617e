# mypy: ignore-errors
"""The entry kernels for several adapters per token: a program adds all adapters of its tile.

An entry of a tile is an adapter that at least one of its tokens has. In h, slice s of entry e is
slice e * NUM_SLICES + s. Axes as in `sgmv.kernels`: T (rows of the tile), N (rows of A, all entries
and slices stacked), R (rank), C (columns of y).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_h,
    load_scales,
    scales_of_b,
    wait_for_h,
)
from lora_backends.sgmv.kernels.indexing import (
    columns_of,
    in_groups,
    row_and_program,
    rows_of_a,
    scales_of_a,
    slice_entry,
)
from lora_backends.sgmv.kernels.operands import ARows, AStack, BStack, Input, RowsOfY, Tile
from lora_backends.sgmv.kernels.products import product_of_operands, right_operand, rounded
from lora_backends.sgmv.kernels.shrink import partial_sums, scale_of_rows


@triton.jit(do_not_specialize=["h_rows", "grid_rows"])
def blend_shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    num_tiles_ptr,
    starts_ptr,
    tokens_ptr,
    slots_ptr,
    h_ptr,
    in_features,
    x_stride_t,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_s,
    a_scales_stride_r,
    h_rows,
    h_stride_s,
    h_stride_t,
    grid_rows,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """h[k, e, s, t, :r] = x[t, part k] @ a[slots[e], s, :r, part k].T for every entry e."""
    first, program = row_and_program(PROGRAMS)
    x = Input(ptr=x_ptr, stride_t=x_stride_t, features=in_features)
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=a_slices_ptr, scales=a_scales_ptr, stride_l=a_stride_l,
        stride_s=a_stride_s, stride_r=a_stride_r, scales_stride_l=a_scales_stride_l,
        scales_stride_s=a_scales_stride_s, scales_stride_r=a_scales_stride_r,
    )  # fmt: skip
    if SIZES.PROGRAMMATIC:
        gdc_wait()  # before reading x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    part = program % SIZES.SPLIT_K
    n = program // SIZES.SPLIT_K * SIZES.BLOCK_N + tl.arange(0, SIZES.BLOCK_N)  # [N]
    stacked = n // SIZES.RANK_PAD  # [N]
    r = n % SIZES.RANK_PAD  # [N]
    e, s = stacked // SIZES.NUM_SLICES, stacked % SIZES.NUM_SLICES  # [N]
    plane = ENTRIES * SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    h_columns = h_ptr + part * plane + stacked.to(tl.int64) * h_stride_s + r  # [N]
    num_tiles = tl.load(num_tiles_ptr)
    for row in tl.range(first, num_tiles, grid_rows, num_stages=1):
        slot = tl.load(slots_ptr + row * ENTRIES + e, mask=e < ENTRIES, other=-1).to(tl.int64)
        ranks_at = ranks_ptr + slot * SIZES.NUM_SLICES + s
        rank = tl.load(ranks_at, mask=slot >= 0, other=0, cache_modifier=".cg")  # [N]
        if tl.max(rank - r) > 0:
            slot = tl.maximum(slot, 0)
            tokens, _ = _positions(starts_ptr, tokens_ptr, row, TILE)
            has_token, used = tokens >= 0, r < rank  # [T], [N]
            x_rows = x.ptr + tokens * x.stride_t  # [T]
            scales = scales_of_a(a, slot, s, r, SIZES)
            a_rows = ARows(
                at=rows_of_a(a, slot, s, r, SIZES), scales=scales,
                scale=scale_of_rows(scales, used, SIZES), used=used,
            )  # fmt: skip
            sums = partial_sums(x_rows, has_token, a_rows, part, x.features, SIZES)  # [T, N]
            mask = has_token[:, None] & in_groups(r, rank, SIZES.EVEN_R)[None, :]
            tl.store(h_columns[None, :] + (tokens * h_stride_t)[:, None], sums, mask=mask)


@triton.jit(do_not_specialize=["h_rows", "grid_rows"])
def blend_expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    ranks_ptr,
    scalings_ptr,
    b_slices_ptr,
    b_scales_ptr,
    num_tiles_ptr,
    starts_ptr,
    tokens_ptr,
    slots_ptr,
    factors_ptr,
    h_rows,
    h_stride_s,
    h_stride_t,
    b_stride_l,
    b_stride_c,
    y_stride_t,
    bias_stride_l,
    b_scales_stride_l,
    b_scales_stride_c,
    grid_rows,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[t, c] += sum over e of factors[t, e] * scaling * (h[e, s, t, :r] @ b[l, c, :r].T) + bias.

    The sum starts from y, follows the order of the entries in float32, and is rounded once. Where
    a token does not have the adapter, its factor is NaN.
    """
    CHUNKS: tl.constexpr = SIZES.CHUNKS
    row, program = row_and_program(PROGRAMS)
    b = BStack(
        ptr=b_ptr, slices=b_slices_ptr, scales=b_scales_ptr, stride_l=b_stride_l,
        stride_c=b_stride_c, scales_stride_l=b_scales_stride_l, scales_stride_c=b_scales_stride_c,
    )  # fmt: skip
    s, first, end = columns_of(program, SIZES)
    wait_for_h(SIZES)
    num_tiles = tl.load(num_tiles_ptr)
    plane = ENTRIES * SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    for tile_row in tl.range(row, num_tiles, grid_rows, num_stages=1):
        tokens, positions = _positions(starts_ptr, tokens_ptr, tile_row, TILE)
        has_token = tokens >= 0  # [T]
        slots_at = slots_ptr + tile_row * ENTRIES
        used = tl.sum((tl.load(slots_at + tl.arange(0, ENTRIES)) >= 0).to(tl.int32))
        y_at = y_ptr + tokens * y_stride_t  # [T]
        for chunk in tl.static_range(CHUNKS):
            c = first + chunk * SIZES.BLOCK_C + tl.arange(0, SIZES.BLOCK_C)  # [C]
            inside = has_token[:, None]
            if not SIZES.EVEN_C:
                inside = inside & (c < end)[None, :]
            y = tl.load(y_at[:, None] + c[None, :], mask=inside, other=0.0)
            total, changed = y.to(tl.float32), tokens < -1  # [T, C], [T]
            for e in tl.range(0, used, num_stages=1):
                slot = tl.load(slots_at + e).to(tl.int64)
                rank = tl.load(ranks_ptr + slot * SIZES.NUM_SLICES + s)
                factor = tl.load(
                    factors_ptr + positions * ENTRIES + e, mask=has_token, other=float("nan")
                )  # [T]
                member = factor == factor
                if rank > 0:
                    scaling = tl.load(scalings_ptr + slot * SIZES.NUM_SLICES + s)
                    h_slice = h_ptr + (e * SIZES.NUM_SLICES + s).to(tl.int64) * h_stride_s
                    of_y = RowsOfY(at=y_at, read=member, written=member)
                    product = _product(
                        h_slice + tokens * h_stride_t, plane, of_y, b, slot, s, rank, end, c, SIZES
                    )  # [T, C]
                    factors = tl.where(member, scaling * factor, 0.0)
                    added = total + factors[:, None] * product
                    total = tl.where(member[:, None], added, total)
                    changed = changed | member
                if SIZES.HAS_BIAS:
                    bias_at = bias_ptr + slot * bias_stride_l + c
                    bias = tl.load(bias_at, mask=c < end, other=0.0).to(tl.float32)
                    total = tl.where(member[:, None], total + bias[None, :], total)
                    changed = changed | member
            at = y_at[:, None] + c[None, :]
            value = rounded(total, y.dtype, SIZES.INTERPRETED)
            tl.store(at, value, mask=inside & changed[:, None])


@triton.jit
def _positions(starts_ptr, tokens_ptr, row, TILE: tl.constexpr):
    """Return the tokens of a tile [T], -1 where there is none, and their positions [T]."""
    at = tl.load(starts_ptr + row).to(tl.int64) + tl.arange(0, TILE)
    tokens = tl.load(tokens_ptr + at, mask=at < tl.load(starts_ptr + row + 1), other=-1)
    return tokens.to(tl.int64), at


@triton.jit
def _product(h_rows, plane, y, b, slot, s, rank, end, c, S: tl.constexpr):
    """Return h @ b.T of one entry for a block of columns [T, C], BLOCK_R ranks at a time.

    `y` selects the rows of y that have the entry.
    """
    if S.SLICE_ALIGN > 0:
        own, slot_stride, b_stride = slice_entry(b.slices, s, True, S.SLICE_ALIGN)
        b_slot = b.ptr + own + slot * slot_stride
    else:
        b_slot, b_stride = b.ptr + slot * b.stride_l, b.stride_c
    group, start = s * 0, s * 0
    if S.STORAGE > 0:
        SLICES: tl.constexpr = len(S.FIRST_GROUPS)
        for i in tl.static_range(SLICES):
            group = tl.where(s == i, S.FIRST_GROUPS[i], group)
            start = tl.where(s == i, S.STARTS[i], start)
    # Not returned by a function of its own: Triton 3.6 returns no tuple that holds None.
    tile = Tile(
        h=h_rows, plane=plane, y=y, factor=1.0, b=b_slot, b_stride=b_stride, read=rank, rank=rank,
        scales=b.scales + slot * b.scales_stride_l, scales_stride=b.scales_stride_c, first=0,
        end=end, group=group, start=start,
    )  # fmt: skip
    if S.RANK_PAD == S.BLOCK_R:
        return _part(tile, c, 0, S)
    else:
        T: tl.constexpr = tile.h.shape[0]
        C: tl.constexpr = c.shape[0]
        acc = tl.zeros((T, C), dtype=tl.float32)
        # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
        # registers
        for done in tl.range(0, tile.rank, S.BLOCK_R, num_stages=1):
            acc += _part(tile, c, done, S)
        return acc


@triton.jit
def _part(tile, c, done, S: tl.constexpr):
    """Return the product over BLOCK_R ranks from `done` on."""
    r = done + tl.arange(0, S.BLOCK_R)  # [R]
    b = load_b(tile, c, r, S)
    h = load_h(tile, tile.h, r, tile.rank, S)
    scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
    return product_of_operands(1.0, h, right_operand(b, scales, r, tile.rank, S), scales, S)
