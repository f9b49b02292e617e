"""Transformers models with a PEFT adapter per row; needs the extra ``lora-backends[hf]``."""

from lora_backends.hf.calls.prepared import PreparedAdapters
from lora_backends.hf.model import MultiLoRAModel
from lora_backends.hf.training.module import TrainingModule
from lora_backends.hf.words import OneAdapter

__all__ = ["MultiLoRAModel", "OneAdapter", "PreparedAdapters", "TrainingModule"]
