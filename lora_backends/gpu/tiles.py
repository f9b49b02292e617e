"""Sizes of tiles: what the engines written in Triton share."""

from __future__ import annotations


def power_of_two(value: int) -> int:
    """Return the least power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def padded_rank(max_rank: int) -> int:
    """Return the power of two that holds max_rank, at least 16, the side of a matrix product."""
    return max(16, power_of_two(max_rank))
