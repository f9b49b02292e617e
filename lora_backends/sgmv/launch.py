"""The kernels of a layer and a plan, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lora_backends.eight_bit import b_row_groups
from lora_backends.sgmv.kernels import entry
from lora_backends.sgmv.kernels.operands import ExpandSizes, GatherSizes, ShrinkSizes
from lora_backends.sgmv.launching.call_cache import Launched
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.launching.sizes import expand_sizes, shrink_sizes
from lora_backends.sgmv.launching.slice_tables import Located, located_a, located_b, stride_unit
from lora_backends.sgmv.launching.tma import MAX_GRID_ROWS, allows_tma, descriptor
from lora_backends.sgmv.layout import SgmvPlan
from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind, stored_bytes
from lora_backends.sgmv.tiles.eight_bit_rules import of_8_bits
from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.rules import (
    ends_beyond_ranks,
    of_scaled_blocks,
    prefetched_lines,
)
from lora_backends.sgmv.tiles.sizes import (
    BatchShape,
    ColumnPrograms,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    column_programs,
    h_width,
    padded_rank,
)
from lora_backends.sgmv.tiles.source import TileSource
from lora_backends.weights import LoRAWeights

EMPTY_ROW = 0 if INTERPRETED else 1
"""Rows launched for a batch without adapters. They compute nothing, but compile the kernels: a
capture that follows with other adapters cannot compile."""

INVARIANT_BATCH = (64, 8)
"""A batch-invariant backend takes the sizes for this many tokens and active slots, always."""

PLANES_BESIDE = 4
"""The most planes of h beside a base product. The product hides a longer shrink, and the expand
reads fewer planes."""

Form = Literal["linear", "beside", "separate", "embedding"]
"""The form of h between the kernels. linear: planes of partial sums, their sum rounded before the
second product; beside: the same, with a base product between shrink and expand; separate: a row
for every token, float32, as callers of `run_lora_a` see it; embedding: one plane."""


class Options(NamedTuple):
    """Options of a backend, equal in all of its launches."""

    precision: str  # of float32 products, as `tl.dot` names it
    programmatic: bool  # whether the expand launches before the shrink has ended
    batch_invariant: bool
    source: TileSource
    tma: bool  # whether the device has TMA
    gpu: Gpu


class Kernels(NamedTuple):
    """Both kernels of a layer for one shape of batch."""

    shrink: SpecializedKernel
    expand: SpecializedKernel
    split_k: int  # planes of h that the shrink writes


class Epilogue(NamedTuple):
    """The factors and terms that an expand applies, besides the scaling."""

    bias: bool
    output_scales: bool
    token_scales: bool


class Stacks(NamedTuple):
    """A layer as kernels read it: what launches need of it, without a look at its tensors."""

    a: Located | None
    b: Located | None
    b_strides: tuple[int, ...]  # times `stride_unit`
    ranks: Tensor  # contiguous
    scalings: Tensor  # contiguous
    bias: Tensor | None
    output_scales: Tensor | None
    a_scales: Tensor | None
    b_scales: Tensor | None
    max_rank: int
    h_width: int  # values of a row of h between both kernels
    in_features: int
    aligns: tuple[int, int]  # of the tables of A and B in elements; 0 where no table is read
    tma: bool  # whether B can be loaded through TMA
    is_plain: bool  # whether values are stored as they are
    in_place: bool  # whether ranks and scalings are the layer's, not copies


def stacks_of(weights: LoRAWeights) -> Stacks:
    """Return the `Stacks` of a layer."""
    stacks = weights.derived(_stacks)
    if stacks.in_place:
        return stacks
    # a copy of a table is made before the first launch: no kernel may run between the shrink and an
    # expand that starts before the shrink has ended
    ranks, scalings = weights.ranks.contiguous(), weights.scalings.contiguous()
    return stacks._replace(ranks=ranks, scalings=scalings)


def _stacks(weights: LoRAWeights) -> Stacks:
    a = None if weights.lora_a is None else located_a(weights)
    b = None if weights.lora_b is None else located_b(weights)
    unit = stride_unit(weights.max_rank, weights.dtype.itemsize)
    # scales along the sum: B is widened to float32
    tma = b is not None and weights.scale_block[1] is None and allows_tma(b, weights.max_rank, 0)
    return Stacks(
        a,
        b,
        () if b is None else tuple(unit * stride for stride in b.strides),
        weights.ranks,
        weights.scalings,
        weights.bias,
        weights.output_scales,
        weights.a_scales,
        weights.b_scales,
        weights.max_rank,
        h_width(weights.max_rank),
        weights.in_features,
        (0 if a is None else a.alignment, 0 if b is None else b.alignment),
        tma,
        not storage_kind(weights.dtype),
        weights.ranks.is_contiguous() and weights.scalings.is_contiguous(),
    )


def kernels_of(
    weights: LoRAWeights,
    stacks: Stacks,  # the layer's
    plan: SgmvPlan,
    rows: int,  # of x
    dtype: torch.dtype | None,  # of x, or of the result where x has none
    options: Options,
    form: Form = "linear",
) -> Kernels:
    """Return both kernels for a layer, a plan and x: one cached lookup."""
    # a captured graph serves every batch of `rows` rows, an eager call the batch as it is
    tokens = rows if plan.is_captured else plan.num_tokens
    shape = INVARIANT_BATCH if options.batch_invariant else (tokens, plan.active_slots)
    # as `layer_shape`, without a call: this runs for every call of a layer
    layer = LayerShape(
        weights.num_slices,
        weights.max_rank,
        weights.in_features,
        weights.out_features,
        max(weights.dtype.itemsize, 2 if dtype is None else dtype.itemsize),
    )
    kind = 0 if stacks.is_plain else storage_kind(weights.dtype, options.programmatic)
    return _kernels(
        BatchShape(*shape, plan.tile_tokens),
        layer,
        weights.output_slices,
        Epilogue(
            weights.bias is not None,
            weights.output_scales is not None,
            plan.token_scales is not None,
        ),
        stacks.aligns,
        Storage(kind, weights.scale_block, dtype) if kind else PLAIN,
        plan.row_constants(form == "separate"),
        options,
        form,
        options.tma and stacks.tma and plan.grid_rows(True, rows) <= MAX_GRID_ROWS,
    )


def layer_shape(weights: LoRAWeights, x_bytes: int) -> LayerShape:
    """Return the sizes of a layer for an x of `x_bytes` bytes an element."""
    return LayerShape(
        weights.num_slices,
        weights.max_rank,
        weights.in_features,
        weights.out_features,
        max(weights.dtype.itemsize, x_bytes),
    )


@lru_cache(maxsize=16384)
def _kernels(
    batch: BatchShape,
    layer: LayerShape,
    output_slices: tuple[int, ...],
    epilogue: Epilogue,  # what the layer and the plan add
    slice_aligns: tuple[int, int],  # of A and B; 0 where the slices are one stack
    storage: Storage,
    row: tuple[Any, ...],  # constants by which a program finds its row
    options: Options,
    form: Form,
    tma: bool,  # B allows it
) -> Kernels:
    shrink, expand = choose_sizes(batch, layer, storage, options, form)
    linear, exact = form in ("linear", "beside"), form == "separate"
    if form == "beside" and shrink.warps_k:  # else the kernel unrolls its steps
        shrink = replace(shrink, split_k=min(shrink.split_k, PLANES_BESIDE))
    if slice_aligns[1]:  # no block may reach beyond the tensor of its slice
        tma = tma and column_programs(output_slices, expand).even
    if exact or not tma:  # the expand with TMA rounds h
        expand = replace(expand, num_stages=min(1, expand.num_stages))
    x_lines = y_lines = 0
    if options.programmatic and linear:
        x_lines, y_lines = prefetched_lines(batch, layer, options.gpu)
    rank, wide_ranks = layer.max_rank, layer.max_rank % 8 == 0
    # h is exact where callers pass it, and where it is not a value of the stack's dtype
    exact_h = exact or (form == "embedding" and storage.kind > 0)
    columns = column_programs(output_slices, expand)
    of_a = shrink_sizes(
        shrink,
        layer.in_features,
        rank,
        storage,
        PRECISION=options.precision,
        PROGRAMMATIC=options.programmatic,
        NUM_SLICES=layer.num_slices,
        SLICE_ALIGN=slice_aligns[0],
        # exact: callers see h, so not even zeros are written beyond a rank
        EVEN_R=8 if wide_ranks and not exact else 0,
        EXITS=ends_beyond_ranks(batch, options.gpu),
        PREFETCH=x_lines,
    )
    of_b = expand_sizes(
        expand,
        columns,
        shrink.split_k if linear else 1,
        rank,
        storage._replace(wide=None) if exact_h else storage,
        FIRST_GROUPS=tuple(accumulate(b_row_groups(output_slices, storage.block), initial=0)),
        PRECISION="ieee" if exact_h else options.precision,
        PROGRAMMATIC=options.programmatic and linear,
        NUM_SLICES=layer.num_slices,
        SLICE_ALIGN=slice_aligns[1],
        HAS_BIAS=epilogue.bias,
        HAS_OUTPUT_SCALES=epilogue.output_scales,
        HAS_TOKEN_SCALES=epilogue.token_scales,
        EXACT_H=exact_h,
        LATE_Y=form == "beside",
        EARLY_B=storage.kind > 0,
        PREFETCH=y_lines if expand.num_stages > 1 else 0,
    )
    return Kernels(
        shrink_kernel_of(layer, shrink, of_a, row, options),
        _expand_kernel(expand, columns, of_b, row, options),
        shrink.split_k,
    )


def choose_sizes(
    batch: BatchShape, layer: LayerShape, storage: Storage, options: Options, form: Form
) -> tuple[ShrinkTiles, ExpandTiles]:
    """Return the tile sizes of both kernels for one layer and batch."""
    choose_tiles = options.source.choose_tiles

    def choose(layer: LayerShape) -> TileConfig:
        if not storage.kind:
            return choose_tiles(batch, layer)
        if storage.block[1] is not None:
            return of_scaled_blocks(choose_tiles(batch, layer), batch, layer, options.gpu)
        if layer.item_bytes == 2:
            return choose_tiles(batch, replace(layer, item_bytes=1))
        return of_8_bits(choose_tiles(batch, layer), batch, layer, options.gpu)

    chosen = choose(layer)
    if form != "separate":
        return chosen.shrink, chosen.expand
    exact = replace(layer, item_bytes=torch.float32.itemsize)  # h and B multiply in float32
    return chosen.shrink, choose(exact).expand


def shrink_kernel_of(
    layer: LayerShape,
    tiles: ShrinkTiles,
    sizes: ShrinkSizes,
    row: tuple[Any, ...],
    options: Options,
) -> SpecializedKernel:
    """Return the kernel of a shrink of these sizes; `row` as `SgmvPlan.row_constants`."""
    return specialized(
        entry.shrink_kernel,
        -(-layer.stacked // tiles.block_n) * tiles.split_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        programmatic=sizes.PROGRAMMATIC,
        ROW=row,
        SIZES=sizes,
    )


def _expand_kernel(
    tiles: ExpandTiles,
    columns: ColumnPrograms,
    sizes: ExpandSizes,
    row: tuple[Any, ...],
    options: Options,
) -> SpecializedKernel:
    # With 128 registers or fewer, two programs of 8 warps fit on a multiprocessor. A kernel that
    # widens B after TMA takes 138 if ptxas may choose, and 126, without spills, under this limit.
    widens = sizes.STORAGE > 0 and tiles.num_stages > 1 and tiles.num_warps == 8
    return specialized(
        entry.expand_kernel,
        columns.programs,
        num_warps=tiles.num_warps,
        programmatic=sizes.PROGRAMMATIC,
        max_registers=128 if widens else 0,
        # With TMA two axes: finding the row by division takes up to 24 registers, with which one
        # program fits on a multiprocessor instead of two.
        PROGRAMS=columns.programs if tiles.num_stages <= 1 else 0,
        ROW=row,
        SIZES=sizes,
    )


def gather_kernel_of(
    weights: LoRAWeights, plan: SgmvPlan, options: Options, by_token: bool = False
) -> SpecializedKernel:
    """Return the kernel that shrinks one-hot rows for a layer and a plan, as `row_constants`."""
    kind = storage_kind(weights.dtype)
    return gather_kernel(
        weights.num_slices,
        weights.max_rank,
        weights.derived(_stacks).aligns[0],
        Storage(kind, weights.scale_block) if kind else PLAIN,
        plan.row_constants(by_token),
    )


@lru_cache(maxsize=1024)
def gather_kernel(
    num_slices: int,
    max_rank: int,
    slice_align: int,
    storage: Storage,
    row: tuple[Any, ...],
) -> SpecializedKernel:
    """Return the kernel that shrinks one-hot rows."""
    block_r = min(64, padded_rank(max_rank))
    sizes = GatherSizes(
        NUM_SLICES=num_slices,
        SLICE_ALIGN=slice_align,
        STORAGE=storage.kind,
        GROUP_R=storage.block[0] or 0,
        GROUP_K=storage.block[1] or 0,
        BLOCK_R=block_r,
    )
    programs = -(-max_rank // block_r) * num_slices
    return specialized(entry.gather_kernel, programs, ROW=row, SIZES=sizes)


def shrink(
    x: Tensor, weights: Stacks, plan: SgmvPlan, h: Tensor, rows: int, kernel: SpecializedKernel
) -> Launched:
    """Write the planes of h, [planes, num_slices, rows of h, width] float32, contiguous.

    The width is `h_width` or max_rank. Nothing is written for tokens without an adapter; beyond a
    rank, at most zeros up to the end of its group of 8.
    """
    arguments = shrink_arguments(x, weights, plan.tables(), h)
    kernel.launch(rows, arguments)
    return Launched(kernel, arguments)


def shrink_arguments(x: Tensor, weights: Stacks, tables: tuple[Any, ...], h: Tensor) -> Arguments:
    """Return the arguments of `shrink`'s kernel; `tables` are the plan's."""
    assert weights.a is not None
    a = weights.a
    scales = a.base if weights.a_scales is None else weights.a_scales  # the base is not read
    scale_strides = (0, 0, 0) if weights.a_scales is None else scales.stride()[:3]
    stored = a.base if weights.is_plain else stored_bytes(a.base)
    tensors = (x, stored, weights.ranks, a.table, scales, *tables, h)
    in_features, layout = weights.in_features, (h.shape[2], *h.stride()[1:3])
    numbers = (in_features, x.stride(0), *a.strides, *scale_strides, *layout)
    return Arguments(tensors, (), numbers)


def gather(
    token_ids: Tensor,
    weights: Stacks,
    plan: SgmvPlan,
    h: Tensor,
    rows: int,
    kernel: SpecializedKernel,
) -> Launched:
    """Write h for ``x = one_hot(token_ids)``: [1, num_slices, rows of h, width] float32."""
    # those of a shrink but for the width of x, its stride and the rows of h
    tensors, _, (_, _, *strides, _, h_stride_s, h_stride_t) = shrink_arguments(
        token_ids, weights, plan.tables(), h
    )
    arguments = Arguments(tensors, (), (*strides, h_stride_s, h_stride_t))
    kernel.launch(rows, arguments)
    return Launched(kernel, arguments)


def expand(
    h: Tensor, weights: Stacks, plan: SgmvPlan, y: Tensor, rows: int, kernel: SpecializedKernel
) -> Launched:
    """Add the LoRA to y; h is as in `shrink`, of which only the last axis need be contiguous.

    A programmatic kernel must follow `shrink`, which waits for all earlier kernels. With LATE_Y
    a base product that writes y may lie between them.
    """
    arguments = expand_arguments(h, weights, plan, y, kernel)
    kernel.launch(rows, arguments)
    return Launched(kernel, arguments)


def expand_arguments(
    h: Tensor, weights: Stacks, plan: SgmvPlan, y: Tensor, kernel: SpecializedKernel
) -> Arguments:
    """Return the arguments of `expand`'s kernel."""
    assert weights.b is not None
    located, sizes = weights.b, kernel.sizes
    bias, scales, of_tokens = weights.bias, weights.output_scales, plan.token_scales
    # also passed for the tensors that the layer or the plan lacks: the kernel does not read those
    b = located.base if weights.is_plain else stored_bytes(located.base)
    tma = None
    if sizes.STAGES > 1:
        tma = descriptor(located._replace(base=b), weights.max_rank, sizes.BLOCK_C, sizes.BLOCK_R)
    tensors = (
        h,
        b,
        y,
        b if bias is None else bias,
        b if scales is None else scales,
        weights.ranks,
        weights.scalings,
        b if of_tokens is None else of_tokens,
        located.table,
        b if weights.b_scales is None else weights.b_scales,
        *plan.tables(),
    )
    numbers = (
        h.shape[2],
        *h.stride()[1:3],
        *weights.b_strides,
        y.stride(0),
        0 if bias is None else bias.stride(0),
        0 if scales is None else scales.stride(0),
        *((0, 0) if weights.b_scales is None else weights.b_scales.stride()[:2]),
    )
    return Arguments(tensors, (tma,), numbers)
