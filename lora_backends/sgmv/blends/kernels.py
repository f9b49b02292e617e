# mypy: ignore-errors
"""The entry kernels for several adapters per token: a program adds all adapters of its tile.

An entry of a tile is an adapter that at least one of its tokens has. h has a row for each pair of a
token and an adapter. The shrink is the dense one over the pairs, by slot; or, in large tiles, the
one below, which stacks the rows of A of all entries and reads x once. Axes as in `sgmv.kernels`:
T (rows of the tile), N (rows of A, all entries and slices stacked), C (columns of y).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.blends.like_kernels import add_row, add_rows, add_tma, add_together
from lora_backends.sgmv.blends.tile_kernels import BlendTile, positions_of
from lora_backends.sgmv.blends.unlike_kernels import add_each, add_entries
from lora_backends.sgmv.kernels.blocks import wait_for_h
from lora_backends.sgmv.kernels.indexing import columns_of, in_elements, row_and_program
from lora_backends.sgmv.kernels.operands import AStack, BStack, Input, Rows, StackedRows
from lora_backends.sgmv.kernels.prefetch import prefetch_block
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
    SIZES: tl.constexpr,
):
    """h[k, s, t, e, :r] = x[t, part k] @ a[slots[e], s, :r, part k].T for every entry e.

    All tokens of a tile have all its entries.
    """
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
    plane = SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    s, e = stacked % SIZES.NUM_SLICES, stacked // SIZES.NUM_SLICES
    h_columns = s.to(tl.int64) * h_stride_s + e.to(tl.int64) * h_stride_t
    h_columns = h_ptr + part * plane + h_columns + r  # [N]
    num_tiles = tl.load(num_tiles_ptr)
    # the first tile's, which unlike `num_tiles` need not be waited for
    block = _stacked_rows(slots_ptr, first, stacked, r, ENTRIES, SIZES)
    tokens, _ = positions_of(starts_ptr, tokens_ptr, first, TILE)
    if SIZES.PROGRAMMATIC:
        if SIZES.WARPS_K > 0:
            prefetch_block(x, a, block, part, SIZES)
        gdc_wait()  # before reading x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    for row in tl.range(first, num_tiles, grid_rows, num_stages=1):
        if tl.max(block.live.to(tl.int32)) > 0:
            rows = Rows(slot=0, tokens=tokens, h=tokens * ENTRIES)
            shrink_block(x, a, block, h_columns, h_stride_t, rows, part, SIZES)
        following = tl.minimum(row + grid_rows, num_tiles - 1)
        block = _stacked_rows(slots_ptr, following, stacked, r, ENTRIES, SIZES)
        tokens, _ = positions_of(starts_ptr, tokens_ptr, following, TILE)


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
    ids_ptr,
    b_tma,
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
    WIDTH: tl.constexpr,
    HOW: tl.constexpr,
    TOGETHER: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[t, c] += sum over j of factors[t, j] * scaling * (h[s, t, j, :r] @ b[l, c, :r].T) + bias.

    The sum is float32 and rounded once. Where the token lacks the adapter, nothing is added. HOW is
    one of `launch.How`; TOGETHER: entries of a product of "together".
    """
    row, program = row_and_program(PROGRAMS)
    b = BStack(
        ptr=b_ptr, slices=b_slices_ptr, scales=b_scales_ptr,
        stride_l=in_elements(b_stride_l, b_ptr, SIZES.EVEN_R),
        stride_c=in_elements(b_stride_c, b_ptr, SIZES.EVEN_R),
        scales_stride_l=b_scales_stride_l, scales_stride_c=b_scales_stride_c,
    )  # fmt: skip
    s, first, end = columns_of(program, SIZES)
    if HOW == "row":  # at most one tile; if there is none, its table of tokens is empty
        end_row = row + 1
    else:
        end_row = tl.load(num_tiles_ptr)
    plane = SIZES.NUM_SLICES * h_rows.to(tl.int64) * h_stride_t
    h_slice = h_ptr + s.to(tl.int64) * h_stride_s
    for tile_row in tl.range(row, end_row, grid_rows, num_stages=1):
        tokens, positions = positions_of(starts_ptr, tokens_ptr, tile_row, TILE)
        tile = BlendTile(
            tokens=tokens, slots=slots_ptr + tile_row * ENTRIES, ids=ids_ptr + positions * WIDTH,
            factors=factors_ptr + positions * WIDTH, ranks=ranks_ptr + s,
            scalings=scalings_ptr + s, h=h_slice + tokens * (WIDTH * h_stride_t),
            h_stride=h_stride_t, plane=plane, y=y_ptr + tokens * y_stride_t, bias=bias_ptr,
            bias_stride=bias_stride_l, s=s, first=first, end=end,
        )  # fmt: skip
        if HOW == "each":
            add_each(tile, b, WIDTH, ENTRIES, SIZES)
        elif HOW == "entries":
            add_entries(tile, b, WIDTH, ENTRIES, SIZES)
        elif HOW == "row":
            add_row(tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH, SIZES)
        elif HOW == "rows":
            add_rows(tile, b, h_slice, factors_ptr, positions, y_ptr, y_stride_t, WIDTH, SIZES)
        elif HOW == "tma":
            add_tma(tile, b, b_tma, WIDTH, SIZES)
        else:
            add_together(tile, b, ENTRIES, TOGETHER, SIZES)
    wait_for_h(SIZES)  # this grid must end after the shrink, on which later kernels rely
