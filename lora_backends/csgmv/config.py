"""Sizes of segments and groups, and the tile sizes worth measuring: pure functions of shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from lora_backends.errors import InvalidInputError
from lora_backends.gpu.config import Problem, equal_parts, fitting, row_tokens, tiles_for
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


def candidates(problem: Problem) -> Iterator[TileConfig]:
    """Yield sizes worth measuring: the chosen ones, then one kernel's sizes varied at a time."""
    chosen = tiles_for(problem)
    yield chosen
    for shrink in dict.fromkeys(_shrinks(problem)):
        if shrink != chosen.shrink:
            yield replace(chosen, shrink=shrink)
    for expand in dict.fromkeys(_expands(problem)):
        if expand != chosen.expand:
            yield replace(chosen, expand=expand)


def _shrinks(problem: Problem) -> Iterator[ShrinkTiles]:
    widest = min(256, power_of_two(problem.stacked))
    widths = [width for width in (16, 32, 64, 128, 256) if width <= widest][-4:]
    for block_n in widths:
        blocks = -(-problem.stacked // block_n) * problem.rows
        splits = {equal_parts(problem.in_features, max(1, n // blocks)) for n in (128, 256, 512)}
        for split_k in sorted(
            {min(split, equal_parts(problem.in_features, 32)) for split in splits}
        ):
            yield fitting(ShrinkTiles(block_n, 128, split_k, num_stages=4), problem)
            yield fitting(ShrinkTiles(block_n, 64, split_k, num_stages=4), problem)
            if block_n * problem.row_tokens <= 512:
                yield fitting(ShrinkTiles(block_n, 256, split_k, warps_k=4), problem)
            if block_n * problem.row_tokens >= 4096:
                yield fitting(ShrinkTiles(block_n, 64, split_k, num_warps=8), problem)


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
                if chunks >= 4 and problem.item_bytes == 2:
                    yield ExpandTiles(block_c, block_r, chunks, num_stages=3)
                if block_c * problem.row_tokens >= 4096:
                    yield ExpandTiles(block_c, block_r, chunks, num_warps=8)
