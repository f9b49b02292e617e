"""Adapters that bring more than LoRA, from memory and out of a store."""

import copy

import peft
import pytest
import torch
from helpers.sweeps.sweep import BOUND, adapt, in_peft
from helpers.sweeps.sweep_variants import Q_V, build, inputs

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel

HEAD = {**Q_V, "modules_to_save": ["lm_head"]}


@pytest.fixture
def two(tmp_path):
    """A model with one slot, and folders and logits of two adapters with heads of their own."""
    base = build("llama")
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_adapters=1, max_rank=8)
    expected, folders = {}, {}
    for seed, name in enumerate(("a", "b")):
        folders[name] = str(tmp_path / name)
        adapt(base, folders[name], seed, **HEAD)
        with torch.no_grad():
            expected[name] = in_peft(base, folders[name])(**inputs("llama")).logits
    return base, model, folders, expected


def assert_is(model, name, expected):
    rows = len(expected[name])
    logits = model(adapters=[name] * rows, **inputs("llama")).logits
    torch.testing.assert_close(logits, expected[name], rtol=0, atol=BOUND)


def test_an_adapter_comes_back_from_memory_with_its_head(two):
    _, model, folders, expected = two
    store = model.keep_adapters()
    for name, folder in folders.items():
        model.load_adapter(name, folder)
    store.prefetch(["a"])
    store._worker.submit(int).result()
    assert model.adapters == ["b"]  # the batch takes the head: streams that read it are recorded
    for name in ("a", "b", "a"):
        assert_is(model, name, expected)
    assert store.disk_reads == 2


def test_a_peft_model_brings_its_head_and_is_not_updated_in_place(two):
    base, model, folders, expected = two
    trained = peft.PeftModel.from_pretrained(copy.deepcopy(base), folders["a"])
    model.add_adapter("a", trained)
    assert_is(model, "a", expected)
    with pytest.raises(InvalidInputError, match="it has modules of its own"):
        model.update_adapter("a", trained)
    assert_is(model, "a", expected)
