"""Copies of plans, weights and backends live on their own."""

import copy
import pickle

import pytest
import torch
from helpers.small_layers import per_token, small_batch, small_weights

from lora_backends import LoRABatch, backend_names, get_backend, unavailable_reasons

ANOTHER = LoRABatch([1, 1, -1, 3, 2, 0, -1], num_slots=4)
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}
BACKENDS = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_copied_plan_outlives_the_original_and_is_refilled(name, how):
    backend, weights = get_backend(name, device="cpu"), small_weights(bias=True)
    x, base = torch.randn(7, 10), torch.randn(7, 14)
    original = backend.prepare_batch(small_batch())
    backend.run_linear(x, weights, original)
    plan = COPIES[how](original)
    if how != "copy":  # a shallow copy shares its tables
        backend.prepare_batch(ANOTHER, out=original)
    del original
    for batch in (small_batch(), ANOTHER, small_batch()):
        y = backend.run_linear(x, weights, plan, base.clone())
        assert torch.allclose(y.double(), per_token(x, weights, small_batch(), base), atol=1e-5)
        backend.prepare_batch(batch, out=plan)
        y = backend.run_linear(x, weights, plan, base.clone())
        assert torch.allclose(y.double(), per_token(x, weights, batch, base), atol=1e-5)
        backend.prepare_batch(small_batch(), out=plan)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_copied_backend_outlives_the_original(name, how):
    original, weights = get_backend(name, device="cpu"), small_weights(bias=True)
    x, base = torch.randn(7, 10), torch.randn(7, 14)
    original.run_linear(x, weights, original.prepare_batch(small_batch()))
    backend = COPIES[how](original)
    assert backend.handle != original.handle
    del original
    y = backend.run_linear(x, weights, backend.prepare_batch(small_batch()), base.clone())
    assert torch.allclose(y.double(), per_token(x, weights, small_batch(), base), atol=1e-5)
