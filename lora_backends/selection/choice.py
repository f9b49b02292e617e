"""`get_backend`: a backend by name, by configuration, or the best that runs on the device."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.common.names import AUTO, ENV_PREFIX
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
    did_you_mean,
    shown,
)
from lora_backends.selection.registry import (
    auto_priority,
    backend_class,
    backend_names,
    faulty_entries,
    plugin_code,
    reasons_of,
    resolve_device,
    unavailable_reasons,
)

if TYPE_CHECKING:
    from lora_backends.selection.config import LoRAConfig


def get_backend(
    name: str | LoRAConfig | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> LoRABackend:
    """Return a backend by name, by configuration, or the best that runs on the device.

    An argument that is left out comes from the environment (``LORA_BACKENDS_BACKEND``,
    ``LORA_BACKENDS_DEVICE``, ...), or else is "auto".

    Args:
        name: a registered name, "auto", a `LoRAConfig`, or None.
        device: a `torch.device` or its name, "auto" or None (CUDA where there is one, else the
            CPU).
        options: the backend's own, e.g. ``segment_size=32``; they override the configuration's.

    Returns:
        A new backend. A name that was given never falls back to another.

    Raises:
        BackendUnavailableError: the name is not registered, does not run on the device, or fails
            while it is made.
        InvalidInputError: an option that the backend does not have, or a switch that is no bool.
    """
    if not isinstance(name, str):
        config = _as_config(name)
        device = config.device if device is None else device
        name, options = config.backend, {**config.backend_options, **options}
    elif device is None:
        device = os.environ.get(ENV_PREFIX + "DEVICE")
    resolved = resolve_device(device)
    if name == AUTO:
        return _create_best(resolved, options)
    engine = backend_class(name)
    reasons = reasons_of(name, engine, resolved)
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        runnable = [n for n in backend_names() if not unavailable_reasons(n, resolved)]
        raise BackendUnavailableError(
            f"backend {name!r} does not run on {resolved}:{lines}\n"
            f"  runs there: {', '.join(runnable) or 'none'}"
        )
    return _create(name, engine, resolved, options)


def _as_config(config: LoRAConfig | None) -> LoRAConfig:
    """Return the configuration given, else the one that the environment holds."""
    from lora_backends.selection.config import LoRAConfig  # kernels need no settings library

    if config is None:
        return LoRAConfig()
    if isinstance(config, LoRAConfig):
        return config
    raise InvalidInputError(
        f"a backend is chosen by its name or a LoRAConfig\n  given: a {type(config).__name__}"
    )


def _create(
    name: str, engine: type[LoRABackend], device: torch.device, options: dict[str, Any]
) -> LoRABackend:
    with plugin_code(f"backend {name!r} fails", passes=LoRABackendError):
        _check_options(name, engine, options)
        backend = engine(device=device, **options)
        if not isinstance(backend, LoRABackend) or not hasattr(backend, "device"):
            raise BackendUnavailableError(
                f"backend {name!r} fails: its constructor does not call "
                f"super().__init__(device), or makes a {type(backend).__name__}"
            )
        backend.name = name  # commands and errors show the registered name
        backend._made_with = options
    return backend


def _check_options(name: str, engine: type[LoRABackend], options: dict[str, Any]) -> None:
    parameters = inspect.signature(engine).parameters
    allowed = [parameter for parameter in parameters if parameter != "device"]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for option, value in options.items():
        if option not in allowed and not takes_any:
            raise InvalidInputError(
                f"backend {name!r} has no option {option!r}{did_you_mean(option, allowed)}\n"
                f"  allowed: {', '.join(allowed) or 'none; this backend has no options'}"
            )
        # annotations are strings under `from __future__ import annotations`
        is_switch = option in allowed and parameters[option].annotation in (bool, "bool")
        if is_switch and not isinstance(value, bool):  # any text counts as true, "no" as well
            raise InvalidInputError(
                f"option {option!r} of backend {name!r} is a switch\n"
                f"  given: {shown(value)}\n  allowed: true or false"
            )


def _create_best(device: torch.device, options: dict[str, Any]) -> LoRABackend:
    """Return the backend of the highest priority that runs on `device`; broken plugins lose."""
    candidates, passed_over = [], []
    for name in backend_names():
        try:
            engine = backend_class(name)
            priority = auto_priority(name, engine, device)
        except BackendUnavailableError as error:
            passed_over.append(f"{name}: {error}")
            continue
        reasons = reasons_of(name, engine, device)
        passed_over += [f"{name}: {reason}" for reason in reasons]
        if priority is not None and not reasons:
            candidates.append((priority, name, engine))
    # the name breaks ties, so that the choice does not depend on the order of entry points
    for _, name, engine in sorted(candidates, key=lambda c: c[:2], reverse=True):
        try:
            return _create(name, engine, device, options)
        except (BackendUnavailableError, UnsupportedInputError) as error:
            passed_over.append(f"{name}: {error}")
    lines = "".join(f"\n  - {each}" for each in passed_over + faulty_entries())
    raise BackendUnavailableError(
        f"no backend runs on {device}\n"
        f"  registered: {', '.join(backend_names()) or 'none; is lora-backends installed?'}{lines}"
    )
