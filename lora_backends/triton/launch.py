"""Grids, buffers and arguments of the kernels."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from lora_backends.triton import kernels
from lora_backends.triton.config import ExpandTiles, ShrinkTiles, padded_rank
from lora_backends.triton.plan import TritonPlan
from lora_backends.weights import LoRAWeights

INTERPRETED = isinstance(kernels.shrink_kernel, InterpretedFunction)

_compiled: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that Triton specializes on; its own look-up takes 20 us a launch."""


def grid_tiles(plan: TritonPlan) -> int:
    """Return the tiles to launch: all that a graph may meet later, else those in use."""
    if plan.packed.is_cuda and torch.cuda.is_current_stream_capturing():
        return plan.max_tiles
    return plan.num_tiles


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
) -> None:
    """Launch a kernel on the device of its first argument, a tensor."""
    if INTERPRETED:
        kernel[grid](*arguments, *constants)
        return None
    device = arguments[0].device
    if _several_devices() and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, arguments, constants, options)
    key = (kernel.fn, device.index, constants, options, *map(_specialization, arguments))
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel[grid](*arguments, *constants, **dict(options))
    else:
        found[(*grid, 1)](*arguments, *constants)
    return None


def _specialization(argument: torch.Tensor | int) -> Any:
    """Return what Triton compiles for: dtype and alignment, or 1, alignment and width."""
    if isinstance(argument, int):
        return argument if argument == 1 else (argument & 15 == 0, argument > 0x7FFFFFFF)
    return argument.dtype, argument.data_ptr() & 15 == 0


@lru_cache(maxsize=1)
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


@lru_cache(maxsize=1024)
def _options(num_warps: int, num_stages: int, programmatic: bool) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if programmatic:
        options["launch_pdl"] = True
    return tuple(options.items())


@lru_cache(maxsize=1024)
def _columns(output_slices: tuple[int, ...], stride: int) -> tuple[tuple[int, ...], ...]:
    """Return where every slice starts, and the first program of every slice and their number."""
    starts = accumulate(output_slices, initial=0)
    programs = accumulate((-(-width // stride) for width in output_slices), initial=0)
    return tuple(starts), tuple(programs)


def shrink(
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: TritonPlan,
    h: torch.Tensor,
    num_tiles: int,
    tiles: ShrinkTiles,
    precision: str,
    programmatic: bool,
) -> None:
    """Write the planes of h.

    Args:
        x: [num_tokens, in_features].
        weights: the layer.
        plan: the batch.
        h: [split_k, num_slices, num_tokens, max_rank] float32, contiguous. Nothing is written
            beyond a rank and in rows without an adapter.
        num_tiles: tiles to launch, from `grid_tiles`.
        tiles: sizes.
        precision: of float32 products, as `tl.dot` names it.
        programmatic: launch before the kernel in front has ended.
    """
    a = weights.lora_a
    num_slices, max_rank, in_features = a.shape[1:]
    rank_pad = padded_rank(max_rank)
    split_k = h.shape[0]
    step = tiles.block_k * split_k
    blocks = -(-num_slices * rank_pad // tiles.block_n)
    arguments = (
        x,
        a,
        weights.ranks.contiguous(),
        plan.tile_slots,
        plan.tile_tokens,
        h,
        plan.num_tokens,
        in_features,
        max_rank,
        x.stride(0),
        a.stride(0),
        a.stride(1),
        a.stride(2),
    )
    constants = (
        num_slices,
        rank_pad,
        plan.block_tokens,
        tiles.block_n,
        tiles.block_k,
        tiles.warps_k,
        split_k,
        -(-in_features // step),  # STEPS
        in_features % step == 0,  # EVEN_K
        max_rank % 8 == 0,  # EVEN_R
        precision,
        INTERPRETED,  # WIDEN
        programmatic,
    )
    options = _options(tiles.num_warps, tiles.num_stages, programmatic)
    grid = (blocks * split_k, num_tiles)
    _launch(kernels.shrink_kernel, grid, arguments, constants, options)


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
) -> None:
    """Add the LoRA to y.

    Args:
        h: [planes, num_slices, num_tokens, max_rank] float32, the last axis contiguous; planes
            follow each other.
        weights: the layer.
        plan: the batch.
        y: [num_tokens, out_features], changed in place.
        num_tiles: tiles to launch, from `grid_tiles`.
        tiles: sizes.
        precision: of float32 products.
        exact_h: keep h in float32; else it is rounded to the dtype of the weights.
        programmatic: launch before the kernel in front, which has to be `shrink`, has ended.
    """
    b, bias = weights.lora_b, weights.bias
    stride = tiles.block_c * tiles.chunks
    starts, programs = _columns(weights.output_slices, stride)
    arguments = (
        h,
        b,
        y,
        y if bias is None else bias,
        weights.ranks.contiguous(),
        weights.scalings.contiguous(),
        plan.tile_slots,
        plan.tile_tokens,
        plan.num_tokens,
        weights.max_rank,
        h.stride(1),
        h.stride(2),
        b.stride(0),
        b.stride(1),
        y.stride(0),
        0 if bias is None else bias.stride(0),
    )
    constants = (
        starts,
        programs[:-1],  # FIRST_PROGRAMS
        weights.num_slices,
        h.shape[0],  # SPLIT_K
        padded_rank(weights.max_rank),
        plan.block_tokens,
        tiles.block_c,
        tiles.block_r,
        tiles.chunks,
        all(width % stride == 0 for width in weights.output_slices),  # EVEN_C
        weights.max_rank % 8 == 0,  # EVEN_R
        bias is not None,  # HAS_BIAS
        exact_h,
        precision,
        INTERPRETED,  # WIDEN
        programmatic,
    )
    options = _options(tiles.num_warps, 1, programmatic)
    grid = (programs[-1], num_tiles)
    _launch(kernels.expand_kernel, grid, arguments, constants, options)


def gather(
    token_ids: torch.Tensor,
    weights: LoRAWeights,
    plan: TritonPlan,
    h: torch.Tensor,
    num_tiles: int,
) -> None:
    """Write h for ``x = one_hot(token_ids)``: [1, num_slices, num_tokens, max_rank] float32."""
    a = weights.lora_a
    block_r = min(64, padded_rank(weights.max_rank))
    blocks = -(-weights.max_rank // block_r) * weights.num_slices
    arguments = (
        token_ids,
        a,
        weights.ranks.contiguous(),
        plan.tile_slots,
        plan.tile_tokens,
        h,
        plan.num_tokens,
        weights.max_rank,
        a.stride(0),
        a.stride(1),
        a.stride(2),
    )
    constants = (weights.num_slices, plan.block_tokens, block_r)
    grid = (blocks, num_tiles)
    _launch(kernels.gather_kernel, grid, arguments, constants, _options(4, 1, False))
