"""Trained adapters: reading PEFT checkpoints, and the pool of slots that they are loaded into."""

from typing import TYPE_CHECKING, Any

from lora_backends.adapters.describe import AdapterInfo, AdaptersReport
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.dora import BaseLayer
from lora_backends.adapters.pool.pool import AdapterPool, Loaded
from lora_backends.adapters.pool.quantized import AdapterReport
from lora_backends.adapters.pool.slots import SlotTable
from lora_backends.adapters.pool.store import AdapterStore
from lora_backends.adapters.specs import (
    Checkpoint,
    ExpertDelta,
    ExpertSpec,
    ModuleDelta,
    ModuleSpec,
    OwnModules,
    OwnParameter,
    TokenRows,
)

if TYPE_CHECKING:
    from lora_backends.adapters.peft.checkpoint import read_checkpoint

__all__ = [
    "AdapterInfo",
    "AdapterPool",
    "AdapterReport",
    "AdapterStore",
    "AdaptersReport",
    "BaseLayer",
    "Checkpoint",
    "ExpertDelta",
    "ExpertSpec",
    "LoadLimits",
    "Loaded",
    "ModuleDelta",
    "ModuleSpec",
    "OwnModules",
    "OwnParameter",
    "SlotTable",
    "TokenRows",
    "read_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Import the reader on use: it needs pydantic, the pool does not."""
    if name == "read_checkpoint":
        from lora_backends.adapters.peft.checkpoint import read_checkpoint

        return read_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
