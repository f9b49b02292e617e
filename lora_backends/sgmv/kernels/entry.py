# mypy: ignore-errors
"""The entry kernels of dense layers: a row of the grid is one tile of one slot's tokens.

ROW has the constants of `find_rows`. group_starts is None where the engine has no such table.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lora_backends.sgmv.kernels.expand import expand_tile
from lora_backends.sgmv.kernels.indexing import columns_of, find_rows, in_elements, row_and_program
from lora_backends.sgmv.kernels.operands import (
    AStack,
    BStack,
    Columns,
    Input,
    Intermediate,
    Output,
)
from lora_backends.sgmv.kernels.prefetch import prefetch_a, prefetch_x
from lora_backends.sgmv.kernels.shrink import gather_tile, shrink_tile


@triton.jit(do_not_specialize=["h_rows"])
def shrink_kernel(
    x_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    group_starts_ptr,
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
    ROW: tl.constexpr,
    SIZES: tl.constexpr,
):
    """h[k, s, t, :r] = x[t, part k] @ a[l, s, :r, part k].T."""
    row, program = row_and_program(PROGRAMS)
    rows = find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW)
    x = Input(ptr=x_ptr, stride_t=x_stride_t, features=in_features)
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=a_slices_ptr, scales=a_scales_ptr, stride_l=a_stride_l,
        stride_s=a_stride_s, stride_r=a_stride_r, scales_stride_l=a_scales_stride_l,
        scales_stride_s=a_scales_stride_s, scales_stride_r=a_scales_stride_r,
    )  # fmt: skip
    if SIZES.PROGRAMMATIC:
        if SIZES.WARPS_K > 0:  # token by token it costs more than it gains
            prefetch_a(x, a, rows.slot, program, SIZES)
        if SIZES.PREFETCH > 0:
            prefetch_x(x, rows.tokens, program, SIZES)
        gdc_wait()  # before reading x, A and ranks, which an earlier kernel may write
        gdc_launch_dependents()
    if rows.slot < 0:
        return
    h = Intermediate(ptr=h_ptr, rows=h_rows, stride_s=h_stride_s, stride_t=h_stride_t)
    shrink_tile(x, a, h, rows, program, SIZES)


@triton.jit
def gather_kernel(
    token_ids_ptr,
    a_ptr,
    ranks_ptr,
    a_slices_ptr,
    a_scales_ptr,
    slot_table_ptr,
    token_table_ptr,
    group_starts_ptr,
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
    ROW: tl.constexpr,
    SIZES: tl.constexpr,
):
    """h[s, t, :r] = a[l, s, :r, token_ids[t]]."""
    row, program = row_and_program(PROGRAMS)
    rows = find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW)
    if rows.slot < 0:
        return
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=a_slices_ptr, scales=a_scales_ptr, stride_l=a_stride_l,
        stride_s=a_stride_s, stride_r=a_stride_r, scales_stride_l=a_scales_stride_l,
        scales_stride_s=a_scales_stride_s, scales_stride_r=a_scales_stride_r,
    )  # fmt: skip
    h = Intermediate(ptr=h_ptr, rows=0, stride_s=h_stride_s, stride_t=h_stride_t)  # one plane
    gather_tile(token_ids_ptr, a, h, rows, program, SIZES)


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
    group_starts_ptr,
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
    PROGRAMS: tl.constexpr,
    ROW: tl.constexpr,
    SIZES: tl.constexpr,
):
    """y[t, c] += scaling * (h[s, t, :r] @ b[l, c, :r].T) + bias."""
    row, program = row_and_program(PROGRAMS)
    rows = find_rows(row, slot_table_ptr, token_table_ptr, group_starts_ptr, ROW)
    if rows.slot < 0:
        if SIZES.PROGRAMMATIC:
            gdc_wait()  # so that this grid ends after the shrink, on which later kernels rely
        return
    s, first, end = columns_of(program, SIZES)
    rank = tl.load(ranks_ptr + rows.slot * SIZES.NUM_SLICES + s)
    if rank == 0 and not (SIZES.HAS_BIAS or SIZES.HAS_OUTPUT_SCALES):
        if SIZES.PROGRAMMATIC:
            gdc_wait()
        return
    h = Intermediate(ptr=h_ptr, rows=h_rows, stride_s=h_stride_s, stride_t=h_stride_t)
    b = BStack(
        ptr=b_ptr, slices=b_slices_ptr, scales=b_scales_ptr,
        stride_l=in_elements(b_stride_l, b_ptr, SIZES.EVEN_R),
        stride_c=in_elements(b_stride_c, b_ptr, SIZES.EVEN_R),
        scales_stride_l=b_scales_stride_l, scales_stride_c=b_scales_stride_c,
    )  # fmt: skip
    y = Output(
        ptr=y_ptr, stride_t=y_stride_t, scalings=scalings_ptr, token_scales=token_scales_ptr,
        bias=bias_ptr, bias_stride_l=bias_stride_l, scales=output_scales_ptr,
        scales_stride_l=output_scales_stride_l,
    )  # fmt: skip
    columns = Columns(s=s, first=first, end=end, rank=rank)
    expand_tile(h, b, b_tma, y, rows, columns, SIZES)
