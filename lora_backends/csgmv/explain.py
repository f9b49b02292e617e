"""How `csgmv` cuts a batch: segments of one slot's tokens, and groups of segments."""

from __future__ import annotations

import torch

from lora_backends.batch import LoRABatch
from lora_backends.csgmv import plan as plans
from lora_backends.csgmv import tuning
from lora_backends.csgmv.config import segment_and_group
from lora_backends.explain import Explanation, Layer, Piece, table_device
from lora_backends.gpu.choice import tile_choice
from lora_backends.gpu.lanes import Cut, explanation

SEGMENT_SIZE = 16
"""The default of the backend's option `segment_size`."""

_NARROW_TOKENS = 32  # rows up to here have a form of 16 lanes in the expand kernel

_LEGEND = (
    "Tokens are permuted so that those of one slot stand together, those without an adapter left "
    "out, and each slot's tokens are cut into segments; neighbouring segments of one slot form a "
    "group where a batch has many tokens a slot. A group is a row of the grid, and its last places "
    "may stay empty. A program of the shrink takes some of the stacked rows of A (each slice "
    "padded to a power of two of at least 16 ranks) and a part of the inputs; one of the expand "
    "takes some columns of one slice. Empty places, ranks beyond the adapter's own and columns "
    "beyond the layer are masked: they are not read from memory, but occupy lanes."
)


def explain(batch: LoRABatch, layer: Layer) -> Explanation:
    """Return how a batch is cut for a layer, with the backend's default options."""
    choice = tile_choice(tuning, "csgmv", table_device(), "auto")
    counts = plans.count_tokens(batch.token_slots.numpy(), batch.num_slots)
    active = int((counts > 0).sum())
    row = choice.block_tokens(batch.num_tokens, active)
    segment, group = segment_and_group(SEGMENT_SIZE, batch.num_tokens, active, row)
    plan = plans.make_plan(batch, segment, group, active, torch.device("cpu"))
    pieces = _groups(plan)
    return explanation(
        "csgmv",
        batch,
        layer,
        Cut("group", pieces, segment * group, active),
        choice,
        f"segments of {segment} tokens, up to {group} in a group: {plan.num_segments} in "
        f"{plan.num_groups} groups, {plan.max_groups} groups while a CUDA graph is captured",
        _LEGEND,
        _NARROW_TOKENS,
        True,
    )


def _groups(plan: plans.CsgmvPlan) -> tuple[Piece, ...]:
    starts = plan.group_starts[: plan.num_groups + 1].tolist()
    pieces = []
    for first, end in zip(starts, starts[1:], strict=False):
        tokens = plan.segment_tokens[first:end].flatten().tolist()
        slot, places = int(plan.segment_slots[first]), plan.segment_size * plan.group_size
        pieces.append(Piece(slot, tuple(t for t in tokens if t != plans.EMPTY), places))
    return tuple(pieces)
