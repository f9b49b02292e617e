"""Kernels compile before the engine serves, for every batch that it may run."""

import random
from types import SimpleNamespace

import pytest
import torch

from lora_backends import LoRAWeights, get_backend
from lora_backends.integrations.vllm.warm_up import Batch, batches, distinct
from lora_backends.sgmv.launch import Options, kernel_sizes
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.rules import choose_tiles, tile_tokens
from lora_backends.sgmv.tiles.source import TileSource

ROWS = 8192  # vLLM's usual max_num_batched_tokens
LAYERS = {  # of Llama-3-8B, with 8 adapters of rank 16: in_features and output_slices
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


@pytest.fixture(scope="module")
def sizes():
    source = TileSource(tile_tokens, lambda batch, layer: choose_tiles(batch, layer, H200), ())
    options = Options("ieee", True, False, source, True, H200)

    def of(name, halves=False):
        wide, slices = LAYERS[name]
        weights = LoRAWeights(
            torch.empty(8, len(slices), 16, wide, dtype=torch.bfloat16),
            torch.empty(8, sum(slices), 16, dtype=torch.bfloat16),
            torch.zeros(8, len(slices), dtype=torch.int32),
            torch.ones(8, len(slices)),
            slices,
        )
        form = "separate" if halves else "linear"
        return lambda rows, slots: kernel_sizes(weights, rows, slots, options, form)

    return of


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("num_slots", [1, 8])
def test_no_batch_of_a_simulated_serving_needs_another_kernel(sizes, layer, num_slots, halves):
    of = sizes(layer, halves)
    chosen = distinct(ROWS, num_slots, of)
    assert len(chosen) < 40, "kernels are few; calls at start-up are no more"
    compiled = {of(*batch) for batch in chosen}
    draw = random.Random(7)
    for _ in range(4000):  # prefills in chunks beside decodes, and decodes alone
        decodes, prefill = draw.randint(0, 256), draw.choice((0, draw.randint(0, ROWS)))
        rows = min(decodes + prefill, ROWS)
        if rows:
            slots = draw.randint(1, min(num_slots, rows))
            assert of(rows, slots) in compiled, (rows, slots)


def test_batches_of_a_backend_that_tells_nothing_are_close_to_any_batch():
    chosen = batches(ROWS, 8)
    assert {Batch(1, 1), Batch(ROWS, 1), Batch(ROWS, 8)} <= set(chosen)
    assert all(batch.slots <= batch.rows <= ROWS for batch in chosen)
    for rows in (3, 40, 100, 777, 5000):
        for slots in (1, 3, 8):
            if slots <= rows:
                near = [b for b in chosen if b.slots == slots and b.rows <= rows < 1.3 * b.rows]
                assert near, (rows, slots)


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
