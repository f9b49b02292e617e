"""Grids, buffers and arguments of the kernels."""

from __future__ import annotations

from functools import lru_cache

import torch

from lora_backends.gpu.boxes import boxes_of, fits_boxes, without_boxes
from lora_backends.gpu.launching import INTERPRETED, Arguments, Variant
from lora_backends.gpu.ready import Launched
from lora_backends.gpu.tiles import ExpandTiles, ShrinkTiles, column_programs, padded_rank
from lora_backends.triton import kernels
from lora_backends.triton.plan import TritonPlan
from lora_backends.weights import LoRAWeights


def grid_tiles(plan: TritonPlan, capturing: bool) -> int:
    """Return the tiles to launch: all that a graph may meet later, else those in use."""
    return plan.max_tiles if capturing else plan.num_tiles


def shrink(
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: TritonPlan,
    h: torch.Tensor,
    num_tiles: int,
    tiles: ShrinkTiles,
    precision: str,
    programmatic: bool,
    exact: bool = False,
) -> Launched:
    """Write the planes of h.

    Args:
        x: [num_tokens, in_features].
        weights: the layer, its tables contiguous.
        plan: the batch.
        h: [split_k, num_slices, num_tokens, max_rank] float32, contiguous. Nothing is written
            in rows without an adapter, and beyond a rank at most the rest of a group of 8.
        num_tiles: tiles to launch, from `grid_tiles`.
        tiles: sizes.
        precision: of float32 products, as `tl.dot` names it.
        programmatic: launch before the kernel in front has ended.
        exact: write nothing beyond a rank.
    """
    a = weights.lora_a
    _, num_slices, max_rank, in_features = a.shape
    variant = _shrink_variant(
        num_slices, max_rank, in_features, plan.block_tokens, tiles, precision, programmatic, exact
    )
    a_slot, a_slice, a_row, _ = a.stride()
    arguments = Arguments(
        (x, a, weights.ranks, plan.tile_slots, plan.tile_tokens, h),
        (plan.num_tokens, in_features, max_rank, x.stride(0), a_slot, a_slice, a_row),
    )
    variant.launch(num_tiles, arguments)
    return Launched(variant, arguments)


@lru_cache(maxsize=4096)
def _shrink_variant(
    num_slices: int,
    max_rank: int,
    in_features: int,
    block_tokens: int,
    tiles: ShrinkTiles,
    precision: str,
    programmatic: bool,
    exact: bool,
) -> Variant:
    rank_pad = padded_rank(max_rank)
    step = tiles.block_k * tiles.split_k
    programs = -(-num_slices * rank_pad // tiles.block_n) * tiles.split_k
    constants = (
        programs,
        num_slices,
        rank_pad,
        block_tokens,
        tiles.block_n,
        tiles.block_k,
        tiles.warps_k,
        tiles.split_k,
        -(-in_features // step),  # STEPS
        in_features % step == 0,  # EVEN_K
        max_rank % 8 == 0 and not exact,  # EVEN_R
        precision,
        INTERPRETED,
        programmatic,
    )
    options = (tiles.num_warps, tiles.num_stages, programmatic)
    return Variant(kernels.shrink_kernel, constants, programs, True, *options)


def expand(
    h: torch.Tensor,
    weights: LoRAWeights,
    plan: TritonPlan,
    y: torch.Tensor,
    num_tiles: int,
    tiles: ExpandTiles,
    precision: str,
    exact_h: bool,
    programmatic: bool,
    boxes: bool,
) -> Launched:
    """Add the LoRA to y.

    Args:
        h: [planes, num_slices, num_tokens, max_rank] float32, the last axis contiguous; planes
            follow each other.
        weights: the layer, its tables contiguous.
        plan: the batch.
        y: [num_tokens, out_features], changed in place.
        num_tiles: tiles to launch, from `grid_tiles`.
        tiles: sizes.
        precision: of float32 products.
        exact_h: keep h in float32; else it is rounded to the dtype of the weights.
        programmatic: launch before the kernel in front, which has to be `shrink`, has ended.
        boxes: whether the device can copy boxes.
    """
    if not (boxes and fits_boxes(weights.lora_b, plan.max_tiles)):
        tiles = without_boxes(tiles)
    b, bias = weights.lora_b, weights.bias
    max_rank = b.shape[2]
    planes, _, _, _ = h.shape
    _, h_slice, h_token, _ = h.stride()
    b_slot, b_column, _ = b.stride()
    variant = _expand_variant(
        weights.output_slices,
        max_rank,
        planes,
        plan.block_tokens,
        tiles,
        bias is not None,
        exact_h,
        precision,
        programmatic,
    )
    ranks, scalings = weights.ranks, weights.scalings
    added = b if bias is None else bias  # not read without a bias
    bias_slot = 0 if bias is None else bias.stride(0)
    arguments = Arguments(
        (h, b, y, added, ranks, scalings, plan.tile_slots, plan.tile_tokens),
        (plan.num_tokens, max_rank, h_slice, h_token, b_slot, b_column, y.stride(0), bias_slot),
        (boxes_of(b, tiles.block_c, tiles.block_r) if tiles.num_stages > 1 else None,),
    )
    variant.launch(num_tiles, arguments)
    return Launched(variant, arguments)


@lru_cache(maxsize=4096)
def _expand_variant(
    output_slices: tuple[int, ...],
    max_rank: int,
    planes: int,
    block_tokens: int,
    tiles: ExpandTiles,
    has_bias: bool,
    exact_h: bool,
    precision: str,
    programmatic: bool,
) -> Variant:
    starts, firsts, programs, even, flat = column_programs(output_slices, tiles)
    constants = (
        starts,
        firsts,
        programs if flat else 0,
        len(output_slices),
        planes,  # SPLIT_K
        padded_rank(max_rank),
        block_tokens,
        tiles.block_c,
        tiles.block_r,
        tiles.chunks,
        tiles.num_stages,
        even,
        max_rank % 8 == 0,  # EVEN_R
        has_bias,
        exact_h,
        precision,
        INTERPRETED,
        programmatic,
    )
    options = (tiles.num_warps, 1, programmatic)
    return Variant(kernels.expand_kernel, constants, programs, flat, *options)


def gather(
    token_ids: torch.Tensor,
    weights: LoRAWeights,
    plan: TritonPlan,
    h: torch.Tensor,
    num_tiles: int,
) -> None:
    """Write h for ``x = one_hot(token_ids)``: [1, num_slices, num_tokens, max_rank] float32."""
    a, max_rank = weights.lora_a, weights.max_rank
    block_r = min(64, padded_rank(max_rank))
    blocks = -(-max_rank // block_r) * weights.num_slices
    a_slot, a_slice, a_row, _ = a.stride()
    arguments = Arguments(
        (token_ids, a, weights.ranks, plan.tile_slots, plan.tile_tokens, h),
        (plan.num_tokens, max_rank, a_slot, a_slice, a_row),
    )
    variant = _gather_variant(blocks, weights.num_slices, plan.block_tokens, block_r)
    variant.launch(num_tiles, arguments)


@lru_cache(maxsize=1024)
def _gather_variant(programs: int, num_slices: int, block_tokens: int, block_r: int) -> Variant:
    constants = (programs, num_slices, block_tokens, block_r)
    return Variant(kernels.gather_kernel, constants, programs, True, 4, 1)
