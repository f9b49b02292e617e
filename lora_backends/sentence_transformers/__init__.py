"""Embedders and rerankers with an adapter per text: ``lora-backends[sentence-transformers]``."""

from lora_backends.sentence_transformers.encoder import MultiLoRAEncoder

__all__ = ["MultiLoRAEncoder"]
