"""Architectures and variants of adapters, each beside PEFT."""
