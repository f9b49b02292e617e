"""Adapters with names of another model around the same layers, against PEFT on that model."""

import copy
import warnings

import peft
import pytest
import torch
import transformers
from helpers.adapters.saved_adapters import edit_config, edit_tensors, save_random, with_seed

from lora_backends import InvalidInputError
from lora_backends.hf import MultiLoRAModel
from lora_backends.hf.layout.unused import unused_by

IDS = torch.arange(2 * 6).reshape(2, 6) + 3
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.fixture(scope="module")
def llava():
    config = transformers.LlavaConfig(
        vision_config=VISION, text_config={"model_type": "llama", **SIZES}, image_token_index=60
    )
    return with_seed(lambda: transformers.LlavaForConditionalGeneration(config))


@pytest.fixture(scope="module")
def llama(llava):
    """Return the language model of `llava` alone."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    names = {key: key.replace("model.language_model.", "model.") for key in llava.state_dict()}
    state = {names[key]: value for key, value in llava.state_dict().items()}
    model.load_state_dict({key: state[key] for key in model.state_dict()})
    return model.eval()


def save(base, folder, rename=None, config=None, **options):
    """Save a random adapter, rename its tensors, and return its folder and PEFT's logits."""
    model = save_random(base, folder, 0.3, r=4, **options)
    with torch.no_grad():
        truth = model(IDS).logits
    if rename is not None:
        edit_tensors(folder, lambda tensors: {rename(k): t for k, t in tensors.items()})
    edit_config(folder, **(config or {}))
    return folder, truth


def assert_rows(base, folder, truth):
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref")
    model.load_adapter("a", folder)
    rows = model(adapters=["a", None], input_ids=IDS).logits
    with torch.no_grad():
        plain = base(IDS).logits
    assert (truth - plain).abs().max() > 0.01
    torch.testing.assert_close(rows[0], truth[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(rows[1], plain[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "name",
    ["model.language_model.", "language_model.model.", "model.text_model.", "llm.model."],
)
def test_a_language_model_alone_takes_the_names_it_has_in_one_of_images(
    llava, llama, tmp_path, name
):
    targets = r".*language_model.*(q_proj|down_proj)|lm_head"
    folder, truth = save(
        llava,
        tmp_path / "a",
        lambda key: key.replace("model.language_model.", name),
        {"target_modules": ["q_proj", "down_proj", "lm_head"]},
        target_modules=targets,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_rows(llama, folder, truth)


def test_parts_for_images_are_left_out_of_a_language_model_alone(llava, llama, tmp_path):
    options = {"target_modules": ["q_proj", "linear_1"], "modules_to_save": ["linear_2"]}
    folder, truth = save(llava, tmp_path / "a", **options)
    with pytest.warns(
        RuntimeWarning,
        match=r"(?s)3 of its 5 modules .*multi_modal_projector.linear_1': .* text alone",
    ):
        assert_rows(llama, folder, truth)
    edit_tensors(
        folder, lambda tensors: {k: t for k, t in tensors.items() if "language_model" not in k}
    )
    with pytest.raises(InvalidInputError, match="has no use for any module of the adapter"):
        MultiLoRAModel(copy.deepcopy(llama), "torch_ref").load_adapter("a", folder)


def test_parts_for_images_under_another_name_are_refused_by_a_model_of_images(llava, tmp_path):
    def rename(key):
        return key.replace("multi_modal_projector", "connector")

    folder, _ = save(llava, tmp_path / "a", rename, target_modules=["q_proj", "linear_1"])
    with pytest.raises(InvalidInputError, match=r"has no module 'model.connector"):
        MultiLoRAModel(copy.deepcopy(llava), "torch_ref").load_adapter("a", folder)


def test_a_model_of_images_alone_does_not_leave_its_own_parts_out(tmp_path):
    """Transformers 4 had the layers of CLIPVisionModel below vision_model."""
    base = with_seed(lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**VISION)))
    folder = tmp_path / "a"
    peft.get_peft_model(
        copy.deepcopy(base), peft.LoraConfig(target_modules=["q_proj"])
    ).save_pretrained(folder)
    tensors = of("vision_model.encoder.layers.0.self_attn.v_proj", 16, 16, rank=8)
    edit_tensors(folder, lambda kept: kept | tensors)
    edit_config(folder, target_modules=["q_proj", "v_proj"])
    with pytest.raises(InvalidInputError, match="has no module 'vision_model.encoder.layers.0"):
        MultiLoRAModel(base, "torch_ref").load_adapter("a", folder)


def test_a_model_of_sound_does_not_leave_sound_out():
    config = transformers.WhisperConfig(
        vocab_size=40,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=0,
    )
    unused = unused_by(with_seed(lambda: transformers.WhisperForConditionalGeneration(config)))
    assert unused("audio_tower.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize("kind", ["rows of tokens", "saved module"])
def test_two_values_for_one_embedding_are_refused(llama, tmp_path, kind):
    """Under the name it has in a model of images, and under the base model's."""
    extra = {
        "rows of tokens": {"trainable_token_indices": [3, 5]},
        "saved module": {"modules_to_save": ["embed_tokens"]},
    }[kind]
    folder, _ = save(llama, tmp_path / "a", target_modules=["q_proj"], **extra)

    def with_another(tensors):
        mine = next(key for key in tensors if "embed_tokens" in key)
        other = mine.replace("model.model.", "model.model.language_model.")
        base = llama.model.embed_tokens.weight.detach()
        given = base[[3, 5]] if kind == "rows of tokens" else base
        return tensors | {mine: given.clone(), other: tensors[mine] + 1}

    edit_tensors(folder, with_another)
    with pytest.raises(InvalidInputError, match="two names for one module of the base model"):
        MultiLoRAModel(copy.deepcopy(llama), "torch_ref").load_adapter("a", folder)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_has_the_name_that_tinker_gives_it(tmp_path, tied):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    base = with_seed(lambda: transformers.LlamaForCausalLM(config))
    folder, truth = save(
        base,
        tmp_path / "a",
        lambda key: key.replace("model.lm_head", "model.model.unembed_tokens"),
        {"target_modules": "all-linear"},
        target_modules=["q_proj", "up_proj", "lm_head"],
    )
    assert_rows(base, folder, truth)


def test_attention_has_the_name_that_tinker_gives_it(llama, tmp_path):
    folder, truth = save(
        llama,
        tmp_path / "a",
        lambda key: key.replace(".self_attn.", ".attn."),
        target_modules=["q_proj", "o_proj"],
    )
    assert_rows(llama, folder, truth)


def gemma3n():
    config = transformers.Gemma3nTextConfig(
        **SIZES | {"num_hidden_layers": 4},
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return transformers.Gemma3nForCausalLM(config)


def of(path, a, b, rank=4):
    name = f"base_model.model.{path}"
    return {
        f"{name}.lora_A.weight": torch.ones(rank, a),
        f"{name}.lora_B.weight": torch.ones(b, rank),
    }


def test_layers_that_share_keys_and_values_need_no_lora_of_their_own(tmp_path):
    base = with_seed(gemma3n)
    folder, truth = save(base, tmp_path / "a", target_modules=["q_proj", "k_proj", "v_proj"])
    for part in ("k_proj", "v_proj"):
        path = f"model.layers.3.self_attn.{part}"
        edit_tensors(folder, lambda tensors, path=path: tensors | of(path, 32, 16))
    with pytest.warns(
        RuntimeWarning, match=r"layers.3.self_attn.k_proj': the layer takes the keys"
    ):
        assert_rows(base, folder, truth)
    # Another module that the layer lacks is no module that does not matter.
    edit_tensors(folder, lambda tensors: tensors | of("model.layers.3.self_attn.r_proj", 32, 16))
    with pytest.raises(InvalidInputError, match="r_proj"):
        MultiLoRAModel(base, "torch_ref").load_adapter("a", folder)


def test_a_layer_without_shared_keys_needs_its_lora(llama, tmp_path):
    folder, _ = save(llama, tmp_path / "a", target_modules=["q_proj", "k_proj"])
    base = copy.deepcopy(llama)
    del base.model.layers[1].self_attn.k_proj
    base.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(InvalidInputError, match=r"layers.1.self_attn.k_proj"):
        MultiLoRAModel(base, "torch_ref").load_adapter("a", folder)


def test_layers_for_several_tokens_ahead_are_left_out(tmp_path):
    """Qwen3.5's class leaves the weights under `mtp` out, which its forward does not run."""
    base = with_seed(
        lambda: transformers.Qwen3_5ForCausalLM(
            transformers.Qwen3_5TextConfig(
                **SIZES,
                head_dim=8,
                layer_types=["full_attention"] * 2,
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=6,
                linear_value_head_dim=6,
            )
        )
    )
    folder, truth = save(base, tmp_path / "a", target_modules=["q_proj", "up_proj"])
    edit_tensors(folder, lambda tensors: tensors | of("mtp.layers.0.mlp.up_proj", 32, 24))
    with pytest.warns(RuntimeWarning, match=r"'mtp.layers.0.mlp.up_proj': the base model's class"):
        assert_rows(base, folder, truth)
