"""The parameters that a batch keeps between steps follow changes of its adapters."""

import peft
import torch
from helpers.training import PLAIN, batch, tiny, train_step, wrapped


def test_gradients_follow_adapters_that_are_frozen_removed_and_made_anew():
    model = wrapped(tiny(), "numba_cpu")
    config = peft.LoraConfig(**PLAIN)
    ids, labels = batch(2)
    a, b = (model.new_adapter(name, config) for name in "ab")
    assert a is not b

    def missing(name):
        return [p.grad is None for p in model.adapter_parameters(name).values()]

    train_step(model, ["a", "b"], ids, labels)
    assert not any(missing("a") + missing("b"))
    for p in model.adapter_parameters("b").values():
        p.requires_grad_(False)
        p.grad = None
    train_step(model, ["a", "b"], ids, labels)
    assert all(missing("b"))
    model.unload_adapter("b")
    model.new_adapter("b", config)
    train_step(model, ["a", "b"], ids, labels)
    assert not any(missing("b"))
    own = [p.grad.clone() for p in model.adapter_parameters("b").values()]
    for p in model.adapter_parameters("b").values():
        p.grad = None
    train_step(model, ["b", "b"], ids[1:].repeat(2, 1), labels[1:].repeat(2, 1))
    for p, grad in zip(model.adapter_parameters("b").values(), own, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)
