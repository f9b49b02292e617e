"""Backends by name: the entry points that register them, and why one does not run here.

Built-ins and third parties share one entry-point group, ``lora_backends``. Listing names imports
nothing. A plugin is foreign code that may fail in any way; whatever it does becomes a
`BackendUnavailableError` or a reason that names it, and no other backend is affected.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, cast

import torch

from lora_backends.backend import LoRABackend
from lora_backends.common.devices import as_device
from lora_backends.common.names import AUTO
from lora_backends.errors import (
    BackendUnavailableError,
    UnknownBackendError,
    did_you_mean,
    shown,
    told,
)
from lora_backends.features import FEATURES
from lora_backends.operations import OPERATIONS

GROUP = "lora_backends"

PACKAGE = __name__.partition(".")[0]
"""The package of the built-ins, whose names nobody else's entry point takes over."""


def _set_device(device: torch.device) -> None:
    """Set the default device; None leaves out the mode that torch needs for another."""
    torch.set_default_device(None if device.type == "cpu" else device)


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _set_random_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_random_state, _set_random_state),
)
"""Settings of torch that a plugin may not change for the rest of the process."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that a backend may declare; stacks of 8 bits are a feature."""


def backend_names() -> list[str]:
    """Return every registered name in alphabetical order; nothing is imported."""
    return sorted({entry.name for entry in _entries()})


def backend_class(name: str) -> type[LoRABackend]:
    """Import and return the backend class registered as `name`.

    Args:
        name: one of `backend_names`.

    Returns:
        The subclass of `LoRABackend`.

    Raises:
        BackendUnavailableError: no such name, two different objects under it, a failing import,
            something that is no `LoRABackend`, or a backend with a wrong declaration or method.
    """
    entry = _entry_point(name)
    with plugin_code(f"backend {name!r} does not import", _origin(entry)):
        loaded = entry.load()
        is_backend = isinstance(loaded, type) and issubclass(loaded, LoRABackend)
        faults = _declaration_faults(loaded) if is_backend else []
    if not is_backend:
        raise BackendUnavailableError(
            f"backend {name!r} is no subclass of LoRABackend\n  given: {shown(loaded)}\n"
            f"  registered by: {_origin(entry)}"
        )
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise BackendUnavailableError(
            f"backend {name!r} declares wrongly what it supports:{lines}\n"
            f"  registered by: {_origin(entry)}"
        )
    return cast(type[LoRABackend], loaded)


def unavailable_reasons(name: str, device: torch.device | str | None = None) -> list[str]:
    """Return why `name` does not run on `device`, one sentence a reason; [] if it does.

    Args:
        name: a backend's name.
        device: as for `get_backend`.

    Returns:
        The reasons; an unknown name or a failing import is a reason too.
    """
    try:
        engine = backend_class(name)
    except BackendUnavailableError as error:
        return [str(error)]
    return reasons_of(name, engine, resolve_device(device))


def reasons_of(name: str, engine: type[LoRABackend], device: torch.device) -> list[str]:
    """Return a backend's own reasons; a failure to give them is a reason."""
    try:
        with plugin_code(f"{name}.unavailable_reasons fails"):
            reasons: Any = engine.unavailable_reasons(device)
    except BackendUnavailableError as error:
        return [f"{error}."]
    # a plugin's return value is as foreign as its code
    if isinstance(reasons, list | tuple) and all(isinstance(r, str) for r in reasons):
        return list(reasons)
    return [f"{name}.unavailable_reasons returns {shown(reasons)}; allowed: a list of sentences."]


def auto_priority(name: str, engine: type[LoRABackend], device: torch.device) -> int | None:
    """Return a backend's priority for "auto" on a device; None if it never takes part there."""
    with plugin_code(f"{name}.auto_priority cannot be read"):
        priorities: Any = dict(engine.auto_priority)
        priority = priorities.get(device.type)
    if priority is None or isinstance(priority, int):
        return priority
    raise BackendUnavailableError(
        f"{name}.auto_priority is {shown(priorities)}; allowed: a type of device to an int"
    )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device asked for; for "auto" or None, CUDA where there is one, else the CPU."""
    if device is None or device == AUTO:
        return as_device("cuda" if torch.cuda.is_available() else "cpu")
    return as_device(device)


def faulty_entries() -> list[str]:
    """Return why entry points of installed packages are not used, a sentence each."""
    faults = []
    try:
        entry_points(group=GROUP)
    except Exception:  # one bad file makes it raise; look at each package alone
        faults = [fault for _, fault in _entries_one_by_one() if fault]
    entries = _entries()
    built_in = {entry.name for entry in entries if _is_built_in(entry)}
    return faults + [
        f"{_origin(entry)} is ignored: {entry.name!r} is the name of a built-in backend"
        for entry in entries
        if entry.name in built_in and not _is_built_in(entry)
    ]


@contextmanager
def plugin_code(
    failure: str, origin: str = "", passes: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Turn whatever a plugin raises into an error that names it; undo its changes to torch.

    `failure` is e.g. ``backend 'x' does not import``, `origin` the plugin's package, and `passes`
    are errors that are meant for the caller.

    Raises:
        BackendUnavailableError: the plugin raised anything else, SystemExit included.
    """
    before = [get() for get, _ in _SETTINGS]
    try:
        yield
    except KeyboardInterrupt:
        raise
    except passes:
        raise
    except BaseException as error:
        by = f"\n  registered by: {origin}" if origin else ""
        raise BackendUnavailableError(f"{failure}: {told(error)}{by}") from error
    finally:
        for (get, restore), value in zip(_SETTINGS, before, strict=True):
            if get() != value:
                restore(value)


def _declaration_faults(engine: type[LoRABackend]) -> list[str]:
    """Return the class attributes that the checks of a call cannot work with, and why."""
    faults = []
    for field, kinds, known, allowed in (
        ("dtypes", (tuple, list), FLOATS, "a tuple of float16, bfloat16, float32 or float64"),
        ("features", (frozenset, set), FEATURES, f"a frozenset of {', '.join(FEATURES)}"),
        ("device_types", (tuple, list), None, "a tuple of types of torch.device"),
    ):
        value: Any = getattr(engine, field)
        if not isinstance(value, kinds) or not all(
            isinstance(each, str) if known is None else each in known for each in value
        ):
            faults.append(f"{field} is {shown(value)}; allowed: {allowed}")
    if not faults and not engine.dtypes:
        faults.append("dtypes is empty; allowed: one dtype or more")
    if not isinstance(engine.plan_type, type):
        faults.append(f"plan_type is {shown(engine.plan_type)}; allowed: a class")
    return faults + _signature_faults(engine)


def _signature_faults(engine: type[LoRABackend]) -> list[str]:
    """Return the methods of the interface that cannot be called as the interface calls them."""
    calls: dict[str, tuple[int, list[str]]] = {
        "prepare_batch": (1, ["out"]),
        "prepare_experts": (5, ["out"]),
    }
    for operation in OPERATIONS:
        positional = 3 if operation.result == "h" else 4
        calls[operation.name] = positional, [option.name for option in operation.options]
    faults = []
    for name, (positional, named) in calls.items():
        # of the method itself, which its wrapper names; a class lends it without self
        signature = inspect.signature(getattr(engine, name))
        try:
            signature.bind(*range(1 + positional), **dict.fromkeys(named))
        except TypeError as error:
            faults.append(
                f"{name}{signature} does not take what the interface passes: {error}; allowed: "
                f"{name}{inspect.signature(getattr(LoRABackend, name))}"
            )
    return faults


def _entries() -> list[EntryPoint]:
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # one package's bad entry_points.txt hides those of all others
        return [entry for entry, _ in _entries_one_by_one() if entry]


def _entries_one_by_one() -> Iterator[tuple[EntryPoint | None, str]]:
    """Yield the entry points of each package, or why they cannot be read."""
    seen = set()
    for distribution in distributions():
        # normalised, as indexes of packages compare names
        name = re.sub(r"[-_.]+", "-", _name_of(distribution)).lower()
        # as in `importlib.metadata`, the first of two distributions of one name on the path wins
        if name in seen:
            continue
        seen.add(name)
        try:
            entries = list(distribution.entry_points.select(group=GROUP))
        except Exception as error:
            yield (
                None,
                f"the entry points of {_label_of(distribution)} cannot be read: {told(error)}",
            )
        else:
            yield from ((entry, "") for entry in entries)


def _name_of(distribution: Distribution) -> str:
    try:
        return str(distribution.metadata["Name"])
    except Exception:  # its METADATA is broken too
        return f"the package at {getattr(distribution, '_path', 'an unknown place')}"


def _label_of(distribution: Distribution) -> str:
    try:
        return f"{_name_of(distribution)} {distribution.version}"
    except Exception:
        return _name_of(distribution)


def _entry_point(name: str) -> EntryPoint:
    entries = [entry for entry in _entries() if entry.name == name]
    entries = [entry for entry in entries if _is_built_in(entry)] or entries
    if not entries:
        names = backend_names()
        faulty = "".join(f"\n  {fault}" for fault in faulty_entries())
        raise UnknownBackendError(
            f"no LoRA backend named {name!r}{did_you_mean(str(name), names) or ';'} "
            f"registered: {', '.join(names) or 'none; is lora-backends installed?'}{faulty}"
        )
    if len({entry.value for entry in entries}) > 1:
        origins = "".join(f"\n  - {_origin(entry)}" for entry in entries)
        raise BackendUnavailableError(
            f"backend {name!r} is registered more than once:{origins}\n"
            f"  to do: uninstall all but one, or rename it"
        )
    return entries[0]


def _is_built_in(entry: EntryPoint) -> bool:
    return entry.module.partition(".")[0] == PACKAGE


def _origin(entry: EntryPoint) -> str:
    package = f" of {_label_of(entry.dist)}" if entry.dist else ""
    return f"{entry.value}{package}"
