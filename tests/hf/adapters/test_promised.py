"""Files that lack what their `adapter_config.json` promises, and files that lack nothing."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from helpers.sweeps.sweep import BOUND, adapt, in_peft, result
from helpers.sweeps.sweep_variants import BERT, EXPERTS, Q_V, build, inputs
from safetensors.torch import load_file, save_file

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

ALL = {"target_modules": "all-linear", "bias": "lora_only"}


def without(folder, *parts):
    """Take the tensors with a part of their name out of a file; at least one for each."""
    file = Path(folder, "adapter_model.safetensors")
    tensors = load_file(file)
    for part in parts:
        lost = [name for name in tensors if part in name]
        assert lost, [*tensors]
        for name in lost:
            del tensors[name]
    save_file(tensors, file)
    return folder


def beside(folder, base, *names, off=0.3, start=""):
    """Put parameters of a base model into a file, moved by `off`, under names that begin so."""
    file = Path(folder, "adapter_model.safetensors")
    tensors = load_file(file)
    for name in names:
        path, _, leaf = name.rpartition(".")
        value = base.get_parameter(name).detach() + off
        tensors[f"base_model.model.{path}.{start}{leaf}"] = value
    save_file(tensors, file)
    return folder


def edit_config(folder, **values):
    file = Path(folder, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def load(base, folder):
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    model.load_adapter("own", folder)
    return model


@torch.no_grad()
def assert_rows_of_peft(name, base, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(base, folder)
    given = inputs(name)
    expected = result(in_peft(base, folder)(**given))
    rows = result(model(adapters=["own"] * len(given["input_ids"]), **given))
    torch.testing.assert_close(rows, expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    ("name", "config", "lost", "told"),
    [
        ("llama", {"modules_to_save": ["lm_head"]}, "lm_head", "lm_head.weight"),
        ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, "embed_tokens", "embed_tokens"),
        (
            "llama",
            {"modules_to_save": ["norm"]},
            "layers.1.input_layernorm",
            "layers.1.input_layer",
        ),
        ("tied llama", {"modules_to_save": ["embed_tokens"]}, "embed_tokens", "embed_tokens"),
        ("bert", {**BERT, "task_type": "SEQ_CLS"}, "classifier.bias", "classifier.bias"),
        (
            "roberta",
            {**BERT, "task_type": "SEQ_CLS"},
            "classifier.dense",
            "classifier.dense.weight",
        ),
        ("llama for classes", {"task_type": "SEQ_CLS"}, "score", "score.weight"),
        ("bert for tokens", {**BERT, "task_type": "TOKEN_CLS"}, "classifier", "classifier.weight"),
        ("llama", {"trainable_token_indices": [4, 5]}, "token_adapter", "token embedding"),
        ("llama", {"trainable_token_indices": {"embed_tokens": [4]}}, "token_a", "'embed_tokens'"),
        ("tied llama", {"trainable_token_indices": [4, 5]}, "token_adapter", "token embedding"),
        ("bert", {**BERT, "bias": "all"}, "LayerNorm.bias", "output.LayerNorm.bias"),
        ("bert", {**BERT, "bias": "all"}, "layer.1.attention.self.key.bias", "self.key.bias"),
        (
            "bert",
            {**BERT, "bias": "lora_only"},
            "layer.1.attention.self.query.base",
            "self.query.bi",
        ),
        ("llama with biases", {"bias": "lora_only"}, "base_layer.bias", "v_proj.bias"),
        ("llama with biases", {"bias": "lora_only"}, "layers.1.self_attn.v_proj", "v_proj.bias"),
    ],
)
def test_a_file_that_lacks_what_its_configuration_promises_is_refused(
    name, config, lost, told, tmp_path
):
    base = build(name)
    adapt(base, str(tmp_path), 1, **{**Q_V, **config})
    load(base, tmp_path)
    without(tmp_path, lost)
    with warnings.catch_warnings(), pytest.raises(InvalidInputError, match="lacks") as error:
        warnings.simplefilter("ignore")
        load(base, tmp_path)
    assert told in str(error.value)
    assert "promises" in str(error.value)


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_task_promises_its_head_where_the_configuration_does_not_name_it(task, tmp_path):
    base = build("llama for classes")
    adapt(base, str(tmp_path), 1, **Q_V, task_type=task)
    edit_config(without(tmp_path, "score"), modules_to_save=None)
    with pytest.raises(KeyError, match="score"):
        in_peft(base, tmp_path)
    with pytest.raises(InvalidInputError, match=r"no tensor for score\.weight"):
        load(base, tmp_path)


def test_rows_of_an_untied_head_are_promised_by_its_name(tmp_path):
    base = build("llama")
    ids = {"embed_tokens": [4, 5], "lm_head": [4, 5]}
    adapt(base, str(tmp_path), 1, **Q_V, trainable_token_indices=ids)
    without(tmp_path, "lm_head")
    with pytest.raises(InvalidInputError, match="no rows of lm_head"):
        load(base, tmp_path)


def test_a_refused_file_leaves_loaded_adapters_as_they_were(tmp_path):
    base = build("llama")
    for name in ("whole", "cut"):
        adapt(base, str(tmp_path / name), 1, **Q_V, modules_to_save=["lm_head"])
    model = MultiLoRAModel(base, "torch_ref", max_adapters=1, max_rank=3)
    model.load_adapter("own", tmp_path / "whole")
    before = model(adapters=["own"] * 4, **inputs("llama")).logits
    with pytest.raises(InvalidInputError, match=r"lm_head\.weight"):
        model.load_adapter("other", without(tmp_path / "cut", "lm_head"))
    assert model.adapters == ["own"]
    assert torch.equal(model(adapters=["own"] * 4, **inputs("llama")).logits, before)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"modules_to_save": ["lm_head", "classifier", "v_head"]}),
        ("llama", {"modules_to_save": ["rotary_emb", "act_fn"]}),
        ("llama", {"target_modules": ["q_proj", "fc1", "no_such_module"]}),
        ("llama", {"bias": "all"}),
        ("llama", {"bias": "lora_only"}),
        ("llama", {"layers_to_transform": [1, 7]}),
        ("llama", {"rank_pattern": {"no_such": 2}, "alpha_pattern": {"none_of_it": 3}}),
        ("llama with biases", {"bias": "lora_only", "layers_to_transform": [1]}),
        ("llama with biases", {"bias": "all", "modules_to_save": ["up_proj"]}),
        ("bert", ALL),
        ("bert", {"target_modules": ".*layer.1.*query", "bias": "lora_only"}),
        ("tied llama", {"trainable_token_indices": {"embed_tokens": [4, 5], "lm_head": [4, 5]}}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "lora_only"}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}),
    ],
)
def test_what_has_no_counterpart_in_the_base_is_not_promised(name, config, tmp_path):
    base = build(name)
    adapt(base, str(tmp_path), 1, **{**Q_V, **config})
    assert_rows_of_peft(name, base, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(base, tmp_path)


@pytest.mark.parametrize("config", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_targeted_modules_without_lora_compute_as_in_the_base_with_a_warning(config, tmp_path):
    base = build("llama with biases")
    adapt(base, str(tmp_path), 1, **Q_V, **config)
    without(tmp_path, "layers.1.self_attn.v_proj", "layers.0.self_attn.q_proj")
    assert_rows_of_peft("llama with biases", base, tmp_path)
    with pytest.warns(
        RuntimeWarning, match=r"LoRA of 2 modules(.|\n)*layers\.0\.self_attn\.q_proj"
    ):
        load(base, tmp_path)


@pytest.mark.parametrize(
    ("config", "lost", "told"),
    [
        (Q_V, "layers.1.self_attn.v_proj", r"layers\.1\.self_attn\.v_proj"),
        (EXPERTS, "layers.1.mlp.experts", r"layers\.1\.mlp\.experts\.down_proj"),
    ],
)
def test_targets_without_lora_are_refused_where_peft_draws_their_numbers(
    config, lost, told, tmp_path
):
    base = build("mixtral")
    adapt(base, str(tmp_path), 1, **config, init_lora_weights=False)
    load(base, tmp_path)
    without(tmp_path, lost)
    with pytest.raises(InvalidInputError, match=rf"no LoRA for 'model\.{told}"):
        load(base, tmp_path)


Q_WEIGHT, Q_BIAS = (f"model.layers.1.self_attn.q_proj.{leaf}" for leaf in ("weight", "bias"))


@pytest.mark.parametrize(
    ("name", "config", "tensor", "start"),
    [
        ("llama", {}, Q_WEIGHT, ""),
        ("llama", {"target_modules": "all-linear"}, Q_WEIGHT, ""),
        ("llama with biases", {}, Q_BIAS, ""),
        ("llama with biases", {"bias": "all"}, Q_BIAS, ""),
        ("llama", {"target_modules": ["embed_tokens"]}, "model.embed_tokens.weight", ""),
        ("llama", {"trainable_token_indices": [4]}, "model.embed_tokens.weight", ""),
        ("tied llama", {"trainable_token_indices": [4]}, "lm_head.weight", ""),
        ("llama", {"trainable_token_indices": [4]}, "model.embed_tokens.weight", "token_adapter.b"),
        ("tied llama", {"modules_to_save": ["lm_head"]}, "lm_head.weight", "original_module."),
    ],
)
def test_a_tensor_that_peft_ignores_or_gives_to_the_base_is_refused(
    name, config, tensor, start, tmp_path
):
    base = build(name)
    adapt(base, str(tmp_path), 1, **{**Q_V, **config})
    start = start.replace("adapter.b", "adapter.base_layer.")
    if config.get("bias") != "all" and "embed_tokens" not in config.get("target_modules", ()):
        beside(tmp_path, base, tensor, off=0.0, start=start)
        assert_rows_of_peft(name, base, tmp_path)
    if config.get("bias") == "all":  # else the file has two values, which is refused as such
        without(tmp_path, tensor.replace("bias", "base_layer.bias"))
    beside(tmp_path, base, tensor, start=start)
    with pytest.raises(UnsupportedInputError, match="does not promise") as error:
        load(base, tmp_path)
    assert tensor in str(error.value)


@pytest.mark.parametrize("start", ["modules_to_save.", "modules_to_save.default."])
@pytest.mark.parametrize("saved", [None, ["norm"]])
def test_a_saved_module_that_the_configuration_does_not_name_is_refused(saved, start, tmp_path):
    base = build("llama")
    adapt(base, str(tmp_path), 1, **Q_V, modules_to_save=saved)
    beside(tmp_path, base, "lm_head.weight", start=start)
    with pytest.raises(UnsupportedInputError, match=r"does not name[\s\S]*lm_head.modules_to_save"):
        load(base, tmp_path)
    edit_config(tmp_path, modules_to_save=[*(saved or []), "lm_head"])
    load(base, tmp_path)


def test_a_plain_weight_of_a_targeted_module_without_lora_is_refused(tmp_path):
    base = build("llama")
    adapt(base, str(tmp_path), 1, **Q_V)
    beside(without(tmp_path, "layers.1.self_attn.q_proj"), base, Q_WEIGHT)
    with pytest.warns(RuntimeWarning), pytest.raises(UnsupportedInputError, match="PEFT ignores"):
        load(base, tmp_path)


def test_lora_of_a_module_that_is_saved_whole_is_refused(tmp_path):
    base = build("llama")
    adapt(base, str(tmp_path), 1, target_modules=["q_proj", "lm_head"])
    edit_config(tmp_path, modules_to_save=["lm_head"])
    beside(without(tmp_path, "lm_head.base_layer"), base, "lm_head.weight")
    with pytest.raises(InvalidInputError, match="does not target module 'lm_head'"):
        load(base, tmp_path)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_whole_weight_that_peft_reads_into_the_base_is_replaced(tensor, tmp_path):
    base = build("tied llama")
    adapt(base, str(tmp_path), 1, **Q_V)
    beside(tmp_path, base, tensor)
    assert_rows_of_peft("tied llama", base, tmp_path)


def test_biases_under_the_names_of_the_first_versions_of_peft_are_read(tmp_path):
    base = build("llama with biases")
    adapt(base, str(tmp_path), 1, **Q_V, bias="lora_only")
    given = inputs("llama with biases")
    expected = load(base, tmp_path)(adapters=["own"] * 4, **given).logits
    file = Path(tmp_path, "adapter_model.safetensors")
    save_file({n.replace("base_layer.bias", "bias"): t for n, t in load_file(file).items()}, file)
    edit_config(tmp_path, peft_version=None)
    rows = load(base, tmp_path)(adapters=["own"] * 4, **given).logits
    assert torch.equal(rows, expected)
