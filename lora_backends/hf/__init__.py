"""Transformers models with a PEFT adapter per row; needs the extra ``lora-backends[hf]``."""

from lora_backends.hf.model import MultiLoRAModel
from lora_backends.hf.prepared import PreparedAdapters

__all__ = ["MultiLoRAModel", "PreparedAdapters"]
