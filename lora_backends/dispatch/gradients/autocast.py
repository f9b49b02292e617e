"""`torch.autocast`: inputs are cast to the layer's dtype, and engines run without it.

Under autocast, torch's operators return 16 bits whatever they are given. An operation here takes
that for its input, as torch's own operators do, and returns what it promises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lora_backends.dispatch.engine import Engine
from lora_backends.dtypes import accumulator_dtype
from lora_backends.layer_weights import LayerWeights
from lora_backends.operations import Input, Operation

is_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device, in a fraction of the time of asking for one."""

_NOTHING = nullcontext()


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Return a context manager that turns autocast off."""
    # creating torch's own takes longer than launching a kernel
    return torch.autocast(device_type, enabled=False) if is_any_autocast() else _NOTHING


def for_autocast(operation: Operation, x: Any, weights: Any) -> Any:
    """Return x in a dtype that the layer takes, if autocast is on; arguments are unchecked."""
    if not is_any_autocast() or not isinstance(weights, LayerWeights):
        return x
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    device = x.device.type
    # torch knows no autocast for meta, and its is_autocast_available breaks graphs in torch 2.10.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    # `to` is recorded: a gradient comes back in the dtype of x
    dtypes = weights.input_dtypes
    if operation.input is Input.H:
        dtypes = torch.float32, accumulator_dtype(weights.dtype)
        return x if x.dtype in dtypes else x.to(dtypes[1])
    return x if x.dtype in dtypes else x.to(weights.compute_dtype)


def run_outside(
    method: Callable[..., torch.Tensor], engine: Engine, *args: Any, **options: Any
) -> torch.Tensor:
    """Run a method of an engine with autocast off: the engine chooses the dtypes of products."""
    with torch.autocast(engine.device.type, enabled=False):
        return method(engine, *args, **options)
