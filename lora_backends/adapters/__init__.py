"""Trained adapters: reading PEFT checkpoints, and the pool of slots that they are loaded into."""

from lora_backends.adapters.checkpoint import read_checkpoint
from lora_backends.adapters.pool import AdapterPool, Loaded
from lora_backends.adapters.slots import SlotTable
from lora_backends.adapters.specs import Checkpoint, ModuleDelta, ModuleSpec

__all__ = [
    "AdapterPool",
    "Checkpoint",
    "Loaded",
    "ModuleDelta",
    "ModuleSpec",
    "SlotTable",
    "read_checkpoint",
]
