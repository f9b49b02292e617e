"""How `torch_ref` cuts a batch: a loop over slots."""

from __future__ import annotations

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Launch, Layer, Piece, Program, Share, launch_of
from lora_backends.torch_ref import TorchRefBackend

_LEGEND = (
    "The tokens of each slot are gathered, those without an adapter left out, and every slice is "
    "two matrix products of the adapter's true rank: one with A, one with B. Nothing is padded, so "
    "nothing is wasted; what it costs is two or more launches per slot and slice, one slot after "
    "the other."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer."""
    every = range(batch.num_tokens)
    pieces = []
    for slot, rows in TorchRefBackend("cpu").prepare_batch(batch).segments:
        tokens = tuple(every[rows]) if isinstance(rows, slice) else tuple(rows.tolist())
        pieces.append(Piece(slot, tokens, len(tokens)))
    return Explanation.of(
        "torch_ref",
        batch,
        layer,
        pieces,
        piece_name="slot",
        launches=(_launch("shrink", pieces, layer), _launch("expand", pieces, layer)),
        facts=("one matrix product per slot and slice in each half",),
        legend=_LEGEND,
    )


def _launch(half: str, pieces: list[Piece], layer: Layer) -> Launch:
    work = []
    for piece in pieces:
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            if rank:
                width = layer.in_features if half == "shrink" else outputs
                rows, columns, ranks = (Share(n, n) for n in (len(piece.tokens), width, rank))
                work.append(Program(rows, columns, ranks))
    return launch_of(half, "products", work, len(pieces) * len(layer.output_slices))
