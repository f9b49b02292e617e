"""`LoRAPlan`: the base of every backend's plan."""

from __future__ import annotations

from dataclasses import dataclass

from lora_backends.dispatch.handles import Handled


@dataclass(eq=False)
class LoRAPlan(Handled):
    """The sizes of a batch; a backend's own plan adds its per-batch data."""

    num_tokens: int  # tokens of the batch, those without an adapter included
    num_slots: int  # slots of the weights that the plan fits
