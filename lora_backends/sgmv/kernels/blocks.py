# mypy: ignore-errors
"""Device functions that load the operands of an expand, block by block, and store y.

Axes: T (rows of the tile), R (rank), C (columns of y). Offsets that a stride multiplies are int64.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.kernels.indexing import group_of, in_groups
from lora_backends.sgmv.kernels.operands import Block
from lora_backends.sgmv.kernels.products import rounded


@triton.jit
def wait_for_h(S: tl.constexpr):
    """Wait for the shrink; only h needs it, as the shrink itself waits for all earlier kernels."""
    if S.PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def load_h(tile, h_rows, r, rank, S: tl.constexpr):
    """Return h [T, R], its planes summed in order, zero beyond the rank."""
    PLANES: tl.constexpr = S.SPLIT_K
    mask = tile.y.written[:, None] & in_groups(r, rank, S.EVEN_H)[None, :]
    h = tl.load(h_rows[:, None] + r[None, :], mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(1, PLANES):
        h += tl.load(h_rows[:, None] + k * tile.plane + r[None, :], mask=mask, other=0.0)
    return tl.where((r < rank)[None, :], h, 0.0)


@triton.jit
def load_h_row(h_row, plane, r, rank, S: tl.constexpr):
    """Return h of one row [R], its planes summed, zero beyond the rank."""
    k = tl.arange(0, S.PLANES)
    mask = (k < S.SPLIT_K)[:, None] & (r < rank)[None, :]
    # one load takes all planes: code for each of up to 32 would not stay in the caches
    h = tl.load(h_row + k[:, None] * plane + r[None, :], mask=mask, other=0.0)
    # The gather keeps the layout of this load from spreading to the product. So B is multiplied in
    # the registers that it was loaded to, instead of passing through shared memory.
    return tl.gather(tl.sum(h.to(tl.float32), axis=0), r, 0)


@triton.jit
def load_b(tile, c, r, S: tl.constexpr):
    """Return a block of B, transposed; values beyond the rank are arbitrary."""
    mask = in_groups(r, tile.read, S.EVEN_R)[:, None]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[None, :]
    offsets = c.to(tl.int64)[None, :] * tile.b_stride + r[:, None]
    if S.EVEN_R == 16 and r.shape[0] == 16 and c.shape[0] <= 32 * S.WARPS:
        # Give each column two threads. With one thread per column, Triton lays the widened values
        # out by rank and stores them one at a time.
        offsets = tl.max_contiguous(offsets, (8, 1))
    return tl.load(tile.b + offsets, mask=mask, other=0.0)  # [R, C]


@triton.jit
def load_b_rows(tile, c, r, S: tl.constexpr):
    """Return a block of B as it lies in memory; values beyond the rank are arbitrary."""
    mask = in_groups(r, tile.read, S.EVEN_R)[None, :]
    if not S.EVEN_C:
        mask = mask & (c < tile.end)[:, None]
    offsets = c.to(tl.int64)[:, None] * tile.b_stride + r[None, :]
    return tl.load(tile.b + offsets, mask=mask, other=0.0)  # [C, R]


@triton.jit
def scales_of_b(tile, c, S: tl.constexpr):
    """Return the addresses of the scales of columns c [C].

    Groups of columns are numbered slice by slice: those of slice i start at FIRST_GROUPS[i].
    """
    SLICES: tl.constexpr = len(S.FIRST_GROUPS)
    SPANS_SLICES: tl.constexpr = len(S.SCALE_STARTS) > 0
    if S.SPREAD:
        group = c % SLICES * S.FIRST_GROUPS[1] + group_of(c // SLICES, S.GROUP_C)
    elif S.GROUP_C == 1:  # groups are numbered as columns of y are
        group = c.to(tl.int64)
    elif SPANS_SLICES:
        start, before = c * 0, c * 0
        for i in tl.static_range(1, SLICES):
            start = tl.where(c >= S.SCALE_STARTS[i], S.SCALE_STARTS[i], start)
            before = tl.where(c >= S.SCALE_STARTS[i], S.FIRST_GROUPS[i], before)
        group = before + group_of(c - start, S.GROUP_C)
    else:
        group = tile.group + group_of(c - tile.start, S.GROUP_C)
    return tile.scales + group * tile.scales_stride


@triton.jit
def load_scales(tile, at, c, r, read, rank, S: tl.constexpr):
    """Return the scales of a block of B: per column [C], or [R, C] where they change with r."""
    if S.STORAGE == 0:
        return 0.0
    elif S.GROUP_R == 0:
        return tl.load(at, mask=c < tl.where(read > 0, tile.end, 0), other=0.0)
    else:  # beyond the rank a scale may be NaN
        mask = (r < rank)[:, None] & (c < tile.end)[None, :]
        return tl.load(at[None, :] + (r // S.GROUP_R)[:, None], mask=mask, other=0.0)


@triton.jit
def load_block(tile, y_rows, c, r, BY_ROW: tl.constexpr, WITH_Y: tl.constexpr, S: tl.constexpr):
    """Return a block of columns, and its y where the kernel may read it already."""
    if BY_ROW:
        b = load_b_rows(tile, c, r, S)
    else:
        b = load_b(tile, c, r, S)
    scales = load_scales(tile, scales_of_b(tile, c, S), c, r, tile.read, tile.rank, S)
    y = load_y(tile, y_rows, c, S) if WITH_Y else 0.0
    output_scales = load_output_scales(tile, c, S)
    return Block(c=c, b=b, scales=scales, output_scales=output_scales), y


@triton.jit
def load_y(tile, y_rows, c, S: tl.constexpr):
    """Return a block of y [T, C], or zeros where y is fresh."""
    T: tl.constexpr = y_rows.at.shape[0]
    C: tl.constexpr = c.shape[0]
    if S.FRESH:
        return tl.zeros((T, C), dtype=y_rows.at.dtype.element_ty)
    else:
        mask = y_rows.read[:, None]
        if not S.EVEN_C:
            mask = mask & (c < tile.end)[None, :]
        return tl.load(y_rows.at[:, None] + c[None, :], mask=mask, other=0.0)


@triton.jit
def load_output_scales(tile, c, S: tl.constexpr):
    """Return the output scales of a block of columns [C]; 0 where the layer has none."""
    if not S.HAS_OUTPUT_SCALES:
        return 0.0
    elif S.EVEN_C:
        return tl.load(tile.output_scales + c)
    else:
        return tl.load(tile.output_scales + c, mask=c < tile.end, other=0.0)


@triton.jit
def store_y(tile, y_rows, block, y, delta, S: tl.constexpr):
    """Store output_scale * (y + delta) + bias; each element is rounded once."""
    mask = y_rows.written[:, None]
    if not S.EVEN_C:
        mask = mask & (block.c < tile.end)[None, :]
    total = y.to(tl.float32) + delta
    if S.HAS_OUTPUT_SCALES:
        total *= block.output_scales[None, :]
    if S.HAS_BIAS:
        if S.EVEN_C:
            bias = tl.load(tile.bias + block.c)
        else:
            bias = tl.load(tile.bias + block.c, mask=block.c < tile.end, other=0.0)
        total += bias.to(tl.float32)[None, :]
    at = y_rows.at[:, None] + block.c[None, :]
    tl.store(at, rounded(total, y.dtype, S.INTERPRETED), mask=mask)
