"""`lora_dropout` of each adapter on its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.hf.training.adapter import TrainedAdapter


class Dropout:
    """Drops elements of the LoRA's input: x * keep / (1 - p) with each row's own p, as PEFT does.

    Rows of other adapters than `adapters`, which are trained, keep their values.
    """

    def __init__(
        self, backend: LoRABackend, num_slots: int, adapters: Sequence[TrainedAdapter]
    ) -> None:
        self._backend = backend
        rates = torch.zeros(num_slots + 1, device="cpu")  # the last for rows without an adapter
        for adapter in adapters:
            rates[adapter.slot] = adapter.dropout
        # on the device once: a call must not wait for a copy
        self._rates = rates.to(backend.device)
        self._of_plan: tuple[Any, torch.Tensor] | None = None  # most modules share a plan

    def of(self, x: torch.Tensor, plan: Any) -> torch.Tensor:
        """Return x [..., in_features] with elements dropped, drawn anew at each call."""
        rates = self._rates_of(plan, x[..., 0].numel()).view(*x.shape[:-1], 1)
        keep = torch.rand(x.shape, device=x.device) >= rates
        # In float32, so that a narrow dtype rounds once; all elements are dropped where p is 1.
        scaled = (x * (1 / (1 - rates)).clamp(max=torch.finfo(torch.float32).max)).to(x.dtype)
        return torch.where(keep, scaled, 0)

    def _rates_of(self, plan: Any, rows: int) -> torch.Tensor:
        if self._of_plan is None or self._of_plan[0] is not plan:
            slots = self._backend.token_slots(plan, rows, plan.num_slots)
            self._of_plan = plan, self._rates[slots]  # -1 is the last
        return self._of_plan[1]
