# mypy: ignore-errors
"""The entry kernels: the per-LoRA grid, in which a row is one tile of one slot's tokens.

A program finds the slot and the tokens of its tile and calls the arithmetic of `sgmv.blocks`. h
has a row for every token of the batch. T names the axis over the tokens of a tile.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.blocks import (
    columns_of,
    expand_tile,
    gather_tile,
    prefetch_a,
    prefetch_x,
    row_and_program,
    shrink_tile,
)


@triton.jit
def _tile(row, slot_table_ptr, token_table_ptr, TILE: tl.constexpr):
    """Return the slot of a tile and its tokens [T]; -1 where there is none."""
    slot = tl.load(slot_table_ptr + row).to(tl.int64)
    tokens = tl.load(token_table_ptr + row * TILE + tl.arange(0, TILE)).to(tl.int64)
    return slot, tokens


@triton.jit(do_not_specialize=["h_rows"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
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
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_R: tl.constexpr,
    EXITS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """h[k, s, t, :r] = x[t, part k] @ a[l, s, :r, part k].T."""
    row, program = row_and_program(PROGRAMS)
    slot, tokens = _tile(row, slot_table_ptr, token_table_ptr, TILE)
    if PROGRAMMATIC:
        if WARPS_K > 0:  # token by token it costs more than it gains
            prefetch_a(
                a_ptr, ranks_ptr, a_slices_ptr, slot, program, in_features, a_stride_l, a_stride_s,
                a_stride_r, NUM_SLICES, SLICE_ALIGN, RANK_PAD, BLOCK_N, BLOCK_K, SPLIT_K, STEPS,
            )  # fmt: skip
        if PREFETCH > 0:
            prefetch_x(
                x_ptr, tokens, program, in_features, x_stride_t, PREFETCH, BLOCK_K, SPLIT_K, STEPS
            )
        gdc_wait()  # before reading x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    if slot < 0:
        return
    shrink_tile(
        x_ptr, a_ptr, ranks_ptr, a_slices_ptr, a_scales_ptr, h_ptr, slot, tokens, tokens, program,
        in_features, x_stride_t, a_stride_l, a_stride_s, a_stride_r, a_scales_stride_l,
        a_scales_stride_s, a_scales_stride_r, h_rows, h_stride_s, h_stride_t, NUM_SLICES,
        SLICE_ALIGN, STORAGE, GROUP_R, GROUP_K, RANK_PAD, BLOCK_N, BLOCK_K, WARPS_K, SPLIT_K, STEPS,
        EVEN_K, EVEN_R, EXITS, PRECISION, INTERPRETED,
    )  # fmt: skip


@triton.jit
def gather_kernel(
    token_ids_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    h_ptr,
    a_stride_l,
    a_stride_s,
    a_stride_r,
    a_scales_stride_l,
    a_scales_stride_s,
    a_scales_stride_r,
    h_stride_s,
    h_stride_t,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """h[s, t, :r] = a[l, s, :r, token_ids[t]]."""
    row, program = row_and_program(PROGRAMS)
    slot, tokens = _tile(row, slot_table_ptr, token_table_ptr, TILE)
    if slot < 0:
        return
    gather_tile(
        token_ids_ptr, a_ptr, ranks_ptr, a_slices_ptr, a_scales_ptr, h_ptr, slot, tokens, tokens,
        program, a_stride_l, a_stride_s, a_stride_r, a_scales_stride_l, a_scales_stride_s,
        a_scales_stride_r, h_stride_s, h_stride_t, NUM_SLICES, SLICE_ALIGN, STORAGE, GROUP_R,
        GROUP_K, BLOCK_R,
    )  # fmt: skip


@triton.jit(do_not_specialize=["h_rows"])
def expand_kernel(
    h_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    output_scales_ptr,
    ranks_ptr,
    scalings_ptr,
    token_scales_ptr,
    b_slices_ptr,
    b_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    b_tma,
    h_rows,
    h_stride_s,
    h_stride_t,
    b_stride_l,
    b_stride_c,
    y_stride_t,
    bias_stride_l,
    output_scales_stride_l,
    b_scales_stride_l,
    b_scales_stride_c,
    STARTS: tl.constexpr,
    FIRST_PROGRAMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    SLICE_ALIGN: tl.constexpr,
    STORAGE: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    GROUP_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    WIDE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_C: tl.constexpr,
    EVEN_R: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_OUTPUT_SCALES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    EXACT_H: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    LATE_Y: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """y[t, c] += scaling * (h[s, t, :r] @ b[l, c, :r].T) + bias."""
    row, program = row_and_program(PROGRAMS)
    slot, tokens = _tile(row, slot_table_ptr, token_table_ptr, TILE)
    if slot < 0:
        if PROGRAMMATIC:
            gdc_wait()  # so that this grid ends after the shrink, on which later kernels rely
        return
    s, first, end = columns_of(program, STARTS, FIRST_PROGRAMS, BLOCK_C * CHUNKS)
    rank = tl.load(ranks_ptr + slot * NUM_SLICES + s)
    if rank == 0 and not (HAS_BIAS or HAS_OUTPUT_SCALES):
        if PROGRAMMATIC:
            gdc_wait()
        return
    expand_tile(
        h_ptr, b_ptr, y_ptr, bias_ptr, output_scales_ptr, scalings_ptr, token_scales_ptr,
        b_slices_ptr, b_scales_ptr, b_tma, slot, tokens, tokens, s, first, end, rank, h_rows,
        h_stride_s, h_stride_t, b_stride_l, b_stride_c, y_stride_t, bias_stride_l,
        output_scales_stride_l, b_scales_stride_l, b_scales_stride_c, STARTS, NUM_SLICES,
        SLICE_ALIGN, STORAGE, FIRST_GROUPS, GROUP_C, GROUP_R, WIDE, SPLIT_K, RANK_PAD, BLOCK_C,
        BLOCK_R, CHUNKS, STAGES, EVEN_C, EVEN_R, HAS_BIAS, HAS_OUTPUT_SCALES, HAS_TOKEN_SCALES,
        EXACT_H, PRECISION, INTERPRETED, PROGRAMMATIC, LATE_Y,
        PREFETCH,
    )  # fmt: skip
