"""LoRA on the experts of a mixture: weights per (slot, expert), routing per token."""

from lora_backends.experts.routing import ExpertRouting as ExpertRouting
from lora_backends.experts.weights import ExpertWeights as ExpertWeights
