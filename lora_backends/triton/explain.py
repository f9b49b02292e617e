"""How `triton` cuts a batch: tiles of one slot's tokens."""

from __future__ import annotations

import torch

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Layer, Piece, table_device
from lora_backends.sgmv.explain import Cut, explanation
from lora_backends.sgmv.runs import EMPTY, count_tokens
from lora_backends.sgmv.tiles.source import tile_source
from lora_backends.triton.plan import TritonPlan

_LEGEND = (
    "Tokens are sorted by slot; tokens without an adapter are left out. Each slot's tokens are cut "
    "into tiles. A tile holds tokens of one slot, so its last places may stay empty. Each kernel "
    "has one row of programs per tile. A program of the shrink takes a block of the stacked rows "
    "of A (each slice padded to a power of two of at least 16 ranks) and a part of the inputs; a "
    "program of the expand takes some columns of one slice. Empty places, ranks beyond the "
    "adapter's own and columns beyond the layer are masked: they cost next to no memory traffic, "
    "but they occupy lanes."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer."""
    source = tile_source("triton", __package__, table_device(), "auto")
    counted = count_tokens(batch)
    tile_tokens = source.tile_for(batch.num_tokens, counted)
    plan = TritonPlan.with_room(batch, batch.num_tokens, (tile_tokens,), torch.device("cpu"))
    plan.fill(batch, counted, tile_tokens)
    pieces = tuple(
        Piece(slot, tuple(token for token in tokens if token != EMPTY), tile_tokens)
        for slot, tokens in zip(
            plan.slot_table[: plan.num_runs].tolist(), plan.token_table.tolist(), strict=False
        )
    )
    return explanation(
        "triton",
        batch,
        layer,
        Cut("tile", pieces, tile_tokens, plan.active_slots),
        source,
        f"tiles of {tile_tokens} tokens; {plan.num_runs} launched, "
        f"{plan.most_runs} while a CUDA graph is captured",
        _LEGEND,
    )
