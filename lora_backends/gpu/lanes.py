"""Programs and lanes of the two kernels over tiles, as `explain` counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Launch, Layer, Piece, Share, tokens_of
from lora_backends.gpu.choice import TileChoice
from lora_backends.gpu.tiles import NARROWEST, ExpandTiles, ShrinkTiles, TileConfig, padded_rank


class Cut(NamedTuple):
    """How a plan cuts a batch: what a row of the grid works for."""

    name: str  # of a piece
    pieces: tuple[Piece, ...]
    tile_tokens: int  # places of a piece
    active_slots: int  # slots with tokens


def explanation(
    backend: str,
    batch: LoRABatch,
    layer: Layer,
    cut: Cut,
    choice: TileChoice,
    fact: str,
    legend: str,
    narrow_tokens: int,
    narrow_long_ranks: bool,
) -> Explanation:
    """Return the explanation of an engine that launches a shrink and an expand over pieces.

    Args:
        backend: its name.
        batch: the batch.
        layer: the layer.
        cut: how the plan cuts the batch.
        choice: where sizes come from.
        fact: what is to be told of the plan.
        legend: what the words mean.
        narrow_tokens: as in `count_expand`.
        narrow_long_ranks: as in `count_expand`.
    """
    tiles = choice.choose_tiles(
        batch.num_tokens,
        cut.active_slots,
        cut.tile_tokens,
        len(layer.output_slices),
        layer.max_rank,
        layer.in_features,
        sum(layer.output_slices),
        layer.item_bytes,
    )
    return Explanation(
        backend=backend,
        token_slots=tokens_of(batch),
        num_slots=batch.num_slots,
        layer=layer,
        order=tuple(token for piece in cut.pieces for token in piece.tokens),
        piece_name=cut.name,
        pieces=cut.pieces,
        launches=(
            count_shrink(cut.pieces, layer, tiles.shrink),
            count_expand(cut.pieces, layer, tiles.expand, narrow_tokens, narrow_long_ranks),
        ),
        facts=(fact, *describe(tiles, choice.sources)),
        legend=legend,
    )


def describe(tiles: TileConfig, sources: Sequence[str]) -> tuple[str, str]:
    """Return the sizes in words, and where they come from."""
    shrink, expand = tiles.shrink, tiles.expand
    parts = f"inputs in {shrink.split_k} parts" if shrink.split_k > 1 else "inputs in one part"
    columns = expand.block_c * expand.chunks
    sizes = (
        f"shrink: {shrink.block_n} rows of A a program, {parts}, {shrink.block_k} a step; "
        f"expand: {columns} columns a program, {expand.block_r} ranks at once"
    )
    origin = ", then ".join([*sources, "the rules"]) if sources else "the rules"
    return sizes, f"sizes from {origin}"


def count_shrink(pieces: Sequence[Piece], layer: Layer, tiles: ShrinkTiles) -> Launch:
    """Return what the shrink kernel launches: a block of stacked ranks and a part of the inputs.

    A program whose ranks all lie beyond the adapter's own returns at once.
    """
    rank_pad, step = padded_rank(layer.max_rank), tiles.block_k * tiles.split_k
    blocks = -(-len(layer.output_slices) * rank_pad // tiles.block_n)
    computed_inputs = -(-layer.in_features // step) * step
    work = []
    for piece in pieces:
        for block in range(blocks):
            lanes = range(block * tiles.block_n, (block + 1) * tiles.block_n)
            used = sum(_is_used(lane, rank_pad, layer.ranks[piece.slot]) for lane in lanes)
            if used:
                work.append((piece, used, tiles.block_n))
    return _launch(
        "shrink",
        len(pieces) * blocks * tiles.split_k,
        tiles.split_k,
        work,
        [Share(layer.in_features, computed_inputs)] * len(work),
    )


def count_expand(
    pieces: Sequence[Piece],
    layer: Layer,
    tiles: ExpandTiles,
    narrow_tokens: int,
    narrow_long_ranks: bool,
) -> Launch:
    """Return what the expand kernel launches: blocks of columns of every slice.

    Args:
        pieces: the tiles.
        layer: without a bias.
        tiles: sizes.
        narrow_tokens: tiles of up to this many tokens multiply ranks up to 16 in 16 lanes,
            where one block holds the padded rank;
        narrow_long_ranks: elsewhere, too.

    Returns:
        The launch; a program whose slice has rank 0 returns at once.
    """
    width, rank_pad = tiles.block_c * tiles.chunks, padded_rank(layer.max_rank)
    work, columns, programs = [], [], 0
    for piece in pieces:
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            lanes = -(-rank // tiles.block_r) * tiles.block_r
            may_narrow = narrow_long_ranks or tiles.block_r == rank_pad
            if may_narrow and piece.places <= narrow_tokens and 0 < rank <= NARROWEST:
                lanes = NARROWEST
            for first in range(0, outputs, width):
                programs += 1
                if rank:
                    work.append((piece, rank, lanes))
                    columns.append(Share(min(width, outputs - first), width))
    return _launch("expand", programs, 1, work, columns)


def _is_used(lane: int, rank_pad: int, ranks: Sequence[int]) -> bool:
    slice_, rank = divmod(lane, rank_pad)
    return slice_ < len(ranks) and rank < ranks[slice_]


def _launch(
    name: str,
    programs: int,
    parts: int,
    work: Sequence[tuple[Piece, int, int]],
    columns: Sequence[Share],
) -> Launch:
    """Add up programs that work: (piece, used lanes, lanes), `parts` of each."""
    rows = Share(sum(len(p.tokens) for p, _, _ in work), sum(p.places for p, _, _ in work))
    used = sum(len(p.tokens) * u * c.used for (p, u, _), c in zip(work, columns, strict=True))
    done = sum(p.places * n * c.computed for (p, _, n), c in zip(work, columns, strict=True))
    return Launch(
        name=name,
        unit="programs",
        programs=programs,
        idle=programs - parts * len(work),
        rows=rows,
        columns=Share(sum(c.used for c in columns), sum(c.computed for c in columns)),
        ranks=Share(sum(u for _, u, _ in work), sum(n for _, _, n in work)),
        products=Share(used, done),
    )
