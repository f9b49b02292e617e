"""Multi-LoRA compute: one interface, interchangeable engines, every token its own adapter."""

from typing import TYPE_CHECKING, Any

from lora_backends.backend import LoRABackend, LoRAPlan
from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.errors import (
    BackendUnavailableError,
    InvalidInputError,
    LoRABackendError,
    UnsupportedInputError,
)
from lora_backends.experts import ExpertRouting, ExpertWeights
from lora_backends.registry import backend_names, get_backend, unavailable_reasons
from lora_backends.weights import LoRAWeights

if TYPE_CHECKING:
    from lora_backends.config import LoRAConfig

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
    "unavailable_reasons",
]


def __getattr__(name: str) -> Any:
    """Import `LoRAConfig` when it is asked for: kernels need no settings library."""
    if name == "LoRAConfig":
        from lora_backends.config import LoRAConfig

        return LoRAConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
