"""Sizes of segments, groups and tiles: pure functions of shapes; any result is correct.

The rules start from what the measured optima of the `triton` engine on one H200 have in common;
`candidates` lists what is worth measuring around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from lora_backends.errors import InvalidInputError
from lora_backends.gpu.tiles import (
    WIDEST_RANK_BLOCK,
    ExpandTiles,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    power_of_two,
)

SEGMENT_SIZES = (16, 32, 64, 128)
"""Tokens per segment that may be asked for, besides "auto"."""

_PREFILL_TOKENS = 512
_MANY_ROWS = 32  # about a quarter of an H200's multiprocessors
_LONG_INPUT = 8192  # from which on more parts pay
_WIDE_OUTPUT = 16384  # from which on every further plane of h is read too often
_SHARED_BYTES = 128 * 1024  # of shared memory for the loads in flight


@dataclass(frozen=True)
class Problem:
    """What tile sizes are chosen from: a layer, and the sizes of a batch."""

    num_tokens: int
    active_slots: int  # slots that have tokens
    row_tokens: int  # tokens per row of the grid: of a group of segments
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


def check_segment_size(given: object) -> int | Literal["auto"]:
    """Return the option `segment_size`, or raise InvalidInputError."""
    if given == "auto":
        return "auto"
    if isinstance(given, int) and not isinstance(given, bool) and given in SEGMENT_SIZES:
        return given
    raise InvalidInputError(
        f"backend 'csgmv' cannot cut batches into segments of this size\n"
        f"  given: segment_size={given!r}\n"
        f'  allowed: {", ".join(map(str, SEGMENT_SIZES))}, or "auto" to follow the batch'
    )


def row_tokens(num_tokens: int, active_slots: int) -> int:
    """Return the tokens that a row of the grid is best made of, 16 to 64.

    As many as an active slot has on average: rows of 16 waste least on slots with few tokens,
    wider ones read A and B less often.
    """
    average = num_tokens // max(1, active_slots)
    if num_tokens < _PREFILL_TOKENS:
        return 32 if average >= 32 and num_tokens > _MANY_ROWS else 16
    return 64 if average >= 64 else 32 if average >= 32 else 16


def segment_and_group(
    segment_size: int | Literal["auto"], num_tokens: int, active_slots: int, row: int = 0
) -> tuple[int, int]:
    """Return the tokens per segment and the segments per group of a batch.

    `row` is the tokens per row of the grid, those of `row_tokens` if 0.

    "auto" makes segments as long as rows should be; shorter ones of a fixed size are grouped.

    >>> segment_and_group("auto", 2048, 8), segment_and_group(16, 2048, 8)
    ((64, 1), (16, 4))
    """
    tokens = row or row_tokens(num_tokens, active_slots)
    if segment_size == "auto":
        return tokens, 1
    return segment_size, max(1, tokens // segment_size)


@lru_cache(maxsize=4096)
def choose_tiles(problem: Problem) -> TileConfig:
    """Return the sizes for one layer and batch."""
    prefill = problem.num_tokens >= _PREFILL_TOKENS
    shrink = _shrink_prefill(problem) if prefill else _shrink_decode(problem)
    return TileConfig(_fitting(shrink, problem), _expand(problem, prefill))


def candidates(problem: Problem) -> Iterator[TileConfig]:
    """Yield sizes worth measuring: the chosen ones, then one kernel's sizes varied at a time."""
    chosen = choose_tiles(problem)
    yield chosen
    for shrink in dict.fromkeys(_shrinks(problem)):
        if shrink != chosen.shrink:
            yield replace(chosen, shrink=shrink)
    for expand in dict.fromkeys(_expands(problem)):
        if expand != chosen.expand:
            yield replace(chosen, expand=expand)


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
    split_k = _equal_parts(problem.in_features, min(planes, programs // blocks))
    if block_n == 16 and problem.row_tokens == 16 and (rows >= _MANY_ROWS or long):
        return ShrinkTiles(block_n, 256, split_k, warps_k=4)
    return ShrinkTiles(block_n, 128, split_k, num_stages=4)


def _shrink_prefill(problem: Problem) -> ShrinkTiles:
    """Take many rows of A at once: x is read again for every block of them."""
    stacked, rows = power_of_two(problem.stacked), problem.rows
    wide, narrow = problem.out_features >= _WIDE_OUTPUT, padded_rank(problem.max_rank) == 16
    planes = 4 if problem.num_slices == 1 or not (narrow or wide) else 2
    planes = 1 if stacked >= 256 and rows >= 64 else min(planes, 256 // rows)
    split_k = _equal_parts(problem.in_features, planes)
    if stacked >= 128:
        return ShrinkTiles(64, 64, split_k)
    if wide and stacked <= 32 and rows >= 64:
        return ShrinkTiles(stacked, 64, split_k, num_warps=8, num_stages=4)
    return ShrinkTiles(stacked, 128, split_k)


def _expand(problem: Problem, prefill: bool) -> ExpandTiles:
    rank_pad = padded_rank(problem.max_rank)
    block_r = min(rank_pad, WIDEST_RANK_BLOCK)
    wide = problem.out_features >= _WIDE_OUTPUT
    if problem.item_bytes == 4:  # float32 products take more registers and shared memory
        block_r, block_c, chunks = min(block_r, 32), 64, 1
    elif problem.row_tokens > 64:
        block_c, chunks = 64, 8 if prefill else 2
    elif prefill:
        block_c, chunks = 64 if problem.rows < 64 and not wide else 128, 8
    elif rank_pad == 16:
        many = problem.rows * problem.out_features >= 200_000
        block_c, chunks = (128, 4) if many else (256, 1)
    else:
        block_c, chunks = 128, 4 if wide and problem.row_tokens > 16 else 1
    return ExpandTiles(block_c, block_r, chunks if block_r == rank_pad else 1)


def _shrinks(problem: Problem) -> Iterator[ShrinkTiles]:
    widest = min(256, power_of_two(problem.stacked))
    widths = [width for width in (16, 32, 64, 128, 256) if width <= widest][-4:]
    for block_n in widths:
        blocks = -(-problem.stacked // block_n) * problem.rows
        splits = {_equal_parts(problem.in_features, max(1, n // blocks)) for n in (128, 256, 512)}
        for split_k in sorted(
            {min(split, _equal_parts(problem.in_features, 32)) for split in splits}
        ):
            yield _fitting(ShrinkTiles(block_n, 128, split_k, num_stages=4), problem)
            yield _fitting(ShrinkTiles(block_n, 64, split_k, num_stages=4), problem)
            if block_n * problem.row_tokens <= 512:
                yield _fitting(ShrinkTiles(block_n, 256, split_k, warps_k=4), problem)
            if block_n * problem.row_tokens >= 4096:
                yield _fitting(ShrinkTiles(block_n, 64, split_k, num_warps=8), problem)


def _expands(problem: Problem) -> Iterator[ExpandTiles]:
    rank_pad = padded_rank(problem.max_rank)
    block_r = min(rank_pad, 32 if problem.item_bytes == 4 else WIDEST_RANK_BLOCK)
    for block_c in (64, 128, 256):
        if block_c * problem.row_tokens > 16384:
            continue
        for chunks in (1, 2, 4, 8) if block_r == rank_pad else (1,):
            programs = problem.rows * problem.out_features // (block_c * chunks)
            if chunks == 1 or programs >= 64:
                yield ExpandTiles(block_c, block_r, chunks)
                if block_c * problem.row_tokens >= 4096:
                    yield ExpandTiles(block_c, block_r, chunks, num_warps=8)


def _fitting(shrink: ShrinkTiles, problem: Problem) -> ShrinkTiles:
    """Return sizes whose loads in flight fit in shared memory and whose sums fit in registers."""
    if problem.item_bytes == 4:
        shrink = ShrinkTiles(min(shrink.block_n, 64), 32, shrink.split_k, num_stages=2)
    if problem.row_tokens > 64:
        shrink = replace(shrink, block_k=min(shrink.block_k, 64), num_warps=8)
    stage = shrink.block_k * (shrink.block_n + problem.row_tokens) * problem.item_bytes
    return replace(shrink, num_stages=max(2, min(shrink.num_stages, _SHARED_BYTES // stage)))


def _equal_parts(in_features: int, most: int) -> int:
    """Return the largest number of equal parts, in steps of 256, that is at most `most`."""
    steps = max(1, in_features // 256)
    return max(parts for parts in range(1, max(1, most) + 1) if steps % parts == 0)
