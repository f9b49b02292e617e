"""Compiled kernels and the host code that launches them."""
