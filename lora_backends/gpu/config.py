"""Tile sizes: pure functions of shapes, measured on one H200 in bfloat16.

The rules are what the measured optima of the layers of Llama-3-8B have in common, for both engines;
docs/explanation/triton-backend.md has the figures. Any result is correct on any shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from lora_backends.gpu.tiles import (
    WIDEST_RANK_BLOCK,
    ExpandTiles,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    power_of_two,
)

_PREFILL_TOKENS = 512
_MULTIPROCESSORS = 132  # of an H200
_MANY_ROWS = 32  # about a quarter of an H200's multiprocessors
_LONG_INPUT = 8192  # from which on more parts pay
_WIDE_OUTPUT = 16384  # from which on every further plane of h is read too often
_SHARED_BYTES = 128 * 1024  # of shared memory for the loads in flight


@dataclass(frozen=True)
class Problem:
    """What tile sizes are chosen from: a layer, and the sizes of a batch."""

    num_tokens: int
    active_slots: int  # slots that have tokens
    row_tokens: int  # tokens per row of the grid: of a tile, or of a group of segments
    num_slices: int
    max_rank: int
    in_features: int
    out_features: int
    item_bytes: int  # of one weight; 4 for float32

    @property
    def rows(self) -> int:
        """Rows of the grid, about."""
        return max(self.active_slots, self.num_tokens // self.row_tokens, 1)

    @property
    def stacked(self) -> int:
        """Rows of A, all slices, each padded to a power of two."""
        return self.num_slices * padded_rank(self.max_rank)


def row_tokens(num_tokens: int, active_slots: int) -> int:
    """Return the tokens that a row of the grid is best made of, 16 to 64.

    As many as an active slot has on average: rows of 16 waste least on slots with few tokens,
    wider ones read A and B less often.
    """
    average = num_tokens // max(1, active_slots)
    if num_tokens < _PREFILL_TOKENS:
        return 32 if average >= 32 and num_tokens > _MANY_ROWS else 16
    return 64 if average >= 64 else 32 if average >= 32 else 16


def choose_tiles(
    num_tokens: int,
    active_slots: int,
    row_tokens: int,
    num_slices: int,
    max_rank: int,
    in_features: int,
    out_features: int,
    item_bytes: int,
) -> TileConfig:
    """Return the sizes for one layer and batch; arguments as of `Problem`."""
    layer = (num_slices, max_rank, in_features, out_features, item_bytes)
    return tiles_for(Problem(num_tokens, active_slots, row_tokens, *layer))


@lru_cache(maxsize=4096)
def tiles_for(problem: Problem) -> TileConfig:
    """Return the sizes for one layer and batch."""
    if problem.num_tokens < _PREFILL_TOKENS:
        shrink = _shrink_decode(problem)
    elif problem.row_tokens == 16:
        shrink = _shrink_many_adapters(problem)
    else:
        shrink = _shrink_prefill(problem)
    return TileConfig(fitting(shrink, problem), _expand(problem))


def _shrink_decode(problem: Problem) -> ShrinkTiles:
    """Split the inputs until the multiprocessors have work; every plane is read by the expand."""
    stacked, rows = power_of_two(problem.stacked), problem.rows
    long, narrow = problem.in_features >= _LONG_INPUT, padded_rank(problem.max_rank) == 16
    single = problem.num_slices == 1
    if rows == 1:
        block_n, programs, planes = 16, 128, 28 if long and narrow else 16
    elif rows >= _MANY_ROWS:
        block_n = 16 if stacked <= (32 if narrow else 128) else 64
        programs, planes = 512 if long and not narrow else 256, 4 if long else 2
    else:
        compact = problem.row_tokens > 16 or (single and not narrow)
        compact = compact and not long and problem.out_features < _WIDE_OUTPUT
        block_n, programs = (16, 512) if compact else (min(64, stacked), 128)
        planes = (16 if single else 8) // (1 if narrow else 2)
        planes = max(4, planes * 16 // problem.row_tokens * (4 if long else 1))
    blocks = -(-problem.stacked // block_n) * rows
    split_k = equal_parts(problem.in_features, min(planes, programs // blocks))
    if block_n == 16 and problem.row_tokens == 16 and (rows >= _MANY_ROWS or long):
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_many_adapters(problem: Problem) -> ShrinkTiles:
    """Keep hundreds of programs in flight: every row of A is read once, and that takes longest."""
    block_n, narrow = min(64, power_of_two(problem.stacked)), padded_rank(problem.max_rank) == 16
    single, wide = problem.num_slices == 1, problem.out_features >= _WIDE_OUTPUT
    planes = 4 if narrow and (single or wide) else 2
    programs = 512 if narrow and single else 256
    planes = min(planes, programs // (-(-problem.stacked // block_n) * problem.rows))
    split_k = equal_parts(problem.in_features, planes)
    if block_n == 16 and problem.in_features >= _LONG_INPUT:
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_prefill(problem: Problem) -> ShrinkTiles:
    """Take many rows of A at once: x is read again for every block of them."""
    stacked, rows = power_of_two(problem.stacked), problem.rows
    wide, narrow = problem.out_features >= _WIDE_OUTPUT, padded_rank(problem.max_rank) == 16
    single, long = problem.num_slices == 1, problem.in_features >= _LONG_INPUT
    programs = -(-problem.stacked // min(64, stacked)) * rows
    planes = 4 if single or not (narrow or wide) else 2
    most = 8 if single and (narrow or long) else 4
    planes = max(planes, min(most, (128 if single else 64) // programs))
    planes = 1 if stacked >= 256 and rows >= 64 else min(planes, 256 // rows)
    split_k = equal_parts(problem.in_features, planes)
    block_n, block_k = min(64, stacked), 128
    if stacked >= 128:
        block_n, block_k = (128 if rows >= 64 and problem.row_tokens == 64 else 64), 64
    programs = -(-problem.stacked // block_n) * rows * split_k
    step = 4 * (block_n + problem.row_tokens) * problem.item_bytes  # of four loads in flight
    if programs <= _MULTIPROCESSORS and 128 * step <= _SHARED_BYTES:
        return ShrinkTiles(block_n, 128, split_k, num_stages=4)  # one each has all the room
    stages = 4 if block_k * step <= _SHARED_BYTES * 3 // 4 else 3  # two or more side by side
    return ShrinkTiles(block_n, block_k, split_k, num_stages=stages)


def _expand(problem: Problem) -> ExpandTiles:
    rank_pad = padded_rank(problem.max_rank)
    block_r = min(rank_pad, WIDEST_RANK_BLOCK)
    wide = problem.out_features >= _WIDE_OUTPUT
    prefill = problem.num_tokens >= _PREFILL_TOKENS
    if problem.item_bytes == 4:  # float32 products take more registers and shared memory
        block_r, block_c, chunks = min(block_r, 32), 64, 1
    elif problem.row_tokens > 64:
        block_c, chunks = 64, 8 if prefill else 2
    elif prefill:
        block_c = 64 if problem.rows < 64 and not wide else 128
        least = 256 if problem.row_tokens == 16 else 128  # programs
        chunks = _chunks(problem.rows * (problem.out_features // block_c) // least)
    elif rank_pad == 16:
        many = problem.rows * problem.out_features >= 200_000
        block_c, chunks = (128, 4) if many else (256, 1)
    else:
        block_c, chunks = 128, 4 if wide and problem.row_tokens > 16 else 1
    if prefill and problem.item_bytes == 2 and block_r == rank_pad:
        # boxes of B pay where two programs for each multiprocessor stay busy, or just one does
        kibi = problem.rows * problem.out_features // 1024
        if problem.row_tokens == 64 or (wide and problem.row_tokens == 32):
            if kibi >= 2 * _MULTIPROCESSORS:
                return ExpandTiles(128, block_r, 8, num_warps=8, num_stages=3)
            if 128 <= 2 * kibi <= 200:
                return ExpandTiles(128, block_r, 4, num_stages=3)
    return ExpandTiles(block_c, block_r, chunks if block_r == rank_pad else 1)


def _chunks(most: int) -> int:
    """Return the largest power of two from 1 to 8 that is at most `most`."""
    return next((chunks for chunks in (8, 4, 2) if chunks <= most), 1)


def fitting(shrink: ShrinkTiles, problem: Problem) -> ShrinkTiles:
    """Return sizes whose loads in flight fit in shared memory and whose sums fit in registers."""
    if problem.item_bytes == 4:
        shrink = ShrinkTiles(min(shrink.block_n, 64), 32, shrink.split_k, num_stages=2)
    if problem.row_tokens > 64:
        shrink = replace(shrink, block_k=min(shrink.block_k, 64), num_warps=8)
    stage = shrink.block_k * (shrink.block_n + problem.row_tokens) * problem.item_bytes
    return replace(shrink, num_stages=max(2, min(shrink.num_stages, _SHARED_BYTES // stage)))


def equal_parts(in_features: int, most: int) -> int:
    """Return the largest number of equal parts, in steps of 256, that is at most `most`."""
    steps = max(1, in_features // 256)
    return max(parts for parts in range(1, max(1, most) + 1) if steps % parts == 0)
