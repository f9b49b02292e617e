"""Compilation of every kernel ahead of time."""
