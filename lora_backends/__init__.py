"""Multi-LoRA compute: one interface, interchangeable engines, every token its own adapter."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_backends.backend import LoRABackend, LoRAPlan
    from lora_backends.batch import NO_ADAPTER, LoRABatch
    from lora_backends.errors import (
        BackendUnavailableError,
        InvalidInputError,
        LoRABackendError,
        UnsupportedInputError,
    )
    from lora_backends.experts import ExpertRouting, ExpertWeights
    from lora_backends.selection.choice import get_backend
    from lora_backends.selection.config import LoRAConfig
    from lora_backends.selection.registry import backend_names, unavailable_reasons
    from lora_backends.weights import LoRAWeights, quantize_weights

__all__ = [
    "NO_ADAPTER",
    "BackendUnavailableError",
    "ExpertRouting",
    "ExpertWeights",
    "InvalidInputError",
    "LoRABackend",
    "LoRABackendError",
    "LoRABatch",
    "LoRAConfig",
    "LoRAPlan",
    "LoRAWeights",
    "UnsupportedInputError",
    "backend_names",
    "get_backend",
    "quantize_weights",
    "unavailable_reasons",
]

_MODULES = {
    "backend": ("LoRABackend", "LoRAPlan"),
    "batch": ("NO_ADAPTER", "LoRABatch"),
    "selection.config": ("LoRAConfig",),
    "errors": (
        "BackendUnavailableError",
        "InvalidInputError",
        "LoRABackendError",
        "UnsupportedInputError",
    ),
    "experts": ("ExpertRouting", "ExpertWeights"),
    "selection.registry": ("backend_names", "unavailable_reasons"),
    "selection.choice": ("get_backend",),
    "weights": ("LoRAWeights", "quantize_weights"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # so the command line answers ``--help`` without torch, and kernels need no settings library
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
