"""The quick checks: True for ordinary arguments, in about 2 us of host time.

A model makes this check for each of its layers in every step. It explains nothing: the guards in
`checks` do, and they decide about every call that is not recognised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.batch import LoRABatch
from lora_backends.dispatch.engine import Engine
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.features import CAPACITY
from lora_backends.plan import LoRAPlan
from lora_backends.weights import MOST, LoRAWeights


def is_ordinary(
    engine: Engine,
    num_slices: int | None,
    x: torch.Tensor,
    weights: LoRAWeights,
    plan: Any,
    y: torch.Tensor | None,
) -> bool:
    """Return True only where the guard of rows would find no problem.

    `num_slices` is what the operation demands, or None; y is base_output. All are unchecked.
    """
    if (
        type(x) is not torch.Tensor
        or type(weights) is not LoRAWeights
        or not isinstance(plan, LoRAPlan)
        or not isinstance(plan, engine.plan_type)
        or plan.num_slots != weights.num_slots
        or weights.lora_a is None
        or weights.lora_b is None
        or not weights.needs <= engine.features
        or (num_slices is not None and num_slices != weights.num_slices)
    ):
        return False
    with_gradients = torch.is_grad_enabled()
    if with_gradients and requires_gradient(weights, x):
        return False
    device, dtype = engine.device, x.dtype
    try:
        tokens = x.shape[0] if x.ndim == 2 else -1
        if (
            dtype not in weights.input_dtypes
            or dtype not in engine.dtypes
            or x.device != device
            or weights.device != device
            or not plan.num_tokens <= tokens <= plan.capacity
            or x.shape[1] != weights.in_features
            or x.is_neg()
        ):
            return False
        x_row, x_step = x.stride()
        x_first, addresses = x.data_ptr(), addresses_of(weights)
        if x_step != 1 or not x_first or 0 in addresses:
            return False
        if y is None:
            return True
        out_features = weights.out_features
        if (
            type(y) is not torch.Tensor
            or y.dtype not in engine.dtypes
            or y.device != device
            or y.shape != (tokens, out_features)
            or y.is_neg()
            or (with_gradients and y.requires_grad)
        ):
            return False
        y_row, y_step = y.stride()
        first = y.data_ptr()
        if y_step != 1 or y_row < out_features or not first:
            return False
        end = first + ((tokens - 1) * y_row + out_features) * y.itemsize
        x_end = x_first + ((tokens - 1) * x_row + weights.in_features) * x.itemsize
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        return False
    apart = x_first >= end or first >= x_end
    return apart and not lies_on(addresses, weights.extents, first, end)


def is_ordinary_batch(engine: Engine, batch: Any, out: Any, capacity: Any) -> bool:
    """Return True only where the guard of `prepare_batch` would find no problem."""
    if type(batch) is not LoRABatch or capacity is not None:
        return False
    if batch.token_scales is not None or batch.token_slots.ndim != 1:
        return False
    if out is None:
        return True
    return (
        type(out) is engine.plan_type
        and CAPACITY in engine.features
        and out.num_slots == batch.num_slots
        and batch.num_tokens <= out.capacity
    )


def is_ordinary_choice(
    engine: Engine, plan: Any, ids: Any, factors: Any, num_experts: Any, expert_map: Any, out: Any
) -> bool:
    """Return True only where the guard of `prepare_experts` would find no problem.

    `ids` and `factors` are topk_ids and topk_weights.
    """
    if (
        type(ids) is not torch.Tensor
        or type(factors) is not torch.Tensor
        or not isinstance(plan, LoRAPlan)
        or not isinstance(plan, engine.plan_type)
        or type(num_experts) is not int
        or not 1 <= num_experts <= MOST
        or expert_map is not None
    ):
        return False
    device = engine.device
    try:
        shape = ids.shape
        if (
            ids.dtype not in (torch.int64, torch.int32)
            or factors.dtype is not torch.float32
            or len(shape) != 2
            or shape[1] < 1
            or factors.shape != shape
            or not plan.num_tokens <= shape[0] <= plan.capacity
            or ids.device != device
            or factors.device != device
            or ids.is_neg()
            or factors.is_neg()
            or (factors.requires_grad and torch.is_grad_enabled())
            or ids.layout is not torch.strided
            or factors.layout is not torch.strided
            or not (ids.data_ptr() and factors.data_ptr())
        ):
            return False
        if device.type == "cpu" and shape[0] and int(ids.max()) >= num_experts:
            return False
    except RuntimeError:  # as in `is_ordinary`
        return False
    if out is None:
        return True
    if not isinstance(out, engine.routing_type):
        return False
    return bool(out.num_experts == num_experts and out.topk_ids.shape == shape)


def is_ordinary_routed(
    engine: Engine,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: Any,
    y: torch.Tensor | None,
    options: Mapping[str, Any],
) -> bool:
    """Return True only where the guard of experts would find no problem; as `is_ordinary`."""
    if (
        type(x) is not torch.Tensor
        or type(weights) is not ExpertWeights
        or not isinstance(routing, ExpertRouting)
        or not isinstance(routing, engine.routing_type)
        or not isinstance(routing.plan, LoRAPlan)
        or routing.plan.num_slots != weights.num_slots
        or routing.num_experts != weights.num_experts
        or options["rows"] not in ("tokens", "pairs")
        or type(options["weighted"]) is not bool
        or type(options["reduce"]) is not bool
        or not weights.needs <= engine.features
    ):
        return False
    with_gradients = torch.is_grad_enabled()
    if with_gradients and requires_gradient(weights, x):
        return False
    tokens, top_k = routing.topk_ids.shape
    rows = tokens * top_k if options["rows"] == "pairs" else tokens
    device, dtype = engine.device, x.dtype
    try:
        if (
            dtype not in weights.input_dtypes
            or dtype not in engine.dtypes
            or x.device != device
            or weights.device != device
            or routing.plan.num_tokens > tokens
            or x.shape != (rows, weights.in_features)
            or x.is_neg()
            or x.layout is not torch.strided
            or not x.is_contiguous()
        ):
            return False
        x_first, addresses = x.data_ptr(), addresses_of(weights)
        if not x_first or 0 in addresses:
            return False
        if y is None:
            return True
        pairs = (tokens,) if options["reduce"] else (tokens, top_k)
        if (
            type(y) is not torch.Tensor
            or y.dtype not in engine.dtypes
            or y.device != device
            or y.shape != (*pairs, weights.out_features)
            or y.is_neg()
            or (with_gradients and y.requires_grad)
            or y.layout is not torch.strided
            or not y.is_contiguous()
        ):
            return False
        first = y.data_ptr()
        end, x_end = first + y.nbytes, x_first + x.nbytes
    except RuntimeError:  # as in `is_ordinary`
        return False
    apart = first != 0 and (x_first >= end or first >= x_end)
    return apart and not lies_on(addresses, weights.extents, first, end)


def requires_gradient(weights: LoRAWeights | ExpertWeights, *others: torch.Tensor) -> bool:
    """Return whether a tensor of a call requires a gradient."""
    return any(tensor.requires_grad for tensor in (*others, *weights.tensors.values()))


def addresses_of(weights: LoRAWeights | ExpertWeights) -> tuple[int, ...]:
    """Return where the tensors of a layer lie now, in the order of its `extents`."""
    return tuple(map(torch.Tensor.data_ptr, weights.tensors.values()))


def lies_on(addresses: tuple[int, ...], extents: tuple[int, ...], first: int, end: int) -> bool:
    """Return whether the bytes from `first` to `end` meet those of a layer's tensors."""
    for address, extent in zip(addresses, extents, strict=True):
        if address < end and first < address + extent:
            return True
    return False
