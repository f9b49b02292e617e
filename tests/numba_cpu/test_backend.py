"""What `numba_cpu` promises besides the interface, which the conformance kit checks."""

import os
import sys
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.small_layers import per_token
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lora_backends import (
    ExpertWeights,
    InvalidInputError,
    LoRABatch,
    LoRAWeights,
    quantize_weights,
)
from lora_backends.eight_bit import LARGEST
from lora_backends.numba_cpu import NumbaCPUBackend, launch
from lora_backends.numba_cpu.config import (
    LONG_CHUNK,
    LONG_PANEL,
    LONG_SEGMENT,
    MAX_SEGMENT,
    SERIAL_BYTES,
)
from lora_backends.numba_cpu.machine.openmp import torch_openmp
from lora_backends.testing import conformance_tests
from lora_backends.testing.profiles import Profile
from lora_backends.torch_ref import TorchRefBackend

SMALL = Profile(
    name="small",
    effort=0.2,
    max_tokens=40,
    max_slots=4,
    max_slices=3,
    widths=(16, 17, 33),
    ranks=(1, 4, 5, 16),
    lengths=(17, 33),
    shrink_seconds=5.0,
)


@pytest.fixture
def two_threads():
    if torch_openmp() is None:
        pytest.skip("torch runs on no OpenMP with GCC's entry points here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layer(slots=3, slices=(128, 40), rank=24, d_in=200, dtype=torch.float32, bias=None, seed=0):
    make = torch.Generator().manual_seed(seed)
    like = {"generator": make}
    ranks = torch.randint(0, rank + 1, (slots, len(slices)), dtype=torch.int32, **like)
    out = sum(slices)
    return LoRAWeights(
        lora_a=torch.randn(slots, len(slices), rank, d_in, **like).to(dtype),
        lora_b=torch.randn(slots, out, rank, **like).to(dtype),
        ranks=ranks,
        scalings=torch.rand(slots, len(slices), **like),
        output_slices=slices,
        bias=None if bias is None else torch.randn(slots, out, **like).to(bias),
    )


def run(backend, weights, slots, x, y):
    plan = backend.prepare_batch(LoRABatch(slots, weights.num_slots))
    return backend.run_linear(x, weights, plan, y.clone())


def random_batch(weights, tokens, seed=1):
    make = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, weights.num_slots, (tokens,), generator=make)
    x = torch.randn(tokens, weights.in_features, generator=make).to(weights.dtype)
    y = torch.randn(tokens, weights.out_features, generator=make).to(weights.dtype)
    return slots, x, y


@pytest.mark.usefixtures("two_threads")
class TestAlwaysThreads:
    """No call is small enough for one thread; tests/interface/test_conformance.py runs on one."""

    @pytest.fixture(autouse=True)
    def _threads(self, monkeypatch):
        monkeypatch.setattr(launch, "SERIAL_BYTES", 0)

    test_conformance = staticmethod(conformance_tests(NumbaCPUBackend, profile=SMALL))


@pytest.mark.parametrize("dtype", NumbaCPUBackend.dtypes, ids=str)
@pytest.mark.parametrize("tokens", [1, LONG_SEGMENT - 1, LONG_SEGMENT, MAX_SEGMENT + 9])
@pytest.mark.parametrize("bias", [None, torch.float64, torch.bfloat16])
def test_long_and_short_segments_agree_with_the_reference(dtype, tokens, bias):
    weights = layer(slots=1, dtype=dtype, bias=bias)
    slots, x, y = [0] * tokens, *random_batch(weights, tokens)[1:]
    actual = run(NumbaCPUBackend(), weights, slots, x, y)
    expected = run(TorchRefBackend(), weights, slots, x, y)
    bound = 2e-5 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < bound


@pytest.mark.parametrize("stored", [*NumbaCPUBackend.dtypes, *LARGEST], ids=str)
@pytest.mark.parametrize("tokens", [1, LONG_SEGMENT - 1, LONG_SEGMENT, MAX_SEGMENT + 9])
def test_a_layer_without_inputs_adds_its_bias_alone(stored, tokens):
    blocks = [(1, None), (3, 5)] if stored in LARGEST else [None]
    for dtype, block in product(NumbaCPUBackend.dtypes, blocks):
        if block is None and dtype is not stored:
            continue
        weights = layer(slots=1, slices=(70,), d_in=0, dtype=dtype, bias=torch.float32)
        weights.ranks.fill_(weights.max_rank)
        if block is not None:
            weights = quantize_weights(weights, stored, block)
        launch._SCRATCH.memory.fill(0x7F)  # h of earlier calls
        x, y = torch.empty(tokens, 0, dtype=dtype), torch.zeros(tokens, 70, dtype=dtype)
        result = run(NumbaCPUBackend(), weights, [0] * tokens, x, y)
        assert torch.equal(result, weights.bias.to(dtype).expand(tokens, 70))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", NumbaCPUBackend.dtypes, ids=str)
def test_rows_do_not_depend_on_threads_or_neighbours(dtype, monkeypatch):
    weights = layer(dtype=dtype, bias=dtype)
    slots, x, y = random_batch(weights, 150)
    backend = NumbaCPUBackend()
    alone = torch.cat(
        [run(backend, weights, slots[t : t + 1], x[t : t + 1], y[t : t + 1]) for t in range(150)]
    )
    for serial_bytes in (0, 10**12):
        monkeypatch.setattr(launch, "SERIAL_BYTES", serial_bytes)
        for segments_per_thread in (0, 10**6):
            monkeypatch.setattr(launch, "SEGMENTS_PER_THREAD", segments_per_thread)
            assert torch.equal(run(backend, weights, slots, x, y), alone)


@pytest.mark.parametrize("dtype", NumbaCPUBackend.dtypes, ids=str)
def test_long_segments_keep_the_order_of_sums(dtype):
    """Over several chunks of inputs, more than a panel of rows, and tiles that are left over."""
    d_in, rank, tokens = 2 * LONG_CHUNK + 37, LONG_PANEL + 13, LONG_SEGMENT + 1
    weights = layer(1, (5 * 16 + 3,), rank, d_in, dtype, bias=dtype)
    weights.ranks.fill_(rank)
    _, x, y = random_batch(weights, tokens)
    backend = NumbaCPUBackend()
    alone = [run(backend, weights, [0], x[t : t + 1], y[t : t + 1]) for t in range(tokens)]
    assert torch.equal(run(backend, weights, [0] * tokens, x, y), torch.cat(alone))


@pytest.mark.parametrize("dtype", NumbaCPUBackend.dtypes, ids=str)
def test_rank_16_keeps_the_order_of_sums_with_and_without_gaps(dtype):
    """A token alone takes a way of its own where rows of B have 16 elements and no gaps."""
    weights = layer(1, (5 * 16 + 3, 32), 16, 70, dtype)
    weights.ranks.fill_(16)
    _, x, y = random_batch(weights, 7)
    wide = torch.full((1, weights.out_features, 17), float("nan"), dtype=dtype)
    gaps = replace(weights, lora_b=wide[..., :16].copy_(weights.lora_b))
    backend = NumbaCPUBackend()
    expected = run(backend, gaps, [0] * 7, x, y)
    assert torch.equal(run(backend, weights, [0] * 7, x, y), expected)
    alone = [run(backend, weights, [0], x[t : t + 1], y[t : t + 1]) for t in range(7)]
    assert torch.equal(torch.cat(alone), expected)


def test_threads_follow_torch_and_small_work_takes_one(two_threads):
    backend, weights = NumbaCPUBackend(), layer()
    read = backend._layers.locate(weights).bytes_read
    few = backend.prepare_batch(LoRABatch([0], 3))
    many = backend.prepare_batch(LoRABatch([0, 1, 2] * (SERIAL_BYTES // 1000), 3))
    assert launch.num_threads(read, few) == 1
    assert launch.num_threads(read, many) == 2
    torch.set_num_threads(1)
    assert launch.num_threads(read, many) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_threads_are_those_of_torch(two_threads, monkeypatch):
    """No second set of threads: it would compete with torch's for the cores."""
    weights = layer()
    batch = random_batch(weights, 9)
    torch.ones(1 << 20) + 1  # starts torch's threads
    before = set(os.listdir("/proc/self/task"))
    monkeypatch.setattr(launch, "SERIAL_BYTES", 0)
    run(NumbaCPUBackend(), weights, *batch)
    assert set(os.listdir("/proc/self/task")) <= before  # threads of earlier tests may end


def test_without_openmp_one_thread_does_all(two_threads, monkeypatch):
    weights = layer()
    batch = random_batch(weights, 40)
    expected = run(NumbaCPUBackend(), weights, *batch)
    monkeypatch.setattr(launch, "SERIAL_BYTES", 0)
    monkeypatch.setattr(launch, "torch_openmp", lambda: None)
    assert torch.equal(run(NumbaCPUBackend(), weights, *batch), expected)


def test_python_threads_may_share_a_backend(two_threads, monkeypatch):
    monkeypatch.setattr(launch, "SERIAL_BYTES", 0)
    backend = NumbaCPUBackend()
    layers = [layer(seed=seed) for seed in range(4)]
    batches = [random_batch(weights, 70, seed) for seed, weights in enumerate(layers)]
    expected = [run(backend, w, *batch) for w, batch in zip(layers, batches, strict=True)]
    wrong = []

    def work(i):
        for _ in range(30):
            if not torch.equal(run(backend, layers[i], *batches[i]), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_weights_that_moved_are_found_again():
    backend, weights = NumbaCPUBackend(), layer()
    slots, x, y = random_batch(weights, 9)
    run(backend, weights, slots, x, y)
    weights.lora_a.data = weights.lora_a.clone()
    weights.lora_b.data = weights.lora_b * 2
    expected = run(TorchRefBackend(), weights, slots, x, y)
    assert torch.allclose(run(backend, weights, slots, x, y), expected, atol=1e-4, rtol=1e-4)


def test_a_layer_is_forgotten_with_its_weights():
    backend, weights = NumbaCPUBackend(), layer()
    run(backend, weights, *random_batch(weights, 3))
    assert len(backend._layers._located) == 1
    del weights
    assert len(backend._layers._located) == 0


def test_negative_zero_stays_where_nothing_is_added():
    weights = layer()
    weights.ranks[1] = 0
    y = torch.full((2, weights.out_features), -0.0)
    result = run(NumbaCPUBackend(), weights, [-1, 1], torch.randn(2, 200), y)
    assert result.signbit().all()


def test_a_plan_lists_tokens_by_slot():
    plan = NumbaCPUBackend().prepare_batch(LoRABatch([2, -1, 0, 2], num_slots=3))
    assert plan.order.tolist() == [2, 0, 3]
    assert plan.segments.tolist() == [[0, 0, 1], [2, 1, 3]]


def test_a_plan_cuts_long_runs():
    plan = NumbaCPUBackend().prepare_batch(LoRABatch([0] * (2 * MAX_SEGMENT + 1), num_slots=1))
    ends = [MAX_SEGMENT, 2 * MAX_SEGMENT, 2 * MAX_SEGMENT + 1]
    assert plan.segments[:, 2].tolist() == ends


def test_it_promises_what_it_is_asked_for():
    assert NumbaCPUBackend.batch_invariant  # what is listed without making one
    assert NumbaCPUBackend().deterministic
    assert NumbaCPUBackend(batch_invariant=True).batch_invariant
    assert not NumbaCPUBackend(batch_invariant=False).batch_invariant


def test_rows_of_b_may_be_one_row():
    weights = LoRAWeights(
        lora_a=torch.randn(2, 1, 8, 24),
        lora_b=torch.randn(2, 1, 8).expand(2, 40, 8),
        ranks=torch.full((2, 1), 8, dtype=torch.int32),
        scalings=torch.ones(2, 1),
        output_slices=(40,),
    )
    batch, x = LoRABatch([0, 1, -1, 1], 2), torch.randn(4, 24)
    backend = NumbaCPUBackend()
    y = backend.run_linear(x, weights, backend.prepare_batch(batch))
    expected = per_token(x, weights, batch, torch.zeros(4, 40))
    assert (y.double() - expected).abs().max() < 1e-4


def calls_of(backend):
    """Return a call of each method, by name, with tensors made beforehand."""
    weights = layer(slots=1, slices=(16,), d_in=8, rank=4)
    experts = ExpertWeights(
        torch.ones(1, 2, 1, 4, 8), torch.ones(1, 2, 16, 4), torch.full((1, 2, 1), 4).int(),
        torch.ones(1, 2, 1), (16,), 2,
    )  # fmt: skip
    batch, scaled = LoRABatch([0] * 3, 1), LoRABatch([0] * 3, 1, torch.ones(3))
    plan = backend.prepare_batch(batch)
    ids, factors = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    routing = backend.prepare_experts(plan, ids, factors, 2)
    x, h, y, of_pairs = (torch.ones(s) for s in [(3, 8), (1, 3, 4), (3, 16), (3, 1, 16)])
    return {
        "run_linear": lambda: backend.run_linear(x, weights, plan),
        "run_linear, base_output": lambda: backend.run_linear(x, weights, plan, y),
        "run_lora_a": lambda: backend.run_lora_a(x, weights, plan),
        "run_lora_a, out": lambda: backend.run_lora_a(x, weights, plan, h),
        "run_lora_b": lambda: backend.run_lora_b(h, weights, plan),
        "run_experts": lambda: backend.run_experts(x, experts, routing),
        "run_experts, base_output": lambda: backend.run_experts(x, experts, routing, of_pairs),
        "run_experts, reduce": lambda: backend.run_experts(x, experts, routing, y, reduce=True),
        "prepare_batch": lambda: backend.prepare_batch(scaled),
        "prepare_batch, out": lambda: backend.prepare_batch(scaled, plan),
    }


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", calls_of(TorchRefBackend()))
def test_a_mode_whose_new_tensors_have_no_memory_is_refused(name):
    call = calls_of(NumbaCPUBackend())[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(InvalidInputError, match="mode of torch"):
            call()
    call()  # and leaves nothing of it


def test_a_mode_whose_tensors_have_memory_is_followed():
    weights, backend = layer(), NumbaCPUBackend()
    slots, x, y = random_batch(weights, 5)
    expected = run(backend, weights, slots, x, y)
    with FlopCounterMode(display=False):
        assert torch.equal(run(NumbaCPUBackend(), weights, slots, x, y), expected)
