"""Calls that `numba_cpu` repeats with what it kept of an earlier one."""

import copy
import pickle
import threading
from dataclasses import replace

import pytest
import torch

from lora_backends import InvalidInputError, LoRABatch, LoRAWeights, quantize_weights
from lora_backends.dispatch.any_axes import over_rows
from lora_backends.numba_cpu import NumbaCPUBackend, launch
from lora_backends.numba_cpu.config import LONG_SEGMENT

SLOTS, IN, OUT, RANK, TOKENS = 3, 40, 48, 5, LONG_SEGMENT + 2


@pytest.fixture(scope="module")
def weights():
    make = torch.Generator().manual_seed(0)
    return LoRAWeights(
        lora_a=torch.randn(SLOTS, 2, RANK, IN, generator=make),
        lora_b=torch.randn(SLOTS, OUT, RANK, generator=make),
        ranks=torch.tensor([[5, 2], [1, 4], [3, 0]], dtype=torch.int32),
        scalings=torch.rand(SLOTS, 2, generator=make),
        output_slices=(32, 16),
    )


@pytest.fixture
def bound(monkeypatch):
    """Return a list to which every call adds that no earlier one stands for."""
    calls, bind = [], launch.bind
    monkeypatch.setattr(launch, "bind", lambda *args: calls.append(args) or bind(*args))
    return calls


def random_rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alone(weights, batch, x, y):
    """Return what a backend without earlier calls computes."""
    backend = NumbaCPUBackend()
    return backend.run_linear(x, weights, backend.prepare_batch(batch), y.clone())


BATCHES = [
    LoRABatch([t % SLOTS for t in range(TOKENS)], SLOTS),
    LoRABatch([-1, 2] + [1] * (TOKENS - 2), SLOTS),  # a long segment
    LoRABatch([-1] * TOKENS, SLOTS),
    LoRABatch([0] * TOKENS, SLOTS, [t / 4 for t in range(TOKENS)]),
    LoRABatch([2, 1], SLOTS),  # fewer tokens than rows
    LoRABatch([t % 2 for t in range(TOKENS)], SLOTS),
]


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
@pytest.mark.parametrize("scratch_bytes", [launch.SCRATCH_BYTES, 0])
def test_every_plan_and_refill_computes_what_it_would_alone(
    kind, scratch_bytes, weights, monkeypatch
):
    monkeypatch.setattr(launch, "SCRATCH_BYTES", scratch_bytes)
    layer = quantize_weights(weights, kind) if kind is torch.int8 else weights
    backend = NumbaCPUBackend()
    plans = [backend.prepare_batch(BATCHES[0], capacity=TOKENS) for _ in range(2)]
    for seed, batch in enumerate(BATCHES * 2):
        x, y = random_rows(seed, TOKENS, IN), random_rows(-seed - 1, TOKENS, OUT)
        padded = batch.token_slots.tolist() + [-1] * (TOKENS - batch.num_tokens)
        scales = batch.token_scales
        expected = alone(layer, LoRABatch(padded, SLOTS, scales), x, y)
        for plan in (plans[seed % 2], None):
            plan = backend.prepare_batch(batch, out=plan, capacity=None if plan else TOKENS)
            assert torch.equal(backend.run_linear(x, layer, plan, y.clone()), expected)


def test_a_new_plan_repeats_calls_of_an_earlier_one(weights, bound):
    """A model that is given adapters by name makes a plan per pass."""
    backend = NumbaCPUBackend()
    add = over_rows(backend, "run_linear", backend.run_linear)
    for seed in range(3):
        x, y = random_rows(seed, 2, 3, IN), torch.zeros(2, 3, OUT)
        plan = backend.prepare_batch(LoRABatch([seed] * 6, SLOTS))
        add(x, weights, plan, y)
        bind = len(bound)
        expected = alone(weights, LoRABatch([seed] * 6, SLOTS), x.view(6, IN), y.view(6, OUT) * 0)
        assert torch.equal(y.view(6, OUT), expected)
        del bound[bind:]
    assert len(bound) == 1


def test_slots_that_are_written_again_are_seen(weights, bound):
    backend, layer = NumbaCPUBackend(), copy.deepcopy(weights)
    plan = backend.prepare_batch(BATCHES[0])
    x, y = random_rows(0, TOKENS, IN), torch.zeros(TOKENS, OUT)
    backend.run_linear(x, layer, plan, y.clone())
    layer.ranks[1, 0], layer.lora_b[0] = 3, 1.0
    layer.scalings.mul_(2)
    found = backend.run_linear(x, layer, plan, y.clone())
    assert len(bound) == 1
    assert torch.equal(found, alone(layer, BATCHES[0], x, y))


@pytest.mark.parametrize("name", ["lora_a", "lora_b", "ranks", "scalings"])
def test_a_tensor_of_the_layer_that_moved_is_followed(name, weights):
    backend, layer = NumbaCPUBackend(), copy.deepcopy(weights)
    plan = backend.prepare_batch(BATCHES[0])
    x, y = random_rows(0, TOKENS, IN), torch.zeros(TOKENS, OUT)
    before = backend.run_linear(x, layer, plan, y.clone())
    tensor = getattr(layer, name)
    old, tensor.data = tensor.data, torch.ones_like(tensor)
    found = backend.run_linear(x, layer, plan, y.clone())
    assert torch.equal(found, alone(layer, BATCHES[0], x, y)) and not torch.equal(found, before)
    assert old.shape == tensor.shape  # alive: its memory was not given to the new one


def test_a_plan_that_does_not_fit_is_refused_after_one_that_did(weights):
    backend = NumbaCPUBackend()
    x, y = random_rows(0, TOKENS, IN), torch.zeros(TOKENS, OUT)
    backend.run_linear(x, weights, backend.prepare_batch(BATCHES[0]), y)
    before = y.clone()
    slots = BATCHES[0].token_slots.tolist()  # no long segment, as in the plan that fits
    for batch in (
        LoRABatch(slots, SLOTS + 1),  # might read beyond the layer's slots
        LoRABatch(slots[:-1], SLOTS),  # no room for as many rows
        LoRABatch([*slots, 0], SLOTS),
    ):
        with pytest.raises(InvalidInputError):
            backend.run_linear(x, weights, backend.prepare_batch(batch), y)
        assert torch.equal(y, before)


def test_strides_and_dtypes_have_calls_of_their_own(weights):
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(BATCHES[0])
    rows, wide = random_rows(0, TOKENS, IN + 24), random_rows(1, TOKENS, OUT + 16)
    contiguous = rows[:, :IN].contiguous(), wide[:, :OUT].contiguous()
    expected = alone(weights, BATCHES[0], *contiguous)
    for _ in range(2):
        for x in (rows[:, :IN], contiguous[0]):
            for y in (wide.clone()[:, :OUT], contiguous[1].clone()):
                assert torch.equal(backend.run_linear(x, weights, plan, y), expected)
        y = contiguous[1].bfloat16()
        backend.run_linear(contiguous[0], weights, plan, y)
        torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


COPIES = [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("copied", ["plan", "backend"])
def test_a_copy_runs_without_the_calls_of_the_original(copied, how, weights):
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(BATCHES[0])
    x, y = random_rows(0, TOKENS, IN), torch.zeros(TOKENS, OUT)
    expected = backend.run_linear(x, weights, plan, y.clone())
    assert len(plan.call_cache) == 1
    if copied == "plan":
        plan = how(plan)
        assert len(plan.call_cache) == 0
    else:
        backend = how(backend)
        assert len(backend.prepare_batch(BATCHES[0]).call_cache) == 0
    assert torch.equal(backend.run_linear(x, weights, plan, y.clone()), expected)


def test_threads_keep_h_apart():
    addresses = [launch._SCRATCH.address]
    thread = threading.Thread(target=lambda: addresses.append(launch._SCRATCH.address))
    thread.start()
    thread.join()
    assert len({*addresses}) == 2 and not any(address % 64 for address in addresses)


def test_layers_are_told_apart(weights):
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(BATCHES[0])
    other = replace(weights, lora_b=weights.lora_b * 2, scalings=weights.scalings + 1)
    x, y = random_rows(0, TOKENS, IN), torch.zeros(TOKENS, OUT)
    for layer in (weights, other) * 2:
        found = backend.run_linear(x, layer, plan, y.clone())
        assert torch.equal(found, alone(layer, BATCHES[0], x, y))
