"""Tile sizes of the shrink and expand kernels, and the checks on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from lora_backends.sgmv.tiles.gpu import H200, Gpu

MIN_DOT = 16
"""The smallest side of a `tl.dot`: no tile size is below it."""

MAX_BLOCK_R = 64
"""The most ranks that one product of the expand kernel takes."""

TILE_TOKENS = (16, 32, 64)
"""Tokens per tile that the rules choose from."""

TMA_BYTES = 192 * 1024
"""Shared memory that any expand of the rules with TMA fits in: the largest has B of 8 bits and y of
float32. A GPU with less expands without TMA."""


@dataclass(frozen=True)
class BatchShape:
    """The sizes of a batch that tile sizes depend on."""

    num_tokens: int
    active_slots: int  # slots that have tokens
    tile_tokens: int  # tokens per tile: of one row of the grid

    @property
    def rows(self) -> int:
        """Rows of the grid if tokens are spread evenly over the slots."""
        slots = max(1, self.active_slots)
        least, more = divmod(self.num_tokens, slots)  # tokens of a slot; slots that have one more
        of_least, of_more = (max(1, -(-n // self.tile_tokens)) for n in (least, least + 1))
        return (slots - more) * of_least + more * of_more


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


def h_width(max_rank: int) -> int:
    """Return the values of a row of h in memory.

    Rows of 8, 24 or 40 ranks are padded to a multiple of 16: Triton compiles loads of 16 bytes only
    for strides that are such multiples, and ptxas orders narrower loads one after the other.

    >>> h_width(8), h_width(16), h_width(24), h_width(5)
    (16, 16, 32, 5)
    """
    return -(-max_rank // 16) * 16 if max_rank % 8 == 0 else max_rank


def row_ranks(max_rank: int) -> int:
    """Return the ranks that a kernel without a matrix product loads per row of B: 8 or more."""
    return max(8, power_of_two(max_rank))


def has_whole_rows(max_rank: int) -> bool:
    """Return whether a kernel without a matrix product loads rows of B without padding."""
    return max_rank == row_ranks(max_rank)


def parts(in_features: int, block_k: int, most: int) -> int:
    """Return the most parts of the inputs, up to `most`, wasting at most an eighth of the steps.

    The last parts may be empty: 56 steps in 15 parts of 4 fill 14 of them.

    >>> parts(2048, 128, 16), parts(17408, 1024, 8), parts(77, 128, 4), parts(14336, 256, 16)
    (16, 6, 1, 15)
    """
    steps = -(-in_features // block_k)
    for split in range(min(most, steps), 1, -1):
        if part_waste(in_features, block_k, split) <= 9 / 8:
            return split
    return 1


def part_waste(in_features: int, block_k: int, split: int) -> float:
    """Return the steps that equal parts take over the steps that the inputs have.

    >>> part_waste(14336, 256, 28), part_waste(14336, 256, 21)
    (1.0, 1.125)
    """
    steps = -(-in_features // block_k)
    return -(-steps // split) * split / steps


def shrink_bytes(
    shrink: ShrinkTiles, tile_tokens: int, item_bytes: int, scaled: bool = False
) -> int:
    """Return the most shared memory that a shrink takes, without some bytes for barriers.

    `item_bytes` is as in `LayerShape`; 1 counts a block of A widened to 16 bits, too. `scaled`: A
    has 8 bits and a scale per value, both loaded, and the product is float32.
    """
    block_n, x_bytes = shrink.block_n, max(2, item_bytes)
    if shrink.warps_k == 0:  # A goes to registers, a row of x and sums of warps through here
        return 4 * (shrink.block_k + shrink.num_warps * block_n)
    if scaled:
        step = 5 * block_n + tile_tokens * x_bytes
        loads, operands = (shrink.num_stages - 1) * step, 4 * (block_n + tile_tokens)
    else:
        loads = shrink.num_stages * (block_n * item_bytes + tile_tokens * x_bytes)
        operands = block_n if item_bytes == 1 else 0
    return shrink.block_k * (loads + operands)


def fitting(
    shrink: ShrinkTiles, tile_tokens: int, item_bytes: int, gpu: Gpu, scaled: bool = False
) -> ShrinkTiles:
    """Return sizes that fit on a GPU.

    They have fewer loads in flight, then shorter steps, fewer groups of warps, and narrower blocks.
    """
    while shrink_bytes(shrink, tile_tokens, item_bytes, scaled) > gpu.shared_bytes:
        if shrink.num_stages > 2:
            shrink = replace(shrink, num_stages=shrink.num_stages - 1)
        elif shrink.block_k > MIN_DOT * shrink.warps_k:
            shrink = replace(shrink, block_k=shrink.block_k // 2)
        elif shrink.warps_k > 1:
            shrink = replace(shrink, warps_k=shrink.warps_k // 2)
        elif shrink.block_n > MIN_DOT:
            shrink = replace(shrink, block_n=shrink.block_n // 2)
        else:
            break  # the launch will name the bytes that it lacks
    return shrink


def tile_faults(
    tiles: TileConfig, tile_tokens: int, layer: LayerShape, gpu: Gpu = H200
) -> list[str]:
    """Return why the kernels cannot run these sizes or would compute wrong results, or []."""
    # every size that a file gives passes through here before it runs
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
    return faults or _joint_faults(shrink, expand, tile_tokens, layer, gpu)


def _joint_faults(
    shrink: ShrinkTiles, expand: ExpandTiles, tile_tokens: int, layer: LayerShape, gpu: Gpu
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
    bytes_of = {
        "shrink": shrink_bytes(shrink, tile_tokens, size),
        "expand": loads if expand.num_stages > 1 else 0,
    }
    faults += [
        f"loads of the {name} take {taken} bytes of shared memory; the GPU has {gpu.shared_bytes}"
        for name, taken in bytes_of.items()
        if taken > gpu.shared_bytes
    ]
    return faults
