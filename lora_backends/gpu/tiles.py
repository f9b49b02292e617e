"""Sizes of tiles: what the engines written in Triton share."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

NARROWEST = 16
"""The side of a matrix product: no size is below it."""

WIDEST_RANK_BLOCK = 64
"""Ranks that one product of the expand kernel takes at most."""

_SHARED_BYTES = 224 * 1024  # of a program, on the devices that have most


@dataclass(frozen=True)
class ShrinkTiles:
    """Sizes of the shrink kernel."""

    block_n: int  # rows of A per program, all slices stacked; a power of two >= 16
    block_k: int  # inputs per step; a power of two >= 16 * warps_k
    split_k: int  # parts of the inputs, each with its own plane of h
    warps_k: int = 1  # parts of a step that warps share out; 1: they share out rows and columns
    num_warps: int = 4
    num_stages: int = 3  # steps whose loads are in flight together


@dataclass(frozen=True)
class ExpandTiles:
    """Sizes of the expand kernel."""

    block_c: int  # columns of y per step; a power of two >= 16
    block_r: int  # ranks per product; a power of two >= 16
    chunks: int = 1  # steps per program; 1 where block_r is narrower than the padded rank
    num_warps: int = 4
    num_stages: int = 1  # above 1: boxes of B in flight together, where B can be copied by boxes


@dataclass(frozen=True)
class TileConfig:
    """Everything that a launch does not take from its tensors."""

    shrink: ShrinkTiles
    expand: ExpandTiles


class ColumnPrograms(NamedTuple):
    """How the programs of an expand kernel share out the columns of a row of the grid."""

    starts: tuple[int, ...]  # first column of every slice, and the end of the last one
    firsts: tuple[int, ...]  # first program of every slice
    programs: int
    even: bool  # whether every slice is whole blocks
    flat: bool  # whether the grid has one axis


def column_programs(output_slices: tuple[int, ...], tiles: ExpandTiles) -> ColumnPrograms:
    """Return the programs of a layer: a ragged grid over slices and blocks of columns.

    >>> column_programs((256, 64), ExpandTiles(block_c=64, block_r=16, chunks=2))
    ColumnPrograms(starts=(0, 256, 320), firsts=(0, 2), programs=3, even=False, flat=True)
    """
    columns = tiles.block_c * tiles.chunks
    *firsts, programs = accumulate((-(-width // columns) for width in output_slices), initial=0)
    return ColumnPrograms(
        starts=tuple(accumulate(output_slices, initial=0)),
        firsts=tuple(firsts),
        programs=programs,
        even=all(width % columns == 0 for width in output_slices),
        flat=tiles.num_stages == 1,  # boxes take up to 24 registers more in a grid of one axis
    )


def power_of_two(value: int) -> int:
    """Return the least power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def padded_rank(max_rank: int) -> int:
    """Return the power of two that holds max_rank, at least 16, the side of a matrix product."""
    return max(NARROWEST, power_of_two(max_rank))


def tile_faults(
    tiles: TileConfig,
    tile_tokens: int,
    num_slices: int,
    max_rank: int,
    in_features: int,
    out_features: int,
    item_bytes: int,
) -> list[str]:
    """Return why the kernels cannot take these sizes, or would give wrong results; [] if neither.

    Whatever stands in a file passes through here before it is run.

    Args:
        tiles: the sizes.
        tile_tokens: of the plan: tokens that a program takes.
        num_slices: of the layer.
        max_rank: of the layer's stack.
        in_features: of the layer.
        out_features: of the layer.
        item_bytes: of one weight.

    Returns:
        Reasons.
    """
    shrink, expand = tiles.shrink, tiles.expand
    sizes = {
        "shrink.block_n": (shrink.block_n, NARROWEST, 256),
        "shrink.block_k": (shrink.block_k, NARROWEST, 1024),
        "shrink.warps_k": (shrink.warps_k, 1, 8),
        "shrink.num_warps": (shrink.num_warps, 1, 16),
        "expand.block_c": (expand.block_c, NARROWEST, 512),
        "expand.block_r": (expand.block_r, NARROWEST, WIDEST_RANK_BLOCK),
        "expand.chunks": (expand.chunks, 1, 16),
        "expand.num_warps": (expand.num_warps, 1, 16),
    }
    faults = [
        f"{name} is {size}, not a power of two from {least} to {most}"
        for name, (size, least, most) in sizes.items()
        if not (least <= size <= most and size & (size - 1) == 0)
    ]
    if not 1 <= shrink.split_k <= 64:
        faults.append(f"shrink.split_k is {shrink.split_k}, not 1 to 64")
    if not 1 <= shrink.num_stages <= 8:
        faults.append(f"shrink.num_stages is {shrink.num_stages}, not 1 to 8")
    if faults:
        return faults
    rank_pad = padded_rank(max_rank)
    if shrink.block_k < NARROWEST * shrink.warps_k:
        faults.append("shrink.block_k is less than 16 for each of shrink.warps_k")
    if shrink.num_warps < shrink.warps_k:
        faults.append("shrink.num_warps is less than shrink.warps_k")
    if expand.block_r > rank_pad:
        faults.append(f"expand.block_r is above the padded rank {rank_pad}")
    if expand.chunks > 1 and expand.block_r < rank_pad:
        faults.append("expand.chunks is above 1 where expand.block_r is narrower than the rank")
    if not 1 <= expand.num_stages <= 8:
        faults.append(f"expand.num_stages is {expand.num_stages}, not 1 to 8")
    if expand.num_stages > 1 and (expand.chunks == 1 or item_bytes != 2):
        faults.append("expand.num_stages is above 1 for one step, or for weights of 32 bits")
    boxes = expand.num_stages * expand.block_c * (expand.block_r + tile_tokens) * item_bytes
    if expand.num_stages > 1 and boxes > _SHARED_BYTES:
        faults.append(f"the expand takes {boxes} bytes of shared memory")
    stage = shrink.block_k * (shrink.block_n + tile_tokens) * item_bytes
    if stage * shrink.num_stages > _SHARED_BYTES:
        faults.append(f"the shrink takes {stage * shrink.num_stages} bytes of shared memory")
    return faults
