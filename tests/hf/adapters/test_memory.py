"""Adapters that come from memory, and that are updated where they lie."""

import copy
import threading
import warnings

import peft
import pytest
import torch
from helpers.adapters.deltas import random_checkpoint

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters.pool.stacks import ModuleStacks
from lora_backends.hf import MultiLoRAModel

IDS = torch.arange(8)[None] + 1
BOUND = 2e-5
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def model(make_base):
    return MultiLoRAModel(make_base("llama"), "torch_ref", max_adapters=2, max_rank=8)


@pytest.fixture
def peft_model(make_base):
    """Return a model in training with two adapters, of which "second" is not active."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=TARGETS, use_rslora=True)
        trained = peft.get_peft_model(make_base("llama"), config)
        wider = peft.LoraConfig(r=8, target_modules=[*TARGETS, "embed_tokens"])
        trained.add_adapter("second", wider)
    shake(trained)
    return trained


@torch.no_grad()
def shake(trained):
    """Stand for a step of training."""
    for path, parameter in trained.named_parameters():
        if "lora_" in path:
            parameter.add_(0.3 * torch.randn_like(parameter))


def by_peft(trained, adapter):
    trained.set_adapter(adapter)
    trained.eval()
    with torch.no_grad():
        return trained(input_ids=IDS).logits


def logits(model, adapter):
    return model(adapters=[adapter], input_ids=IDS).logits


def assert_close(result, expected):
    assert (result - expected).abs().max() <= BOUND * expected.abs().max()


def test_a_peft_model_is_added_as_it_is_in_memory(model, peft_model):
    model.add_adapter("first", peft_model)
    model.add_adapter("second", peft_model, adapter_name="second")
    for ours, theirs in (("first", "default"), ("second", "second")):
        assert_close(logits(model, ours), by_peft(peft_model, theirs))
    assert not torch.equal(logits(model, "first"), logits(model, None))


@pytest.mark.parametrize("form", ["LoraConfig", "dict"])
def test_tensors_with_their_configuration_are_added(model, peft_model, form):
    config = peft_model.peft_config["default"]
    tensors = peft.get_peft_model_state_dict(peft_model)
    model.add_adapter("a", tensors, config if form == "LoraConfig" else config.to_dict())
    expected = by_peft(peft_model, "default")
    shake(peft_model)  # training goes on: the tensors were copied
    assert_close(logits(model, "a"), expected)


def test_peft_3592_a_state_dict_and_its_configuration_stay_as_they_are(model, make_base):
    """PEFT renamed the keys of saved modules in the dict that it was given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"])
        trained = peft.get_peft_model(make_base("llama"), config)
    shake(trained)
    tensors, values = peft.get_peft_model_state_dict(trained), config.to_dict()
    before = [*tensors], copy.deepcopy(values)
    for name in ("first", "second"):
        model.add_adapter(name, tensors, values)
    assert ([*tensors], values) == before
    assert torch.equal(logits(model, "first"), logits(model, "second"))


def test_peft_1989_a_factor_of_a_peft_model_is_refused(model, peft_model):
    """`rescale_adapter_scale` and `set_scale` leave the configuration as it was."""
    with peft.helpers.rescale_adapter_scale(peft_model, 2.0):
        with pytest.raises(UnsupportedInputError, match="factor of its own.*\n.*q_proj"):
            model.add_adapter("a", peft_model)
    assert model.adapters == []
    model.add_adapter("a", peft_model)
    expected = by_peft(peft_model, "default")
    assert_close(logits(model, "a"), expected)


def test_several_active_adapters_of_a_peft_model_are_refused(model, peft_model):
    """PEFT adds them up; the first alone was taken."""
    peft_model.base_model.set_adapter(["default", "second"])
    with pytest.raises(InvalidInputError, match="several adapters.*\n.*'default', 'second'"):
        model.add_adapter("a", peft_model)
    peft_model.base_model.set_adapter("second")
    model.add_adapter("a", peft_model)
    assert_close(logits(model, "a"), by_peft(peft_model, "second"))


def test_an_update_keeps_slot_and_pin_and_prepared_adapters_follow_it(model, peft_model):
    model.add_adapter("live", peft_model, pin=True)
    slot = model.pool.slots.slot("live")
    with model.prepare(["live"], tokens=IDS.shape[1]) as step:
        for _ in range(3):
            shake(peft_model)
            model.update_adapter("live", peft_model)
            expected = by_peft(peft_model, "default")
            assert_close(model(adapters=step, input_ids=IDS).logits, expected)
            assert_close(logits(model, "live"), expected)
    assert model.pool.slots.slot("live") == slot
    with pytest.raises(InvalidInputError, match="pinned"):
        model.unload_adapter("live")


def test_an_update_waits_for_the_calls_that_use_the_adapter(model, peft_model):
    model.add_adapter("live", peft_model)
    with model.pool.slots.in_use(["live"]):
        with pytest.raises(InvalidInputError, match="cannot be updated.*\n.*wait until"):
            model.update_adapter("live", peft_model, timeout_s=0.01)
        update = threading.Thread(target=lambda: model.update_adapter("live", peft_model))
        before = logits(model, "live")
        shake(peft_model)
        update.start()
        assert torch.equal(logits(model, "live"), before)
    update.join()
    assert_close(logits(model, "live"), by_peft(peft_model, "default"))


@pytest.mark.parametrize("seconds", ["soon", -1, float("nan")])
def test_an_update_waits_for_a_number_of_seconds(model, peft_model, seconds):
    model.add_adapter("live", peft_model)
    with pytest.raises(InvalidInputError, match="timeout_s is"):
        model.update_adapter("live", peft_model, timeout_s=seconds)


def test_an_update_of_other_modules_is_refused_and_changes_nothing(model, make_base, peft_model):
    base = make_base("llama")
    model.add_adapter("live", random_checkpoint(base, TARGETS))
    before = logits(model, "live")
    others = [["q_proj"], [*TARGETS, "o_proj"]]
    for checkpoint in [random_checkpoint(base, names, seed=1) for names in others] + [
        random_checkpoint(base, TARGETS, seed=1, bias=True)
    ]:
        with pytest.raises(InvalidInputError, match="cannot be updated in place"):
            model.update_adapter("live", checkpoint)
    with pytest.raises(InvalidInputError, match="no adapter named 'new'"):
        model.update_adapter("new", peft_model)
    assert torch.equal(logits(model, "live"), before)


@pytest.mark.parametrize("fault", ["interrupt", "failure"])
def test_an_update_that_is_disturbed_leaves_no_torn_weights(model, make_base, monkeypatch, fault):
    base = make_base("llama")
    old, new = (random_checkpoint(base, TARGETS, seed=seed) for seed in (0, 1))
    model.add_adapter("live", new)
    expected = logits(model, "live")
    model.add_adapter("live", old)
    join, write, calls = threading.Thread.join, ModuleStacks.write, []

    begun = threading.Event()

    def interrupted(thread, *arguments):
        if not begun.is_set():
            begun.set()
            raise KeyboardInterrupt
        join(thread, *arguments)

    def waiting(*arguments):
        assert begun.wait(10)
        write(*arguments)

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        write(*arguments)

    if fault == "interrupt":
        monkeypatch.setattr(threading.Thread, "join", interrupted)
        monkeypatch.setattr(ModuleStacks, "write", waiting)
        with pytest.raises(KeyboardInterrupt):
            model.update_adapter("live", new)
        assert torch.equal(logits(model, "live"), expected)
    else:
        monkeypatch.setattr(ModuleStacks, "write", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.update_adapter("live", new)
        with pytest.raises(InvalidInputError, match="was lost when loading its replacement"):
            logits(model, "live")


@pytest.mark.parametrize(
    ("adapter", "options", "message"),
    [
        ("pirate", {}, "no adapter"),
        ({"a": 1}, {"config": {"target_modules": ["q_proj"]}}, "something else than tensors"),
        ({}, {}, "config is None"),
        ({}, {"config": {"r": {1: object()}}}, "is not JSON"),
        ({}, {"config": {"peft_type": "LORA", "target_modules": ["q_proj"]}}, "no LoRA tensors"),
    ],
)
def test_what_is_no_adapter_is_refused(model, adapter, options, message):
    with pytest.raises(InvalidInputError, match=message):
        model.add_adapter("a", adapter, **options)


def test_features_and_names_of_a_peft_model_are_refused_like_those_of_a_file(model, peft_model):
    with pytest.raises(InvalidInputError, match="no adapter 'third'"):
        model.add_adapter("a", peft_model, adapter_name="third")
    with pytest.raises(InvalidInputError, match="config is given for a PeftModel"):
        model.add_adapter("a", peft_model, peft_model.peft_config["default"])
    tensors = peft.get_peft_model_state_dict(peft_model)
    config = peft_model.peft_config["default"].to_dict() | {"use_qalora": True}
    with pytest.raises(UnsupportedInputError, match="use_qalora"):
        model.add_adapter("a", tensors, config)
    assert model.adapters == []
