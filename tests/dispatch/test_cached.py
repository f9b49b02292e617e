"""Cached calls: found for a call of the same kind that would pass every check, and for no other."""

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from helpers.small_layers import small_batch, small_weights
from helpers.storing import Plan, Storing

from lora_backends import InvalidInputError, LoRABatch, features
from lora_backends.dispatch import cached


@pytest.fixture
def stored():
    """Return (backend, x, weights, plan, y) of a call that is stored."""
    backend, weights = Storing(), small_weights()
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    assert (backend.ran, backend.call.repeated) == (1, 0)
    return backend, x, weights, plan, y


@pytest.mark.parametrize("gradients", [False, True])
def test_a_call_of_the_same_kind_is_repeated(stored, gradients):
    backend, x, weights, plan, y = stored
    with torch.set_grad_enabled(gradients):
        assert backend.run_linear(x + 1, weights, plan, y) is y
    assert (backend.ran, backend.call.repeated) == (1, 1)
    assert (y == 2).all()


def test_layers_of_one_shape_compare_their_calls_with_one_object(stored):
    backend, x, weights, plan, y = stored
    backend.run_linear(x, small_weights(), plan, y)
    first, second = (entry for (entry,) in plan.call_cache._calls.values())
    assert first.kind is second.kind


def test_without_base_output_a_call_is_repeated_on_zeros_of_the_dtype_of_x(stored):
    backend, x, weights, plan, _ = stored
    y = backend.run_linear(x, weights, plan)
    assert (backend.ran, backend.call.repeated) == (1, 1)
    assert torch.equal(y, torch.ones(7, 14))


def test_a_default_repeats_the_call_of_the_operation_that_it_is_a_case_of(stored):
    backend, x, weights, plan, y = stored
    backend.run_qkv(x, weights, plan, y)
    backend.run_logits(hidden=x, weights=weights, plan=plan, base_output=y)
    backend.run_logits(x, weights, plan)
    assert (backend.ran, backend.call.repeated) == (1, 3)
    with pytest.raises(InvalidInputError, match="run_gate_up takes 2"):
        backend.run_gate_up(x, weights, plan, y)


def _strided(tensor, pad):
    wide = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + pad)
    return wide[:, : tensor.shape[1]]


def _shifted(tensor):
    """Return a copy that begins 4 bytes after a multiple of 16."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view_as(tensor)


OTHER = {
    "row stride of x": lambda x, w, y: (_strided(x, 4), w, y),
    "row stride of y": lambda x, w, y: (x, w, _strided(y, 2)),
    "alignment of x": lambda x, w, y: (_shifted(x), w, y),
    "alignment of y": lambda x, w, y: (x, w, _shifted(y)),
    "dtype of y": lambda x, w, y: (x, w, y.double()),
    "layer": lambda x, w, y: (x, small_weights(), y),
    "subclass of tensor": lambda x, w, y: (torch.nn.Parameter(x, requires_grad=False), w, y),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_call_of_another_kind_runs(stored, other):
    backend, x, weights, plan, y = stored
    x, weights, y = OTHER[other](x, weights, y)
    backend.run_linear(x, weights, plan, y)
    assert (backend.ran, backend.call.repeated) == (2, 0)


def test_calls_of_two_backends_and_two_plans_are_apart(stored):
    backend, x, weights, plan, y = stored
    another = Storing()
    another.run_linear(x, weights, plan, y)
    assert (another.ran, another.call.repeated) == (1, 0)
    backend.run_linear(x, weights, backend.prepare_batch(small_batch()), y)
    assert (backend.ran, backend.call.repeated) == (2, 0)


functional = torch._to_functional_tensor  # what torch.func.functionalize passes


def freed(weights):
    weights.lora_a.untyped_storage().resize_(0)
    return weights


REFUSED = {
    "x and y overlap": (
        lambda x, w, y: (y.view(-1)[:70].view(7, 10), w, y),
        "overlaps x",
    ),
    "y lies on lora_b": (
        lambda x, w, y: (x, w, w.lora_b.view(-1)[:98].view(7, 14)),
        "overlaps lora_b",
    ),
    "y lies on the scalings": (
        lambda x, w, y: (x, w, w.scalings.as_strided((7, 14), (14, 1))),
        "overlaps scalings",
    ),
    "lazy negation of x": (lambda x, w, y: (torch._neg_view(x), w, y), "x is a lazy negation"),
    "lazy negation of y": (lambda x, w, y: (x, w, torch._neg_view(y)), "lazy negation"),
    "sparse x": (lambda x, w, y: (x.to_sparse(), w, y), "x is .* dense"),
    "sparse y": (lambda x, w, y: (x, w, y.to_sparse()), "base_output is .* dense"),
    "x has no address": (lambda x, w, y: (functional(x), w, y), "x has no address.*torch_ref"),
    "y has no address": (lambda x, w, y: (x, w, functional(y)), "base_output has no address"),
    "neither has one": (lambda x, w, y: (functional(x), w, functional(y)), "x has no address"),
    "a layer whose memory was freed": (lambda x, w, y: (x, freed(w), y), "lora_a has no address"),
    "too few rows": (lambda x, w, y: (x[1:], w, y), "x is"),
    "no weights": (lambda x, w, y: (x, None, y), "NoneType"),
}


@pytest.mark.parametrize("bad", REFUSED)
def test_bad_arguments_are_refused_where_a_call_of_their_kind_is_stored(bad):
    backend, weights = Storing(), small_weights()
    roomy = torch.zeros(200)
    scalings = roomy[:12].view(4, 3).copy_(weights.scalings)
    weights = dataclasses.replace(weights, scalings=scalings)
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    change, told = REFUSED[bad]
    x, layer, y = change(x, weights, y)
    with pytest.raises(InvalidInputError, match=told):
        backend.run_linear(x, layer, plan, y)
    assert (backend.ran, backend.call.repeated) == (1, 0)


WITHOUT_Y = ["lazy negation of x", "sparse x", "x has no address", "a layer whose memory was freed"]
WITHOUT_Y += ["too few rows", "no weights"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("bad", [*WITHOUT_Y, "nested x", "more rows than memory", "x is a list"])
def test_bad_arguments_without_base_output_are_refused_where_a_call_is_stored(stored, bad):
    backend, x, weights, plan, y = stored
    change, told = REFUSED.get(bad, (None, "x is"))
    if change is not None:
        x, weights, _ = change(x, weights, y)
    elif bad == "nested x":
        x = torch.nested.nested_tensor(list(x))
    elif bad == "more rows than memory":
        x = x[:1].expand(10**12, 10)
    else:
        x = x.tolist()
    with pytest.raises(InvalidInputError, match=told):
        backend.run_linear(x, weights, plan)
    assert (backend.ran, backend.call.repeated) == (1, 0)


def test_a_transform_repeats_no_stored_call(stored):
    backend, x, weights, plan, y = stored
    for transform in (torch.func.functionalize, torch.vmap):
        for base in (None, y):
            run = transform(lambda x, base=base: backend.run_linear(x, weights, plan, base))
            with pytest.raises(InvalidInputError, match="x has no address"):
                run(x[None] if transform is torch.vmap else x)
    assert (backend.ran, backend.call.repeated) == (1, 0)


class Roomy(Storing):
    """As `Storing`, with plans that take batches of any size up to their capacity."""

    features = frozenset({features.CAPACITY})

    def prepare_batch(self, batch, out=None, capacity=None):
        if out is None:
            return Plan(batch.num_tokens, batch.num_slots, capacity=capacity or 0)
        out.num_tokens = batch.num_tokens
        return out


def test_a_stored_call_of_fewer_rows_than_a_refill_has_tokens_is_refused():
    backend, weights = Roomy(), small_weights()
    plan = backend.prepare_batch(small_batch(), capacity=9)
    x, y = torch.randn(7, 10), torch.zeros(7, 14)
    backend.run_linear(x, weights, plan, y)
    backend.prepare_batch(LoRABatch([0] * 8, 4), out=plan)
    with pytest.raises(InvalidInputError, match=r"x is \[7, 10\]; allowed: \[8, 10\]"):
        backend.run_linear(x, weights, plan, y)
    backend.prepare_batch(LoRABatch([0] * 5, 4), out=plan)
    backend.run_linear(x, weights, plan, y)
    assert (backend.ran, backend.call.repeated) == (1, 1)


def test_a_call_that_needs_a_gradient_does_not_repeat_a_stored_one(stored):
    backend, x, weights, plan, y = stored
    assert backend.run_linear(x.requires_grad_(), weights, plan, y).grad_fn is not None
    assert (backend.ran, backend.call.repeated) == (2, 0)


def test_a_layer_whose_tensor_has_moved_runs(stored):
    backend, x, weights, plan, y = stored
    weights.lora_a.data = weights.lora_a.clone()
    backend.run_linear(x, weights, plan, y)
    assert (backend.ran, backend.call.repeated) == (2, 0)


def test_a_stale_call_runs_the_method(stored):
    backend, x, weights, plan, y = stored
    backend.call.stale = True
    backend.run_linear(x, weights, plan, y)
    assert (backend.ran, backend.call.repeated) == (2, 0)


def test_an_override_runs_its_own_body_around_the_repeated_call(stored):
    _, x, weights, plan, _ = stored

    class Doubled(Storing):
        def run_linear(self, x, weights, plan, base_output=None):
            return 2 * super().run_linear(x, weights, plan, base_output)

    class Wrapped(Storing):
        @functools.wraps(Storing.run_linear)
        def run_linear(self, x, weights, plan, base_output=None):
            return 2 * Storing.run_linear(self, x, weights, plan, base_output)

    for backend in (Doubled(), Wrapped()):
        for run in (backend.run_linear, backend.run_linear, backend.run_qkv):
            assert torch.equal(run(x, weights, plan), torch.full((7, 14), 2.0))
        assert (backend.ran, backend.call.repeated) == (1, 2)


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))]
)
def test_a_copy_of_a_plan_has_no_calls(stored, how):
    plan = stored[3]
    assert len(plan.call_cache) == 1
    assert len(how(plan).call_cache) == 0
    assert len(plan.call_cache) == 1


def test_a_plan_keeps_a_bounded_number_of_calls(stored, monkeypatch):
    backend, x, _, plan, y = stored
    monkeypatch.setattr(cached, "MOST_LAYERS", 3)
    layers = [small_weights() for _ in range(10)]
    for weights in layers:
        backend.run_linear(x, weights, plan, y)
        assert len(plan.call_cache) <= 3
    backend.run_linear(x, layers[-1], plan, y)
    assert backend.call.repeated == 1


def test_a_layer_keeps_a_bounded_number_of_kinds(stored, monkeypatch):
    backend, x, weights, plan, _ = stored
    monkeypatch.setattr(cached, "MOST_KINDS", 3)
    for width in range(20, 30):
        y = torch.zeros(7, width)[:, :14]
        backend.run_linear(x, weights, plan, y)
        assert len(plan.call_cache) <= 3
    backend.run_linear(x, weights, plan, y)
    assert backend.call.repeated == 1
