"""`LoRAPlan`: the base of every backend's plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lora_backends.dispatch.handles import Handled


@dataclass(eq=False)
class LoRAPlan(Handled):
    """The sizes of a batch; a backend's own plan adds its per-batch data."""

    num_tokens: int  # tokens of the batch, those without an adapter included
    num_slots: int  # slots of the weights that the plan fits
    capacity: int = field(default=0, kw_only=True)
    # tokens that a refill may have, at least num_tokens; num_tokens if not given
    token_scales: torch.Tensor | None = field(default=None, kw_only=True, repr=False)
    # [capacity] float32 on the device, 1 beyond num_tokens; None if the batch has no scales
    refills: int = field(default=0, kw_only=True)  # how often another batch took this one's place

    def __post_init__(self) -> None:
        self.capacity = max(self.capacity, self.num_tokens)


def padded(token_scales: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the scales of a batch's tokens, then ones up to the capacity."""
    ones = token_scales.new_ones(capacity)
    ones[: token_scales.shape[0]] = token_scales
    return ones
