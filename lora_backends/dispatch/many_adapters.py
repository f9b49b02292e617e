"""Several adapters per token: one plan for each, and a call on each, for every backend.

The deltas of a token's adapters add up, so a call of n adapters per token is n calls that add to
the same y. It costs n times as much, and y is rounded n times. A kernel that added all adapters of
a token at once would save the roundings, but its programs would have to share rows of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.errors import UnsupportedInputError
from lora_backends.features import OUTPUT_SCALES
from lora_backends.plan import LoRAPlan


@dataclass(eq=False)
class ManyAdaptersPlan(LoRAPlan):
    """The plan of a batch whose tokens have several adapters."""

    plans: tuple[Any, ...]  # of the backend; plan j has the j-th adapter of every token

    @property
    def adapters_per_token(self) -> int:
        """Adapters that a token can have."""
        return len(self.plans)


def prepare_each(
    prepare: Callable[..., Any], batch: LoRABatch, out: ManyAdaptersPlan | None, **options: Any
) -> ManyAdaptersPlan:
    """Return the plan of a batch of several adapters per token; arguments are checked.

    `prepare` makes the plan of one adapter per token, with `options`.
    """
    if out is None:
        plans = [prepare(part, **options) for part in batch.per_adapter(batch.adapters_per_token)]
        capacity = options.get("capacity") or batch.num_tokens
        return ManyAdaptersPlan(batch.num_tokens, batch.num_slots, tuple(plans), capacity=capacity)
    for plan, part in zip(out.plans, batch.per_adapter(len(out.plans)), strict=True):
        prepare(part, out=plan, **options)
    out.num_tokens = batch.num_tokens
    return out


def add_each(
    operation: str,
    call: Callable[..., torch.Tensor],
    weights: Any,
    plan: ManyAdaptersPlan,
    y: torch.Tensor,
) -> torch.Tensor:
    """Add the delta of every adapter to y: ``call(plan of one adapter, y)``, one after another.

    Raises:
        UnsupportedInputError: the layer has output_scales; a token can have only one.
    """
    # else a column would be scaled once for each adapter
    if OUTPUT_SCALES in weights.needs:
        raise UnsupportedInputError(
            f"{operation} cannot apply output_scales to several adapters per token\n"
            f"  given: a plan of {plan.adapters_per_token} adapters per token\n"
            f"  allowed: output_scales with one adapter per token"
        )
    for part in plan.plans:
        call(part, y)
    return y


def refuse(operation: str, plan: ManyAdaptersPlan) -> None:
    """Refuse an operation on h: a token would have one row per adapter.

    Raises:
        UnsupportedInputError: always.
    """
    raise UnsupportedInputError(
        f"{operation} cannot run with several adapters per token, since h has one row per token\n"
        f"  given: a plan of {plan.adapters_per_token} adapters per token\n"
        f"  to do: call run_linear, or one of the operations that add to base_output"
    )
