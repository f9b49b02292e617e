"""Kernels compile before the engine serves, for every batch that it may run."""

from types import SimpleNamespace

import pytest

from lora_backends import get_backend


@pytest.fixture
def calls(monkeypatch):
    """Return the kinds of layers that the backend runs on, in order."""
    backend, seen = type(get_backend("numba_cpu")), []
    for name in ("run_linear", "run_lora_b", "run_logits"):
        run = getattr(backend, name)

        def noted(self, x, weights, plan, *args, run=run, name=name, **kwargs):
            seen.append((name, weights.in_features, weights.output_slices))
            return run(self, x, weights, plan, *args, **kwargs)

        monkeypatch.setattr(backend, name, noted)
    return seen


def test_an_engine_runs_every_kind_of_layer_before_it_serves(make_engine, calls, monkeypatch):
    from lora_backends.integrations.vllm import plugin

    lines = []
    logger = SimpleNamespace(info=lambda text, *args: lines.append(text % args))
    monkeypatch.setattr(plugin, "logger", lambda: logger)
    engine = make_engine()
    assert "compiling LoRA kernels: 6 kinds of layers, 18 calls" in lines
    assert lines[-1].startswith("LoRA kernels are compiled")
    at_start = set(calls)
    calls.clear()
    engine.tokens([[5, 6, 7]] * 3, ["all", "ends", None])
    assert calls and set(calls) <= at_start
