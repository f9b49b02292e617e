"""`gather`: a LoRA backend that gathers the weights of every token's own slot.

Memory for a copy of lora_a and lora_b per token; in exchange every shape is fixed by the layer
and the number of tokens, nothing waits for the device, and a CUDA graph can capture it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lora_backends import NO_ADAPTER, LoRABackend, LoRABatch, LoRAPlan, LoRAWeights


@dataclass(eq=False)
class GatherPlan(LoRAPlan):
    """The slot of every token, on the device."""

    slots: torch.Tensor  # [num_tokens] int64, 0 where there is no adapter
    active: torch.Tensor  # [num_tokens, 1] bool


class GatherBackend(LoRABackend):
    """Batched products over gathered weights."""

    name = "gather"
    plan_type = GatherPlan
    cuda_graphs = True
    deterministic = True

    def prepare_batch(self, batch: LoRABatch, out: GatherPlan | None = None) -> GatherPlan:
        """Copy the slots to the device, into the tensors of `out` if it is given."""
        slots = batch.token_slots.clamp(min=0).to(self.device)
        active = (batch.token_slots != NO_ADAPTER)[:, None].to(self.device)
        if out is None:
            return GatherPlan(batch.num_tokens, batch.num_slots, slots, active)
        out.slots.copy_(slots)
        out.active.copy_(active)
        return out

    def run_lora_a(self, x: torch.Tensor, weights: LoRAWeights, plan: Any) -> torch.Tensor:
        """Shrink; `torch.where` and not a product, since what is masked may be NaN."""
        mask = _rank_mask(weights, plan)
        a = torch.where(mask[..., None], weights.lora_a[plan.slots], 0).float()  # [T, S, R, I]
        x = torch.where(plan.active, x, 0).float()
        return torch.einsum("tsri,ti->str", a, x)

    def run_lora_b(
        self,
        h: torch.Tensor,
        weights: LoRAWeights,
        plan: Any,
        base_output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Expand, in float32, and round once."""
        y = base_output
        if y is None:
            shape = (plan.num_tokens, weights.out_features)
            y = torch.zeros(shape, dtype=weights.dtype, device=self.device)
        mask = _rank_mask(weights, plan)
        offsets = weights.slice_offsets
        for s, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            within = mask[:, s]  # [T, R]
            b = torch.where(within[:, None], weights.lora_b[plan.slots, start:end], 0).float()
            delta = torch.einsum("tr,tnr->tn", torch.where(within, h[s], 0), b)
            touched = within[:, :1]  # a rank above 0
            delta = delta * torch.where(touched, weights.scalings[plan.slots, s, None], 0)
            if weights.bias is not None:
                delta = delta + weights.bias[plan.slots, start:end]
                touched = plan.active
            columns = y[:, start:end]
            total = (columns.float() + delta).to(y.dtype)
            columns.copy_(torch.where(touched, total, columns))  # others keep their bits
        return y


def _rank_mask(weights: LoRAWeights, plan: GatherPlan) -> torch.Tensor:
    """Return which ranks are a token's own: [num_tokens, num_slices, max_rank] bool."""
    ranks = weights.ranks[plan.slots]
    within = torch.arange(weights.max_rank, device=ranks.device) < ranks[..., None]
    return within & plan.active[:, :, None]
