"""The launches of the backward: kernels of a layer and a plan, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from lora_backends.eight_bit import b_row_groups
from lora_backends.sgmv.backward import rules
from lora_backends.sgmv.backward.kernels import outer, rows, sums
from lora_backends.sgmv.backward.kernels.operands import (
    DhSizes,
    DxSizes,
    EmbeddingSizes,
    OuterSizes,
    PieceSizes,
    PlaneSizes,
    RowSumSizes,
)
from lora_backends.sgmv.launch import Options, Stacks, stacks_of
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.layout import SgmvPlan
from lora_backends.sgmv.storage import PLAIN, WIDE, Storage, storage_kind, stored_bytes
from lora_backends.sgmv.tiles.sizes import LayerShape, padded_rank
from lora_backends.weights import LoRAWeights

PLANE_BLOCK = 1024
"""Values that a program sums over planes or pieces."""


class Wanted(NamedTuple):
    """The slots whose gradients are wanted, and the runs of the plan in which to look for them."""

    slots: torch.Tensor | None  # [number] int32 on the device; None: all
    number: int
    runs: int

    def pieces(
        self, plan: SgmvPlan, rows: int, piece_tokens: int, by_place: bool = False
    ) -> PieceSizes:
        """Return how a kernel finds its piece of the slots' tokens, of which x has `rows`."""
        size = plan.run_tokens
        # not from the runs in use: a graph keeps the kernel
        runs = max(1, piece_tokens // size) if rows > piece_tokens else 0
        return PieceSizes(size, runs, self.slots is None, by_place)

    def listed(self, plan: SgmvPlan) -> torch.Tensor:
        """Return the wanted slots as kernels take them, which read no list of all slots."""
        return plan.slot_table if self.slots is None else self.slots

    def windows(self, pieces: PieceSizes) -> int:
        """Return the windows that all runs are divided into; 0: no slot has several pieces."""
        return -(-self.runs // pieces.RUNS) if pieces.RUNS else 0


def run_dh(
    grad: torch.Tensor,
    weights: LoRAWeights,
    plan: SgmvPlan,
    programs: int,  # rows of the grid
    narrow: bool,  # in the dtype of 16-bit stacks
    options: Options,
) -> torch.Tensor:
    """Return dh [num_slices, rows, max_rank], zero beyond ranks and without adapter."""
    tokens, stacks = grad.shape[0], stacks_of(weights)
    shape = (weights.num_slices, tokens, weights.max_rank)
    if not programs:
        return grad.new_zeros(shape, dtype=torch.float32)
    kernel = _dh_kernel(
        _layer_of(weights),
        weights.output_slices,
        stacks.aligns[1],
        _storage(weights, grad.dtype, options),
        grad.dtype,
        weights.dtype,
        plan.token_scales is not None,
        rules.INVARIANT_ROWS if options.batch_invariant else plan.grid_rows(True, tokens),
        plan.tile_tokens,
        plan.row_constants(True),
        options,
    )
    parts = kernel.sizes.PARTS
    if parts == 1:
        # products round it anyway, and dx and dlora_a of several slices read dh more often than x
        dtype = weights.dtype if narrow and weights.dtype.itemsize == 2 else torch.float32
        planes = grad.new_zeros((1, *shape), dtype=dtype)
    else:
        planes = grad.new_empty((parts, *shape), dtype=torch.float32)
    kernel.launch(programs, _dh_arguments(grad, stacks, plan, planes))
    return planes[0] if parts == 1 else sum_planes(planes, plan)[0]


def _dh_arguments(
    grad: torch.Tensor, stacks: Stacks, plan: SgmvPlan, planes: torch.Tensor
) -> Arguments:
    assert stacks.b is not None
    b = stacks.b
    scales = b.base if stacks.b_scales is None else stacks.b_scales  # the base is not read
    of_tokens = plan.token_scales
    tensors = (
        grad,
        b.base if stacks.is_plain else stored_bytes(b.base),
        stacks.ranks,
        stacks.scalings,
        stacks.scalings if of_tokens is None else of_tokens,
        b.table,
        scales,
        *plan.tables(),
        planes,
    )
    scale_strides = (0, 0) if stacks.b_scales is None else scales.stride()[:2]
    return Arguments(
        tensors, (), (grad.shape[0], grad.stride(0), *stacks.b_strides, *scale_strides)
    )


@lru_cache(maxsize=4096)
def _dh_kernel(
    layer: LayerShape,
    output_slices: tuple[int, ...],
    slice_align: int,
    storage: Storage,
    grad_dtype: torch.dtype,
    dtype: torch.dtype,
    token_scales: bool,
    programs: int,  # rows of the grid
    tile: int,  # rows of grad per program
    row: tuple[Any, ...],
    options: Options,
) -> SpecializedKernel:
    casts = not storage.kind and grad_dtype != dtype
    widens = storage.kind > 0 and storage.block[0] is not None  # to float32
    shape = replace(layer, item_bytes=_product_bytes(layer, storage, widens))
    tiles = rules.dh_tiles(
        shape, tile, programs, max(output_slices), grad_dtype.itemsize, casts or widens, options.gpu
    )
    sizes = DhSizes(
        STARTS=tuple(accumulate(output_slices, initial=0)),
        FIRST_GROUPS=tuple(accumulate(b_row_groups(output_slices, storage.block), initial=0)),
        NUM_SLICES=layer.num_slices,
        MAX_RANK=layer.max_rank,
        SLICE_ALIGN=slice_align,
        STORAGE=storage.kind,
        GROUP_C=storage.block[0] or 0,
        GROUP_R=storage.block[1] or 0,
        WIDE=WIDE[storage.wide],
        BLOCK_C=tiles.block_c,
        BLOCK_R=tiles.block_r,
        RANK_BLOCKS=-(-layer.max_rank // tiles.block_r),
        PARTS=tiles.parts,
        EVEN_C=_even(output_slices, tiles.block_c),
        EVEN_R=_even((layer.max_rank,), 16 if storage.kind else 8),
        HAS_TOKEN_SCALES=token_scales,
        PRECISION=options.precision,
        INTERPRETED=INTERPRETED,
    )
    return specialized(
        rows.dh_kernel,
        layer.num_slices * sizes.RANK_BLOCKS * sizes.PARTS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        ROW=row,
        SIZES=sizes,
    )


def run_dx(
    dh: torch.Tensor,
    dx: torch.Tensor,
    weights: LoRAWeights,
    plan: SgmvPlan,
    programs: int,  # rows of the grid
    adds: bool,  # dx has values that stay
    options: Options,
) -> None:
    """Add to dx, or overwrite it, rows without adapter with zeros."""
    tokens, stacks = dx.shape[0], stacks_of(weights)
    clearing = 0 if adds else -(-tokens // rules.CLEARED_TOKENS)
    if not programs + clearing or not dx.numel():
        return
    assert stacks.a is not None
    kernel = _dx_kernel(
        _layer_of(weights),
        stacks.aligns[0],
        _storage(weights, dx.dtype, options),
        adds,
        plan.row_constants(True),
        options,
    )
    a = stacks.a
    scales = a.base if stacks.a_scales is None else stacks.a_scales  # the base is not read
    tensors = (
        dh,
        a.base if stacks.is_plain else stored_bytes(a.base),
        dx,
        stacks.ranks,
        plan.token_slots(),
        a.table,
        scales,
        *plan.tables(),
    )
    numbers = (
        tokens,
        programs,
        stacks.in_features,
        *a.strides,
        *((0, 0, 0) if stacks.a_scales is None else scales.stride()[:3]),
        *dh.stride()[:2],
        dx.stride(0),
    )
    kernel.launch(programs + clearing, Arguments(tensors, (), numbers))


@lru_cache(maxsize=4096)
def _dx_kernel(
    layer: LayerShape,
    slice_align: int,
    storage: Storage,
    adds: bool,
    row: tuple[Any, ...],
    options: Options,
) -> SpecializedKernel:
    widens = storage.kind > 0 and storage.block[1] is not None  # to float32
    item_bytes = _product_bytes(layer, storage, widens)
    tiles = rules.dx_tiles(replace(layer, item_bytes=item_bytes))
    sizes = DxSizes(
        NUM_SLICES=layer.num_slices,
        SLICE_ALIGN=slice_align,
        STORAGE=storage.kind,
        GROUP_R=storage.block[0] or 0,
        GROUP_K=storage.block[1] or 0,
        WIDE=WIDE[storage.wide],
        RANK_PAD=padded_rank(layer.max_rank),
        BLOCK_R=tiles.block_r,
        BLOCK_C=tiles.block_c,
        BLOCKS=tiles.blocks,
        BLOCK_T=rules.CLEARED_TOKENS,
        EVEN_C=_even((layer.in_features,), tiles.block_c),
        EVEN_H=_even((layer.max_rank,), 8),
        ADDS=adds,
        PRECISION=options.precision,
        INTERPRETED=INTERPRETED,
    )
    return specialized(
        rows.dx_kernel,
        -(-layer.in_features // (tiles.block_c * tiles.blocks)),
        num_warps=tiles.num_warps,
        ROW=row,
        SIZES=sizes,
    )


def sum_outer_a(
    dh: torch.Tensor,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: SgmvPlan,
    wanted: Wanted,
    out: torch.Tensor,
    options: Options,
) -> None:
    """Write dlora_a [wanted slots, num_slices, max_rank, in_features]."""
    kernel = _outer_kernel(
        _layer_of(weights), (weights.in_features,), False, x.dtype, weights.dtype, False, options
    )
    _launch_outer(kernel, dh, False, x, weights, plan, wanted, out)


def sum_outer_b(
    h: torch.Tensor,
    by_place: bool,
    grad: torch.Tensor,
    weights: LoRAWeights,
    plan: SgmvPlan,
    wanted: Wanted,
    out: torch.Tensor,
    options: Options,
) -> None:
    """Write dlora_b [wanted slots, out_features, max_rank]."""
    scales, slices = plan.token_scales is not None, weights.output_slices
    kernel = _outer_kernel(
        _layer_of(weights), slices, True, grad.dtype, weights.dtype, scales, options
    )
    _launch_outer(kernel, h, by_place, grad, weights, plan, wanted, out)


class Outer(NamedTuple):
    """A sum of outer products, but for how the plan lists its tokens."""

    sizes: OuterSizes
    tiles: rules.OuterTiles
    programs: int

    def kernel(self, pieces: PieceSizes) -> SpecializedKernel:
        """Return the kernel that sums pieces."""
        return specialized(
            outer.outer_kernel,
            self.programs,
            num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages,
            PIECES=pieces,
            SIZES=self.sizes,
        )


@lru_cache(maxsize=4096)
def _outer_kernel(
    layer: LayerShape,
    widths: tuple[int, ...],
    of_b: bool,
    right: torch.dtype,
    dtype: torch.dtype,
    token_scales: bool,
    options: Options,
) -> Outer:
    rank_pad = padded_rank(layer.max_rank)
    stacked = rank_pad if of_b else layer.stacked
    tiles = rules.outer_tiles(
        layer, stacked, sum(widths), right.itemsize, right != dtype, options.gpu
    )
    *firsts, programs = accumulate((-(-width // tiles.block_c) for width in widths), initial=0)
    n_blocks = -(-stacked // tiles.block_n)
    sizes = OuterSizes(
        STARTS=tuple(accumulate(widths, initial=0)),
        FIRST_PROGRAMS=tuple(firsts),
        NUM_SLICES=layer.num_slices,
        MAX_RANK=layer.max_rank,
        RANK_PAD=rank_pad,
        BLOCK_T=tiles.block_t,
        BLOCK_N=tiles.block_n,
        BLOCK_C=tiles.block_c,
        N_BLOCKS=n_blocks,
        H_LEFT=tiles.h_left,
        BY_COLUMN=of_b,
        SCALED=of_b,
        HAS_TOKEN_SCALES=token_scales,
        EVEN_C=_even(widths, tiles.block_c),
        EVEN_H=_even((layer.max_rank,), 8),
        WIDE=WIDE[dtype],
        PRECISION=options.precision,
        INTERPRETED=INTERPRETED,
    )
    return Outer(sizes, tiles, programs * n_blocks)


def _launch_outer(
    outer: Outer,
    h: torch.Tensor,
    by_place: bool,
    right: torch.Tensor,
    weights: LoRAWeights,
    plan: SgmvPlan,
    wanted: Wanted,
    out: torch.Tensor,
) -> None:
    if not out.numel():
        return
    stacks = stacks_of(weights)
    pieces = wanted.pieces(plan, right.shape[0], outer.tiles.piece, by_place)
    scales = stacks.scalings if plan.token_scales is None else plan.token_scales
    tensors = h, right, stacks.ranks, stacks.scalings, scales
    strides = *h.stride()[:2], right.stride(0)
    _launch_pieces(outer.kernel(pieces), tensors, strides, plan, wanted, pieces, out)


def sum_rows(values: torch.Tensor, plan: SgmvPlan, wanted: Wanted, out: torch.Tensor) -> None:
    """Write the sums of each wanted slot's rows, [wanted slots, n]."""
    if not out.numel():
        return
    columns = values.shape[1]
    piece_tokens = rules.piece_tokens(1, -(-columns // rules.SUM_COLUMNS))
    pieces = wanted.pieces(plan, values.shape[0], piece_tokens)
    kernel = _sum_kernel(columns, pieces)
    _launch_pieces(kernel, (values,), (values.stride(0),), plan, wanted, pieces, out)


def _launch_pieces(
    kernel: SpecializedKernel,
    tensors: tuple[torch.Tensor, ...],
    strides: tuple[int, ...],
    plan: SgmvPlan,
    wanted: Wanted,
    pieces: PieceSizes,
    out: torch.Tensor,
) -> None:
    """Launch a kernel that sums over each wanted slot's tokens, and add up its pieces."""
    target = _contiguous(out)
    # partial sums, two for each window; without pieces none
    shape = (2 * wanted.windows(pieces), *out.shape[1:])
    parts = torch.empty(shape, dtype=torch.float32, device=out.device)
    slots = wanted.listed(plan)
    tensors = *tensors, slots, plan.slot_table, plan.token_table, target, parts
    numbers = wanted.number, wanted.runs, *strides
    kernel.launch(wanted.number + wanted.windows(pieces), Arguments(tensors, (), numbers))
    if pieces.RUNS:
        values = target[0].numel()
        tensors, numbers = (parts, slots, plan.slot_table, target), (*numbers[:2], values)
        adds = _pieces_kernel(values, pieces._replace(BY_PLACE=False))
        adds.launch(wanted.number, Arguments(tensors, (), numbers))
    if target is not out:
        out.copy_(target)


def _sum_kernel(columns: int, pieces: PieceSizes) -> SpecializedKernel:
    sizes = RowSumSizes(columns, BLOCK_T=32, BLOCK_C=rules.SUM_COLUMNS, INTERPRETED=INTERPRETED)
    programs = -(-columns // sizes.BLOCK_C)
    return specialized(sums.sum_kernel, programs, num_stages=3, PIECES=pieces, SIZES=sizes)


def _pieces_kernel(values: int, pieces: PieceSizes) -> SpecializedKernel:
    sizes = PlaneSizes(PLANE_BLOCK, INTERPRETED)
    programs = -(-values // PLANE_BLOCK)
    return specialized(sums.add_pieces_kernel, programs, PIECES=pieces, SIZES=sizes)


def _contiguous(out: torch.Tensor) -> torch.Tensor:
    """Return memory for a result: its own, if kernels can write there."""
    if out.is_contiguous():
        return out
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def sum_planes(planes: torch.Tensor, plan: SgmvPlan | None = None) -> torch.Tensor:
    """Return the sum of planes [planes, num_slices, rows, width] as one plane, in order.

    With a plan, rows are tokens, and those without an adapter become zero.
    """
    out = torch.empty_like(planes[:1])
    values = out.numel()
    if values:
        kernel = planes_kernel(planes.shape[0], planes.shape[3], plan is not None)
        slots = planes if plan is None else plan.token_slots()
        arguments = Arguments((planes, slots, out), (), (values, planes.shape[2]))
        kernel.launch(-(-values // PLANE_BLOCK), arguments)
    return out


def planes_kernel(
    planes: int,
    width: int,  # values of a row
    clears: bool = False,
    block: int = PLANE_BLOCK,
    programmatic: bool = False,
) -> SpecializedKernel:
    """Return the kernel that adds up planes, `block` values a program."""
    sizes = PlaneSizes(block, INTERPRETED, planes, width, clears, programmatic)
    return specialized(sums.add_planes_kernel, 1, programmatic=programmatic, SIZES=sizes)


def _ids_kernel(num_slices: int, max_rank: int, is_all: bool) -> SpecializedKernel:
    rank_pad = padded_rank(max_rank)
    block_r = min(64, rank_pad)
    sizes = EmbeddingSizes(max_rank, block_r, rank_pad // block_r, 32, INTERPRETED)
    pieces = PieceSizes(0, 0, is_all, False)
    programs = num_slices * sizes.N_BLOCKS
    return specialized(sums.add_columns_kernel, programs, PIECES=pieces, SIZES=sizes)


def sum_ids(
    dh: torch.Tensor,
    token_ids: torch.Tensor,
    slots_of_tokens: torch.Tensor,
    weights: LoRAWeights,
    wanted: Wanted,
    out: torch.Tensor,
) -> None:
    """Write dlora_a of an embedding, [wanted slots, num_slices, max_rank, vocabulary]."""
    out.zero_()
    tokens, vocabulary = token_ids.shape[0], weights.in_features
    if not tokens or not out.numel():
        return
    target = out if out.is_contiguous() else _contiguous(out).zero_()
    keys = torch.where(slots_of_tokens < 0, -1, slots_of_tokens * vocabulary + token_ids)
    keys, order = torch.sort(keys, stable=True)  # equal ids of a slot keep the order of tokens
    kernel = _ids_kernel(weights.num_slices, weights.max_rank, wanted.slots is None)
    ranks = stacks_of(weights).ranks
    tensors = (dh, keys, order, ranks if wanted.slots is None else wanted.slots, ranks, target)
    numbers = (tokens, wanted.number, weights.num_slices, vocabulary, *dh.stride()[:2])
    kernel.launch(tokens, Arguments(tensors, (), numbers))
    if target is not out:
        out.copy_(target)


def readable(values: torch.Tensor, narrow: torch.dtype = torch.float32) -> torch.Tensor:
    """Return h or dh as kernels read it: float32 or `narrow`, the last axis contiguous."""
    values = values if values.dtype == narrow else values.float()
    return values if values.stride(-1) == 1 or values.shape[-1] == 1 else values.contiguous()


def _layer_of(weights: LoRAWeights) -> LayerShape:
    return LayerShape(
        weights.num_slices,
        weights.max_rank,
        weights.in_features,
        weights.out_features,
        weights.dtype.itemsize,
    )


def _product_bytes(layer: LayerShape, storage: Storage, widens: bool) -> int:
    """Return the bytes of a value of A or B as it is multiplied."""
    if not storage.kind:
        return layer.item_bytes
    assert storage.wide is not None
    return torch.float32.itemsize if widens else storage.wide.itemsize


def _storage(weights: LoRAWeights, wide: torch.dtype, options: Options) -> Storage:
    kind = storage_kind(weights.dtype, options.programmatic)
    return Storage(kind, weights.scale_block, wide) if kind else PLAIN


def _even(widths: tuple[int, ...], block: int) -> int:
    """Return the block, 16 or 8 if it divides all widths, else 0."""
    return next((size for size in (block, 16, 8) if all(w % size == 0 for w in widths)), 0)
