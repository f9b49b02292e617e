"""LoRA on the experts of a mixture: weights per (slot, expert), routing per token."""

from lora_backends.experts.routing import ExpertRouting
from lora_backends.experts.weights import ExpertWeights

__all__ = ["ExpertRouting", "ExpertWeights"]
