"""Programs and lanes of the two kernels over tiles, as `explain` counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Launch, Layer, Piece, Program, Share, launch_of
from lora_backends.sgmv.tiles.sizes import (
    MIN_DOT,
    BatchShape,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    padded_rank,
    row_ranks,
)
from lora_backends.sgmv.tiles.source import TileSource

NARROW_TOKENS = 32
"""Tiles of up to this many tokens multiply ranks up to 16 in 16 lanes (`expand_tile`)."""


class Cut(NamedTuple):
    """How a plan cuts a batch into rows of the grid."""

    name: str  # of a piece
    pieces: tuple[Piece, ...]
    tile_tokens: int  # places of a piece
    active_slots: int  # slots with tokens


def explanation(
    backend: str,
    batch: LoRABatch,
    layer: Layer,
    cut: Cut,
    source: TileSource,
    fact: str,
    legend: str,
) -> Explanation:
    """Explain an engine that launches a shrink and an expand over the pieces of a cut."""
    shape = LayerShape(
        num_slices=len(layer.output_slices),
        max_rank=layer.max_rank,
        in_features=layer.in_features,
        out_features=sum(layer.output_slices),
        item_bytes=layer.item_bytes,
    )
    sizes = BatchShape(batch.num_tokens, cut.active_slots, cut.tile_tokens)
    tiles = source.choose_tiles(sizes, shape)
    return Explanation.of(
        backend,
        batch,
        layer,
        cut.pieces,
        piece_name=cut.name,
        launches=(
            count_shrink(cut.pieces, layer, tiles.shrink),
            count_expand(cut.pieces, layer, tiles.expand),
        ),
        facts=(fact, *describe(tiles, source.origin)),
        legend=legend,
    )


def describe(tiles: TileConfig, origin: str) -> tuple[str, str]:
    """Return a sentence about the sizes, and one about their source."""
    shrink, expand = tiles.shrink, tiles.expand
    parts = f"inputs in {shrink.split_k} parts" if shrink.split_k > 1 else "inputs in one part"
    columns = expand.block_c * expand.chunks
    ranks = f"{expand.block_r} ranks at once" if expand.num_stages else "all ranks at once"
    sizes = (
        f"shrink: {shrink.block_n} rows of A a program, {parts}, {shrink.block_k} a step"
        f"{', token by token' * (shrink.warps_k == 0)}; "
        f"expand: {columns} columns a program, {ranks}"
        f"{', token by token' * (expand.num_stages == 0)}"
    )
    return sizes, f"sizes from {origin}"


def count_shrink(pieces: Sequence[Piece], layer: Layer, tiles: ShrinkTiles) -> Launch:
    """Return the shrink launch: a block of stacked ranks and a part of the inputs per program."""
    rank_pad, step = padded_rank(layer.max_rank), tiles.block_k * tiles.split_k
    blocks = -(-len(layer.output_slices) * rank_pad // tiles.block_n)
    inputs = Share(layer.in_features, -(-layer.in_features // step) * step)
    used_by_ranks: dict[tuple[int, ...], list[int]] = {}  # counted once, not for each piece
    work = []
    for piece in pieces:
        ranks = layer.ranks[piece.slot]
        if ranks not in used_by_ranks:
            used_by_ranks[ranks] = _used_lanes(ranks, rank_pad, tiles.block_n, blocks)
        rows = _rows(piece, tiles.warps_k == 0)
        # A program whose ranks all lie beyond the adapter's own has no work. It returns at once in
        # a grid of many rows; in one of few rows it multiplies zeros.
        lanes = [Share(used, tiles.block_n) for used in used_by_ranks[ranks] if used]
        work += [Program(rows, inputs, share) for share in lanes]
    launched = len(pieces) * blocks * tiles.split_k
    return launch_of("shrink", "programs", work, launched, parts=tiles.split_k)


def count_expand(pieces: Sequence[Piece], layer: Layer, tiles: ExpandTiles) -> Launch:
    """Return the expand launch: blocks of columns of every slice, for a layer without a bias."""
    width = tiles.block_c * tiles.chunks
    work, launched = [], 0
    for piece in pieces:
        rows = _rows(piece, tiles.num_stages == 0)
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            lanes = -(-rank // tiles.block_r) * tiles.block_r
            if tiles.num_stages == 0:
                lanes = row_ranks(layer.max_rank)
            elif piece.places <= NARROW_TOKENS and 0 < rank <= MIN_DOT:
                lanes = MIN_DOT
            full, rest = divmod(outputs, width)
            launched += full + (rest > 0)
            # a program whose slice has rank 0 returns at once
            if rank:
                ranks = Share(rank, lanes)
                work.append(Program(rows, Share(width, width), ranks, full))
                work.append(Program(rows, Share(rest, width), ranks, rest > 0))
    return launch_of("expand", "programs", work, launched)


def _rows(piece: Piece, by_token: bool) -> Share:
    """Return the rows of a piece; a kernel that works token by token computes no empty places."""
    tokens = len(piece.tokens)
    return Share(tokens, tokens if by_token else piece.places)


def _used_lanes(ranks: Sequence[int], rank_pad: int, block_n: int, blocks: int) -> list[int]:
    """Return how many lanes of each block of stacked ranks lie within the ranks."""
    return [
        sum(_is_used(block * block_n + lane, rank_pad, ranks) for lane in range(block_n))
        for block in range(blocks)
    ]


def _is_used(lane: int, rank_pad: int, ranks: Sequence[int]) -> bool:
    slice_, rank = divmod(lane, rank_pad)
    return slice_ < len(ranks) and rank < ranks[slice_]
