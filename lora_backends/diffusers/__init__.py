"""Diffusers pipelines with an adapter per image; needs the extra ``lora-backends[diffusers]``."""

from lora_backends.diffusers.pipeline import MultiLoRAPipeline

__all__ = ["MultiLoRAPipeline"]
