"""Adapters with `ensure_weight_tying`, on base models that tie their head and on others."""

import copy

import pytest
import torch
import transformers
from helpers.sweeps import sweep_variants
from helpers.sweeps.sweep import BOUND, adapt, in_peft
from helpers.sweeps.sweep_variants import Q_V, build, inputs
from safetensors.torch import load_file, save_file

from lora_backends import UnsupportedInputError
from lora_backends.hf import MultiLoRAModel

PARTS = {
    "a norm": {**Q_V, "modules_to_save": ["norm"]},
    "the embedding": {**Q_V, "modules_to_save": ["embed_tokens"]},
    "the head": {**Q_V, "modules_to_save": ["lm_head"]},
    "rows of tokens": {**Q_V, "trainable_token_indices": [5, 9]},
    "LoRA of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"], "alpha_pattern": {"lm_head": 5}},
    "LoRA by an expression": {"target_modules": ".*(q_proj|lm_head)"},
    "DoRA of the head": {"target_modules": ["lm_head"], "use_dora": True},
}


@pytest.fixture
def save(tmp_path):
    def save(base, name, **config):
        adapt(base, str(tmp_path / name), len(name), ensure_weight_tying=True, **config)
        return str(tmp_path / name)

    return save


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_rows_are_those_of_peft(name, part, save):
    base = build(name)
    folder = save(base, "own", **copy.deepcopy(PARTS[part]))
    model = MultiLoRAModel(copy.deepcopy(base), "torch_ref", max_rank=3)
    model.load_adapter("own", folder)
    logits = model(adapters=["own", None, "own", None], **inputs(name)).logits
    with torch.no_grad():
        alone, without = (in_peft(base, f)(**inputs(name)).logits for f in (folder, None))
    expected = torch.stack([alone[0], without[1], alone[2], without[3]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("the embedding", "lm_head.weight"),
        ("LoRA of the embedding", "lm_head.lora_A.weight"),
        ("LoRA of the embedding", "lm_head.lora_B.weight"),
    ],
)
def test_a_tied_head_of_other_values_is_refused_as_the_last_one_read_counts(part, key, save):
    base = build("tied llama")
    file = save(base, "own", **copy.deepcopy(PARTS[part])) + "/adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.{key}"] += 1
    save_file(tensors, file, {"format": "pt"})
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match="other tensors for 'lm_head' than for"):
        model.load_adapter("own", file.rpartition("/")[0])


@pytest.mark.parametrize("part", ["the embedding", "the head", "LoRA of the embedding"])
def test_adapters_of_an_untied_model_are_refused_on_a_tied_one(part, save):
    folder = save(build("llama"), "own", **copy.deepcopy(PARTS[part]))
    model = MultiLoRAModel(build("tied llama"), "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match="other tensors for 'lm_head' than for"):
        model.load_adapter("own", folder)


def test_lora_of_a_tied_head_is_refused_where_peft_ignores_it(save):
    folder = save(build("tied llama"), "own", **copy.deepcopy(PARTS["LoRA of the head"]))
    model = MultiLoRAModel(build("llama"), "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match="'lm_head', which this base model does not"):
        model.load_adapter("own", folder)


def test_a_tied_head_with_a_bias_is_refused_as_peft_drops_the_bias(save):
    config = transformers.BertConfig(**{**sweep_variants.TEXT, "num_labels": 2})
    base = transformers.BertForMaskedLM(config).eval()
    saved = ["lm_head", "bert.embeddings.word_embeddings"]
    folder = save(base, "own", target_modules=["query"], modules_to_save=saved)
    model = MultiLoRAModel(base, "torch_ref", max_rank=3)
    with pytest.raises(UnsupportedInputError, match=r"ties 'cls\.predictions\.decoder'"):
        model.load_adapter("own", folder)
