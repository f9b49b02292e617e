# mypy: ignore-errors
"""The entry kernels for several adapters per token: a program adds all adapters of its tile.

An entry of a tile is an adapter that at least one of its tokens has. The tile's entries act as one
adapter of a higher rank: the shrink stacks the rows of A of all entries, and one product of the
expand takes the ranks of several. In h, slice s of entry e is slice e * NUM_SLICES + s; with PAIRS
entry e of token t has row t * ENTRIES + e instead. Axes as in `sgmv.kernels`: T (rows of the tile),
N (rows of A, all entries and slices stacked), E (entries of a product), R (rank), V (ranks of the
entries of a product, stacked), C (columns of y).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.kernels.blocks import (
    load_b,
    load_h,
    load_scales,
    load_y,
    scales_of_b,
    wait_for_h,
)
from lora_backends.sgmv.kernels.indexing import (
    columns_of,
    entry,
    in_groups,
    row_and_program,
    slice_entry,
)
from lora_backends.sgmv.kernels.operands import (
    AStack,
    BStack,
    Entries,
    Input,
    Rows,
    RowsOfY,
    StackedRows,
    Tile,
)
from lora_backends.sgmv.kernels.prefetch import prefetch_block, prefetch_lines
from lora_backends.sgmv.kernels.products import (
    multiply,
    product_of_operands,
    right_operand,
    rounded,
)
from lora_backends.sgmv.kernels.shrink import shrink_block


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
    PAIRS: tl.constexpr,
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
    part = program % SIZES.SPLIT_K
    n = program // SIZES.SPLIT_K * SIZES.BLOCK_N + tl.arange(0, SIZES.BLOCK_N)  # [N]
    stacked, r = n // SIZES.RANK_PAD, n % SIZES.RANK_PAD  # [N]
    if PAIRS:
        plane = SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
        s, e = stacked % SIZES.NUM_SLICES, stacked // SIZES.NUM_SLICES
        h_columns = s.to(tl.int64) * h_stride_s + e.to(tl.int64) * h_stride_t
    else:
        plane = ENTRIES * SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
        h_columns = stacked.to(tl.int64) * h_stride_s
    h_columns = h_ptr + part * plane + h_columns + r  # [N]
    num_tiles = tl.load(num_tiles_ptr)
    # the first tile's, which unlike `num_tiles` need not be waited for
    block = _stacked_rows(slots_ptr, first, stacked, r, ENTRIES, SIZES)
    tokens, _ = _positions(starts_ptr, tokens_ptr, first, TILE)
    if SIZES.PROGRAMMATIC:
        if SIZES.WARPS_K > 0:
            prefetch_block(x, a, block, part, SIZES)
        gdc_wait()  # before reading x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    for row in tl.range(first, num_tiles, grid_rows, num_stages=1):
        if tl.max(block.live.to(tl.int32)) > 0:
            rows = Rows(slot=0, tokens=tokens, h=tokens * ENTRIES if PAIRS else tokens)
            shrink_block(x, a, block, h_columns, h_stride_t, rows, part, SIZES)
        following = tl.minimum(row + grid_rows, num_tiles - 1)
        block = _stacked_rows(slots_ptr, following, stacked, r, ENTRIES, SIZES)
        tokens, _ = _positions(starts_ptr, tokens_ptr, following, TILE)


@triton.jit
def _stacked_rows(slots_ptr, row, stacked, r, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Return a tile's block of rows of A."""
    e = stacked // S.NUM_SLICES  # [N]
    slot = tl.load(slots_ptr + row * ENTRIES + e, mask=e < ENTRIES, other=-1).to(tl.int64)
    live = slot >= 0
    slot = tl.maximum(slot, 0)
    return StackedRows(slot=slot, s=stacked % S.NUM_SLICES, r=r, live=live)


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
    TOGETHER: tl.constexpr,
    MERGED: tl.constexpr,
    PAIRS: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[t, c] += sum over e of factors[t, e] * scaling * (h[e, s, t, :r] @ b[l, c, :r].T) + bias.

    The sum is float32 and rounded once. Where a token does not have the adapter, its factor is NaN.
    A product takes TOGETHER entries; 0: one, and its factors are applied behind the product.
    MERGED: tokens of a tile may have other adapters than their neighbours.
    """
    CHUNKS: tl.constexpr = SIZES.CHUNKS
    row, program = row_and_program(PROGRAMS)
    b = BStack(
        ptr=b_ptr, slices=b_slices_ptr, scales=b_scales_ptr, stride_l=b_stride_l,
        stride_c=b_stride_c, scales_stride_l=b_scales_stride_l, scales_stride_c=b_scales_stride_c,
    )  # fmt: skip
    s, first, end = columns_of(program, SIZES)
    num_tiles = tl.load(num_tiles_ptr)
    of_slices = SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    if PAIRS:
        plane, of_entry, of_token = of_slices, h_stride_t, ENTRIES * h_stride_t
    else:
        plane, of_entry, of_token = ENTRIES * of_slices, of_slices, h_stride_t
    e = tl.arange(0, ENTRIES)
    for tile_row in tl.range(row, num_tiles, grid_rows, num_stages=1):
        tokens, positions = _positions(starts_ptr, tokens_ptr, tile_row, TILE)
        slots_at = slots_ptr + tile_row * ENTRIES
        slots = tl.load(slots_at + e).to(tl.int64)  # [E]
        used = tl.sum((slots >= 0).to(tl.int32))
        has_token = tokens >= 0
        factors_at = factors_ptr + positions * ENTRIES  # [T]
        at, mask = factors_at[:, None] + e[None, :], has_token[:, None]
        factors = tl.load(at, mask=mask, other=float("nan"))  # [T, E]
        adds = slots >= 0
        if not SIZES.HAS_BIAS:
            at = ranks_ptr + slots * SIZES.NUM_SLICES + s
            adds = tl.load(at, mask=slots >= 0, other=0) > 0
        changed = (factors == factors) & adds[None, :]  # [T, E]
        changed = tl.max(changed.to(tl.int32), 1) > 0
        of_y = RowsOfY(at=y_ptr + tokens * y_stride_t, read=changed, written=changed)
        h_slice = h_ptr + s.to(tl.int64) * h_stride_s
        h_rows_at = h_slice + tokens * of_token  # [T]
        entries = Entries(
            slots=slots_at, used=used, size=ENTRIES, factors=factors_at, has_token=has_token,
            tokens=tokens, positions=positions, h=h_rows_at, h_stride=of_entry,
            h_stride_t=of_token, plane=plane, ranks=ranks_ptr + s,
            scalings=scalings_ptr + s, y=of_y, y_stride=y_stride_t, first_y=y_ptr, first_h=h_slice,
            first_factors=factors_ptr, s=s, end=end,
        )  # fmt: skip
        if SIZES.STAGES == 0:
            _add_rows(entries, b, bias_ptr, bias_stride_l, first, ENTRIES, SIZES)
        elif TOGETHER > 0:
            _add_together(
                entries, b, bias_ptr, bias_stride_l, first, ENTRIES, TOGETHER, MERGED, SIZES
            )
        else:
            for chunk in tl.static_range(CHUNKS):
                c = first + chunk * SIZES.BLOCK_C + tl.arange(0, SIZES.BLOCK_C)  # [C]
                y = load_y(entries, of_y, c, SIZES)
                wait_for_h(SIZES)
                delta = _one_by_one(entries, b, c, SIZES)
                _store(entries, c, y, delta, bias_ptr, bias_stride_l, SIZES)
    wait_for_h(SIZES)  # this grid must end after the shrink, on which later kernels rely


@triton.jit
def _add_together(
    entries,
    b,
    bias_ptr,
    bias_stride_l,
    first,
    ENTRIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    MERGED: tl.constexpr,
    S: tl.constexpr,
):
    """Add CHUNKS blocks of columns; the loads of B run one product ahead."""
    CHUNKS: tl.constexpr = S.CHUNKS
    PARTS: tl.constexpr = S.RANK_PAD // S.BLOCK_R * (ENTRIES // TOGETHER)
    C: tl.constexpr = S.BLOCK_C
    T: tl.constexpr = entries.factors.shape[0]
    c = first + tl.arange(0, C)  # [C]
    block = _load_b(entries, b, 0, c, ENTRIES, TOGETHER, S)
    y = load_y(entries, entries.y, c, S)
    if S.PROGRAMMATIC and PARTS > 1:
        _prefetch_b(entries, b, c, ENTRIES, S)
    wait_for_h(S)
    if PARTS == 1:
        h = _load_h(entries, 0, block.dtype, ENTRIES, TOGETHER, S)
    for chunk in tl.static_range(CHUNKS):
        c_now, y_now = c, y
        if PARTS == 1:
            delta = multiply(h, block, None, S)
            if chunk + 1 < CHUNKS:
                c = c + C
                block = _load_b(entries, b, 0, c, ENTRIES, TOGETHER, S)
                y = load_y(entries, entries.y, c, S)
        else:
            delta = tl.zeros((T, C), dtype=tl.float32)
            # one stage: ptxas before 13.3 miscompiles a pipelined wgmma whose left operand is in
            # registers
            for part in tl.range(0, PARTS, num_stages=1):
                h = _load_h(entries, part, block.dtype, ENTRIES, TOGETHER, S)
                now = block
                block = _load_b(entries, b, part + 1, c, ENTRIES, TOGETHER, S)
                delta = multiply(h, now, delta, S)
            if chunk + 1 < CHUNKS:
                c = c + C
                block = _load_b(entries, b, 0, c, ENTRIES, TOGETHER, S)
                y = load_y(entries, entries.y, c, S)
        if MERGED:
            # another token's infinite or NaN value times 0 is NaN: add one by one
            if tl.max(tl.max((delta != delta).to(tl.int32), 1), 0) > 0:
                delta = _one_by_one(entries, b, c_now, S)
        _store(entries, c_now, y_now, delta, bias_ptr, bias_stride_l, S)


@triton.jit
def _entries_of(entries, part, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr):
    """Return e, slot and rank of the entries of a product [E], and its ranks r [R]."""
    STEPS: tl.constexpr = S.RANK_PAD // S.BLOCK_R
    e = part // STEPS * TOGETHER + tl.arange(0, TOGETHER)
    slot = tl.load(entries.slots + e, mask=e < ENTRIES, other=-1).to(tl.int64)
    rank = tl.load(entries.ranks + slot * S.NUM_SLICES, mask=slot >= 0, other=0)
    r = part % STEPS * S.BLOCK_R + tl.arange(0, S.BLOCK_R)
    return e.to(tl.int64), tl.maximum(slot, 0), rank, r


@triton.jit
def _b_of(entries, b, slot, S: tl.constexpr):
    """Return the addresses of column 0 of the entries' B [E], and the stride of columns."""
    if S.SLICE_ALIGN > 0:
        own, slot_stride, b_stride = slice_entry(b.slices, entries.s, True, S.SLICE_ALIGN)
        at = b.ptr + own + slot * slot_stride
    else:
        at, b_stride = b.ptr + slot * b.stride_l, b.stride_c
    return at, b_stride


@triton.jit
def _load_b(entries, b, part, c, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr, S: tl.constexpr):
    """Return B of the entries of a product, stacked by rank, transposed: zero beyond the ranks."""
    V: tl.constexpr = TOGETHER * S.BLOCK_R
    C: tl.constexpr = c.shape[0]
    _, slot, rank, r = _entries_of(entries, part, ENTRIES, TOGETHER, S)
    at, b_stride = _b_of(entries, b, slot, S)
    offsets = c.to(tl.int64)[None, None, :] * b_stride + r[None, :, None]
    mask = in_groups(r[None, :], rank[:, None], S.EVEN_R)[:, :, None]
    if not S.EVEN_C:
        mask = mask & (c < entries.end)[None, None, :]
    values = tl.load(at[:, None, None] + offsets, mask=mask, other=0.0)  # [E, R, C]
    values = tl.where((r[None, :] < rank[:, None])[:, :, None], values, 0)
    return tl.reshape(values, (V, C))


@triton.jit
def _prefetch_b(entries, b, c, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Bring the first line of 128 bytes of the columns of B of every entry into L2."""
    _, slot, rank, _ = _entries_of(entries, 0, ENTRIES, ENTRIES, S)
    at, b_stride = _b_of(entries, b, slot, S)
    at = at[:, None] + c.to(tl.int64)[None, :] * b_stride
    prefetch_lines(at, (rank > 0)[:, None] & (c < entries.end)[None, :])


@triton.jit
def _load_h(
    entries,
    part,
    dtype: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOGETHER: tl.constexpr,
    S: tl.constexpr,
):
    """Return the tokens' h of the entries of a product [T, V], rounded, times their factors.

    It is zero where a token lacks the adapter. Factors multiply h, not the product, because a
    product has several; dtypes of the narrow exponents of float16 never come here.
    """
    PLANES: tl.constexpr = S.SPLIT_K
    T: tl.constexpr = entries.factors.shape[0]
    V: tl.constexpr = TOGETHER * S.BLOCK_R
    e, slot, rank, r = _entries_of(entries, part, ENTRIES, TOGETHER, S)
    scaling = tl.load(entries.scalings + slot * S.NUM_SLICES, mask=rank > 0, other=0.0)
    has_token = entries.has_token[:, None]
    factor = tl.load(entries.factors[:, None] + e[None, :], mask=has_token, other=float("nan"))
    member = (factor == factor)[:, :, None]  # [T, E, 1]
    at = entries.h[:, None, None] + (e * entries.h_stride)[None, :, None] + r[None, None, :]
    mask = member & in_groups(r[None, :], rank[:, None], S.EVEN_H)[None, :, :]
    h = tl.load(at, mask=mask, other=0.0)  # [T, E, R]
    for k in tl.static_range(1, PLANES):
        h += tl.load(at + k * entries.plane, mask=mask, other=0.0)
    h *= (factor * scaling[None, :])[:, :, None]
    h = tl.where(member & (r[None, :] < rank[:, None])[None, :, :], h, 0.0)
    return rounded(tl.reshape(h, (T, V)), dtype, S.INTERPRETED)


@triton.jit
def _one_by_one(entries, b, c, S: tl.constexpr):
    """Return the sum over the entries [T, C], with a product for each and no other token's."""
    T: tl.constexpr = entries.factors.shape[0]
    C: tl.constexpr = c.shape[0]
    total = tl.zeros((T, C), dtype=tl.float32)
    for e in tl.range(0, entries.used, num_stages=1):
        slot = tl.load(entries.slots + e).to(tl.int64)
        rank = tl.load(entries.ranks + slot * S.NUM_SLICES)
        factor = tl.load(entries.factors + e, mask=entries.has_token, other=float("nan"))  # [T]
        if rank > 0:
            scaling = tl.load(entries.scalings + slot * S.NUM_SLICES)
            member = factor == factor
            of_y = RowsOfY(at=entries.y.at, read=member, written=member)
            h = entries.h + e * entries.h_stride
            s, end = entries.s, entries.end
            product = _product(h, entries.plane, of_y, b, slot, s, rank, end, c, S)  # [T, C]
            factor = tl.where(member, scaling * factor, 0.0)
            total = tl.where(member[:, None], total + factor[:, None] * product, total)
    return total


@triton.jit
def _store(entries, c, y, delta, bias_ptr, bias_stride_l, S: tl.constexpr):
    """Store y + delta and the biases of the entries, rounded once."""
    total = y.to(tl.float32) + delta
    if S.HAS_BIAS:
        for e in tl.range(0, entries.used, num_stages=1):
            slot = tl.load(entries.slots + e).to(tl.int64)
            factor = tl.load(entries.factors + e, mask=entries.has_token, other=float("nan"))
            bias_at = bias_ptr + slot * bias_stride_l + c
            bias = tl.load(bias_at, mask=c < entries.end, other=0.0).to(tl.float32)
            total = tl.where((factor == factor)[:, None], total + bias[None, :], total)
    mask = entries.y.written[:, None]
    if not S.EVEN_C:
        mask = mask & (c < entries.end)[None, :]
    at = entries.y.at[:, None] + c[None, :]
    tl.store(at, rounded(total, y.dtype, S.INTERPRETED), mask=mask)


@triton.jit
def _add_rows(entries, b, bias_ptr, bias_stride_l, first, ENTRIES: tl.constexpr, S: tl.constexpr):
    """Add CHUNKS blocks of columns token by token, without a matrix product.

    As in `sgmv.kernels.expand`, B goes from memory straight to the registers that multiply it.
    """
    CHUNKS: tl.constexpr = S.CHUNKS
    PLANES: tl.constexpr = S.PLANES
    T: tl.constexpr = entries.factors.shape[0]
    t, k = tl.arange(0, T), tl.arange(0, PLANES)
    e, slot, rank, r = _entries_of(entries, 0, ENTRIES, ENTRIES, S)
    c = first + tl.arange(0, S.BLOCK_C)  # [C]
    scaling = tl.load(entries.scalings + slot * S.NUM_SLICES, mask=rank > 0, other=0.0)  # [E]
    last = tl.max(tl.where(entries.has_token, t + 1, 0))
    block = _load_b_rows(entries, b, slot, rank, r, c, S)  # [C, E, R]
    for chunk in tl.static_range(CHUNKS):
        now, c_now = block, c
        if chunk + 1 < CHUNKS:
            c = c + S.BLOCK_C
            block = _load_b_rows(entries, b, slot, rank, r, c, S)
        for i in tl.range(0, last, num_stages=1):
            row = _one_token(entries, t, i)
            y = load_y(row, row.y, c_now, S)  # [1, C]
            factor = tl.load(row.first_factors + e)  # [E]
            wait_for_h(S)
            used = (factor == factor)[:, None] & (r[None, :] < rank[:, None])  # [E, R]
            at = row.first_h + (e * entries.h_stride)[:, None] + r[None, :]
            mask = (k < S.SPLIT_K)[:, None, None] & used[None, :, :]
            h = tl.load(at[None, :, :] + (k * entries.plane)[:, None, None], mask=mask, other=0.0)
            h = rounded(tl.sum(h, axis=0), now.dtype, S.INTERPRETED).to(tl.float32)
            h = tl.where(used, h * (scaling * factor)[:, None], 0.0)
            values = tl.where(used[None, :, :], now.to(tl.float32), 0.0) * h[None, :, :]
            delta = tl.sum(tl.sum(values, axis=2), axis=1)[None, :]  # [1, C]
            _store(row, c_now, y, delta, bias_ptr, bias_stride_l, S)


@triton.jit
def _one_token(entries, t, i):
    """Return the `Entries` of token i of the tile alone."""
    one = tl.zeros((1,), dtype=tl.int64)
    token, position = entry(entries.tokens, t, i), entry(entries.positions, t, i)
    written = (one + entry(entries.y.written.to(tl.int32), t, i)) > 0
    y = entries.first_y + token * entries.y_stride
    h = entries.first_h + token * entries.h_stride_t
    factors = entries.first_factors + position * entries.size
    return Entries(
        slots=entries.slots, used=entries.used, size=entries.size, factors=factors + one,
        has_token=one == 0, tokens=one, positions=one, h=h + one, h_stride=entries.h_stride,
        h_stride_t=entries.h_stride_t, plane=entries.plane, ranks=entries.ranks,
        scalings=entries.scalings, y=RowsOfY(at=y + one, read=written, written=written),
        y_stride=entries.y_stride, first_y=y, first_h=h, first_factors=factors, s=entries.s,
        end=entries.end,
    )  # fmt: skip


@triton.jit
def _load_b_rows(entries, b, slot, rank, r, c, S: tl.constexpr):
    """Return B of all entries [C, E, R], as it lies in memory; arbitrary beyond a rank."""
    at, b_stride = _b_of(entries, b, slot, S)
    offsets = c.to(tl.int64)[:, None, None] * b_stride + r[None, None, :]
    mask = in_groups(r[None, :], rank[:, None], S.EVEN_R)[None, :, :]
    if not S.EVEN_C:
        mask = mask & (c < entries.end)[:, None, None]
    return tl.load(at[None, :, None] + offsets, mask=mask, other=0.0)


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
