"""Gradients of experts on every engine: how they are recorded, asked for and refused."""

import pytest
import torch
from helpers.small_experts import FACTORS, IDS, small_experts
from helpers.small_layers import small_batch
from torch.utils.checkpoint import checkpoint

from lora_backends import (
    InvalidInputError,
    LoRABackend,
    LoRABatch,
    UnsupportedInputError,
    backend_names,
    get_backend,
    quantize_weights,
    unavailable_reasons,
)
from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.dispatch.gradients.differentiate import record_routed
from lora_backends.dispatch.gradients.recorded import GradientTarget, SlotParameter
from lora_backends.operations import BY_NAME
from lora_backends.torch_ref import TorchRefBackend

ON_THE_CPU = [name for name in backend_names() if not unavailable_reasons(name, "cpu")]


@pytest.fixture(params=ON_THE_CPU)
def backend(request):
    return get_backend(request.param, device="cpu")


def leaf(tensor):
    return tensor.clone().requires_grad_()


def trainable(**changes):
    weights = small_experts(**changes)
    return small_experts(
        **changes | {"lora_a": leaf(weights.lora_a), "lora_b": leaf(weights.lora_b)}
    )


def routed(backend, factors=FACTORS, out=None):
    plan = backend.prepare_batch(small_batch()) if out is None else out.plan
    return backend.prepare_experts(plan, IDS, factors, 3, out=out)


def test_gradients_are_those_worked_out_by_hand(backend):
    weights = small_experts(
        lora_a=leaf(torch.tensor([[[[[1.0, 2.0]]], [[[0.0, 1.0]]]]])),  # one slot, two experts
        lora_b=leaf(torch.tensor([[[[1.0], [3.0]], [[2.0], [-1.0]]]])),
        ranks=torch.ones(1, 2, 1, dtype=torch.int32),
        scalings=torch.tensor([[[0.5], [2.0]]]),
        output_slices=(2,),
        num_experts=2,
    )
    plan = backend.prepare_batch(LoRABatch([0, -1], 1))
    factors = leaf(torch.tensor([[0.5, 2.0]] * 2))
    routing = backend.prepare_experts(plan, torch.tensor([[0, 1], [0, 1]]), factors, 2)
    x, base = leaf(torch.tensor([[1.0, 1.0], [torch.nan] * 2])), leaf(torch.zeros(2, 2))
    y = backend.run_experts(x, weights, routing, base * 1.0, weighted=True, reduce=True)
    y.backward(torch.tensor([[1.0, 2.0], [torch.nan] * 2]))
    # u of both pairs: 0.5 * (1 * 1 + 2 * 3) = 3.5 and 2 * (1 * 2 - 2 * 1) = 0; h: 3 and 1
    assert factors.grad.tolist() == [[3.5 * 3, 0.0], [0.0, 0.0]]
    assert x.grad.tolist() == [[0.5 * 3.5 * 1, 0.5 * 3.5 * 2], [0.0, 0.0]]
    assert weights.lora_a.grad.tolist() == [[[[[1.75, 1.75]]], [[[0.0, 0.0]]]]]
    assert weights.lora_b.grad.tolist() == [[[[0.75], [1.5]], [[4.0], [8.0]]]]
    assert base.grad[0].tolist() == [1.0, 2.0]


def test_a_graph_changes_no_bit_of_the_result(backend):
    x, weights = torch.randn(7, 5), small_experts()
    plain = backend.run_experts(x, weights, routed(backend), weighted=True)
    with_graph = backend.run_experts(leaf(x), trainable(), routed(backend), weighted=True)
    assert with_graph.requires_grad and torch.equal(plain, with_graph.detach())


def test_one_routing_gives_the_routers_weights_the_gradients_of_all_its_sites(backend):
    factors, x = leaf(FACTORS), torch.randn(7, 5)
    weights, other = small_experts(), small_experts(scalings=torch.ones(4, 3, 1))
    routing = routed(backend, factors)
    sites = [backend.run_experts(x, each, routing, weighted=True) for each in (weights, other)]
    alone = [torch.autograd.grad(y.sum(), factors, retain_graph=True)[0] for y in sites]
    (both,) = torch.autograd.grad(sum(y.sum() for y in sites), factors)
    assert torch.equal(both, alone[0] + alone[1]) and bool(both.any())


def test_the_routers_weights_may_have_a_history_and_need_no_other_gradient(backend):
    logits, x = leaf(torch.randn(7, 2)), torch.randn(7, 5)
    y = backend.run_experts(x, small_experts(), routed(backend, logits.softmax(-1)), weighted=True)
    y.sum().backward()
    assert bool(logits.grad.any())
    unweighted = backend.run_experts(x, small_experts(), routed(backend, logits.softmax(-1)))
    assert not unweighted.requires_grad


def test_a_routing_holds_values_alone_and_a_refill_replaces_the_tensor(backend):
    first, second = leaf(FACTORS), leaf(FACTORS.flip(0))
    routing = routed(backend, first)
    for factors in (second, second * 1.0):
        routed(backend, factors, routing)
        assert not routing.topk_weights.requires_grad and routing.topk_weights.grad_fn is None
        assert routing.differentiable_weights is factors
    y = backend.run_experts(torch.randn(7, 5), small_experts(), routing, weighted=True)
    y.sum().backward()
    assert first.grad is None and bool(second.grad.any())
    with torch.no_grad():
        routed(backend, second, routing)
    assert routing.differentiable_weights is None
    routed(backend, FACTORS, routing)
    assert routing.differentiable_weights is None


@pytest.mark.parametrize("refilled", ["routing", "plan"])
def test_a_refill_between_forward_and_backward_is_refused(backend, refilled):
    routing = routed(backend)
    y = backend.run_experts(leaf(torch.randn(7, 5)), small_experts(), routing)
    if refilled == "routing":
        routed(backend, out=routing)
    else:
        backend.prepare_batch(small_batch(), out=routing.plan)
    with pytest.raises(InvalidInputError, match="run_experts was refilled between forward and"):
        y.sum().backward()


def test_a_refill_before_the_forward_is_followed(backend):
    routing, x = routed(backend), torch.randn(7, 5)
    backend.prepare_batch(LoRABatch([2, -1, 0, 1, 0, 3, 3], 4), out=routing.plan)
    fresh = backend.prepare_experts(
        backend.prepare_batch(LoRABatch([2, -1, 0, 1, 0, 3, 3], 4)), IDS, FACTORS, 3
    )
    grads = []
    for each in (routing, fresh):
        given = leaf(x)
        backend.run_experts(given, small_experts(), each, weighted=True).sum().backward()
        grads.append(given.grad)
    assert torch.equal(*grads) and bool(grads[0].any())


def test_stored_tensors_of_8_bits_have_no_gradient_and_all_else_has(backend):
    weights = quantize_weights(small_experts(torch.bfloat16), torch.float8_e4m3fn)
    x, factors = leaf(torch.randn(7, 5).bfloat16()), leaf(FACTORS)
    base = leaf(torch.zeros(7, 6).bfloat16())
    routing = routed(backend, factors)
    y = backend.run_experts(x, weights, routing, base * 1, weighted=True, reduce=True)
    y.sum().backward()
    assert all(bool(t.grad.any()) for t in (x, factors, base))
    stored = small_experts(
        lora_a=weights.lora_a.detach().requires_grad_(),
        lora_b=weights.lora_b,
        a_scales=weights.a_scales,
        b_scales=weights.b_scales,
    )
    with pytest.raises(UnsupportedInputError, match=r"lora_a of float8_e4m3fn requires a gradient"):
        backend.run_experts(x, stored, routing)


def test_constants_have_no_gradient(backend):
    weights = small_experts(scalings=torch.ones(4, 3, 1).requires_grad_())
    with pytest.raises(UnsupportedInputError, match="scalings requires a gradient, but is a cons"):
        backend.run_experts(torch.randn(7, 5), weights, routed(backend))


def test_a_leaf_is_not_written_to(backend):
    base = torch.zeros(7, 2, 6, requires_grad=True)
    with pytest.raises(InvalidInputError, match="base_output is a leaf"):
        backend.run_experts(torch.randn(7, 5), small_experts(), routed(backend), base)
    assert not base.any()


def test_bad_arguments_that_need_a_gradient_are_refused_as_others(backend):
    x = torch.randn(7, 4, requires_grad=True)
    with pytest.raises(InvalidInputError, match=r"x is \[7, 4\]; allowed: \[7, 5\]"):
        backend.run_experts(x, small_experts(), routed(backend))
    with pytest.raises(InvalidInputError, match="weights is a str"):
        backend.run_experts(leaf(torch.randn(7, 5)), "weights", routed(backend))


def test_tensors_of_single_slots_get_their_slots_gradients(backend):
    whole, x = trainable(), torch.randn(7, 5)
    routing = routed(backend)
    backend.run_experts(x, whole, routing, weighted=True).sum().backward()
    parts = [
        SlotParameter(leaf(whole.lora_a.detach()[2]), GradientTarget("lora_a", 2)),
        SlotParameter(leaf(whole.lora_b.detach()[2].double()), GradientTarget("lora_b", 2)),
        SlotParameter(leaf(whole.lora_b.detach()[0, ..., :1]), GradientTarget("lora_b", 0)),
    ]
    options = {"rows": "tokens", "weighted": True, "reduce": False}
    call = BY_NAME["run_experts"], x, small_experts(), routing, None, options
    record_routed(backend, *call, parts).sum().backward()
    assert torch.equal(parts[0].tensor.grad, whole.lora_a.grad[2])
    torch.testing.assert_close(parts[1].tensor.grad.float(), whole.lora_b.grad[2])
    assert torch.equal(parts[2].tensor.grad, whole.lora_b.grad[0, ..., :1])
    assert bool(parts[0].tensor.grad.any())


def test_only_what_is_wanted_is_asked_of_the_engine(monkeypatch):
    seen = []

    class Noting(TorchRefBackend):
        def run_experts_backward(self, grad, x, weights, routing, out, **options):
            given = zip(out._fields, out, strict=True)
            seen.append((x is not None, {name for name, t in given if t is not None}))
            super().run_experts_backward(grad, x, weights, routing, out, **options)

    backend, x = Noting(), torch.randn(7, 5)
    backend.run_experts(leaf(x), small_experts(), routed(backend)).sum().backward()
    weights = small_experts()
    weights.lora_b.requires_grad_()
    backend.run_experts(x, weights, routed(backend)).sum().backward()
    y = backend.run_experts(x, small_experts(), routed(backend, leaf(FACTORS)), weighted=True)
    y.sum().backward()
    base = torch.zeros(7, 2, 6, requires_grad=True)
    backend.run_experts(x, small_experts(), routed(backend), base * 1).sum().backward()
    assert seen == [(False, {"x"}), (True, {"lora_b"}), (True, {"topk_weights"})]
    assert base.grad.eq(1).all()


def test_weights_changed_before_the_backward_are_noticed(backend):
    weights = trainable()
    y = backend.run_experts(leaf(torch.randn(7, 5)), weights, routed(backend))
    with torch.no_grad():
        weights.lora_a.add_(1)
    with pytest.raises((RuntimeError, InvalidInputError), match="lora_a|inplace operation"):
        y.sum().backward()


def test_autocast_casts_x_and_changes_nothing_else(backend):
    weights, x = small_experts(), leaf(torch.randn(7, 5).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        y = backend.run_experts(x, weights, routed(backend), weighted=True)
        y.sum().backward()
    wide = leaf(x.detach().float())
    right = backend.run_experts(wide, weights, routed(backend), weighted=True)
    right.sum().backward()
    assert y.dtype == torch.float32 and torch.equal(y, right)
    assert torch.equal(x.grad, wide.grad.bfloat16())


def test_a_second_derivative_is_refused(backend):
    x = leaf(torch.randn(7, 5))
    y = backend.run_experts(x, small_experts(), routed(backend))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedInputError, match="run_experts has no second derivatives"):
        dx.sum().backward()


def test_many_gradients_at_once_are_refused(backend):
    x = leaf(torch.randn(7, 5))
    y = backend.run_experts(x, small_experts(), routed(backend))
    with pytest.raises(UnsupportedInputError, match="inside a transform of torch"):
        torch.autograd.grad(y, x, torch.ones(2, *y.shape), is_grads_batched=True)


def test_base_output_may_be_a_view_of_a_wider_tensor(backend):
    wide = leaf(torch.randn(7, 2, 8))
    copied = wide * 1.0
    backend.run_experts(torch.randn(7, 5), small_experts(), routed(backend), copied[..., 1:7])
    grad = torch.randn(7, 2, 8)
    copied.backward(grad)
    assert torch.equal(wide.grad, grad)


def test_checkpoints_recompute_the_call(backend):
    weights, x, factors = trainable(), leaf(torch.randn(7, 5)), leaf(FACTORS)

    def layer(x, factors):
        routing = routed(backend, factors * 1.0)
        return backend.run_experts(x, weights, routing, weighted=True)

    leaves, found = (x, factors, weights.lora_a, weights.lora_b), []
    for run in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=False)):
        found.append(torch.autograd.grad(run(x, factors).square().sum(), leaves))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_routing_without_tokens_or_pairs_gives_zeros(backend):
    weights = trainable()
    plan = backend.prepare_batch(LoRABatch(torch.empty(0, dtype=torch.int64), 4))
    empty = torch.empty(0, 2)
    routing = backend.prepare_experts(plan, empty.long(), leaf(empty), 3)
    x = torch.empty(0, 5, requires_grad=True)
    backend.run_experts(x, weights, routing, weighted=True).sum().backward()
    assert not weights.lora_a.grad.any() and not weights.lora_b.grad.any()
    assert x.grad.shape == (0, 5)


def test_gradients_are_written_over_whatever_their_memory_holds(backend):
    weights, routing, x = small_experts(), routed(backend), torch.randn(7, 5)
    grad, found = torch.randn(7, 2, 6), []
    default = LoRABackend.run_experts_backward
    for run in (type(backend).run_experts_backward, default):
        like = x, weights.lora_a, weights.lora_b, FACTORS
        out = ExpertGradients(*[torch.full_like(tensor, torch.nan) for tensor in like])
        run(backend, grad, x, weights, routing, out, weighted=True)
        found.append(out)
    for own, right in zip(*found, strict=True):
        torch.testing.assert_close(own, right)


@pytest.mark.usefixtures("fresh_programs")
def test_a_compiled_call_does_not_lose_the_routers_gradient(backend):
    weights, x = small_experts(), torch.randn(7, 5)
    with torch.enable_grad():
        factors = leaf(FACTORS)
        routing = routed(backend, factors)

        @torch.compile(backend="aot_eager")
        def run(x):
            return backend.run_experts(x, weights, routing, weighted=True) * 1.0

        (found,) = torch.autograd.grad(run(x).sum(), factors)
        y = backend.run_experts(x, weights, routing, weighted=True)
        assert torch.equal(found, torch.autograd.grad(y.sum(), factors)[0])
