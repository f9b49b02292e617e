"""Sizes of tiles: what the engines written in Triton share."""

from __future__ import annotations

from dataclasses import dataclass

WIDEST_RANK_BLOCK = 64
"""Ranks that one product of the expand kernel takes at most."""


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


@dataclass(frozen=True)
class TileConfig:
    """Everything that a launch does not take from its tensors."""

    shrink: ShrinkTiles
    expand: ExpandTiles


def power_of_two(value: int) -> int:
    """Return the least power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def padded_rank(max_rank: int) -> int:
    """Return the power of two that holds max_rank, at least 16, the side of a matrix product."""
    return max(16, power_of_two(max_rank))
