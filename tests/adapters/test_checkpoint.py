"""`read_checkpoint`: equal to what PEFT computes, or an error that names file and feature."""

import json
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import MontecloraConfig, VeloraConfig
from safetensors.torch import load_file, save_file
from torch.nn import functional

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import Checkpoint, LoadLimits, ModuleSpec, read_checkpoint
from lora_backends.adapters.peft.checkpoint import PICKLE_FILE, SAFETENSORS_FILE
from lora_backends.testing.oracles import gamma

VOCAB, DIM = 40, 16  # of the tiny models
Q_PROJ = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q_PROJ}"
SPECS = {Q_PROJ: ModuleSpec("linear", 8, 6)}


def edit_config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rejected(error, folder, **arguments):
    """Return the message of the error that reading a folder raises."""
    with pytest.raises(error) as caught:
        read_checkpoint(folder, **arguments)
    message = str(caught.value)
    assert str(folder) in message
    assert "given:" in message
    assert "allowed:" in message
    return message


# What PEFT computes


def assert_same_matrices(delta, layer):
    """Compare rank, scaling and `scaling * B A` with the state of PEFT's layer."""
    weight = layer.get_delta_weight("default")
    turned = delta.kind == "embedding" or getattr(layer, "fan_in_fan_out", False)
    assert delta.rank == layer.r["default"]
    a, b, scaling = delta.lora_a.double(), delta.lora_b.double(), layer.scaling["default"]
    # PEFT's sums of `rank` products are float32, in whatever order; the scaling is rounded too
    room = gamma(delta.rank + 2, 2.0**-24) * abs(scaling) * (b.abs() @ a.abs())
    theirs = (weight.T if turned else weight).double()
    assert ((scaling * (b @ a) - theirs).abs() <= room).all()
    assert delta.lora_a.shape == (delta.rank, layer.in_features)
    assert delta.lora_b.shape == (layer.out_features, delta.rank)


def assert_same_output(delta, layer):
    """Compare the update with what PEFT's layer adds to its base layer, in float32."""
    generator = torch.Generator().manual_seed(3)
    if delta.kind == "embedding":
        x = torch.arange(layer.in_features)
        hot = functional.one_hot(x, layer.in_features).float()
    else:
        x = hot = torch.randn(5, layer.in_features, generator=generator)
    with torch.no_grad():
        theirs = layer(x) - layer.base_layer(x)
    ours = delta.scaling * (hot @ delta.lora_a.T @ delta.lora_b.T)
    if delta.bias is not None:
        ours = ours + delta.bias
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def assert_equals_peft(checkpoint, layers):
    assert list(checkpoint.modules) == sorted(layers)
    for path, layer in layers.items():
        delta = checkpoint.modules[path]
        assert delta.module == path
        assert_same_matrices(delta, layer)
        assert_same_output(delta, layer)
        with_bias = layer.lora_bias["default"]
        assert (delta.bias is not None) == with_bias
        if with_bias:
            bias = layer.lora_B["default"].bias * layer.scaling["default"]
            torch.testing.assert_close(delta.bias, bias.detach(), rtol=0, atol=0)


ATTENTION = ["q_proj", "v_proj"]
SUPPORTED = {
    "plain": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION}),
    "rslora": (
        "llama",
        {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ATTENTION},
    ),
    "rank_pattern": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "rank_pattern": {"layers.1.self_attn.q_proj": 2}},
    ),
    "rank_pattern_rslora": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "rank_pattern": {"q_proj": 9}, "use_rslora": True},
    ),
    "alpha_pattern": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "alpha_pattern": {r"layers\.[01]\..*v_proj": 32}},
    ),
    "both_patterns": (
        "llama",
        {
            "r": 4,
            "target_modules": ATTENTION,
            "rank_pattern": {"^model.layers.0.self_attn.q_proj": 3},
            "alpha_pattern": {"^layers.0.self_attn.q_proj": 50, "q_proj": 5},
        },
    ),
    "layers_to_transform": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "layers_to_transform": [0, 2]},
    ),
    "layers_pattern": (
        "llama",
        {
            "r": 4,
            "target_modules": ATTENTION,
            "layers_to_transform": 1,
            "layers_pattern": "layers",
        },
    ),
    "regular_expression": ("llama", {"r": 4, "target_modules": r".*\.[02]\..*(up|q)_proj"}),
    "exclude_modules": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "exclude_modules": ["layers.1.self_attn.q_proj"]},
    ),
    "all_linear": ("llama", {"r": 4, "target_modules": "all-linear"}),
    "embedding": ("llama", {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens"]}),
    "lm_head": ("llama", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "tied_head": ("llama_tied", {"r": 4, "target_modules": ["lm_head"]}),
    "tied_both": ("llama_tied", {"r": 4, "target_modules": ["lm_head", "embed_tokens"]}),
    "lora_bias": (
        "llama_bias",
        {"r": 4, "lora_alpha": 6, "lora_bias": True, "target_modules": ["q_proj", "o_proj"]},
    ),
    "conv1d": (
        "gpt2",
        {"r": 4, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    ),
    "gpt2_embedding": ("gpt2", {"r": 4, "target_modules": ["wte", "wpe"]}),
    "scaled_embedding": ("gemma", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "mica": ("llama", {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "mica"}),
    "orthogonal": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "init_lora_weights": "orthogonal"},
    ),
    "velora": (
        "llama",
        {"r": 4, "target_modules": ATTENTION, "velora_config": VeloraConfig(num_groups=4)},
    ),
    "monteclora": (
        "llama",
        {
            "r": 4,
            "target_modules": ["q_proj"],
            "monteclora_config": MontecloraConfig(num_samples=2, buffer_size=2),
        },
    ),
}


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("feature", SUPPORTED)
def test_result_is_what_peft_computes(
    feature, safetensors, save_adapter, load_in_peft, make_base, specs_of
):
    base, config = SUPPORTED[feature]
    folder = save_adapter(base, safetensors=safetensors, **config)
    assert (folder / SAFETENSORS_FILE).exists() == safetensors
    layers = load_in_peft(folder, base)
    assert layers
    assert_equals_peft(read_checkpoint(folder, specs_of(make_base(base))), layers)


def test_embed_scale_is_folded_into_scaling(save_adapter, make_base, specs_of):
    base = make_base("gemma")
    folder = save_adapter("gemma", r=4, lora_alpha=6, target_modules=["embed_tokens", "q_proj"])
    modules = read_checkpoint(folder, specs_of(base)).modules
    assert modules["model.embed_tokens"].scaling == pytest.approx(1.5 * DIM**0.5)
    assert modules[Q_PROJ].scaling == 1.5
    assert read_checkpoint(folder).modules["model.embed_tokens"].scaling == 1.5


def test_embed_scale_of_a_linear_layer_has_no_effect(write_adapter):
    specs = {Q_PROJ: ModuleSpec("linear", 8, 6, embed_scale=5.0)}
    assert read_checkpoint(write_adapter(), specs).modules[Q_PROJ].scaling == 2.0


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "mica", "eva"])
def test_accepted_initialisations_leave_the_base_of_peft_unchanged(
    init, save_adapter, load_in_peft, make_base
):
    folder = save_adapter(r=4, target_modules=["q_proj"])
    edit_config(folder, init_lora_weights=init)
    layers = load_in_peft(folder)
    weights = dict(make_base("llama").named_modules())
    assert all(torch.equal(x.base_layer.weight, weights[p].weight) for p, x in layers.items())
    assert_equals_peft(read_checkpoint(folder), layers)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_refused_initialisations_change_the_base_of_peft(
    init, save_adapter, load_in_peft, make_base
):
    folder = save_adapter(r=4, target_modules=["q_proj"])
    edit_config(folder, init_lora_weights=init)
    layers = load_in_peft(folder)
    assert not torch.equal(
        layers[Q_PROJ].base_layer.weight, make_base("llama").get_submodule(Q_PROJ).weight
    )
    rejected(UnsupportedInputError, folder)


# What is in a checkpoint


def test_file_with_fewer_modules_than_targeted_is_read(save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj", "v_proj"])
    tensors = load_file(folder / SAFETENSORS_FILE)
    kept = {key: value for key, value in tensors.items() if "layers.1" in key}
    save_file(kept, folder / SAFETENSORS_FILE)
    paths = [f"model.layers.1.self_attn.{name}" for name in ("q_proj", "v_proj")]
    assert list(read_checkpoint(folder).modules) == paths


@pytest.mark.parametrize("base", ["llama", "llama_tied"])
def test_base_weights_beside_embedding_and_head_are_returned(base, save_adapter, make_base):
    folder = save_adapter(base, r=4, target_modules=["embed_tokens", "lm_head"])
    weights = read_checkpoint(folder).base_weights
    assert sorted(weights) == ["lm_head", "model.embed_tokens"]
    for path, weight in weights.items():
        assert torch.equal(weight, make_base(base).get_submodule(path).weight)


def test_base_weight_of_another_size_is_an_error(save_adapter, make_base, specs_of):
    folder = save_adapter(r=4, target_modules=["embed_tokens"])
    tensors = load_file(folder / SAFETENSORS_FILE)
    tensors["base_model.model.model.embed_tokens.base_layer.weight"] = torch.zeros(VOCAB + 2, DIM)
    save_file(tensors, folder / SAFETENSORS_FILE)
    message = rejected(InvalidInputError, folder, modules=specs_of(make_base("llama")))
    assert f"base_layer.weight' [{VOCAB + 2}, {DIM}]" in message


def test_base_weight_without_lora_is_an_error(write_adapter, lora):
    folder = write_adapter({**lora(), "base_model.model.lm_head.base_layer.weight": torch.ones(2)})
    assert "module 'lm_head' has no LoRA matrices" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize("kind", [str, Path])
def test_folder_may_be_a_string_or_a_path_in_the_home(kind, write_adapter, monkeypatch):
    folder = write_adapter()
    monkeypatch.setenv("HOME", str(folder.parent))
    checkpoint = read_checkpoint(kind("~/adapter"), SPECS, max_rank=4)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.folder == folder


def test_result_is_read_only(write_adapter):
    checkpoint = read_checkpoint(write_adapter())
    with pytest.raises(TypeError):
        checkpoint.modules["x"] = None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_of_the_file_is_kept(dtype, write_adapter, lora):
    delta = read_checkpoint(write_adapter(lora(dtype=dtype))).modules[Q_PROJ]
    assert delta.lora_a.dtype == delta.lora_b.dtype == dtype


def test_bias_is_float32_with_scaling_folded_in(write_adapter, lora):
    bias = torch.arange(6, dtype=torch.bfloat16)
    tensors = {**lora(), f"{KEY}.lora_B.bias": bias}
    folder = write_adapter(tensors, lora_bias=True, lora_alpha=2)
    delta = read_checkpoint(folder).modules[Q_PROJ]
    assert delta.bias.dtype == torch.float32
    assert torch.equal(delta.bias, bias.float() * 0.5)


def test_safetensors_goes_before_bin(write_adapter):
    folder = write_adapter()
    (folder / PICKLE_FILE).write_bytes(b"never read")
    assert list(read_checkpoint(folder).modules) == [Q_PROJ]


def test_bin_of_the_format_before_zip_is_read(write_adapter, lora):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    torch.save(lora(), folder / PICKLE_FILE, _use_new_zipfile_serialization=False)
    assert list(read_checkpoint(folder).modules) == [Q_PROJ]


# Features known by their tensors

REFUSED = {
    f"{KEY}.lora_diag": "kasa_config",
    f"{KEY}.base_layer.bias": "bias = ",
    f"{KEY}.lora_E": "ADALORA",
    "base_model.model.lm_head.weight": "modules_to_save",
    "base_model.model.score.bias": "modules_to_save",
    "base_model.model.score.modules_to_save.weight": "modules_to_save",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": (
        "trainable_token_indices"
    ),
    "base_model.model.model.layers.0.mlp.gate.base_layer.lora_B.weight": "target_parameters",
    # peft 761: a module of torch that reads the weight of its projection and never calls it
    "base_model.model.head.attention.base_layer.out_proj.lora_A.weight": "MultiheadAttention",
}


@pytest.mark.parametrize("key", REFUSED)
def test_tensor_of_a_refused_feature_names_the_feature(key, write_adapter, lora):
    folder = write_adapter({**lora(), key: torch.ones(4, 4)})
    message = rejected(UnsupportedInputError, folder)
    assert REFUSED[key] in message
    assert key in message


def test_every_feature_found_in_the_tensors_is_listed(write_adapter, lora):
    folder = write_adapter({**lora(), **{key: torch.ones(4, 4) for key in REFUSED}})
    message = rejected(UnsupportedInputError, folder)
    assert all(feature in message for feature in REFUSED.values())


def test_convolution_is_refused_by_name(write_adapter, lora):
    tensors = {**lora(), f"{KEY}.lora_A.weight": torch.ones(4, 8, 3, 3)}
    assert "LoRA of a convolution" in rejected(UnsupportedInputError, write_adapter(tensors))


def test_magnitudes_of_dora_are_read_by_both_of_their_names(save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj"], use_dora=True)
    magnitude = read_checkpoint(folder).modules[Q_PROJ].magnitude
    tensors = load_file(folder / SAFETENSORS_FILE)
    assert torch.equal(magnitude, tensors[f"{KEY}.lora_magnitude_vector"])
    renamed = {
        f"{key}.weight" if key.endswith("vector") else key: tensor.clone()
        for key, tensor in tensors.items()
    }
    save_file(renamed, folder / SAFETENSORS_FILE)
    assert torch.equal(read_checkpoint(folder).modules[Q_PROJ].magnitude, magnitude)
    save_file({**tensors, **renamed}, folder / SAFETENSORS_FILE)
    assert "not understood" in rejected(InvalidInputError, folder)


def test_use_dora_and_the_tensors_of_every_module_agree(save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj"], use_dora=True)
    edit_config(folder, use_dora=False)
    message = rejected(InvalidInputError, folder)
    assert "use_dora = false" in message and f"{KEY}.lora_magnitude_vector" in message
    edit_config(folder, use_dora=True)
    tensors = load_file(folder / SAFETENSORS_FILE)
    del tensors[f"{KEY}.lora_magnitude_vector"]
    save_file(tensors, folder / SAFETENSORS_FILE)
    assert f"no tensor '{KEY}.lora_magnitude_vector'" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize(
    "magnitude", [torch.ones(5), torch.ones(1, 6), torch.full((6,), torch.nan)]
)
def test_a_wrong_magnitude_is_refused(magnitude, write_adapter, lora):
    tensors = {**lora(), f"{KEY}.lora_magnitude_vector": magnitude}
    message = rejected(InvalidInputError, write_adapter(tensors, use_dora=True))
    assert f"{KEY}.lora_magnitude_vector" in message


def test_modules_to_save_saved_by_peft_are_refused(save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert 'modules_to_save = ["lm_head"]' in rejected(UnsupportedInputError, folder)
    edit_config(folder, modules_to_save=None)
    assert "modules_to_save" in rejected(UnsupportedInputError, folder)


def test_trainable_tokens_saved_by_peft_are_refused(save_adapter):
    folder = save_adapter(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 3])
    assert "trainable_token_indices" in rejected(UnsupportedInputError, folder)
    edit_config(folder, trainable_token_indices=None)
    assert "trainable_token_indices" in rejected(UnsupportedInputError, folder)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_saved_by_peft_are_refused(bias, save_adapter):
    folder = save_adapter("llama_bias", r=4, target_modules=["q_proj"], bias=bias)
    assert f'bias = "{bias}"' in rejected(UnsupportedInputError, folder)
    edit_config(folder, bias="none")
    assert "biases of the base model" in rejected(UnsupportedInputError, folder)


def test_tied_adapters_saved_by_peft_are_refused(save_adapter):
    folder = save_adapter(
        "llama_tied", r=4, target_modules=["embed_tokens"], ensure_weight_tying=True
    )
    assert "ensure_weight_tying" in rejected(UnsupportedInputError, folder)


# Tensors that contradict the configuration or each other


@pytest.mark.parametrize(
    "key",
    [
        f"{KEY}.lora_C.weight",
        f"{KEY}.lora_A.default.weight",
        f"{KEY}.lora_A.bias",
        "model.q_proj.lora_A.weight",
        "base_model.model.lora_A.weight",
        "prompt_embeddings",
        "",
    ],
)
def test_tensor_that_is_not_understood_is_named(key, write_adapter, lora):
    folder = write_adapter({**lora(), key: torch.ones(2)})
    message = rejected(InvalidInputError, folder)
    assert "not understood" in message
    assert repr(key) in message


def test_file_without_tensors_is_an_error(write_adapter):
    assert "no LoRA tensors" in rejected(InvalidInputError, write_adapter({}))


@pytest.mark.parametrize("lost", ["lora_A.weight", "lora_B.weight"])
def test_matrix_without_its_partner_is_an_error(lost, write_adapter, lora):
    tensors = lora()
    del tensors[f"{KEY}.{lost}"]
    assert f"lacks {lost}" in rejected(InvalidInputError, write_adapter(tensors))


@pytest.mark.parametrize("lost", ["lora_embedding_A", "lora_embedding_B"])
def test_embedding_matrix_without_its_partner_is_an_error(lost, write_adapter):
    tensors = {
        f"{KEY}.{name}": torch.ones(4, 4)
        for name in ("lora_embedding_A", "lora_embedding_B")
        if name != lost
    }
    assert f"lacks {lost}" in rejected(InvalidInputError, write_adapter(tensors))


def test_bias_without_matrices_is_an_error(write_adapter, lora):
    tensors = {**lora(), f"{KEY}.lora_B.bias": torch.ones(6)}
    tensors[f"{KEY}.lora_B.bias".replace("layers.0", "layers.1")] = torch.ones(6)
    folder = write_adapter(tensors, lora_bias=True)
    assert "has no LoRA matrices" in rejected(InvalidInputError, folder)


def test_two_kinds_of_matrices_in_one_module_are_an_error(write_adapter, lora):
    folder = write_adapter({**lora(), f"{KEY}.lora_embedding_A": torch.ones(4, 8)})
    assert "two kinds of LoRA matrices" in rejected(InvalidInputError, folder)


def test_lora_bias_without_its_tensor_is_an_error(write_adapter):
    message = rejected(InvalidInputError, write_adapter(lora_bias=True))
    assert "lora_bias = true" in message
    assert f"no tensor '{KEY}.lora_B.bias'" in message


def test_bias_tensor_without_lora_bias_is_an_error(write_adapter, lora):
    folder = write_adapter({**lora(), f"{KEY}.lora_B.bias": torch.ones(6)})
    assert "lora_bias = false" in rejected(InvalidInputError, folder)


def test_lora_bias_of_an_embedding_is_an_error(write_adapter):
    tensors = {f"{KEY}.lora_embedding_{x}": torch.ones(4, 4) for x in "AB"}
    folder = write_adapter(tensors, lora_bias=True)
    assert "an embedding has no LoRA bias" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["v_proj"]},
        {"target_modules": []},
        {"target_modules": "q_proj"},
        {"exclude_modules": ["q_proj"]},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_lora_that_the_configuration_does_not_target_is_an_error(config, write_adapter):
    message = rejected(InvalidInputError, write_adapter(**config))
    assert f"does not target module '{Q_PROJ}'" in message
    assert next(iter(config)) in message


def test_an_embedding_is_no_linear_layer(write_adapter, lora):
    """PEFT's "all-linear" leaves embeddings out, and ignores the LoRA that a file has for one."""
    key = "base_model.model.model.embed_tokens.lora_embedding_"
    embedding = {f"{key}A": torch.ones(4, 9), f"{key}B": torch.ones(6, 4)}
    folder = write_adapter(lora() | embedding, target_modules="all-linear")
    assert "does not target module 'model.embed_tokens'" in rejected(InvalidInputError, folder)
    write_adapter(lora(), target_modules="all-linear")
    assert list(read_checkpoint(folder).modules) == [Q_PROJ]


@pytest.mark.parametrize("config", [{"r": 8}, {"rank_pattern": {"q_proj": 8}}], ids=str)
def test_rank_of_tensors_unlike_the_configuration_is_an_error(config, write_adapter):
    message = rejected(InvalidInputError, write_adapter(**config))
    assert SAFETENSORS_FILE in message
    assert f"'{KEY}.lora_A.weight' [4, 8] float32" in message
    assert "rank 8 by adapter_config.json" in message


def test_rank_of_b_unlike_the_configuration_is_an_error(write_adapter, lora):
    folder = write_adapter({**lora(), f"{KEY}.lora_B.weight": torch.ones(6, 5)})
    assert f"'{KEY}.lora_B.weight' [6, 5]" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize("shape", [(4,), (), (0,), (4, 0)])
def test_shard_that_was_not_gathered_is_an_error(shape, write_adapter, lora):
    folder = write_adapter({**lora(), f"{KEY}.lora_A.weight": torch.ones(shape)})
    message = rejected(InvalidInputError, folder)
    assert f"{list(shape)} float32" in message
    assert ("the part that one process of DeepSpeed ZeRO-3" in message) == (shape != ())


def test_bias_of_another_width_is_an_error(write_adapter, lora):
    tensors = {**lora(), f"{KEY}.lora_B.bias": torch.ones(5)}
    message = rejected(InvalidInputError, write_adapter(tensors, lora_bias=True))
    assert "allowed: [6]" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["lora_A.weight", "lora_B.weight", "lora_B.bias"])
def test_values_that_are_not_finite_are_an_error(name, value, write_adapter, lora):
    tensors = {**lora(high=3000), f"{KEY}.lora_B.bias": torch.ones(3000)}
    tensors[f"{KEY}.{name}"].view(-1)[-1] = value
    message = rejected(InvalidInputError, write_adapter(tensors, lora_bias=True))
    assert "NaN or infinity" in message
    assert name in message


def test_float64_beyond_float32_is_an_error(write_adapter, lora):
    tensors = {key: value * 1e300 for key, value in lora(dtype=torch.float64).items()}
    assert "NaN or infinity" in rejected(InvalidInputError, write_adapter(tensors))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_dtype_that_is_no_float_is_an_error(dtype, write_adapter, lora):
    tensors = {key: value.to(dtype) for key, value in lora().items()}
    message = rejected(InvalidInputError, write_adapter(tensors))
    assert str(dtype).removeprefix("torch.") in message
    assert "bfloat16, float16, float32, float64" in message


# Tensors that contradict the base model or the room for them


def test_module_missing_in_the_base_is_an_error_with_a_suggestion(write_adapter):
    specs = {"model.layers.0.self_attn.qq_proj": ModuleSpec("linear", 8, 6)}
    message = rejected(InvalidInputError, write_adapter(), modules=specs)
    assert f"no module '{Q_PROJ}'; did you mean 'model.layers.0.self_attn.qq_proj'?" in message


def test_an_adapter_of_more_layers_than_the_base_has_says_so(write_adapter, lora):
    tensors = lora(Q_PROJ) | lora(Q_PROJ.replace("0", "1")) | lora(Q_PROJ.replace("0", "31"))
    message = rejected(InvalidInputError, write_adapter(tensors), modules=SPECS)
    assert "the base model has fewer layers than the adapter" in message
    assert "3 modules, 2 of which the base model lacks" in message
    assert "LoRA for layer 31; the base model's last layer is 0" in message
    assert "did you mean" not in message


def test_module_of_another_kind_is_an_error(write_adapter):
    specs = {Q_PROJ: ModuleSpec("embedding", 8, 6)}
    message = rejected(InvalidInputError, write_adapter(), modules=specs)
    assert "given: LoRA of kind 'linear'" in message
    assert "allowed: LoRA of kind 'embedding'" in message


@pytest.mark.parametrize(
    ("spec", "tensor"),
    [((9, 6), "lora_A.weight' [4, 8]"), ((8, 7), "lora_B.weight' [6, 4]")],
)
def test_shape_unlike_the_base_is_an_error(spec, tensor, write_adapter):
    specs = {Q_PROJ: ModuleSpec("linear", *spec)}
    message = rejected(InvalidInputError, write_adapter(), modules=specs)
    assert tensor in message
    assert f"in_features {spec[0]} and out_features {spec[1]} by the base model" in message


def test_rank_above_max_rank_is_an_error_that_says_what_to_do(write_adapter):
    message = rejected(InvalidInputError, write_adapter(), max_rank=3)
    assert "given: rank 4" in message
    assert "allowed: at most 3 (max_rank)" in message
    assert "set max_rank to 4 or more" in message


# Files and folders


def test_missing_folder_is_an_error(tmp_path):
    assert "no such folder" in rejected(InvalidInputError, tmp_path / "nowhere")


def test_file_for_a_folder_is_an_error(write_adapter):
    assert "given: a file" in rejected(InvalidInputError, write_adapter() / SAFETENSORS_FILE)


def test_folder_without_configuration_is_an_error(tmp_path):
    assert "there is no adapter_config.json" in rejected(InvalidInputError, tmp_path)


def test_folder_without_weights_is_an_error(write_adapter):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    assert "there are no weights" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize("name", [SAFETENSORS_FILE, PICKLE_FILE])
@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 64, b"\x80\x02}q\x00.", b"PK\x03\x04"], ids=repr
)
def test_file_of_another_format_is_an_error(name, content, write_adapter):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    (folder / name).write_bytes(content)
    assert name in rejected(InvalidInputError, folder)


def test_weights_that_are_a_folder_are_an_error(write_adapter):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    (folder / SAFETENSORS_FILE).mkdir()
    rejected(InvalidInputError, folder)


class Malicious:
    def __reduce__(self):
        return Path.touch, (Path(self.target),)


def test_bin_that_needs_code_is_refused_and_runs_none(write_adapter, lora, tmp_path):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    trap = Malicious()
    trap.target = str(tmp_path / "ran")
    torch.save({**lora(), "trap": trap}, folder / PICKLE_FILE)
    assert "needs code to be unpickled" in rejected(InvalidInputError, folder)
    (folder / PICKLE_FILE).write_bytes(pickle.dumps(trap, protocol=2))
    assert "needs code to be unpickled" in rejected(InvalidInputError, folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[1, 2], torch.ones(2), {"a": 1}, {1: torch.ones(2)}])
def test_bin_without_a_state_dict_is_an_error(content, write_adapter):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    torch.save(content, folder / PICKLE_FILE)
    assert "holds no state dict" in rejected(InvalidInputError, folder)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(4, 8).to_sparse(), torch.ones(4, 8, device="meta")],
    ids=["sparse", "meta"],
)
def test_bin_with_tensors_that_are_not_dense_is_an_error(tensor, write_adapter, lora):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    torch.save({**lora(), f"{KEY}.lora_A.weight": tensor}, folder / PICKLE_FILE)
    assert "dense" in rejected(InvalidInputError, folder)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damaged_file_is_read_or_refused_by_name(data, tmp_path_factory):
    name = data.draw(st.sampled_from([SAFETENSORS_FILE, PICKLE_FILE]))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["a"]})
    )
    tensors = {f"base_model.model.a.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}
    if name == SAFETENSORS_FILE:
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    content = bytearray((folder / name).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(0, 3))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / name).write_bytes(bytes(content))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert list(read_checkpoint(folder).modules) == ["a"]
        except (InvalidInputError, UnsupportedInputError) as error:
            assert re.search(re.escape(str(folder)), str(error))


# What else a user may have at hand


def test_checkpoints_of_a_training_run_below_the_folder_are_named(write_adapter):
    folder = write_adapter()
    for step in (9, 10, 100):
        folder.parent.joinpath(f"checkpoint-{step}").mkdir()
        config = folder.parent / f"checkpoint-{step}" / "adapter_config.json"
        config.write_bytes((folder / "adapter_config.json").read_bytes())
    message = rejected(InvalidInputError, folder.parent)
    assert "adapters below it: adapter, checkpoint-9, checkpoint-10, checkpoint-100" in message
    assert f"pass one of them, e.g. {folder.parent / 'checkpoint-100'}" in message


def test_shards_of_another_kind_are_named(write_adapter):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    for shard in (1, 2):
        (folder / f"adapter_model-0000{shard}-of-00002.bin").touch()
    (folder / "adapter_model.bin.index.json").touch()
    message = rejected(InvalidInputError, folder)
    assert "shards: adapter_model-00001-of-00002.bin, " in message
    assert "to do: copy the shards too, as safetensors" in message


def write_shards(folder, shards):
    (folder / SAFETENSORS_FILE).unlink(missing_ok=True)
    for number, tensors in shards.items():
        save_file(tensors, folder / f"adapter_model-0000{number}-of-00002.safetensors")
    return folder


def test_shards_are_read_as_one_file(write_adapter, lora):
    tensors = lora()
    (a, first), (b, second) = tensors.items()
    folder = write_shards(write_adapter(), {1: {a: first}, 2: {b: second}})
    assert [*read_checkpoint(folder).modules] == [Q_PROJ]


def test_missing_and_overlapping_shards_are_refused(write_adapter, lora):
    tensors = lora()
    folder = write_shards(write_adapter(), {2: tensors})
    assert "without adapter_model-00001-of-00002" in rejected(InvalidInputError, folder)
    write_shards(folder, {1: tensors})
    assert "shards overlap" in rejected(InvalidInputError, folder)


def test_all_shards_together_are_within_the_limits(write_adapter, lora):
    (a, first), (b, second) = lora().items()
    folder = write_shards(write_adapter(), {1: {a: first}, 2: {b: second}})
    with pytest.raises(InvalidInputError, match="beyond the limit tensors"):
        read_checkpoint(folder, limits=LoadLimits(tensors=1))
    with pytest.raises(InvalidInputError, match="beyond the limit unpacked_bytes"):
        read_checkpoint(folder, limits=LoadLimits(unpacked_bytes=first.nbytes + 50))


def test_the_name_of_an_adapter_in_memory_is_left_out(write_adapter, lora):
    named = {key.replace(".weight", ".pirate.weight"): t for key, t in lora().items()}
    assert [*read_checkpoint(write_adapter(named)).modules] == [Q_PROJ]


def test_a_file_with_several_adapters_is_refused(write_adapter, lora):
    named = {
        key.replace(".weight", f".{name}.weight"): t.clone()
        for key, t in lora().items()
        for name in ("pirate", "json")
    }
    message = rejected(InvalidInputError, write_adapter(named))
    assert "the file holds several adapters" in message
    assert "an adapter named 'json'" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.model.layers.0.q_proj", "model.language_model.layers.0.q_proj"),
        ("model.layers.0.q_proj", "model.language_model.layers.0.q_proj"),
        ("language_model.lm_head", "lm_head"),
        ("visual.blocks.0.qkv", "model.visual.blocks.0.qkv"),
        ("multi_modal_projector.linear_1", "model.multi_modal_projector.linear_1"),
        ("vision_tower.vision_model.layers.0.fc1", "model.vision_tower.layers.0.fc1"),
        ("model.vision_tower.vision_model.layers.0.fc1", "model.vision_tower.layers.0.fc1"),
    ],
)
def test_names_of_transformers_4_find_their_modules(old, new, write_adapter, lora):
    folder = write_adapter(lora(old), target_modules=[old.rpartition(".")[2]])
    specs = {new: ModuleSpec("linear", 8, 6), "model.other": ModuleSpec("linear", 8, 6)}
    assert [*read_checkpoint(folder, specs).modules] == [new]
    specs[old] = specs[new]
    assert [*read_checkpoint(folder, specs).modules] == [old]
