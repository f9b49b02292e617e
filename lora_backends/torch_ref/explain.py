"""How `torch_ref` cuts a batch: a loop over slots."""

from __future__ import annotations

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Launch, Layer, Piece, Share, tokens_of
from lora_backends.torch_ref import TorchRefBackend

_LEGEND = (
    "The tokens of each slot are gathered, those without an adapter left out, and every slice is "
    "two matrix products of the adapter's true rank: one with A, one with B. Nothing is padded, so "
    "nothing is wasted; what it costs is two or more launches per slot and slice, one slot after "
    "the other."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer."""
    token_slots = tokens_of(batch)
    every = range(batch.num_tokens)
    plan = TorchRefBackend("cpu").prepare_batch(batch)
    pieces = []
    for slot, rows in plan.segments:
        tokens = tuple(every[rows]) if isinstance(rows, slice) else tuple(rows.tolist())
        pieces.append(Piece(slot, tokens, len(tokens)))
    return Explanation(
        backend="torch_ref",
        token_slots=token_slots,
        num_slots=batch.num_slots,
        layer=layer,
        order=tuple(token for piece in pieces for token in piece.tokens),
        piece_name="slot",
        pieces=tuple(pieces),
        launches=tuple(_launch(half, pieces, layer) for half in ("shrink", "expand")),
        facts=("one matrix product per slot and slice in each half",),
        legend=_LEGEND,
    )


def _launch(half: str, pieces: list[Piece], layer: Layer) -> Launch:
    rows = columns = ranks = products = idle = 0
    for piece in pieces:
        for rank, outputs in zip(layer.ranks[piece.slot], layer.output_slices, strict=True):
            if rank == 0:
                idle += 1
                continue
            width = layer.in_features if half == "shrink" else outputs
            rows, columns, ranks = rows + len(piece.tokens), columns + width, ranks + rank
            products += len(piece.tokens) * width * rank
    return Launch(
        name=half,
        unit="products",
        programs=len(pieces) * len(layer.output_slices),
        idle=idle,
        rows=Share(rows, rows),
        columns=Share(columns, columns),
        ranks=Share(ranks, ranks),
        products=Share(products, products),
    )
