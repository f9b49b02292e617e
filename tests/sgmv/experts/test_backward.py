"""The backward of experts in Triton kernels: the order of its sums, its tiles, and its launches."""

import pytest
import torch
from helpers.engines import ENGINES
from helpers.small_experts import FACTORS, IDS, small_experts
from helpers.small_layers import small_batch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_backends import ExpertWeights, LoRABackend, LoRABatch
from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.sgmv.experts import backward as way


@pytest.fixture
def backend(device):
    """Return one engine: the kernels of experts do not know of which."""
    return ENGINES["triton"](device)


def on(device, weights):
    """Return small experts on a device."""
    moved = {name: getattr(weights, name).to(device) for name in ("lora_a", "lora_b")}
    return small_experts(**moved)


def gradients(run, backend, grad, x, weights, routing, **options):
    like = x, weights.lora_a, weights.lora_b, routing.topk_weights
    out = ExpertGradients(*[torch.full_like(tensor, torch.nan) for tensor in like])
    run(backend, grad, x, weights, routing, out, **options)
    return out


def many_pairs(backend, tokens=260, slots=2):
    """Return x and a routing of two pairs per token, more than are compared with each other."""
    generator = torch.Generator().manual_seed(0)
    batch = LoRABatch(torch.randint(-1, slots, (tokens,), generator=generator), 4)
    ids = torch.randint(-1, 3, (tokens, 2), generator=generator)
    factors = torch.rand(tokens, 2, generator=generator)
    given = ids.to(backend.device), factors.to(backend.device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), *given, 3)
    return torch.randn(tokens, 5, generator=generator).to(backend.device), routing


@pytest.mark.parametrize("slots", [1, 4])  # tiles of 128 pairs, two programs each, or smaller ones
def test_many_pairs_have_the_gradients_of_the_definition(backend, slots):
    weights = on(backend.device, small_experts())
    x, routing = many_pairs(backend, slots=slots)
    assert routing.shape.tile == (128 if slots == 1 else 64)
    grad = torch.randn(260, 6, device=backend.device)
    found = [
        gradients(run, backend, grad, x, weights, routing, weighted=True, reduce=True)
        for run in (type(backend).run_experts_backward, LoRABackend.run_experts_backward)
    ]
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reduce", [False, True])
def test_pairs_that_are_not_sorted_have_the_gradients_of_the_definition(backend, reduce):
    weights, device = on(backend.device, small_experts()), backend.device
    plan = backend.prepare_batch(LoRABatch([3, 1, -1, 2, 0], 4))
    ids = torch.tensor([[0, 2], [1, -1], [1, 0], [2, 0], [1, 2]], device=device)
    routing = backend.prepare_experts(plan, ids, torch.rand(5, 2, device=device), 3)
    assert routing.shape.alone
    x, grad = torch.randn(5, 5, device=device), torch.randn(5, 2, 6, device=device)
    grad = grad[:, 0] if reduce else grad
    found = [
        gradients(run, backend, grad, x, weights, routing, weighted=True, reduce=reduce)
        for run in (type(backend).run_experts_backward, LoRABackend.run_experts_backward)
    ]
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("widths", "rank", "interleaved"), [((33, 7, 1), 130, False), ((20, 20), 80, True)]
)
def test_long_ranks_take_several_blocks(backend, widths, rank, interleaved, dtype):
    device, generator = backend.device, torch.Generator().manual_seed(1)
    shapes = (4, 3, len(widths), rank, 77), (4, 3, sum(widths), rank)
    a, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    ranks = torch.randint(rank // 2, rank + 1, (4, 3, len(widths)), generator=generator)
    weights = ExpertWeights(
        a, b, ranks.to(device), torch.ones_like(ranks), widths, 3, interleaved=interleaved
    )
    *_, routing, _ = small_call(backend)
    x, grad = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in ((7, 77), (7, 2, sum(widths)))
    )
    found = [
        gradients(run, backend, grad, x, weights, routing, weighted=True)
        for run in (type(backend).run_experts_backward, LoRABackend.run_experts_backward)
    ]
    unit = 2.0**-18 if dtype == torch.float32 else 2.0**-6
    for own, right in zip(*found, strict=True):
        largest = right.abs().max().item()
        torch.testing.assert_close(own, right, rtol=0, atol=unit * largest)


def test_no_sum_follows_the_arrival_of_pairs(backend):
    """Programs hand out places as they arrive, so an expert's pairs stand in any order."""
    weights = on(backend.device, small_experts())
    x, routing = many_pairs(backend)
    grad, run = torch.randn(260, 2, 6, device=backend.device), type(backend).run_experts_backward
    first = gradients(run, backend, grad, x, weights, routing, weighted=True)
    for row in routing.tiles[: int(routing.count[0])]:
        start, count = int(row[2]), int(row[3])
        routing.order[start : start + count] = routing.order[start : start + count].flip(0)
        row[4] = routing.order[start]
    again = gradients(run, backend, grad, x, weights, routing, weighted=True)
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left, right)


def small_call(backend):
    """Return x, weights, a routing and dL/dy."""
    device, plan = backend.device, backend.prepare_batch(small_batch())
    routing = backend.prepare_experts(plan, IDS.to(device), FACTORS.to(device), 3)
    x, grad = torch.randn(7, 5, device=device), torch.randn(7, 2, 6, device=device)
    return x, on(device, small_experts()), routing, grad


class NoWaiting(TorchDispatchMode):
    """Fails where a value of a tensor is looked at, which waits for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "_unique2", "masked_select"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device(backend, monkeypatch):
    launched = []
    monkeypatch.setattr(
        way.SpecializedKernel,
        "launch",
        lambda self, rows, arguments: launched.append(self.kernel.__name__),
    )
    x, weights, routing, grad = small_call(backend)
    launched.clear()
    with NoWaiting():
        gradients(type(backend).run_experts_backward, backend, grad, x, weights, routing)
    names = ["product_kernel"] * 2 + ["dx_kernel", "sum_pairs_kernel"] + ["outer_kernel"] * 2
    assert launched == names


def test_only_what_is_wanted_is_launched(backend, monkeypatch):
    launched = []
    launch = way.SpecializedKernel.launch
    monkeypatch.setattr(
        way.SpecializedKernel,
        "launch",
        lambda self, *args: (launched.append(self.kernel.__name__), launch(self, *args)),
    )
    x, weights, routing, grad = small_call(backend)
    for out, x_given, kernels in (
        (ExpertGradients(x=torch.empty_like(x)), None, ["product", "dx", "sum_pairs"]),
        (ExpertGradients(lora_b=torch.empty_like(weights.lora_b)), x, ["product", "outer"]),
        (
            ExpertGradients(topk_weights=torch.empty_like(routing.topk_weights)),
            x,
            ["product", "product"],
        ),
    ):
        launched.clear()
        backend.run_experts_backward(grad, x_given, weights, routing, out)
        assert launched == [f"{kernel}_kernel" for kernel in kernels]
