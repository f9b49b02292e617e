"""The quick check of experts: True only where the guard finds no problem."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from lora_backends import ExpertWeights, LoRABackendError, LoRABatch
from lora_backends.dispatch.ordinary import is_ordinary_routed
from lora_backends.torch_ref import TorchRefBackend

OPTIONS = {"rows": "tokens", "weighted": False, "reduce": False}


@pytest.fixture
def call():
    """Return the arguments of an ordinary call, to be spoiled."""
    backend = TorchRefBackend()
    plan = backend.prepare_batch(LoRABatch([0, 1, -1], 2), capacity=4)
    ids = torch.tensor([[0, 2], [1, 1], [0, 1]])
    weights = ExpertWeights(
        torch.randn(2, 3, 1, 4, 6),
        torch.randn(2, 3, 8, 4),
        torch.full((2, 3, 1), 4),
        torch.ones(2, 3, 1),
        (8,),
        3,
    )
    routing = backend.prepare_experts(plan, ids, torch.rand(3, 2), 3)
    y, x = torch.zeros(3, 2, 8), torch.randn(3, 6)
    return SimpleNamespace(
        backend=backend, x=x, weights=weights, routing=routing, y=y, options=dict(OPTIONS)
    )


def ordinary(call):
    return is_ordinary_routed(
        call.backend, call.x, call.weights, call.routing, call.y, call.options
    )


def pairs(call):
    call.x, call.options["rows"] = torch.randn(6, 6), "pairs"


def reduced(call):
    call.y, call.options["reduce"] = torch.zeros(3, 8), True


@pytest.mark.parametrize("change", [lambda call: None, pairs, reduced])
@pytest.mark.parametrize("with_base", [True, False])
def test_ordinary_calls_are_recognised(call, change, with_base):
    change(call)
    call.y = call.y if with_base else None
    assert ordinary(call)


def nested():
    with warnings.catch_warnings(action="ignore"):  # torch says that they are new
        return torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(1, 6)])


SPOILED = {
    "x of another dtype": lambda call: setattr(call, "x", call.x.double()),
    "x too wide": lambda call: setattr(call, "x", torch.randn(3, 7)),
    "x for pairs": lambda call: setattr(call, "x", torch.randn(6, 6)),
    "x negated": lambda call: setattr(call, "x", torch._neg_view(call.x)),
    "x nested": lambda call: setattr(call, "x", nested()),
    "y nested": lambda call: setattr(call, "y", nested()),
    "y of another shape": lambda call: setattr(call, "y", torch.zeros(3, 8)),
    "y an integer": lambda call: setattr(call, "y", call.y.long()),
    "y on x": lambda call: setattr(call, "x", call.y.flatten()[:18].view(3, 6)),
    "y on lora_b": lambda call: setattr(
        call, "y", call.weights.lora_b.flatten()[8:56].view(3, 2, 8)
    ),
    "y a leaf": lambda call: setattr(call, "y", call.y.requires_grad_()),
    "rows unknown": lambda call: call.options.update(rows="experts"),
    "weighted an int": lambda call: call.options.update(weighted=2),
    "a plan of more tokens": lambda call: call.backend.prepare_batch(
        LoRABatch([0] * 4, 2), out=call.routing.plan
    ),
    "another number of experts": lambda call: setattr(call.routing, "num_experts", 4),
    "no routing": lambda call: setattr(call, "routing", call.routing.plan),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_the_guard_refuses_is_not_ordinary(call, spoil):
    spoil(call)
    assert not ordinary(call)
    with pytest.raises(LoRABackendError):
        call.backend.run_experts(call.x, call.weights, call.routing, call.y, **call.options)


@pytest.mark.parametrize("name", ["x", "y"])
def test_other_strides_are_left_to_the_guard(call, name):
    wide = getattr(call, name).repeat_interleave(2, 0)
    setattr(call, name, wide[::2])
    assert not ordinary(call)
    call.backend.run_experts(call.x, call.weights, call.routing, call.y, **call.options)
