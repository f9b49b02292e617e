"""The kernels of the backward: beside float64, and bit for bit whatever runs beside them."""

import numpy as np
import pytest
import torch
from numba import config, njit

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.numba_cpu import NumbaCPUBackend
from lora_backends.numba_cpu.gradients import launch as backward
from lora_backends.numba_cpu.machine import plain
from lora_backends.numba_cpu.machine import vectors as v

OUT, IN, RANK, SLOTS = 37, 53, 19, 4  # tails of every vector and group of rows
needs_jit = pytest.mark.skipif(config.DISABLE_JIT, reason="torch sums where numba is off")


def layer():
    torch.manual_seed(0)
    ranks = torch.tensor([[RANK], [3], [0], [16]], dtype=torch.int32)
    a, b = torch.randn(SLOTS, 1, RANK, IN), torch.randn(SLOTS, OUT, RANK)
    return LoRAWeights(a, b, ranks, torch.full((SLOTS, 1), 0.5), (OUT,))


def gradients(weights, slots, grad, h, x):
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(torch.tensor(slots), SLOTS))
    b, a = torch.full((SLOTS, OUT, RANK), torch.nan), torch.full((SLOTS, 1, RANK, IN), torch.nan)
    dx = torch.full((len(slots), IN), torch.nan)
    dh = backend.run_lora_b_backward(grad, h, weights, plan, lora_b=b)
    backend.run_lora_a_backward(dh, x, weights, plan, dx=dx, lora_a=a)
    return dh, b, dx, a


def inputs(rows):
    torch.manual_seed(1)
    return torch.randn(rows, OUT), torch.randn(1, rows, RANK), torch.randn(rows, IN)


def expected(weights, slots, grad, h, x):
    b, a = torch.zeros(SLOTS, OUT, RANK).double(), torch.zeros(SLOTS, 1, RANK, IN).double()
    dx, dh = torch.zeros(len(slots), IN).double(), torch.zeros(1, len(slots), RANK).double()
    for t, slot in enumerate(slots):
        rank = 0 if slot < 0 else int(weights.ranks[slot, 0])
        if rank:
            g = 0.5 * grad[t].double()
            dh[0, t, :rank] = g @ weights.lora_b[slot, :, :rank].double()
            b[slot, :, :rank] += torch.outer(g, h[0, t, :rank].double())
            dx[t] = dh[0, t, :rank] @ weights.lora_a[slot, 0, :rank].double()
            a[slot, 0, :rank] += torch.outer(dh[0, t, :rank], x[t].double())
    return dh, b, dx, a


@pytest.mark.parametrize("strided", [False, True])
def test_gradients_of_tails_and_views_and_zeros_elsewhere(strided):
    slots, weights = [1, 0, -1, 0, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1], layer()
    given = inputs(len(slots))
    taken = given
    if strided:
        taken = [torch.cat([t, t * torch.nan], -1)[..., : t.shape[-1]] for t in given[:2]]
        taken.append(given[2].t().contiguous().t())
    for found, want in zip(
        gradients(weights, slots, *taken), expected(weights, slots, *given), strict=True
    ):
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-4)
        assert torch.equal(found == 0, want == 0)


@needs_jit
@pytest.mark.parametrize("threads", [1, 2])
def test_other_adapters_and_threads_change_no_bit(threads, monkeypatch):
    monkeypatch.setattr(backward, "num_threads", lambda *_: threads)
    slots, weights = [0, 3, 0, 1] * 40, layer()
    grad, h, x = inputs(len(slots))
    own = [t for t, slot in enumerate(slots) if slot == 0]
    others = [t for t, slot in enumerate(slots) if slot != 0]
    monkeypatch.setattr(backward, "num_threads", lambda *_: 1)
    alone = gradients(weights, [0] * len(own), grad[own], h[:, own], x[own])
    for tensor in (grad, h[0], x):
        tensor[others] = torch.nan
    monkeypatch.setattr(backward, "num_threads", lambda *_: threads)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        dh, b, dx, a = gradients(weights, slots, grad, h, x)
    finally:
        torch.set_num_threads(before)
    for found, want in zip(
        (dh[:, own], b[0], dx[own], a[0]),
        (alone[0], alone[1][0], alone[2], alone[3][0]),
        strict=True,
    ):
        assert torch.equal(found, want)


def test_places_follow_the_slots_that_are_asked_for():
    plan = NumbaCPUBackend().prepare_batch(LoRABatch(torch.tensor([0, 1]), SLOTS))
    slots = [1]
    assert plan.places_of(slots).tolist() == [-1, 0, -1, -1]
    slots[0] = 3
    assert plan.places_of(slots).tolist() == [-1, -1, -1, 0]


@needs_jit
def test_a_strided_dx_and_a_16_bit_dh_are_read_as_they_are():
    weights, backend = layer(), NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(torch.tensor([0, 3, 0]), SLOTS))
    dh, dx, flat = torch.randn(1, 3, RANK).bfloat16(), torch.zeros(IN, 3).t(), torch.zeros(3, IN)
    backend.run_lora_a_backward(dh, None, weights, plan, dx=dx)
    backend.run_lora_a_backward(dh.float(), None, weights, plan, dx=flat)
    assert torch.equal(dx, flat)


def outer(of, a, b, c, order, count, begun):
    like = (0, 0, 0)
    rows = of.steps_until(c, 80, 0, 1, like)
    taken = of.rows_until((a, 4, order), 0, 1, like)
    pair = (of.load_first(v.FLOAT32, b, 16), of.load_first(v.FLOAT32, b + 64, count - 16))
    sums = of.add_outer(v.FLOAT32, of.zeros(like, (0, 0)), taken, 0, pair)
    of.update_first(rows, 0, count, sums, of.read_scaled(taken, np.float32(1)), begun)


@njit
def compiled_outer(a, b, c, order, count, begun):
    like = (0, 0, 0)
    rows = v.steps_until(c, 80, 0, 1, like)
    taken = v.rows_until((a, 4, order), 0, 1, like)
    pair = (v.load_first(v.FLOAT32, b, 16), v.load_first(v.FLOAT32, b + 64, count - 16))
    sums = v.add_outer(v.FLOAT32, v.zeros(like, (0, 0)), taken, 0, pair)
    v.update_first(rows, 0, count, sums, v.read_scaled(taken, np.float32(1)), begun)


@pytest.mark.parametrize("begun", [0, 1])
def test_masked_operations_agree_with_their_plain_twins(begun):
    a, b = torch.tensor([2.0, 3.0]), torch.arange(20.0)
    order = torch.tensor([1, 0])
    results = []
    for run in (compiled_outer, lambda *args: outer(plain, *args)):
        c = torch.full((2, 20), 7.0 if begun else torch.nan)
        run(a.data_ptr(), b.data_ptr(), c.data_ptr(), order.data_ptr(), 18, begun)
        results.append(c)
    want = torch.stack([b * 9, b * 4])[:, :18] + 7 * begun
    for c in results:
        assert torch.equal(c[:, :18], want)
        assert torch.equal(c[:, 18:].isnan(), torch.full((2, 2), not begun))
