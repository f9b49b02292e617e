"""How `numba_cpu` cuts a batch: segments of one slot's tokens, shared out among threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Layer, Piece, Program, Share, launch_of
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
    pieces = [
        Piece(int(slot), tuple(order[first:end].tolist()), int(end - first))
        for slot, first, end in segments.tolist()
    ]
    return Explanation.of(
        "numba_cpu",
        batch,
        layer,
        pieces,
        piece_name="segment",
        launches=(
            launch_of("shrink", "passes", _passes(pieces, layer)),
            launch_of("expand", "blocks", _blocks(pieces, layer)),
        ),
        facts=(f"segments of at most {MAX_SEGMENT} tokens",),
        legend=_LEGEND,
    )


def _passes(pieces: Sequence[Piece], layer: Layer) -> Iterator[Program]:
    inputs = Share(layer.in_features, -(-layer.in_features // LANES) * LANES)
    for piece in pieces:
        for rank in layer.ranks[piece.slot]:
            full, rest = divmod(rank, SHRINK_RANKS)
            yield Program(_all(len(piece.tokens)), inputs, _all(SHRINK_RANKS), full)
            # the last pass multiplies zeros beyond the rank
            yield Program(_all(len(piece.tokens)), inputs, Share(rest, SHRINK_RANKS), rest > 0)


def _blocks(pieces: Sequence[Piece], layer: Layer) -> Iterator[Program]:
    for piece in pieces:
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            if rank:
                blocks, single = divmod(outputs, LANES)
                yield Program(_all(len(piece.tokens)), _all(LANES), _all(rank), blocks)
                yield Program(_all(len(piece.tokens)), _all(1), _all(rank), single)


def _all(size: int) -> Share:
    return Share(size, size)
