"""How `triton` cuts a batch: tiles of one slot's tokens."""

from __future__ import annotations

import torch

from lora_backends.batch import LoRABatch
from lora_backends.explain import Explanation, Layer, Piece, table_device
from lora_backends.gpu.choice import tile_choice
from lora_backends.gpu.lanes import Cut, explanation
from lora_backends.triton import plan as plans
from lora_backends.triton import tuning

_NARROW_TOKENS = 32  # tiles up to here have a form of 16 lanes in the expand kernel

_LEGEND = (
    "Tokens are sorted by slot, those without an adapter left out, and each slot's tokens are cut "
    "into tiles; a tile holds one slot, so its last places may stay empty. Each tile is served by "
    "a row of programs per kernel. A program of the shrink takes some of the stacked rows of A "
    "(each slice padded to a power of two of at least 16 ranks) and a part of the inputs; one of "
    "the expand takes some columns of one slice. Empty places, ranks beyond the adapter's own and "
    "columns beyond the layer are masked: they are not read from memory, but occupy lanes."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer."""
    choice = tile_choice(tuning, "triton", table_device(), "auto")
    counts = plans.count_tokens(batch)
    tile_tokens = choice.block_tokens(batch.num_tokens, plans.count_active(counts))
    plan = plans.make_plan(batch, counts, tile_tokens, torch.device("cpu"))
    pieces = tuple(
        Piece(slot, tuple(token for token in tokens if token != plans.EMPTY), tile_tokens)
        for slot, tokens in zip(
            plan.tile_slots[: plan.num_tiles].tolist(), plan.tile_tokens.tolist(), strict=False
        )
    )
    return explanation(
        "triton",
        batch,
        layer,
        Cut("tile", pieces, tile_tokens, plan.active_slots),
        choice,
        f"tiles of {tile_tokens} tokens; {plan.num_tiles} launched, "
        f"{plan.max_tiles} while a CUDA graph is captured",
        _LEGEND,
        _NARROW_TOKENS,
        False,
    )
