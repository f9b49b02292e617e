"""Transformers models with a PEFT adapter per row; needs the extra ``lora-backends[hf]``."""

from lora_backends.hf.model import MultiLoRAModel

__all__ = ["MultiLoRAModel"]
