"""Choosing a backend: the registry of names, the configuration, and "auto"."""
