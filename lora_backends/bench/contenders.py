"""Contenders: registered backends and, where they are installed, other engines' operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.bench.layers import Workload
from lora_backends.bench.peers import PEERS, peer
from lora_backends.bench.timing import Call
from lora_backends.common.devices import as_device
from lora_backends.dtypes import dtype_name, dtype_names
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
    did_you_mean,
)
from lora_backends.operations import Input
from lora_backends.selection.choice import get_backend
from lora_backends.selection.registry import backend_class, backend_names, unavailable_reasons


@dataclass(frozen=True)
class Contender:
    """Something that runs an operation on the layers of a cell."""

    name: str
    graphs: bool  # whether a CUDA graph may capture its calls
    bind: Callable[[Workload], Call]  # returns a function that runs one layer, by index
    options: Mapping[str, Any] = field(default_factory=dict)


def from_backend(backend: LoRABackend, options: Mapping[str, Any] | None = None) -> Contender:
    """Return a backend as a contender; its plan is made before the clock starts."""

    def bind(work: Workload) -> Call:
        plan, run = backend.prepare_batch(work.batch), getattr(backend, work.operation.name)
        if work.operation.result == "h":
            return lambda layer: run(work.x, work.layers[layer], plan)
        return lambda layer: run(work.x, work.layers[layer], plan, work.y)

    return Contender(backend.name, backend.cuda_graphs, bind, options or {})


def choose(
    names: Sequence[str] | None,
    device: torch.device | str,
    dtype: torch.dtype,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders on a device, and why others are left out.

    Args:
        names: registered backends and peers; None: all that run on the device.
        device: of the cells.
        dtype: of the cells.
        options: the options of each backend, by name.

    Returns:
        The contenders, and a reason for each backend or peer that is left out; one that was asked
        for by name never is.

    Raises:
        BackendUnavailableError: a name does not run on the device, or none does.
        UnsupportedInputError: a name does not take the dtype.
        InvalidInputError: an unknown name, or an unknown option or one of no contender.
    """
    device, options = as_device(device), options or {}
    known = [*backend_names(), *PEERS]
    for name in [*(names or ()), *options]:
        if name not in known:
            raise InvalidInputError(
                f"nothing named {name!r} can be timed{did_you_mean(name, known)}\n"
                f"  allowed: {', '.join(known)}"
            )
    if names is not None:
        wrong = [name for name in options if name not in names]
        if wrong:
            raise InvalidInputError(
                f"options for {wrong[0]!r}, which is no contender\n  contenders: {', '.join(names)}"
            )
        return [_one(name, device, dtype, options) for name in dict.fromkeys(names)], {}
    contenders, left_out = [], {}
    for name in known:
        reason = "" if name in options else _why_not_by_default(name, device)
        try:
            contenders += [] if reason else [_one(name, device, dtype, options)]
        except (BackendUnavailableError, UnsupportedInputError) as error:
            # an option asks for the backend by name
            if name in options:
                raise
            reason = " ".join(str(error).split())
        if reason:
            left_out[name] = reason
    if not contenders:
        lines = "".join(f"\n  - {name}: {reason}" for name, reason in left_out.items())
        raise BackendUnavailableError(f"nothing to time on {device}:{lines}")
    return contenders, left_out


def _one(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    options: Mapping[str, Mapping[str, Any]],
) -> Contender:
    if name in PEERS and name not in backend_names():
        return Contender(name, True, _linear_alone(name, peer(name, device, dtype)))
    supported = backend_class(name).dtypes
    if dtype not in supported:
        raise UnsupportedInputError(
            f"{name} does not take {dtype_name(dtype)}; supported: {dtype_names(supported)}"
        )
    backend = get_backend(name, device, **options.get(name, {}))
    return from_backend(backend, options.get(name))


def _linear_alone(name: str, bind: Callable[[Workload], Call]) -> Callable[[Workload], Call]:
    """Refuse single halves and token ids: the peers' operators run whole layers on rows."""

    def checked(work: Workload) -> Call:
        if (work.operation.input, work.operation.result) != (Input.ROWS, "y"):
            raise UnsupportedInputError(f"{name} is timed in run_linear, not {work.operation.name}")
        return bind(work)

    return checked


def _why_not_by_default(name: str, device: torch.device) -> str:
    if name not in backend_names():
        return ""
    reasons = unavailable_reasons(name, device)
    if reasons:
        return " ".join(" ".join(reasons).split())
    try:
        priority = dict(backend_class(name).auto_priority)
    except (LoRABackendError, TypeError, ValueError):
        return ""
    if priority and device.type not in priority:
        return f"made for {', '.join(priority)}; on {device.type} it is timed if asked for by name."
    return ""
