"""Adapters of a vLLM engine: kinds that vLLM's own loader refuses, strengths and blends."""
