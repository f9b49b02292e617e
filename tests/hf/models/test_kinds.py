"""Encoder-decoders, images and sound: rows of their own adapters, or refused by name."""

import copy
import json

import pytest
import torch
import transformers
from helpers.sweeps import sweep
from helpers.sweeps.sweep import adapt, in_peft
from safetensors.torch import load_file, save_file

from lora_backends import UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

NEW = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}


def pair(name, tmp_path, **config):
    """Return a wrapped model with adapters "a" and "b", and PEFT's model of each."""
    base = sweep.build(name)
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    expected = {None: base}
    for seed, adapter in enumerate("ab"):
        folder = str(tmp_path / adapter)
        adapt(base, folder, seed, **config)
        model.load_adapter(adapter, folder)
        expected[adapter] = in_peft(base, folder)
    return model, expected


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_beams_of_an_encoder_decoder_keep_the_adapter_of_their_row(name, tmp_path):
    model, expected = pair(name, tmp_path)
    given = {k: v for k, v in sweep.inputs(name).items() if k != "decoder_input_ids"}
    settings = {**NEW, "num_beams": 2, "num_return_sequences": 2}
    rows = ["a", None, "b", "a"]
    tokens = model.generate(adapters=rows, **given, **settings).view(4, 2, -1)
    for row, name in enumerate(rows):
        alone = expected[name].generate(**given, **settings).view(4, 2, -1)[row]
        width = min(alone.shape[-1], tokens.shape[-1])
        assert torch.equal(tokens[row, :, :width], alone[:, :width])


def test_a_prepared_decoder_follows_its_adapters(tmp_path):
    model, expected = pair("T5", tmp_path)
    given = sweep.inputs("T5")
    with model.prepare(["a", None, "b", "a"], tokens=3) as step:
        for rows in (["a", None, "b", "a"], ["b", "b", "a", None]):
            step.update(rows)
            logits = model(adapters=step, **given).logits
            for row, name in enumerate(rows):
                with torch.no_grad():
                    alone = expected[name](**given).logits[row]
                torch.testing.assert_close(logits[row], alone, rtol=0, atol=2e-5)


def test_adapters_of_an_encoder_decoder_do_not_differ_by_token(tmp_path):
    model, _ = pair("T5", tmp_path)
    with pytest.raises(UnsupportedInputError, match="is an encoder-decoder"):
        model(adapters=[["a", "b", "b"]] * 4, **sweep.inputs("T5"))


def test_sound_that_moves_rows_as_it_is_transcribed_is_refused(tmp_path):
    model, expected = pair("Whisper", tmp_path)
    features = sweep.inputs("Whisper")["input_features"]
    long = torch.cat([features, features], dim=-1)
    rows = ["a", None, "b", "a"]
    for message, given in (
        ("sound of 24 frames or less", {"input_features": long}),
        ("num_beams=1", {"input_features": features, "num_beams": 2}),
    ):
        with pytest.raises(UnsupportedInputError, match=message):
            model.generate(adapters=rows, **given)
    tokens = model.generate(features, adapters=rows, **NEW)
    for row, name in enumerate(rows):
        alone = expected[name].generate(input_features=features, **NEW)[row]
        assert torch.equal(tokens[row], alone)


@pytest.mark.parametrize("where", ["transformers.models.pop2piano.modeling_pop2piano", "anyones"])
def test_a_generate_of_the_models_own_takes_one_adapter(tmp_path, where):
    model, _ = pair("T5", tmp_path)

    class Own(type(model.base)):
        def generate(self, **given):
            return super().generate(**given)

    Own.generate.__module__ = where
    model.base.__class__ = Own
    given = {k: v for k, v in sweep.inputs("T5").items() if k != "decoder_input_ids"}
    with pytest.raises(UnsupportedInputError, match="Own has a generate of its own"):
        model.generate(adapters=["a", "b"] * 2, **given, **NEW)
    assert len(model.generate(adapters=["a"] * 4, **given, **NEW)) == 4


def test_a_loop_of_the_callers_own_takes_one_adapter(tmp_path):
    model, _ = pair("T5", tmp_path)
    given = {k: v for k, v in sweep.inputs("T5").items() if k != "decoder_input_ids"}
    with pytest.raises(UnsupportedInputError, match="may move rows with custom_generate"):
        model.generate(adapters=["a", "b"] * 2, custom_generate=lambda *_, **__: 0, **given, **NEW)


def test_windows_of_an_image_belong_to_its_row(tmp_path):
    """Swin's first layers see windows on the first axis; where one was one, more have no order."""
    model, expected = pair("Swin", tmp_path, target_modules=r".*layers\.0\..*q_proj")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    given = {"pixel_values": images, "interpolate_pos_encoding": True}
    rows = ["b", None, "a", "a"]
    logits = model(adapters=rows, **given).logits
    for row, name in enumerate(rows):
        with torch.no_grad():
            alone = expected[name](**given).logits[row]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=2e-5)
    model, _ = pair("Swin", tmp_path)
    with pytest.raises(UnsupportedInputError, match=r"swin.encoder.layers.1.* shape \[16, 4\]"):
        model(adapters=rows, **given)


IMAGES = {
    "ResNet": ("ForImageClassification", {"embedding_size": 8, "layer_type": "basic"}),
    "PoolFormer": ("ForImageClassification", {"num_encoder_blocks": 2}),
    "Segformer": (
        "ForSemanticSegmentation",
        {"num_attention_heads": [1, 2], "num_encoder_blocks": 2, "decoder_hidden_size": 8},
    ),
}


@pytest.mark.parametrize("was_run", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_images_of_any_size_have_rows_of_their_own(name, was_run, tmp_path):
    kind, sizes = IMAGES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")
    made = config(hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, **sizes)
    base = getattr(transformers, name + kind)(made).eval()
    linear = [path for path, m in base.named_modules() if isinstance(m, torch.nn.Linear)]
    folders: dict = {None: None}
    for seed, adapter in enumerate("ab"):
        folders[adapter] = str(tmp_path / adapter)
        adapt(base, folders[adapter], seed, std=1.0, target_modules=linear)
    images = torch.randn(4, 3, 64, 96, generator=torch.Generator().manual_seed(3))
    if was_run:  # Transformers hooks some models in their first pass
        base(images)
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    rows = ["a", None, "b", "a"]
    for adapter in "ab":
        model.load_adapter(adapter, folders[adapter])
    logits = model(images, adapters=rows).logits
    for row, adapter in enumerate(rows):
        with torch.no_grad():
            alone = in_peft(base, folders[adapter])(images).logits[row]
        torch.testing.assert_close(logits[row], alone, rtol=0, atol=sweep.BOUND)


def named_as_before(base, folder):
    """Return every linear layer's path in checkpoints of Transformers 4, which it still saves."""
    base.save_pretrained(folder)
    saved = load_file(f"{folder}/model.safetensors")
    return {
        path: name.removesuffix(".weight")
        for path, module in base.named_modules()
        if isinstance(module, torch.nn.Linear)
        for name, tensor in saved.items()
        if torch.equal(tensor, module.weight)
    }


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Beit", "Dinov2"])
def test_adapters_of_transformers_4_find_the_layers_of_a_vision_model(name, tmp_path):
    values = {**sweep.SIZES, **sweep.VISION}
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**values)
    base = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    paths = named_as_before(base, tmp_path / "base")
    folder = str(tmp_path / "adapter")
    adapt(base, folder, 1, modules_to_save=["classifier"], target_modules=[*paths][:-1])
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = in_peft(base, folder)(images).logits
    tensors = load_file(f"{folder}/adapter_model.safetensors")
    for path, old in paths.items():
        tensors = {key.replace(f".{path}.", f".{old}."): tensors[key] for key in tensors}
    save_file(tensors, f"{folder}/adapter_model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    settings["target_modules"] = [paths[path] for path in settings["target_modules"]]
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    model.load_adapter("old", folder)
    logits = model(images, adapters=["old", None]).logits
    torch.testing.assert_close(logits[0], expected[0], rtol=0, atol=sweep.BOUND)
    assert {*model.pool.adapted_by(0)} == {*paths} - {"classifier"}
