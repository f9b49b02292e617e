"""The example that trains three adapters in one batch, on a small base model."""

import importlib
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("matplotlib")
EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ("pirate", "json", "telegram")


def small_base():
    """Return a model of as many layers as the recipes name, and a tokenizer of bytes."""
    special = ["<pad>", "<|im_end|>"]
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=16, intermediate_size=24, num_hidden_layers=26,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("train_many_adapters")
    monkeypatch.setattr(module, "load_base", small_base)
    return module


@pytest.mark.filterwarnings("ignore")
def test_the_program_trains_saves_and_checks(program, tmp_path, capsys):
    assert program.main(["--steps", "2", "--rows", "1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in NAMES:
        weights = load_file(tmp_path / name / "adapter_model.safetensors")
        moved = [key for key, value in weights.items() if "lora_B" in key and value.any()]
        assert len(moved) * 2 == len(weights)  # B starts as 0
        assert f"{name}: loss" in printed
    assert (tmp_path / "losses.svg").read_text().rstrip().endswith("</svg>")
    assert "after 0 steps" in printed and "after 2 steps" in printed
    base, tokenizer = small_base()
    ids = torch.tensor([program.chat_ids(tokenizer, "Why?")])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    wrong = {"json": torch.tensor(50.0)}  # far above the loss of any model of 258 tokens at random
    folders = {"json": tmp_path / "json"}
    assert not program.check_with_peft(base, folders, wrong, batch, ["json"], program.Console())
