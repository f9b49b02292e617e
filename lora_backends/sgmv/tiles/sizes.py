"""Tile sizes of the shrink and expand kernels, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

MIN_DOT = 16
"""The smallest side of a `tl.dot`: no tile size is below it."""

MAX_BLOCK_R = 64
"""The most ranks that one product of the expand kernel takes."""

TILE_TOKENS = (16, 32, 64)
"""Tokens per tile that the rules choose from."""

_SHARED_BYTES = 224 * 1024  # per program, on the devices with the most


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch that tile sizes depend on."""

    num_tokens: int
    active_slots: int  # slots that have tokens
    tile_tokens: int  # tokens per tile: of one row of the grid

    @property
    def rows(self) -> int:
        """Rows of the grid, approximately."""
        return max(self.active_slots, self.num_tokens // self.tile_tokens, 1)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that tile sizes depend on."""

    num_slices: int
    max_rank: int
    in_features: int
    out_features: int
    item_bytes: int  # of a weight and of x: 2, or 4 for float32; 1: 8-bit weights and 16-bit x

    @property
    def stacked(self) -> int:
        """Rows of A over all slices, each slice padded to a power of two."""
        return self.num_slices * padded_rank(self.max_rank)


@dataclass(frozen=True)
class ShrinkTiles:
    """Sizes of the shrink kernel."""

    block_n: int  # rows of A per program, all slices stacked; a power of two >= 16
    block_k: int  # inputs per loop step; a power of two >= 16 * warps_k
    split_k: int  # parts of the inputs; each part writes its own plane of h
    warps_k: int = 1  # parts of a step, one for each group of warps; 1: all warps share a step;
    # 0: token by token, without a matrix product
    num_warps: int = 4
    num_stages: int = 3  # loop steps whose loads are in flight together


@dataclass(frozen=True)
class ExpandTiles:
    """Sizes of the expand kernel."""

    block_c: int  # columns of y per step; a power of two >= 16
    block_r: int  # ranks per product; a power of two >= 16
    chunks: int = 1  # steps per program; 1 where block_r is narrower than the padded rank
    num_warps: int = 4
    num_stages: int = 1  # above 1: TMA loads of B in flight together, where B allows TMA; 0: token
    # by token, without a matrix product, all ranks at once whatever block_r


@dataclass(frozen=True)
class TileConfig:
    """The sizes of both kernels for one layer and batch."""

    shrink: ShrinkTiles
    expand: ExpandTiles


class ColumnPrograms(NamedTuple):
    """The grid of an expand kernel over the columns of y: some programs per slice."""

    starts: tuple[int, ...]  # first column of every slice, then out_features
    firsts: tuple[int, ...]  # first program of every slice
    programs: int  # of all slices
    even: bool  # whether a program's columns divide every slice


def column_programs(output_slices: tuple[int, ...], tiles: ExpandTiles) -> ColumnPrograms:
    """Return the programs of a layer: a ragged grid over slices and blocks of columns.

    >>> column_programs((256, 64), ExpandTiles(block_c=64, block_r=16, chunks=2))
    ColumnPrograms(starts=(0, 256, 320), firsts=(0, 2), programs=3, even=False)
    """
    columns = tiles.block_c * tiles.chunks
    *firsts, programs = accumulate((-(-width // columns) for width in output_slices), initial=0)
    return ColumnPrograms(
        starts=tuple(accumulate(output_slices, initial=0)),
        firsts=tuple(firsts),
        programs=programs,
        even=all(width % columns == 0 for width in output_slices),
    )


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def padded_rank(max_rank: int) -> int:
    """Return the smallest power of two that holds max_rank and is at least `MIN_DOT`."""
    return max(MIN_DOT, power_of_two(max_rank))


def tile_faults(tiles: TileConfig, tile_tokens: int, layer: LayerShape) -> list[str]:
    """Return why the kernels cannot run these sizes or would compute wrong results; [] if neither.

    Every size that a file gives passes through here before it runs.
    """
    shrink, expand = tiles.shrink, tiles.expand
    sizes = {
        "shrink.block_n": (shrink.block_n, MIN_DOT, 256),
        "shrink.block_k": (shrink.block_k, MIN_DOT, 1024),
        "shrink.warps_k": (shrink.warps_k or 1, 1, 8),
        "shrink.num_warps": (shrink.num_warps, 1, 16),
        "expand.block_c": (expand.block_c, MIN_DOT, 512),
        "expand.block_r": (expand.block_r, MIN_DOT, MAX_BLOCK_R),
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
    for name, stages, least in (("shrink", shrink.num_stages, 1), ("expand", expand.num_stages, 0)):
        if not least <= stages <= 8:
            faults.append(f"{name}.num_stages is {stages}, not {least} to 8")
    return faults or _joint_faults(shrink, expand, tile_tokens, layer)


def _joint_faults(
    shrink: ShrinkTiles, expand: ExpandTiles, tile_tokens: int, layer: LayerShape
) -> list[str]:
    """Return the faults of sizes that are allowed one by one, but not together."""
    rank_pad, faults = padded_rank(layer.max_rank), []
    if shrink.block_k < MIN_DOT * shrink.warps_k:
        faults.append("shrink.block_k is less than 16 for each of shrink.warps_k")
    if shrink.num_warps < shrink.warps_k:
        faults.append("shrink.num_warps is less than shrink.warps_k")
    if expand.block_r > rank_pad:
        faults.append(f"expand.block_r is above the padded rank {rank_pad}")
    if expand.chunks > 1 and expand.block_r < rank_pad:
        faults.append("expand.chunks is above 1 where expand.block_r is narrower than the rank")
    if expand.num_stages > 1 and (expand.chunks == 1 or layer.item_bytes > 2):
        faults.append("expand.num_stages is above 1 for one step, or for weights of 32 bits")
    size, x_size = layer.item_bytes, max(2, layer.item_bytes)
    loads = expand.num_stages * expand.block_c * (expand.block_r * size + tile_tokens * x_size)
    if expand.num_stages > 1 and loads > _SHARED_BYTES:
        faults.append(f"the expand takes {loads} bytes of shared memory")
    stage = shrink.block_k * (shrink.block_n * size + tile_tokens * x_size)
    if shrink.warps_k > 0 and stage * shrink.num_stages > _SHARED_BYTES:
        faults.append(f"the shrink takes {stage * shrink.num_stages} bytes of shared memory")
    return faults
