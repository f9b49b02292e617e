"""A model's activations: an operation over rows, and repeated calls, without views."""

import copy
from dataclasses import dataclass

import pytest
import torch
from layers import small_batch, small_weights

from lora_backends import InvalidInputError, LoRABackend, LoRABatch, LoRAWeights
from lora_backends.dispatch.any_axes import over_product, over_rows
from lora_backends.dispatch.cached import CachingPlan, stores_calls
from lora_backends.torch_ref import TorchRefBackend


@dataclass(eq=False)
class Plan(CachingPlan):
    pass


class Call:
    def __init__(self):
        self.repeated = 0

    def run(self, x, weights, plan, y):
        self.repeated += 1
        y += 1
        return True


class Storing(LoRABackend):
    """Adds one to y and stores a call that does the same; notes the axes it is given."""

    plan_type = Plan

    def __init__(self):
        super().__init__()
        self.call, self.axes = Call(), []

    def prepare_batch(self, batch, out=None):
        if out is None:
            return Plan(batch.num_tokens, batch.num_slots)
        out.num_tokens = batch.num_tokens
        return out

    def run_lora_a(self, x, weights, plan):
        raise NotImplementedError

    def run_lora_b(self, h, weights, plan, base_output=None):
        raise NotImplementedError

    @stores_calls
    def run_linear(self, x, weights, plan, base_output=None):
        self.axes.append((x.ndim, base_output.ndim))
        base_output += 1
        plan.call_cache.store("run_linear", self, x, weights, base_output, self.call)
        return base_output


class Overriding(Storing):
    def run_qkv(self, x, weights, plan, base_output=None):
        base_output += 5
        return base_output


def inputs():
    return torch.randn(7, 1, 10), torch.zeros(7, 1, 14)


@pytest.mark.parametrize("operation", ["run_linear", "run_qkv"])
def test_a_call_of_another_shape_is_repeated(operation):
    backend, weights = Storing(), small_weights()
    plan = backend.prepare_batch(small_batch())
    add = over_rows(backend, operation, getattr(backend, operation))
    x, y = inputs()
    for turn in range(1, 4):
        assert add(x, weights, plan, y) is y
        assert (y == turn).all() and backend.call.repeated == turn - 1
    assert backend.axes == [(2, 2)]
    other = torch.zeros(1, 7, 14)  # the same rows in another shape
    assert add(x.view(1, 7, 10), weights, plan, other) is other and (other == 1).all()
    assert add(x[:, 0], weights, plan, other[0]).ndim == 2 and (other == 2).all()


def test_an_operation_that_stores_nothing_always_runs():
    backend, weights = Overriding(), small_weights()
    plan = backend.prepare_batch(small_batch())
    x, y = inputs()
    over_rows(backend, "run_linear", backend.run_linear)(x, weights, plan, y)  # is stored
    add = over_rows(backend, "run_qkv", backend.run_qkv)
    for turn in (1, 2):
        assert (add(x, weights, plan, y) == 1 + 5 * turn).all()
    assert backend.call.repeated == 0


def test_layouts_that_are_no_rows_are_never_repeated():
    backend, weights = Storing(), small_weights()
    plan = backend.prepare_batch(small_batch())
    add = over_rows(backend, "run_linear", backend.run_linear)
    x, y = torch.randn(1, 7, 20)[..., ::2], torch.zeros(7, 2, 14)[:, :1]
    for _ in range(2):
        found = add(x, weights, plan, y)
        assert found.is_contiguous() and (found == 1).all()
    assert not y.any()


def test_a_refill_with_more_tokens_than_rows_is_refused():
    backend, weights = Storing(), small_weights()
    plan = backend.prepare_batch(LoRABatch([0, 1], 4))
    add = over_rows(backend, "run_linear", backend.run_linear)
    x, y = torch.randn(2, 1, 10), torch.zeros(2, 1, 14)
    add(x, weights, plan, y), add(x, weights, plan, y)
    assert backend.call.repeated == 1
    plan.num_tokens = 3
    with pytest.raises(InvalidInputError):
        add(x, weights, plan, y)
    assert (y == 2).all()


def test_a_backend_without_stored_calls_adds_to_rows():
    backend, weights = TorchRefBackend(), small_weights(bias=True)
    plan = backend.prepare_batch(small_batch())
    x, y = inputs()
    expected = backend.run_linear(x[:, 0], weights, plan, y[:, 0].clone())
    found = over_rows(backend, "run_linear", backend.run_linear)(x, weights, plan, y)
    assert found is y and torch.equal(y[:, 0], expected)


@pytest.fixture
def stored():
    """Return `over_product`'s function and (x, weights, plan, y) of a call that it repeats."""
    backend, weights = Storing(), small_weights(slices=(12,))
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 1, 10), torch.zeros(7, 1, 12)
    repeat = over_product(backend, "run_linear")
    with torch.no_grad():
        assert not repeat(x, weights, plan, y) and not y.any()
        over_rows(backend, "run_linear", backend.run_linear)(x, weights, plan, y)
        assert repeat(x + 1, weights, plan, y) and (y == 2).all()
        yield repeat, x, weights, plan, y


def test_a_product_is_repeated_for_an_operation_that_is_a_case_of_the_stored_one(stored):
    repeat, x, weights, plan, y = stored
    backend = Storing()
    backend.run_linear(x[:, 0], weights, plan, y[:, 0])
    assert over_product(backend, "run_qkv")(x[:, 0], weights, plan, y[:, 0])
    assert backend.call.repeated == 1
    assert not over_product(Overriding(), "run_qkv")(x[:, 0], weights, plan, y[:, 0])


def shifted(tensor):
    """Return a copy that begins 4 bytes after a multiple of 16."""
    return tensor.new_zeros(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)


def wide(tensor):
    """Return a copy whose rows lie further apart."""
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def refilled(plan):
    plan.num_tokens = 8
    return plan


def cut_anew(plan):
    plan.call_cache.key = ("another cut",)
    return plan


def overlapping(x, weights, plan, y, x_first, y_first):
    """Return the arguments with an x and a y that begin at these elements of one storage."""
    storage = x.new_zeros(200)
    parts = storage[x_first:][: x.numel()], storage[y_first:][: y.numel()]
    return parts[0].view_as(x), weights, plan, parts[1].view_as(y)


class Layer(LoRAWeights):
    pass


def of_another_class(weights):
    object.__setattr__(weights, "__class__", Layer)
    return weights


def moved(weights, name):
    getattr(weights, name).data = getattr(weights, name).clone()
    return weights


OTHER = {
    "fewer rows of both": lambda x, w, p, y: (x[1:], w, p, y[1:]),
    "the rows in another shape": lambda x, w, p, y: (x[None], w, p, y[None]),
    "fewer columns of y": lambda x, w, p, y: (x, w, p, y[..., :8].contiguous()),
    "more columns of y": lambda x, w, p, y: (x, w, p, torch.cat([y, y], -1)),
    "more columns of x": lambda x, w, p, y: (torch.cat([x, x], -1), w, p, y),
    "dtype of x": lambda x, w, p, y: (x.double(), w, p, y),
    "dtype of y": lambda x, w, p, y: (x, w, p, y.double()),
    "device of x": lambda x, w, p, y: (x.to("meta"), w, p, y),
    "device of y": lambda x, w, p, y: (x, w, p, y.to("meta")),
    "devices of both": lambda x, w, p, y: (x.to("meta"), w, p, y.to("meta")),
    "strides of x": lambda x, w, p, y: (wide(x), w, p, y),
    "strides of y": lambda x, w, p, y: (x, w, p, wide(y)),
    "alignment of x": lambda x, w, p, y: (shifted(x), w, p, y),
    "alignment of y": lambda x, w, p, y: (x, w, p, shifted(y)),
    "lazy negation of x": lambda x, w, p, y: (torch._neg_view(x), w, p, y),
    "sparse x": lambda x, w, p, y: (x.to_sparse(), w, p, y),
    "sparse y": lambda x, w, p, y: (x, w, p, y.to_sparse()),
    "opaque x": lambda x, w, p, y: (x.to_mkldnn(), w, p, y),
    "class of x": lambda x, w, p, y: (torch.nn.Parameter(x, requires_grad=False), w, p, y),
    "class of y": lambda x, w, p, y: (x, w, p, torch.nn.Parameter(y, requires_grad=False)),
    "y where x lies": lambda x, w, p, y: overlapping(x, w, p, y, 0, 0),
    "y on the end of x": lambda x, w, p, y: overlapping(x, w, p, y, 0, 68),
    "y that ends on x": lambda x, w, p, y: overlapping(x, w, p, y, 80, 0),
    "class of the layer": lambda x, w, p, y: (x, of_another_class(w), p, y),
    "another layer": lambda x, w, p, y: (x, small_weights(slices=(12,)), p, y),
    "a copy of the layer": lambda x, w, p, y: (x, copy.copy(w), p, y),
    "A elsewhere": lambda x, w, p, y: (x, moved(w, "lora_a"), p, y),
    "B elsewhere": lambda x, w, p, y: (x, moved(w, "lora_b"), p, y),
    "ranks elsewhere": lambda x, w, p, y: (x, moved(w, "ranks"), p, y),
    "scalings elsewhere": lambda x, w, p, y: (x, moved(w, "scalings"), p, y),
    "a plan of more tokens": lambda x, w, p, y: (x, w, refilled(p), y),
    "a plan that was cut anew": lambda x, w, p, y: (x, w, cut_anew(p), y),
    "a copy of the plan": lambda x, w, p, y: (x, w, copy.copy(p), y),
    "a plan without stored calls": lambda x, w, p, y: (
        *(x, w, TorchRefBackend().prepare_batch(small_batch()), y),
    ),
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_product_of_another_kind_is_left_to_the_operation(stored, other):
    repeat, *given = stored
    x, weights, plan, y = other(*given)
    assert not repeat(x, weights, plan, y)
    assert y.is_meta or (y.to_dense() != 3).all()


STORED = {
    "strides of x": lambda x, y: (wide(x), y),
    "strides of y": lambda x, y: (x, wide(y)),
    "alignment of x": lambda x, y: (shifted(x), y),
    "alignment of y": lambda x, y: (x, shifted(y)),
}


@pytest.mark.parametrize("other", STORED.values(), ids=STORED)
def test_a_stored_call_of_another_kind_is_not_repeated_for_a_product(other):
    backend, weights = Storing(), small_weights(slices=(12,))
    plan, x, y = backend.prepare_batch(small_batch()), torch.randn(7, 10), torch.zeros(7, 12)
    with torch.no_grad():
        stored = other(x, y)
        backend.run_linear(stored[0], weights, plan, stored[1])
        assert plan.call_cache.find("run_linear", backend, stored[0], weights, stored[1])
        assert not over_product(backend, "run_linear")(x, weights, plan, y)


def test_a_product_that_may_need_a_gradient_is_left_to_the_operation(stored):
    repeat, x, weights, plan, y = stored
    with torch.enable_grad():
        assert not repeat(x, weights, plan, y)
    with torch.inference_mode():
        assert repeat(x, weights, plan, y)


def test_stored_calls_of_layers_share_what_is_equal(stored):
    """A model's step finds it in the processor's cache then."""
    _, x, weights, plan, y = stored
    backend, layers = Storing(), [weights, small_weights(slices=(12,))]
    for layer in layers:
        backend.run_linear(x[:, 0], layer, plan, y[:, 0])
    keys = [("run_linear", backend.handle, layer.handle) for layer in layers]
    first, second = (plan.call_cache._calls[key][0] for key in keys)
    assert first.kind is second.kind and first.product is second.product is not None
