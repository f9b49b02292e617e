"""An operation on rows for tensors of more axes, as a model has them.

Views of x and y as rows cost more host time than finding a cached call. Contiguous tensors of other
shapes are the same rows in memory, so a call is also stored for the shapes that a model passes, and
repeated without views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lora_backends.dispatch.cached import CachingPlan
from lora_backends.dispatch.engine import Engine
from lora_backends.dispatch.tracing import is_traced
from lora_backends.dispatch.wrap import stored_as
from lora_backends.weights import LoRAWeights

Add = Callable[[torch.Tensor, LoRAWeights, Any, torch.Tensor], Any]
"""Adds to y: of x, a layer, a plan and y."""


def over_rows(engine: Engine, operation: str, run: Add) -> Add:
    """Return a function that adds to y [..., out_features] for x [..., in_features].

    `run` is the operation for rows. The function returns y, or a contiguous copy of a y that is
    not, with the LoRA added.
    """
    stored = stored_as(engine, operation)

    def add(x: torch.Tensor, weights: LoRAWeights, plan: Any, y: torch.Tensor) -> torch.Tensor:
        if stored is None or not isinstance(plan, CachingPlan) or is_traced():
            y = y.contiguous()
            run(as_rows(x), weights, plan, y.view(-1, y.shape[-1]))
            return y
        cache = plan.call_cache
        cached = cache.find(stored, engine, x, weights, y, plan)
        if cached is not None and cached.run(x, weights, plan, y):
            return y
        y = y.contiguous()
        rows, flat = as_rows(x), y.view(-1, y.shape[-1])
        run(rows, weights, plan, flat)
        # the same bytes: the next call finds the entry without making views
        if x.ndim != 2 and x.is_contiguous():
            cached = cache.find(stored, engine, rows, weights, flat, plan)
            if cached is not None:
                cache.store(stored, engine, x, weights, y, cached)
        return y

    return add


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in_features] as [tokens, in_features], the last axis contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()
