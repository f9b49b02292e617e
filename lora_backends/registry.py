"""Backends by name: entry points, why one does not run here, and the choice of "auto".

Built-ins and third parties stand in one entry-point group, ``lora_backends``. Asking for names
imports nothing; a plugin that fails to import hurts only the one who asks for it.
"""

from __future__ import annotations

import inspect
import os
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import torch

from lora_backends.backend import LoRABackend
from lora_backends.devices import as_device
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    UnknownBackendError,
    did_you_mean,
)

if TYPE_CHECKING:
    from lora_backends.config import LoRAConfig

GROUP = "lora_backends"
AUTO = "auto"
ENV_PREFIX = "LORA_BACKENDS_"


def backend_names() -> list[str]:
    """Return every registered name in alphabetical order; nothing is imported."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def backend_class(name: str) -> type[LoRABackend]:
    """Import and return the backend class registered as `name`.

    Args:
        name: one of `backend_names`.

    Returns:
        The subclass of `LoRABackend`.

    Raises:
        BackendUnavailableError: no such name, two different objects under it, a failing import,
            or something that is no `LoRABackend`.
    """
    entry = _entry_point(name)
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # whatever a plugin does while it is imported
        raise BackendUnavailableError(
            f"backend {name!r} does not import: {_told(error)}\n  registered by: {_origin(entry)}"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, LoRABackend)):
        raise BackendUnavailableError(
            f"backend {name!r} is no subclass of LoRABackend\n  given: {loaded!r}\n"
            f"  registered by: {_origin(entry)}"
        )
    return loaded


def unavailable_reasons(name: str, device: torch.device | str | None = None) -> list[str]:
    """Return why `name` does not run on `device`, one sentence a reason; [] if it does.

    Args:
        name: a backend's name.
        device: as for `get_backend`.

    Returns:
        The reasons; an unknown name or a failing import is a reason too.
    """
    try:
        found = backend_class(name)
    except BackendUnavailableError as error:
        return [str(error)]
    return _reasons(name, found, _resolve_device(device))


def get_backend(
    name: str | LoRAConfig | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> LoRABackend:
    """Return a backend by name, by configuration, or the best that runs on the device.

    What is not given comes from the environment (``LORA_BACKENDS_BACKEND``,
    ``LORA_BACKENDS_DEVICE``, ...), else it is "auto".

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
        InvalidInputError: an option that the backend does not have.
    """
    if not isinstance(name, str):
        config = _as_config(name)
        device = config.device if device is None else device
        name, options = config.backend, {**config.backend_options, **options}
    elif device is None:
        device = os.environ.get(ENV_PREFIX + "DEVICE")
    resolved = _resolve_device(device)
    if name == AUTO:
        return _create_best(resolved, options)
    found = backend_class(name)
    reasons = _reasons(name, found, resolved)
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise BackendUnavailableError(
            f"backend {name!r} does not run on {resolved}:{lines}\n"
            f"  runs there: {', '.join(_runnable_names(resolved)) or 'none'}"
        )
    return _create(name, found, resolved, options)


def _as_config(config: LoRAConfig | None) -> LoRAConfig:
    """Return the configuration given, else the one that the environment holds."""
    from lora_backends.config import LoRAConfig  # kernels need no settings library

    if config is None:
        return LoRAConfig()
    if isinstance(config, LoRAConfig):
        return config
    raise InvalidInputError(
        f"a backend is chosen by its name or a LoRAConfig\n  given: a {type(config).__name__}"
    )


def _create(
    name: str, found: type[LoRABackend], device: torch.device, options: dict[str, Any]
) -> LoRABackend:
    parameters = inspect.signature(found).parameters
    allowed = [parameter for parameter in parameters if parameter != "device"]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in allowed and not takes_any:
            raise InvalidInputError(
                f"backend {name!r} has no option {option!r}{did_you_mean(option, allowed)}\n"
                f"  allowed: {', '.join(allowed) or 'none; this backend has no options'}"
            )
    try:
        backend = found(device=device, **options)
    except LoRABackendError:
        raise
    except Exception as error:  # whatever a plugin raises
        raise BackendUnavailableError(f"backend {name!r} fails: {_told(error)}") from error
    backend.name = name  # commands and errors name what can be asked for
    return backend


def _create_best(device: torch.device, options: dict[str, Any]) -> LoRABackend:
    """Return the backend of the highest priority that runs on `device`; broken plugins lose."""
    candidates = []
    for name in backend_names():
        try:
            found = backend_class(name)
            priority = int(dict(found.auto_priority)[device.type])
        except (BackendUnavailableError, KeyError, TypeError, ValueError):
            continue  # named by `lora-backends list` and by whoever asks for it
        if not _reasons(name, found, device):
            candidates.append((priority, name, found))
    for _, name, found in sorted(candidates, key=lambda c: c[:2], reverse=True):
        try:
            return _create(name, found, device, options)
        except BackendUnavailableError:
            continue
    raise BackendUnavailableError(
        f"no backend runs on {device}\n"
        f"  registered: {', '.join(backend_names()) or 'none; is lora-backends installed?'}"
    )


def _reasons(name: str, found: type[LoRABackend], device: torch.device) -> list[str]:
    """Return a backend's own reasons; that it cannot even tell is one."""
    try:
        return list(found.unavailable_reasons(device))
    except Exception as error:  # whatever a plugin raises
        return [f"{name} fails to tell whether it runs: {_told(error)}."]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _runnable_names(device: torch.device) -> list[str]:
    return [name for name in backend_names() if not unavailable_reasons(name, device)]


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None or device == AUTO:
        return as_device("cuda" if torch.cuda.is_available() else "cpu")
    return as_device(device)


def _entry_point(name: str) -> EntryPoint:
    found = list(entry_points(group=GROUP, name=name)) if isinstance(name, str) else []
    if not found:
        names = backend_names()
        raise UnknownBackendError(
            f"no LoRA backend named {name!r}{did_you_mean(str(name), names) or ';'} "
            f"registered: {', '.join(names) or 'none; is lora-backends installed?'}"
        )
    if len({entry.value for entry in found}) > 1:
        origins = "".join(f"\n  - {_origin(entry)}" for entry in found)
        raise BackendUnavailableError(
            f"backend {name!r} is registered more than once:{origins}\n"
            f"  to do: uninstall all but one, or rename it"
        )
    return found[0]


def _origin(entry: EntryPoint) -> str:
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist else ""
    return f"{entry.value}{package}"
