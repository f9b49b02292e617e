"""`torch_ref`: the plain-torch definition, on any device, differentiable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lora_backends.backend import LoRABackend, LoRAPlan
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.common.devices import as_device
from lora_backends.defaults.gradients import Segments
from lora_backends.dispatch.output import added_to
from lora_backends.dtypes import accumulator_dtype
from lora_backends.features import FEATURES
from lora_backends.plan import padded
from lora_backends.torch_ref import reference
from lora_backends.weights import LoRAWeights


@dataclass(eq=False)
class TorchRefPlan(LoRAPlan):
    """The tokens of each active slot, in order of the slots."""

    segments: reference.Segments


class TorchRefBackend(LoRABackend):
    """Loops over the active slots with torch's own matrix products: short, right and portable.

    Two runs on one device are equal bit for bit if their tensors have the same layout (strides, and
    addresses modulo 64 bytes) and torch uses the same number of threads: the matrix library
    chooses its order of sums by these. It also chooses by the number of rows, so results are not
    batch-invariant.
    """

    name = "torch_ref"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "xpu", "mps")
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    features = frozenset(FEATURES)
    plain_torch = True
    auto_priority = {"cpu": 10, "cuda": 10, "xpu": 10, "mps": 10}
    plan_type = TorchRefPlan
    deterministic = True

    @classmethod
    @override
    def unavailable_reasons(cls, device: torch.device | str) -> list[str]:
        reasons = super().unavailable_reasons(device)
        if not reasons and as_device(device).type not in ("cpu", "cuda"):
            try:
                # torch knows of device types that its build cannot use
                torch.empty(0, device=device)
            except (RuntimeError, AssertionError, NotImplementedError) as error:
                reasons.append(f"torch cannot use {device} here: {error}.")
        return reasons

    @override
    def prepare_batch(
        self, batch: LoRABatch, out: TorchRefPlan | None = None, capacity: int | None = None
    ) -> TorchRefPlan:
        segments: reference.Segments = [
            (slot, _rows_of(batch.token_slots, slot, self.device))
            for slot in sorted(set(batch.token_slots.tolist()))
            if slot != NO_ADAPTER
        ]
        if out is None:
            sizes = (batch.num_tokens, batch.num_slots)
            out = TorchRefPlan(*sizes, segments, capacity=capacity or 0)
        scales = batch.token_scales
        out.num_tokens, out.segments = batch.num_tokens, segments
        # an operation indexes them with rows of x, up to the capacity
        out.token_scales = None if scales is None else padded(scales, out.capacity).to(self.device)
        return out

    @override
    def slot_rows(self, plan: TorchRefPlan, num_rows: int, num_slots: int) -> Segments:
        return plan.segments

    @override
    def token_slots(self, plan: TorchRefPlan, num_rows: int, num_slots: int) -> Tensor:
        slots = torch.full((num_rows,), NO_ADAPTER, dtype=torch.int64, device=self.device)
        for slot, rows in plan.segments:
            slots[rows] = slot
        return slots

    @override
    def run_lora_a(
        self, x: Tensor, weights: LoRAWeights, plan: Any, out: Tensor | None = None
    ) -> Tensor:
        h = out
        if h is None:
            shape = (weights.num_slices, x.shape[0], weights.max_rank)
            h = x.new_empty(shape, dtype=accumulator_dtype(x.dtype))
        return reference.shrink(x, weights, plan.segments, h.zero_())

    @override
    def run_lora_b(
        self, h: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        y = added_to(base_output, weights, h.shape[1])
        return reference.expand(h, weights, plan.segments, y, plan.token_scales)

    @override
    def run_linear(
        self, x: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        y = added_to(base_output, weights, x.shape[0])
        sums = accumulator_dtype(x.dtype)
        return reference.linear(x, weights, plan.segments, y, sums, plan.token_scales)

    @override
    def run_embedding(
        self, token_ids: Tensor, weights: LoRAWeights, plan: Any, base_output: Tensor | None = None
    ) -> Tensor:
        h = reference.shrink_one_hot(
            token_ids, weights, plan.segments, accumulator_dtype(weights.dtype)
        )
        return self.run_lora_b(h, weights, plan, base_output)


def _rows_of(token_slots: Tensor, slot: int, device: torch.device) -> reference.Rows:
    """Return the tokens of `slot` in `token_slots`: a slice if those tokens are neighbours."""
    rows = (token_slots == slot).nonzero().flatten()
    first, last = int(rows[0]), int(rows[-1])
    # a slice is a view; indices would copy x
    if last - first + 1 == rows.numel():
        return slice(first, last + 1)
    return rows.to(device)
