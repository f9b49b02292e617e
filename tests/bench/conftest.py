"""Layers and copies so small that a measurement takes a moment."""

import pytest

from lora_backends.bench import layers, timing


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(layers.ROTATED_BYTES, "cpu", 1.0)
    monkeypatch.setitem(timing.COPIED_VALUES, "cpu", 2**12)
    monkeypatch.setattr(timing, "TIMINGS", 1)
