"""Prepared adapters: refilled in place, protected, refused where a graph would go wrong."""

import gc
from dataclasses import replace

import pytest
import torch
from helpers.adapters.deltas import random_checkpoint
from torch._dynamo.utils import counters

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

TARGETS = ("q_proj", "v_proj", "down_proj")
IDS = torch.randint(0, 40, (3, 5), generator=torch.Generator().manual_seed(1))
COMPOSITIONS = [["b", "a", None], [None] * 3, ["c", "c", "c"], ["a", None, "b"]]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


@pytest.fixture
def model(make_base):
    base = make_base("llama")
    del base.model.layers[1:]
    model = MultiLoRAModel(base, TorchRefBackend(), max_adapters=4, max_rank=4)
    for seed, name in enumerate("abc"):
        model.add_adapter(name, random_checkpoint(model.base, TARGETS, seed=seed))
    return model


def logits(model, adapters, ids=IDS, **inputs):
    return model(adapters=adapters, input_ids=ids, use_cache=False, **inputs).logits


def test_a_call_with_prepared_adapters_is_one_with_their_names(model):
    with model.prepare(["a", None, "b"], tokens=5) as step:
        for rows in COMPOSITIONS:
            step.update(rows)
            assert step.adapters == rows
            assert torch.equal(logits(model, step), logits(model, rows))


def test_updates_make_no_new_plan_and_calls_none_at_all(model, monkeypatch):
    made = []
    prepare = TorchRefBackend.prepare_batch

    def counting(self, batch, out=None):
        made.append(out)
        return prepare(self, batch, out)

    monkeypatch.setattr(TorchRefBackend, "prepare_batch", counting)
    step = model.prepare(["a", None, "b"], tokens=5)
    for rows in COMPOSITIONS:
        step.update(rows)
        logits(model, step)
    assert made[0] is None and len(made) == 1 + len(COMPOSITIONS)
    assert all(out is made[1] is not None for out in made[1:])


def test_modules_that_see_fewer_tokens_have_a_plan_too(model):
    model.add_adapter("head", random_checkpoint(model.base, ["lm_head"], seed=9))
    with model.prepare(["head", None, "b"], tokens=5) as step:
        for rows in (["head", None, "b"], [None, "head", "head"]):
            step.update(rows)
            last = logits(model, step, logits_to_keep=1)
            assert torch.equal(last, logits(model, rows, logits_to_keep=1))


def test_adapters_in_use_are_neither_evicted_nor_replaced(model):
    checkpoint = random_checkpoint(model.base, TARGETS, seed=5)
    step = model.prepare(["a", None, "b"])
    assert [model.add_adapter(name, checkpoint).evicted for name in ("d", "e")] == [None, "c"]
    for name in "ab":
        with pytest.raises(InvalidInputError, match="in use"):
            model.unload_adapter(name)
        with pytest.raises(InvalidInputError, match="in use"):
            model.add_adapter(name, checkpoint)
    step.update(["d", "d", None])
    model.unload_adapter("a")
    step.release()
    model.unload_adapter("d")


def test_adapters_of_a_forgotten_step_are_free(model):
    step = model.prepare(["a", "b", "c"])
    del step
    gc.collect()
    model.unload_adapter("a")


def test_an_update_that_fails_changes_nothing(model):
    step = model.prepare(["a", None, "b"], tokens=5)
    expected = logits(model, step)
    for rows, told in (
        (["a", "nobody", "c"], "no adapter named 'nobody'"),
        (["c"], "1 entries, prepared are 3 rows"),
        ("abc", "allowed: a list"),
    ):
        with pytest.raises(InvalidInputError, match=told):
            step.update(rows)
    with pytest.raises(UnsupportedInputError, match="differ by token"):
        step.update([["c"] * 5, None, None])
    assert step.adapters == ["a", None, "b"]
    assert torch.equal(logits(model, step), expected)
    model.unload_adapter("c")


def test_an_adapter_of_other_modules_is_refused_until_prepared_again(model):
    step = model.prepare(["a", None, "b"], tokens=5)
    model.add_adapter("o", random_checkpoint(model.base, ["o_proj"], seed=7))
    with pytest.raises(InvalidInputError, match=r"not adapted[\s\S]*layers.0.self_attn.o_proj"):
        step.update(["o", None, "b"])
    rows = ["o", "o", "a"]
    assert torch.equal(logits(model, model.prepare(rows, tokens=5)), logits(model, rows))


def test_an_adapter_that_brings_the_first_bias_is_refused_until_prepared_again(model):
    step = model.prepare(["a", None, "b"], tokens=5)
    model.add_adapter("bias", random_checkpoint(model.base, ["q_proj"], seed=7, bias=True))
    with pytest.raises(InvalidInputError, match=r"had no bias[\s\S]*layers.0.self_attn.q_proj"):
        step.update(["bias", None, "b"])
    rows = ["bias", None, "b"]
    changed = logits(model, model.prepare(rows, tokens=5))
    assert torch.equal(changed, logits(model, rows))
    assert not torch.equal(changed[0], logits(model, [None] * 3)[0])


def test_a_slot_that_is_loaded_again_is_followed(model):
    step = model.prepare(["a", None, "b"], tokens=5)
    step.update([None, None, "b"])
    model.add_adapter("a", random_checkpoint(model.base, TARGETS, seed=77))
    step.update(["a", None, "b"])
    assert torch.equal(logits(model, step), logits(model, ["a", None, "b"]))


def test_another_shape_is_refused(model):
    step = model.prepare(["a", None, "b"])
    with pytest.raises(InvalidInputError, match="3 rows of 1 tokens[\\s\\S]*3 rows of 5 tokens"):
        logits(model, step)
    with pytest.raises(InvalidInputError, match="tokens is 0"):
        model.prepare(["a"], tokens=0)
    with pytest.raises(InvalidInputError, match="adapters is empty"):
        model.prepare([])


def test_released_or_foreign_steps_are_refused(model, make_base):
    step = model.prepare(["a", None, "b"], tokens=5)
    other = MultiLoRAModel(make_base("llama"), TorchRefBackend())
    with pytest.raises(InvalidInputError, match="not prepared by this model"):
        logits(other, step)
    step.release()
    with pytest.raises(InvalidInputError, match="were released"):
        logits(model, step)
    with pytest.raises(InvalidInputError, match="were released"):
        step.update(["a", None, "b"])


def test_generate_takes_names(model):
    with pytest.raises(InvalidInputError, match="allowed: a list"):
        model.generate(IDS, adapters=model.prepare(["a", None, "b"]))


def capturing(monkeypatch):
    for module in ("request", "prepared"):
        monkeypatch.setattr(f"lora_backends.hf.calls.{module}.is_capturing", lambda device: True)


def test_a_graph_takes_no_call_that_makes_plans(model, monkeypatch):
    model.add_adapter("head", random_checkpoint(model.base, ["lm_head"], seed=9))
    step = model.prepare(["a", None, "b"], tokens=5)
    capturing(monkeypatch)
    with pytest.raises(InvalidInputError, match="model.prepare"):
        logits(model, ["a", None, "b"])
    with pytest.raises(UnsupportedInputError, match="cannot capture backend 'torch_ref'"):
        logits(model, step)
    monkeypatch.setattr(TorchRefBackend, "cuda_graphs", True)
    logits(model, step)
    with pytest.raises(
        InvalidInputError, match=r"no plan for an input of shape \[3, 1\][\s\S]*warm up"
    ):
        logits(model, step, logits_to_keep=1)


def test_a_compiled_model_follows_updates_in_one_program(model):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model.base, fullgraph=True, backend="aot_eager")
    step = model.prepare(["a", None, "b"], tokens=5)

    def compiled_logits():
        with model.using(step):
            return compiled(input_ids=IDS, use_cache=False).logits

    assert torch.equal(compiled_logits(), logits(model, ["a", None, "b"]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in COMPOSITIONS:
            step.update(rows)
            assert torch.equal(compiled_logits(), logits(model, rows))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_compiled_model_meets_modules_that_are_adapted_later(make_base):
    torch._dynamo.reset()
    base = make_base("llama")
    del base.model.layers[1:]
    models = [MultiLoRAModel(base, TorchRefBackend(), max_rank=4) for _ in range(2)]
    compiled = torch.compile(base, fullgraph=True, backend="eager")

    def compiled_logits(model, rows):
        with model.prepare(rows, tokens=5) as step, model.using(step):
            return compiled(input_ids=IDS, use_cache=False).logits

    with torch.no_grad():
        plain = base(input_ids=IDS, use_cache=False).logits
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, plain)
    assert torch.equal(compiled_logits(models[0], [None] * 3), plain)
    for model, target in zip(models, ("o_proj", "up_proj"), strict=True):
        checkpoint = random_checkpoint(base, [target], seed=10, bias=target == "up_proj")
        model.add_adapter(target, checkpoint)
        rows = [target, None, target]
        found = compiled_logits(model, rows)
        assert torch.equal(found, logits(model, rows))
        assert not torch.equal(found[0], plain[0])
    with torch.no_grad():
        assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, plain)


def test_an_update_that_fails_halfway_changes_nothing(model, monkeypatch):
    model.add_adapter("head", random_checkpoint(model.base, ["lm_head"], seed=9))
    step = model.prepare(["a", None, "b"], tokens=5)
    logits(model, step, logits_to_keep=1)  # a second plan, for fewer tokens
    before, prepare, calls = logits(model, step), TorchRefBackend.prepare_batch, []

    def failing(self, batch, out=None):
        calls.append(out)
        if len(calls) == 2:
            raise MemoryError
        return prepare(self, batch, out)

    monkeypatch.setattr(TorchRefBackend, "prepare_batch", failing)
    with pytest.raises(MemoryError):
        step.update(["c", "c", "c"])
    assert step.adapters == ["a", None, "b"]
    assert torch.equal(logits(model, step), before)


def test_an_adapter_with_the_first_bias_leaves_prepared_steps_to_those_without(model):
    step = model.prepare(["a", None, "b"], tokens=5)
    model.add_adapter("biased", random_checkpoint(model.base, TARGETS, seed=8, bias=True))
    step.update(["c", "b", None])
    assert torch.equal(logits(model, step), logits(model, ["c", "b", None]))
    with pytest.raises(InvalidInputError, match="or had no bias"):
        step.update(["biased", None, None])


def test_a_checkpoint_that_cannot_be_written_leaves_the_adapter_that_it_replaces(model):
    before = logits(model, ["a", "b", None])
    for wrong in ("x", float("inf"), None):
        checkpoint = random_checkpoint(model.base, TARGETS, seed=5)
        path, delta = next(iter(checkpoint.modules.items()))
        broken = replace(
            checkpoint, modules=checkpoint.modules | {path: replace(delta, scaling=wrong)}
        )
        with pytest.raises(InvalidInputError, match="the scaling of"):
            model.add_adapter("a", broken)
    with pytest.raises(
        InvalidInputError, match="base weights of modules that the base model lacks"
    ):
        unknown = replace(checkpoint, base_weights={"nowhere": torch.zeros(1)})
        model.add_adapter("a", unknown)
    assert torch.equal(logits(model, ["a", "b", None]), before)
