"""Adapters that vLLM's own loader refuses, strengths of adapters, and blends."""
