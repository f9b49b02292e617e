"""A job of `generate` and `agree`."""

import pytest


@pytest.fixture
def tiny_job(tmp_path, make_base, save_adapter):
    """Return a configuration with a tiny model on disk, a tokenizer and one adapter."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    make_base("llama").save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")
    save_adapter(name="one", std=0.5, r=4, target_modules="all-linear")
    file = tmp_path / "job.toml"
    file.write_text(
        f"backend = 'torch_ref'\nmax_new_tokens = 4\n[model]\npath = '{tmp_path / 'model'}'\n"
        "[adapters]\none = 'one'\n"
        "[[prompts]]\ntext = 'a b c'\n[[prompts]]\ntext = 'd'\nadapter = 'one'\n"
    )
    return file
