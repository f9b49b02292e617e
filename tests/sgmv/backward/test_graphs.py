"""A CUDA graph captures forward and backward, and follows its plan; nothing waits."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from helpers.engines import ON_GPU, VARIANTS, make_engine
from helpers.gradients import NUM_SLOTS, Run, case, layer

from lora_backends import LoRABatch
from lora_backends.sgmv.backward import launch, rules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="torch finds no CUDA device, or Triton interprets"),
]
COMPOSITIONS = [
    [-1] * 96,
    [3] * 96,
    [t % 6 - 1 for t in range(96)],
    [0, 3] + [-1] * 94,
    [4] * 50,
    [2] * 80 + [0] * 16,
]


@pytest.fixture(params=VARIANTS)
def backend(request):
    return make_engine(request.param, "cuda")


@contextmanager
def side_stream():
    """Run on another stream, between what the default stream has before and after."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def finite(made):
    """Fill the NaN of rows without adapter: in this test every row gets one."""
    for name in ("x", "grad", "h", "dh"):
        getattr(made, name).nan_to_num_(1.0)
    return made


@pytest.mark.parametrize("slots", [None, (0, 3)])
@pytest.mark.parametrize("pieces", [False, True])
def test_a_captured_backward_follows_refills(backend, monkeypatch, slots, pieces):
    if pieces:
        monkeypatch.setattr(rules, "piece_tokens", lambda *sizes: 32)
    launch._outer_kernel.cache_clear()
    made = finite(case(layer(torch.bfloat16, (48, 16), 8, 64), slots=[0] * 96, scales=True))
    run = Run(backend, made, torch.float32, slots)
    run.all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run.all()
    for composition in COMPOSITIONS:
        scales = torch.rand(len(composition))
        backend.prepare_batch(LoRABatch(composition, NUM_SLOTS, scales), out=run.plan)
        graph.replay()
        for name, eager in run.all().items():
            assert torch.equal(captured[name], eager), name
    launch._outer_kernel.cache_clear()


def test_a_captured_step_follows_refills(backend):
    made = finite(case(layer(torch.bfloat16, (48, 16), 8, 64), slots=[0] * 96))
    run = Run(backend, made, torch.bfloat16)
    weights, plan = run.made.weights, run.plan
    a = weights.lora_a.nan_to_num(0).requires_grad_()
    b = weights.lora_b.nan_to_num(0).requires_grad_()
    weights = replace(weights, lora_a=a, lora_b=b)
    x = run.made.x.clone().requires_grad_()
    base = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        y = backend.run_linear(x, weights, plan, base.clone())
        return torch.autograd.grad(y, (x, a, b), run.made.grad)

    with side_stream():
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for composition in COMPOSITIONS:
        backend.prepare_batch(LoRABatch(composition, NUM_SLOTS), out=plan)
        graph.replay()
        for result, eager in zip(captured, step(), strict=True):
            assert torch.equal(result, eager)


def test_a_graph_may_meet_a_list_of_slots_first(backend):
    made = finite(case(layer(torch.bfloat16, (48, 16), 8, 64), slots=[0, 2, 3] * 32))
    warm = Run(backend, made, torch.float32, (1, 2))
    warm.all()
    run = Run(backend, made, torch.float32, (2, 3), warm.plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run.all()
    graph.replay()
    for name, eager in run.all().items():
        assert torch.equal(captured[name], eager), name


def test_no_step_waits_for_the_device(backend):
    made = case(layer(torch.bfloat16, (4096, 16), 8, 64), room=5, scales=True)
    run = Run(backend, made, torch.float32, (0, 2, 4))
    run.all()
    fresh = Run(backend, made, torch.float32, (0, 4), run.plan)
    moved = run.made
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.all()
        fresh.all()  # its list of slots is sent
        _, h = backend.forward_with_h("run_linear", moved.x, moved.weights, run.plan, None)
        run.lora_b(h)
        backend.embedding_h(moved.token_ids, moved.weights, run.plan)
        backend.token_slots(run.plan, made.rows, made.weights.num_slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lists_of_slots_are_sent_on_any_stream(backend):
    made = case(layer(torch.float32, (20, 7), 8, 64))
    run = Run(backend, made, torch.float32, (0, 2))
    expected = run.all()
    with side_stream():
        results = run.all()
    for name, values in expected.items():
        assert torch.equal(values, results[name]), name


def test_long_batches_agree_with_the_defaults(backend):
    """Wide layers: the sizes that large batches take."""
    from helpers.gradients import assert_within, expected

    weights = layer(torch.bfloat16, (1024, 256), 64, 512)
    made = case(weights, tokens=5000, scales=True)
    run = Run(backend, made, torch.float32)
    for name in ("dh", "lora_b", "dx", "lora_a", "sums"):
        dtype = torch.bfloat16 if name == "dx" else torch.float32
        assert_within(getattr(run, name)(), expected(made, name, dtype))
