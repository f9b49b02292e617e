"""Several adapters per token: one pass if the engine offers it, else a call for each adapter.

The deltas of a token's adapters add up in float32 and are rounded once. For n adapters per token
and a 16-bit y [tokens, out]:

                      calls     reads of x, of y    writes of y
    a call for each   n         n, n + 2            n + 2, of them n + 1 float32, in a copy
    one pass          1         1 to n, 1           1

Either way, A, B and h are read once for each tile of tokens and each adapter in it. An engine
offers one pass by `prepare_together` and `add_together`: `numba_cpu` always, `triton` and `csgmv`
except for embeddings and under `batch_invariant`. The plans of single adapters are made in
any case, because gradients and experts use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.dispatch.cached import CallCache
from lora_backends.dispatch.engine import Engine
from lora_backends.errors import UnsupportedInputError
from lora_backends.features import OUTPUT_SCALES
from lora_backends.plan import LoRAPlan

Ints = npt.NDArray[np.int64]


@dataclass(eq=False)
class ManyAdaptersPlan(LoRAPlan):
    """The plan of a batch whose tokens have several adapters; it caches the calls in one pass."""

    plans: tuple[Any, ...]  # of the backend; plan j has the j-th adapter of every token
    joint: Any = None  # the result of `prepare_together` of the backend
    call_cache: CallCache = field(default_factory=CallCache, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"call_cache": CallCache()}  # addresses die with a copy

    @property
    def adapters_per_token(self) -> int:
        """Adapters that a token can have."""
        return len(self.plans)


class SortedTokens(NamedTuple):
    """The tokens of a batch that have adapters, ordered by their adapters, ascending.

    Row i has the slots of tokens[i], ascending, then places without a slot. A slot that a token has
    twice comes twice.
    """

    tokens: Ints  # [active]
    slots: Ints  # [active, n] num_slots where there is none
    repeats: Ints  # [active, n] how often the slot comes earlier in the row
    live: npt.NDArray[np.bool_]  # [active, n] whether there is a slot
    scales: npt.NDArray[np.float32] | None  # [active, n]; None: all are 1


def sorted_tokens(batch: LoRABatch) -> SortedTokens:
    """Return the tokens of a batch, those with equal adapters together.

    >>> found = sorted_tokens(LoRABatch([[2, 0], [-1, -1], [2, -1], [0, 2]], num_slots=3))
    >>> found.tokens.tolist(), found.slots.tolist()
    ([0, 3, 2], [[0, 2], [0, 2], [2, 3]])
    """
    given = batch.token_slots.numpy().reshape(batch.num_tokens, batch.adapters_per_token)
    slots = np.where(given == NO_ADAPTER, batch.num_slots, given)
    by_slot = np.argsort(slots, axis=1, kind="stable")
    slots = np.take_along_axis(slots, by_slot, axis=1)
    order = np.lexsort(slots.T[::-1])
    order = np.ascontiguousarray(order[slots[order, 0] < batch.num_slots])
    slots = slots[order]
    repeats = np.zeros_like(slots)
    for j in range(1, slots.shape[1]):
        repeats[:, j] = np.where(slots[:, j] == slots[:, j - 1], repeats[:, j - 1] + 1, 0)
    scales = None
    if batch.token_scales is not None:
        scales = batch.token_scales.numpy().reshape(given.shape)
        scales = np.take_along_axis(scales, by_slot, axis=1)[order]
    return SortedTokens(order, slots, repeats, slots < batch.num_slots, scales)


def prepare_each(
    engine: Engine,
    prepare: Callable[..., Any],
    batch: LoRABatch,
    out: ManyAdaptersPlan | None,
    **options: Any,
) -> ManyAdaptersPlan:
    """Return the plan of a batch of several adapters per token; arguments are checked.

    `prepare` makes the plan of one adapter per token, with `options`.
    """
    if out is None:
        plans = [prepare(part, **options) for part in batch.per_adapter(batch.adapters_per_token)]
        capacity = options.get("capacity")
        joint = engine.prepare_together(batch, None, capacity)
        sizes = batch.num_tokens, batch.num_slots
        return ManyAdaptersPlan(*sizes, tuple(plans), joint, capacity=capacity or batch.num_tokens)
    for plan, part in zip(out.plans, batch.per_adapter(len(out.plans)), strict=True):
        prepare(part, out=plan, **options)
    if out.joint is not None:
        engine.prepare_together(batch, out.joint, None)
    out.num_tokens = batch.num_tokens
    return out


def add_each(
    operation: str,
    call: Callable[..., torch.Tensor],
    engine: Engine,
    weights: Any,
    plan: ManyAdaptersPlan,
    y: torch.Tensor,
) -> torch.Tensor:
    """Add the delta of every adapter to y: ``call(plan of one adapter, y)``, one after another.

    Raises:
        UnsupportedInputError: the layer has output_scales; a token can have only one.
    """
    refuse_output_scales(operation, weights, plan)
    if y.dtype.itemsize > 2 or torch.float32 not in engine.dtypes:
        for part in plan.plans:
            call(part, y)
        return y
    # so that a 16-bit y is rounded once
    total = y.float()
    for part in plan.plans:
        total = call(part, total)
    # a NaN that y held keeps its bits, which a cast does not
    return y.copy_(torch.where(y == y, total.to(y.dtype), y))


def refuse_output_scales(operation: str, weights: Any, plan: ManyAdaptersPlan) -> None:
    """Raise UnsupportedInputError for a layer with output_scales."""
    # else a column would be scaled once for each adapter
    if OUTPUT_SCALES in weights.needs:
        raise UnsupportedInputError(
            f"{operation} cannot apply output_scales to several adapters per token\n"
            f"  given: a plan of {plan.adapters_per_token} adapters per token\n"
            f"  allowed: output_scales with one adapter per token"
        )


def refuse(operation: str, plan: ManyAdaptersPlan) -> None:
    """Raise UnsupportedInputError: on h, a token would have one row per adapter."""
    raise UnsupportedInputError(
        f"{operation} cannot run with several adapters per token, since h has one row per token\n"
        f"  given: a plan of {plan.adapters_per_token} adapters per token\n"
        f"  to do: call run_linear, or one of the operations that add to base_output"
    )
