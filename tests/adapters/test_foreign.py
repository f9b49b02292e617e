"""Folders and files that are no adapters of PEFT, or lack a part of one, are named."""

import json

import pytest
import torch

from lora_backends import InvalidInputError, UnsupportedInputError
from lora_backends.adapters import ModuleSpec, read_checkpoint
from lora_backends.adapters.files.formats import CONFIG_FILE, PICKLE_FILE, SAFETENSORS_FILE

Q_PROJ = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{Q_PROJ}"
SPECS = {Q_PROJ: ModuleSpec("linear", 8, 6)}


def rejected(error, folder):
    """Return the message of the error that reading a folder raises."""
    with pytest.raises(error) as caught:
        read_checkpoint(folder)
    message = str(caught.value)
    assert str(folder) in message and "given:" in message and "allowed:" in message
    return message


@pytest.mark.parametrize(
    ("key", "written"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight", "kohya"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "kohya"),
        ("unet.down_blocks.0.attentions.0.proj_in.lora_A.weight", "diffusers"),
        ("transformer.blocks.0.attn.to_q.lora.down.weight", "diffusers"),
        ("model.layers.0.self_attn.q_proj.lora_a", "MLX"),
        (f"{Q_PROJ}.lora_A.weight", "PEFT without the prefix base_model.model."),
        (
            f"_orig_mod.{KEY}.lora_A.weight",
            "a PeftModel that torch.compile or a parallel wrapper held when it was saved",
        ),
    ],
)
def test_another_format_is_named(key, written, write_adapter):
    message = rejected(InvalidInputError, write_adapter({key: torch.ones(4, 8)}))
    assert f"they are named in the format of {written}\n" in message


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("shape", [(5, 4, 8), (4, 8)])
def test_lora_as_parametrizations_is_named(prefix, shape, write_adapter):
    layer = f"{prefix}roberta.encoder.layers.0.mixer.Wqkv"
    key = f"{layer}.parametrizations.weight.0.lora_A"
    whole = {key: torch.ones(shape), f"{layer}.parametrizations.weight.original": torch.ones(6, 8)}
    message = rejected(UnsupportedInputError, write_adapter(whole))
    assert f"'{key}' {[*shape]}" in message and "save a PEFT adapter per task" in message
    assert "original" not in message and "convolution" not in message


def test_packed_tasks_of_a_model_are_named(tmp_path):
    tasks = ["retrieval.query", "text-matching"]
    (tmp_path / "config.json").write_text(json.dumps({"lora_adaptations": tasks}))
    message = rejected(InvalidInputError, tmp_path)
    assert f"the LoRA of these tasks: {tasks}" in message and "a PEFT adapter per task" in message


@pytest.mark.parametrize("text", ["[]", "{", "{}", "[" * 10**5])
def test_a_config_json_without_tasks_is_reported_as_a_whole_model(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    message = rejected(InvalidInputError, tmp_path)
    assert "the config.json of a whole model" in message and "task" not in message


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pytorch_lora_weights.safetensors", "weights of diffusers"),
        ("add_detail.safetensors", "other safetensors, e.g. of kohya"),
        ("config.json", "the config.json of a whole model"),
    ],
)
def test_a_folder_of_another_format_is_named(name, told, tmp_path):
    (tmp_path / name).touch()
    assert told in rejected(InvalidInputError, tmp_path)


def test_the_id_of_a_hub_is_told_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf download someone/an-adapter" in rejected(InvalidInputError, "someone/an-adapter")
    assert "hf download" not in rejected(InvalidInputError, tmp_path / "someone" / "an-adapter")


def test_a_file_of_a_checkpoint_names_its_folder(write_adapter):
    folder = write_adapter()
    message = rejected(InvalidInputError, folder / SAFETENSORS_FILE)
    assert f"to do: pass its folder, {folder}" in message


@pytest.mark.parametrize("folder", [None, 3, "~nosuchuser/x", "nul\0byte", "x" * 300])
def test_what_is_no_path_is_refused(folder):
    with pytest.raises(InvalidInputError, match="is no path|of a user that|cannot read"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "non_lora_trainables.bin",
        "non_lora_state_dict.bin",
        "mm_projector.bin",
        "trainable_params.bin",
        "vit.safetensors",
        "embed_tokens.pt",
        "lm_head.safetensors",
        "merger.bin",
        "vision_abstractor.pt",
        "head.pth",
    ],
)
def test_trained_weights_beside_the_adapter_are_refused(name, write_adapter):
    folder = write_adapter()
    torch.save({}, folder / name)
    assert f"given: {name}" in rejected(UnsupportedInputError, folder)


def test_files_of_a_training_run_beside_the_adapter_are_no_weights(write_adapter):
    folder = write_adapter()
    names = "optimizer.pt scheduler.pt rng_state.pth training_args.bin scaler.pt model.safetensors"
    others = "value_head.bin v_head.safetensors tokenizer.json projector.json README.md"
    for name in [*names.split(), *others.split(), "pytorch_model.bin"]:
        torch.save({}, folder / name)
    assert [*read_checkpoint(folder).modules] == [Q_PROJ]


@pytest.mark.parametrize("name", [SAFETENSORS_FILE, PICKLE_FILE])
def test_a_pointer_of_git_lfs_is_named(write_adapter, name):
    folder = write_adapter()
    (folder / SAFETENSORS_FILE).unlink()
    (folder / name).write_text("version https://git-lfs.example/spec/v1\nsize 13640432\n")
    with pytest.raises(InvalidInputError, match="Git LFS pointer"):
        read_checkpoint(folder, SPECS)


def test_an_adapter_of_mlx_is_named(write_adapter):
    folder = write_adapter()
    values = {"fine_tune_type": "lora", "num_layers": 8, "lora_parameters": {"rank": 8}}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedInputError, match="MLX"):
        read_checkpoint(folder, SPECS)


def test_shard_of_rows_is_named(write_adapter, lora):
    shards = {key: tensor[: len(tensor) // 2] for key, tensor in lora().items()}
    message = rejected(InvalidInputError, write_adapter(shards))
    assert "the part that one process of DeepSpeed ZeRO-3 or FSDP has of it" in message
    assert "gather the parameters on one process" in message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensors_of_8_bits_are_named(dtype, write_adapter, lora):
    tensors = {key: tensor.to(dtype) for key, tensor in lora().items()}
    assert "a tensor has 8 bits (fp8)" in rejected(InvalidInputError, write_adapter(tensors))
    scales = {key.removesuffix("weight") + "weight_scale": torch.ones(1) for key in tensors}
    message = rejected(InvalidInputError, write_adapter(tensors | scales))
    assert "a quantised checkpoint, with scales" in message


def test_pickles_of_8_bits_and_of_shards_are_named(write_adapter, lora, tmp_path):
    folder = write_adapter(lora())
    (folder / SAFETENSORS_FILE).unlink()
    eight = {key: tensor.to(torch.float8_e4m3fn) for key, tensor in lora().items()}
    torch.save(eight, folder / PICKLE_FILE)
    assert "tensors of 8 bits (fp8)" in rejected(InvalidInputError, folder)
    torch.save(
        {f"{KEY}.lora_A.weight": Shard(lora()[f"{KEY}.lora_A.weight"])}, folder / PICKLE_FILE
    )
    assert "shards (DTensor)" in rejected(InvalidInputError, folder)


class Shard(torch.Tensor):
    """A subclass, which torch.save writes as it writes DTensor."""

    def __new__(cls, tensor):
        return torch.Tensor._make_subclass(cls, tensor)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("adapters.safetensors", "weights of MLX"),
        ("adapters.npz", "weights of MLX"),
        ("pytorch_model_fsdp_0", "shards of a distributed checkpoint (FSDP)"),
        ("__0_0.distcp", "shards of a distributed checkpoint (FSDP)"),
        ("global_step12", "partitions of DeepSpeed ZeRO"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "partitions of DeepSpeed ZeRO"),
        ("adapter_model_rank0.safetensors", "parts of several processes"),
        ("adapter-f16.gguf", "weights of llama.cpp (GGUF)"),
        ("adapter_0.pt", "weights of torchtune"),
    ],
)
def test_weights_of_others_are_named_with_a_configuration_and_without(
    name, told, write_adapter, lora
):
    folder = write_adapter(lora())
    (folder / SAFETENSORS_FILE).unlink()
    (folder / name).touch()
    assert f"{told}: {name}" in rejected(InvalidInputError, folder)
    (folder / CONFIG_FILE).unlink()
    assert f"{told}: {name}" in rejected(InvalidInputError, folder)


def test_configuration_that_git_lfs_left_out_is_named(write_adapter, lora):
    folder = write_adapter(lora())
    (folder / CONFIG_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n")
    assert "Git LFS pointer" in rejected(InvalidInputError, folder)
