"""The parameters that a batch keeps between steps follow changes of its adapters."""

import peft
import torch
from helpers.adapters.training import PLAIN, batch, shake, tiny, train_step, wrapped


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


def taken(model, name):
    """Return the gradients of an adapter, and leave it without."""
    grads = {}
    for key, p in model.adapter_parameters(name).items():
        grads[key], p.grad = p.grad, None
    return grads


def test_gradients_are_the_same_again_after_a_step_with_dropout_in_between():
    model = wrapped(tiny(), "numba_cpu")
    ids, labels = batch(2)
    for name in "ab":
        model.new_adapter(name, peft.LoraConfig(**PLAIN, lora_dropout=0.5))
        shake(model.adapter_parameters(name))

    def step(mode):
        getattr(model.base, mode)()
        train_step(model, ["a", "b"], ids, labels)
        return taken(model, "a"), taken(model, "b")

    first = step("eval")
    dropped = step("train")
    for before, between, after in zip(first, dropped, step("eval"), strict=True):
        assert before.keys() == after.keys()
        assert any(not torch.equal(between[key], before[key]) for key in before)
        for key in before:
            assert torch.equal(after[key], before[key]), key


def test_gradients_reach_an_adapter_that_is_loaded_again_and_not_its_old_parameters(tmp_path):
    model = wrapped(tiny(), "numba_cpu")
    ids, labels = batch(2)
    for name in "ab":
        model.new_adapter(name, peft.LoraConfig(**PLAIN))
        shake(model.adapter_parameters(name))
    train_step(model, ["a", "b"], ids, labels)
    before, old = taken(model, "a"), model.adapter_parameters("a")
    model.save_adapter("a", tmp_path / "a")
    model.unload_adapter("a")
    model.load_adapter("a", tmp_path / "a", trainable=True)
    train_step(model, ["a", "b"], ids, labels)
    after = taken(model, "a")
    assert all(p.grad is None for p in old.values())
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(after[key], before[key]), key
