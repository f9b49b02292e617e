"""Grids, buffers and arguments of the kernels."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from lora_backends.csgmv import kernels
from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.gpu.boxes import boxes_of, fits_boxes, without_boxes
from lora_backends.gpu.choice import TileChoice
from lora_backends.gpu.config import Problem
from lora_backends.gpu.launching import INTERPRETED, Arguments, Variant
from lora_backends.gpu.ready import EMPTY_ROW, Launched
from lora_backends.gpu.tiles import (
    ExpandTiles,
    ShrinkTiles,
    TileConfig,
    column_programs,
    padded_rank,
)
from lora_backends.weights import LoRAWeights

INVARIANT_BATCH = (64, 8)
"""Tokens and active slots whose sizes a batch-invariant backend takes for every batch."""


Form = Literal["linear", "separate", "embedding"]
"""What h is between both kernels. linear: planes with a row for every place, to be rounded;
separate: with a row for every token, as callers see it, kept in float32; embedding: one plane."""


class Options(NamedTuple):
    """What a backend fixes for all of its launches."""

    precision: str  # of float32 products, as `tl.dot` names it
    programmatic: bool  # launch before the kernel in front has ended
    batch_invariant: bool
    choice: TileChoice  # of tile sizes
    boxes: bool  # whether the device can copy boxes


class Grid(NamedTuple):
    """How much of a plan is launched: all that a graph may meet later, else what is in use."""

    rows: int
    places: int  # rows of h per slice and plane


class Kernel(NamedTuple):
    """A kernel with its constants."""

    variant: Variant
    box: tuple[int, int] | None = None  # columns and ranks of a box of B, if it loads boxes


class Kernels(NamedTuple):
    """Both kernels of a layer for one size of batch, and the planes that the shrink writes."""

    shrink: Kernel
    expand: Kernel
    split_k: int


def grid_of(plan: CsgmvPlan, capturing: bool) -> Grid:
    """Return what to launch."""
    if capturing:
        return Grid(plan.max_groups, plan.max_segments * plan.segment_size)
    segments = plan.num_segments or EMPTY_ROW
    return Grid(plan.num_groups or EMPTY_ROW, segments * plan.segment_size)


def kernels_of(
    weights: LoRAWeights, plan: CsgmvPlan, options: Options, form: Form = "linear"
) -> Kernels:
    """Return both kernels for a layer and a plan: one cached lookup."""
    fixed, a = options.batch_invariant, weights.lora_a
    return _kernels(
        weights.output_slices,
        a.shape[2],
        a.shape[3],
        a.element_size(),
        weights.bias is not None,
        *(INVARIANT_BATCH if fixed else (plan.num_tokens, plan.active_slots)),
        (plan.segment_size, plan.group_size),
        options,
        form,
        options.boxes and fits_boxes(weights.lora_b, plan.max_groups),
    )


@lru_cache(maxsize=16384)
def _kernels(
    output_slices: tuple[int, ...],
    max_rank: int,
    in_features: int,
    item_bytes: int,
    has_bias: bool,
    num_tokens: int,
    active_slots: int,
    row: tuple[int, int],
    options: Options,
    form: Form,
    boxes: bool,
) -> Kernels:
    segment_size, group_size = row
    problem = Problem(
        num_tokens=num_tokens,
        active_slots=active_slots,
        row_tokens=segment_size * group_size,
        num_slices=len(output_slices),
        max_rank=max_rank,
        in_features=in_features,
        out_features=sum(output_slices),
        item_bytes=item_bytes,
    )
    first = second = _chosen(problem, options.choice)
    if form == "separate":
        exact = replace(problem, item_bytes=torch.float32.itemsize)
        second = _chosen(exact, options.choice)
    planes = first.shrink.split_k if form == "linear" else 1
    follows = options if form == "linear" else options._replace(programmatic=False)
    if form == "separate":
        follows = follows._replace(precision="ieee")
    by_token = form == "separate"
    layer = (output_slices, max_rank)
    expand = second.expand if boxes else without_boxes(second.expand)
    return Kernels(
        _shrink(layer, in_features, row, first.shrink, by_token, options),
        _expand(layer, planes, row, expand, has_bias, by_token, follows),
        first.shrink.split_k,
    )


def _chosen(problem: Problem, choice: TileChoice) -> TileConfig:
    tiles: TileConfig = choice.choose_tiles(*astuple(problem))
    return tiles


@lru_cache(maxsize=4096)
def _shrink(
    layer: tuple[tuple[int, ...], int],
    in_features: int,
    row: tuple[int, int],
    tiles: ShrinkTiles,
    by_token: bool,
    options: Options,
) -> Kernel:
    output_slices, max_rank = layer
    num_slices, rank_pad = len(output_slices), padded_rank(max_rank)
    step = tiles.block_k * tiles.split_k
    programs = -(-num_slices * rank_pad // tiles.block_n) * tiles.split_k
    constants = (
        programs,
        num_slices,
        rank_pad,
        *row,  # SEGMENT, GROUP
        tiles.block_n,
        tiles.block_k,
        tiles.warps_k,
        tiles.split_k,
        -(-in_features // step),  # STEPS
        in_features % step == 0,  # EVEN_K
        max_rank % 8 == 0 and not by_token,  # EVEN_R: callers see nothing beyond a rank
        by_token,
        options.precision,
        INTERPRETED,
        options.programmatic,
    )
    how = (tiles.num_warps, tiles.num_stages, options.programmatic)
    return Kernel(Variant(kernels.shrink_kernel, constants, programs, True, *how))


@lru_cache(maxsize=4096)
def _expand(
    layer: tuple[tuple[int, ...], int],
    planes: int,
    row: tuple[int, int],
    tiles: ExpandTiles,
    has_bias: bool,
    by_token: bool,
    options: Options,
) -> Kernel:
    output_slices, max_rank = layer
    starts, firsts, programs, even, flat = column_programs(output_slices, tiles)
    constants = (
        starts,
        firsts,
        programs if flat else 0,
        len(output_slices),
        planes,
        padded_rank(max_rank),
        *row,  # SEGMENT, GROUP
        tiles.block_c,
        tiles.block_r,
        tiles.chunks,
        tiles.num_stages,
        even,
        max_rank % 8 == 0,  # EVEN_R
        has_bias,
        by_token,
        options.precision,
        INTERPRETED,
        options.programmatic,
    )
    how = (tiles.num_warps, 1, options.programmatic)
    box = None if flat else (tiles.block_c, tiles.block_r)
    return Kernel(Variant(kernels.expand_kernel, constants, programs, flat, *how), box)


@lru_cache(maxsize=1024)
def _gather(num_slices: int, max_rank: int, segment_size: int, group_size: int) -> Kernel:
    block_r = min(64, padded_rank(max_rank))
    programs = -(-max_rank // block_r) * num_slices
    constants = (programs, num_slices, segment_size, group_size, block_r)
    return Kernel(Variant(kernels.gather_kernel, constants, programs, True, 4, 1))


def shrink(
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: CsgmvPlan,
    h: torch.Tensor,
    rows: int,
    kernel: Kernel,
) -> Launched:
    """Write the planes of h.

    Args:
        x: [num_tokens, in_features].
        weights: the layer, its tables contiguous.
        plan: the batch.
        h: [planes, num_slices, places or num_tokens, max_rank] float32, contiguous. Nothing is
            written beyond a rank, at places without a token and for tokens without an adapter.
        rows: of the grid, from `grid_of`.
        kernel: from `kernels_of`.
    """
    a = weights.lora_a
    a_slot, a_slice, a_row, _ = a.stride()
    h_plane, h_slice, h_row, _ = h.stride()
    arguments = Arguments(
        (x, a, weights.ranks, *_tables(plan), h),
        (a.shape[3], x.stride(0), a_slot, a_slice, a_row, h_plane, h_slice, h_row),
    )
    kernel.variant.launch(rows, arguments)
    return Launched(kernel.variant, arguments)


def expand(
    h: torch.Tensor,
    weights: LoRAWeights,
    plan: CsgmvPlan,
    y: torch.Tensor,
    rows: int,
    kernel: Kernel,
) -> Launched:
    """Add the LoRA to y.

    Args:
        h: [planes, num_slices, places or num_tokens, max_rank] float32, the last axis contiguous.
        weights: the layer, its tables contiguous.
        plan: the batch.
        y: [num_tokens, out_features], changed in place.
        rows: of the grid.
        kernel: from `kernels_of`. A programmatic one is launched right behind the kernel that
            writes h, which has waited for all kernels in front of itself.
    """
    b, bias = weights.lora_b, weights.bias
    h_plane, h_slice, h_row, _ = h.stride()
    b_slot, b_column, _ = b.stride()
    added, bias_slot = (b, 0) if bias is None else (bias, bias.stride(0))  # b: not read
    ranks, scalings = weights.ranks, weights.scalings
    arguments = Arguments(
        (h, b, y, added, ranks, scalings, *_tables(plan)),
        (h_plane, h_slice, h_row, b_slot, b_column, y.stride(0), bias_slot),
        (None if kernel.box is None else boxes_of(b, *kernel.box),),
    )
    kernel.variant.launch(rows, arguments)
    return Launched(kernel.variant, arguments)


def gather(
    token_ids: torch.Tensor, weights: LoRAWeights, plan: CsgmvPlan, h: torch.Tensor, rows: int
) -> None:
    """Write h for ``x = one_hot(token_ids)``: [1, num_slices, places, max_rank] float32."""
    a = weights.lora_a
    a_slot, a_slice, a_row, _ = a.stride()
    _, h_slice, h_row, _ = h.stride()
    kernel = _gather(weights.num_slices, weights.max_rank, plan.segment_size, plan.group_size)
    arguments = Arguments(
        (token_ids, a, weights.ranks, *_tables(plan), h),
        (a_slot, a_slice, a_row, h_slice, h_row),
    )
    kernel.variant.launch(rows, arguments)


def _tables(plan: CsgmvPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return plan.segment_slots, plan.segment_tokens, plan.group_starts
