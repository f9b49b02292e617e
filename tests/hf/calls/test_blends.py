"""Blends and strengths: rows that name several adapters, each with a factor of its delta."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from helpers.adapters.deltas import random_checkpoint

from lora_backends import (
    InvalidInputError,
    UnsupportedInputError,
    backend_names,
    get_backend,
    unavailable_reasons,
)
from lora_backends.adapters import Checkpoint
from lora_backends.features import TOKEN_SCALES
from lora_backends.hf import MultiLoRAModel
from lora_backends.torch_ref import TorchRefBackend

BOUND = 2e-5  # absolute, on logits of tiny random models
BACKENDS = [
    name
    for name in backend_names()
    if not unavailable_reasons(name, "cpu") and TOKEN_SCALES in get_backend(name, "cpu").features
]
KINDS = {
    "llama": [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 3, "target_modules": ["q_proj", "embed_tokens"]},
    ],
    "gpt2": [
        {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
        {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    ],
}
ROWS = [{"first": 0.7, "second": 0.3}, "first", None, {"second": -1.5}, {"first": 1, "second": 1}]
IDS = torch.randint(0, 40, (5, 6), generator=torch.Generator().manual_seed(3))


def merged(base, folders, entry):
    """Return a copy of `base` with the deltas of an entry in its weights, as PEFT has them."""
    base = copy.deepcopy(base)
    strengths = dict.fromkeys([entry], 1.0) if isinstance(entry, str) else entry or {}
    for name, strength in strengths.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(copy.deepcopy(base), folders[name])
        for path, layer in adapted.base_model.model.named_modules():
            if isinstance(layer, peft.tuners.lora.LoraLayer):
                weight = base.get_submodule(path).weight
                weight.data += strength * layer.get_delta_weight("default").data
    return base.eval()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fuse", [False, True])
def test_a_row_is_the_sum_of_pefts_deltas(kind, backend, fuse, make_base, save_adapter):
    folders = {
        name: save_adapter(kind, name=name, std=0.3, seed=seed, **config)
        for seed, (name, config) in enumerate(zip(("first", "second"), KINDS[kind], strict=True))
    }
    model = MultiLoRAModel(make_base(kind), backend, max_adapters=3, max_rank=4, fuse=fuse)
    for name, folder in folders.items():
        model.load_adapter(name, folder)
    logits = model(adapters=ROWS, input_ids=IDS).logits
    for row, entry in enumerate(ROWS):
        with torch.no_grad():
            expected = merged(make_base(kind), folders, entry)(input_ids=IDS).logits[row]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=BOUND)
    names = model(adapters=["first", "first", None, "second", "second"], input_ids=IDS).logits
    torch.testing.assert_close(logits[1], names[1], rtol=0, atol=BOUND)
    assert torch.equal(logits[2], names[2])
    assert (logits - names)[[0, 3, 4]].abs().amax((1, 2)).min() > 100 * BOUND


def test_a_blend_is_pefts_weighted_adapter(make_base, save_adapter):
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
    folders = {n: save_adapter(name=n, std=0.3, seed=s, **config) for s, n in enumerate("ab")}
    model = MultiLoRAModel(make_base("llama"), "torch_ref", max_rank=4)
    for name, folder in folders.items():
        model.load_adapter(name, folder)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(make_base("llama"), folders["a"], "a")
        theirs.load_adapter(folders["b"], "b")
        theirs.add_weighted_adapter(["a", "b"], [0.7, 0.3], "blend", combination_type="cat")
        theirs.set_adapter("blend")
        expected = theirs.eval()(input_ids=IDS).logits
    logits = model(adapters=[{"a": 0.7, "b": 0.3}] * 5, input_ids=IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


@pytest.fixture
def model(request, make_base):
    base = make_base("llama_bias")
    del base.model.layers[getattr(request, "param", 3) :]
    model = MultiLoRAModel(base, TorchRefBackend(), max_adapters=5, max_rank=4)
    for seed, name in enumerate("abc"):
        model.add_adapter(name, random_checkpoint(model.base, ["q_proj", "up_proj"], seed=seed))
    dora = random_checkpoint(model.base, ["q_proj", "v_proj"], seed=7)
    modules = {p: replace(d, magnitude=torch.ones(len(d.lora_b))) for p, d in dora.modules.items()}
    model.add_adapter("dora", Checkpoint(Path("in memory"), modules, {}))
    biased = random_checkpoint(model.base, ["o_proj"], seed=8, bias=True)
    model.add_adapter("bias", biased)
    return model


def logits(model, adapters, ids=IDS[:3]):
    return model(adapters=adapters, input_ids=ids, use_cache=False).logits


def test_blends_run_beside_dora_and_beside_layers_that_hold_it(model):
    rows = [{"a": 0.7, "b": 0.3}, "dora", {"dora": 0.5}]
    mixed = logits(model, rows)
    for row, entry in enumerate(rows):
        alone = logits(model, [entry], IDS[row : row + 1])
        torch.testing.assert_close(mixed[row], alone[0], rtol=0, atol=BOUND)
    assert (mixed[2] - logits(model, ["dora"] * 3)[2]).abs().max() > 100 * BOUND
    model.unload_adapter("dora")
    assert torch.equal(logits(model, [rows[0], None, None])[0], mixed[0])


def test_a_strength_of_dora_scales_its_delta_before_the_magnitude(model, make_base):
    expected = make_base("llama_bias")
    for layer in range(3):
        for name in ("q_proj", "v_proj"):
            path = f"model.layers.{layer}.self_attn.{name}"
            stack, module = model.pool.weights(path), expected.get_submodule(path)
            slot = model.pool.slots.slot("dora")
            delta = stack.scalings[slot, 0] * stack.lora_b[slot] @ stack.lora_a[slot, 0]
            scales = 1 / (module.weight.data + delta).norm(dim=1)
            module.weight.data = scales[:, None] * (module.weight.data + 0.5 * delta)
    with torch.no_grad():
        expected = expected(input_ids=IDS[:3]).logits
    rows = logits(model, [{"dora": 0.5}] * 3)
    torch.testing.assert_close(rows, expected, rtol=0, atol=BOUND)


def test_one_adapter_of_strength_1_is_its_name(model, monkeypatch):
    expected = logits(model, ["a", "dora", None])
    monkeypatch.setattr(TorchRefBackend, "features", frozenset({"output_scales"}))
    assert torch.equal(logits(model, [{"a": 1.0}, {"dora": 1}, None]), expected)


def test_the_order_in_a_blend_does_not_matter(model):
    there, back = {"a": 0.7, "b": 0.3, "c": 0.1}, {"c": 0.1, "b": 0.3, "a": 0.7}
    assert torch.equal(logits(model, [there] * 3), logits(model, [back] * 3))


def test_tokens_of_a_row_may_have_blends(model):
    blend = {"a": 0.7, "b": 0.3}
    late = logits(model, [[None] * 4 + [blend] * 2, "c", [blend] * 6])
    assert torch.equal(late[0, :4], logits(model, [None] * 3)[0, :4])
    torch.testing.assert_close(late[2], logits(model, [blend] * 3)[2], rtol=0, atol=BOUND)
    assert (late[0, 4:] - logits(model, ["a"] * 3)[0, 4:]).abs().max() > 1e-3


def test_generated_tokens_keep_the_blend_of_their_row(model):
    rows = [{"a": 2.0, "b": -1.0}, "c", None]
    settings = {
        "attention_mask": torch.ones(3, 6),
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    tokens = model.generate(IDS[:3], adapters=rows, **settings)
    for length in range(6, 10):
        following = logits(model, rows, tokens[:, :length])[:, -1].argmax(-1)
        assert torch.equal(following, tokens[:, length])


def test_one_plan_serves_all_layers_of_a_pass(model, monkeypatch):
    made, prepare = [], TorchRefBackend.prepare_batch

    def counting(self, batch, *args, **kwargs):
        made.append(batch)
        return prepare(self, batch, *args, **kwargs)

    monkeypatch.setattr(TorchRefBackend, "prepare_batch", counting)
    logits(model, [{"a": 0.7, "b": 0.3}, "c", None])
    assert [batch.adapters_per_token for batch in made] == [2]


# Prepared adapters


def test_prepared_blends_follow_updates(model):
    step = model.prepare([{"a": 0.5, "b": 0.5}, None, None], tokens=6)
    for rows in (["dora", {"c": 0.2}, None], [None] * 3, [{"a": 2, "c": 1}, "b", {"dora": 0.5}]):
        step.update(rows)
        assert step.adapters == rows
        torch.testing.assert_close(logits(model, step), logits(model, rows), rtol=0, atol=BOUND)
    rows[0]["a"] = 5.0
    assert step.adapters[0] == {"a": 2, "c": 1}


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.parametrize("model", [1], indirect=True, ids=["one layer"])
def test_a_compiled_program_follows_blends(model):
    torch.compiler.reset()
    compiled = torch.compile(model.base, fullgraph=True, backend="aot_eager")
    with model.prepare([{"a": 0.5, "b": 0.5}, None, None], tokens=6) as step:
        for rows in (["dora", {"c": 0.2}, None], [{"a": 2, "c": 1}, "b", {"dora": 0.5}]):
            step.update(rows)
            with model.using(step):
                result = compiled(input_ids=IDS[:3], use_cache=False).logits
            torch.testing.assert_close(result, logits(model, rows), rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    ("first", "rows"),
    [
        (["a", None, "b"], [{"a": 0.5}, None, "b"]),
        ([{"a": 0.5}, None, "b"], [{"a": 0.5, "b": 0.5}, None, None]),
        ([{"a": 1, "b": 1}, None, None], [{"a": 1, "b": 2}, None, None]),
    ],
)
def test_a_blend_without_room_is_refused_until_prepared_again(model, first, rows):
    step = model.prepare(first, tokens=6)
    before = logits(model, step)
    with pytest.raises(InvalidInputError, match="prepared without room for such a blend"):
        step.update(rows)
    assert step.adapters == first and torch.equal(logits(model, step), before)
    step = model.prepare(rows, tokens=6)
    torch.testing.assert_close(logits(model, step), logits(model, rows), rtol=0, atol=BOUND)


# What is refused before anything runs


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({}, r"adapters\[1\] holds an empty dict"),
        ({"a": float("nan")}, r"adapters\[1\] holds a blend with 'a': nan"),
        ({"a": float("-inf"), "b": 1}, "'a': -inf"),
        ({"a": 1e39}, "'a': 1e"),
        ({"a": 10**400}, "'a': 1"),
        ({"a": "0.5"}, "'a': '0.5'"),
        ({"a": True}, "'a': True"),
        ({"a": None}, "'a': None"),
        ({"a": torch.ones(())}, "'a': tensor"),
        ({"a": {"b": 1}}, "'a': "),
        ({3: 0.5}, "blend with 3: 0.5"),
        ({None: 0.5}, "blend with None: 0.5"),
        ({"nobody": 0.5}, "no adapter named 'nobody'"),
        ([{"a": 0.5}] * 5 + [{}], r"adapters\[1\] holds an empty dict"),
    ],
)
def test_a_wrong_blend_is_refused(model, entry, told, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the model has run")

    step = model.prepare([{"a": 0.5, "b": 0.5}, None])
    monkeypatch.setattr(type(model.base), "forward", fail)
    rows = ["a", entry]
    for call in (model, model.generate):
        with pytest.raises(InvalidInputError, match=told):
            call(adapters=rows, input_ids=IDS[:2])
    with pytest.raises((InvalidInputError, UnsupportedInputError)):
        step.update(rows)
    assert step.adapters == [{"a": 0.5, "b": 0.5}, None]


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"dora": 0.5, "a": 0.5}, "'dora' uses DoRA.*adds up with no other"),
        ({"dora": 1, "a": 0}, "'dora' uses DoRA"),
        ({"bias": 0.5}, r"'bias' has a LoRA bias \(lora_bias\), which no strength"),
        ({"bias": 2, "a": 1}, "'bias' has a LoRA bias"),
    ],
)
def test_a_blend_that_cannot_be_reproduced_is_refused_by_name(model, entry, told):
    for call in (model, model.generate, lambda adapters, input_ids: model.prepare(adapters)):
        with pytest.raises(UnsupportedInputError, match=told):
            call(adapters=["a", entry], input_ids=IDS[:2])


def test_a_lora_bias_of_strength_1_is_part_of_a_blend(model):
    both = logits(model, [{"bias": 1, "a": 0.5}] * 3)
    path = "model.layers.0.self_attn.o_proj"
    slot = model.pool.slots.slot("bias")
    assert model.pool.has_bias(slot, path) and not model.pool.has_dora(slot)
    for name, strength in (("bias", 1), ("a", 0.5)):
        for module, stack in model.pool.active_weights.items():
            own = model.pool.slots.slot(name)
            if module in model.pool.modules_of(own):
                layer = model.base.get_submodule(module)
                delta = stack.scalings[own, 0] * stack.lora_b[own] @ stack.lora_a[own, 0]
                layer.weight.data += strength * delta
                if stack.bias is not None and name == "bias":
                    layer.bias.data += stack.bias[own]
    with torch.no_grad():
        expected = model.base(input_ids=IDS[:3]).logits
    torch.testing.assert_close(both, expected, rtol=0, atol=BOUND)


def test_a_backend_without_token_scales_refuses_strengths_and_adds_whole_adapters(
    model, monkeypatch
):
    expected = logits(model, [{"a": 1, "b": 1}, None, None])
    monkeypatch.setattr(TorchRefBackend, "features", frozenset({"output_scales"}))
    with pytest.raises(UnsupportedInputError, match="torch_ref.*cannot apply strengths"):
        logits(model, [{"a": 0.5}, None, None])
    assert torch.equal(logits(model, [{"a": 1, "b": 1}, None, None]), expected)


def test_strengths_may_be_numbers_of_numpy(model):
    expected = logits(model, [{"a": 0.5}, None, None])
    for half in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert torch.equal(logits(model, [{"a": half}, None, None]), expected)
