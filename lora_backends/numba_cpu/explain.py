"""How `numba_cpu` cuts a batch: segments of one slot's tokens, shared out among threads."""

from __future__ import annotations

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Launch, Layer, Piece, Share, tokens_of
from lora_backends.numba_cpu.config import MAX_SEGMENT, SHRINK_RANKS
from lora_backends.numba_cpu.machine.vectors import LANES
from lora_backends.numba_cpu.plan import order_and_segments

_LEGEND = (
    "Tokens are sorted by slot, those without an adapter left out, and cut into segments of one "
    "slot; a segment is as long as its tokens, so no row is padded. The shrink passes over the "
    f"rows of x once per {SHRINK_RANKS} ranks, of which the last pass may fill fewer; the expand "
    f"takes {LANES} columns of y at a time and what remains one by one, at the adapter's true "
    "rank. Threads share out the work of all segments by its cost, not by segment."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer."""
    order, segments = order_and_segments(batch)
    pieces = tuple(
        Piece(int(slot), tuple(order[first:end].tolist()), int(end - first))
        for slot, first, end in segments.tolist()
    )
    return Explanation(
        backend="numba_cpu",
        token_slots=tokens_of(batch),
        num_slots=batch.num_slots,
        layer=layer,
        order=tuple(order.tolist()),
        piece_name="segment",
        pieces=pieces,
        launches=(_shrink(pieces, layer), _expand(pieces, layer)),
        facts=(f"segments of at most {MAX_SEGMENT} tokens",),
        legend=_LEGEND,
    )


def _shrink(pieces: tuple[Piece, ...], layer: Layer) -> Launch:
    passes = rows = ranks = used = done = 0
    inputs = -(-layer.in_features // LANES) * LANES
    for piece in pieces:
        for rank in layer.ranks[piece.slot]:
            blocks = -(-rank // SHRINK_RANKS)
            passes, rows, ranks = passes + blocks, rows + blocks * len(piece.tokens), ranks + rank
            used += len(piece.tokens) * rank * layer.in_features
            done += len(piece.tokens) * blocks * SHRINK_RANKS * inputs
    return Launch(
        name="shrink",
        unit="passes",
        programs=passes,
        idle=0,
        rows=Share(rows, rows),
        columns=Share(passes * layer.in_features, passes * inputs),
        ranks=Share(ranks, passes * SHRINK_RANKS),
        products=Share(used, done),
    )


def _expand(pieces: tuple[Piece, ...], layer: Layer) -> Launch:
    blocks = rows = columns = ranks = products = 0
    for piece in pieces:
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            if rank == 0:
                continue
            count = outputs // LANES + outputs % LANES
            blocks, rows = blocks + count, rows + count * len(piece.tokens)
            columns, ranks = columns + outputs, ranks + count * rank
            products += len(piece.tokens) * rank * outputs
    return Launch(
        name="expand",
        unit="blocks",
        programs=blocks,
        idle=0,
        rows=Share(rows, rows),
        columns=Share(columns, columns),
        ranks=Share(ranks, ranks),
        products=Share(products, products),
    )
