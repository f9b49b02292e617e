"""A model's activations: an operation over rows, and repeated calls, without views."""

import pytest
import torch
from helpers.small_layers import small_batch, small_weights
from helpers.storing import Storing

from lora_backends import InvalidInputError, LoRABatch
from lora_backends.dispatch.any_axes import over_rows
from lora_backends.torch_ref import TorchRefBackend


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
