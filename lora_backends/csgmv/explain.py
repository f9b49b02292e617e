"""How `csgmv` cuts a batch: segments of one slot's tokens, and groups of segments."""

from __future__ import annotations

import torch

from lora_backends.batch import LoRABatch
from lora_backends.csgmv import segment_and_group
from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.explain import Explanation, Layer, Piece, table_device
from lora_backends.sgmv.explain import Cut, explanation
from lora_backends.sgmv.runs import EMPTY, count_tokens
from lora_backends.sgmv.tiles.source import tile_source

SEGMENT_SIZE = 16
"""The default of the backend's option `segment_size`."""

_LEGEND = (
    "Tokens are permuted so that those of one slot lie together; tokens without an adapter are "
    "left out. Each slot's tokens are cut into segments. Where a slot has many tokens, "
    "neighbouring segments form a group. Each kernel has one row of programs per group, whose last "
    "places may stay empty. A program of the shrink takes a block of the stacked rows of A (each "
    "slice padded to a power of two of at least 16 ranks) and a part of the inputs; a program of "
    "the expand takes some columns of one slice. Empty places, ranks beyond the adapter's own and "
    "columns beyond the layer are masked: they cost next to no memory traffic, but they occupy "
    "lanes."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer, with the backend's default options."""
    source = tile_source("csgmv", __package__, table_device(), "auto")
    counted = count_tokens(batch)
    tile_tokens = source.tile_for(batch.num_tokens, counted)
    segment, group = segment_and_group(SEGMENT_SIZE, tile_tokens)
    plan = CsgmvPlan.with_room(batch, batch.num_tokens, (segment,), torch.device("cpu"))
    plan.fill(batch, counted, segment, group)
    return explanation(
        "csgmv",
        batch,
        layer,
        Cut("group", _groups(plan), segment * group, counted.active),
        source,
        f"segments of {segment} tokens, up to {group} in a group: {plan.num_runs} in "
        f"{plan.num_groups} groups, {plan.most_rows} groups while a CUDA graph is captured",
        _LEGEND,
    )


def _groups(plan: CsgmvPlan) -> tuple[Piece, ...]:
    starts = plan.group_starts[: plan.num_groups + 1].tolist()
    pieces = []
    for first, end in zip(starts, starts[1:], strict=False):
        tokens = plan.token_table[first:end].flatten().tolist()
        slot, rows = int(plan.slot_table[first]), plan.tile_tokens
        pieces.append(Piece(slot, tuple(t for t in tokens if t != EMPTY), rows))
    return tuple(pieces)
