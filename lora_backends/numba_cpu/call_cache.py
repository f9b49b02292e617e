"""A call of one layer, kept with every argument that stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.numba_cpu import launch
from lora_backends.numba_cpu.plan import NumbaPlan
from lora_backends.weights import LoRAWeights


@dataclass(eq=False, slots=True)
class CachedRun:
    """The `CachedCall` of `run_linear` for one layer and one kind of x and y, for any plan."""

    bound: launch.Bound
    tokens: int  # rows of x, which a model passes with more axes
    num_slots: int
    needs: int  # of the batch

    def run(self, x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> bool:
        """Run the kernel; return False, with nothing run, if the plan does not fit."""
        if (
            type(plan) is not NumbaPlan
            or plan.num_slots != self.num_slots
            or plan.capacity < self.tokens
        ):
            return False
        if plan.num_segments:
            if plan.needs != self.needs:
                return False
            launch.start(self.bound, plan, x.data_ptr(), y.data_ptr())
        return True
