"""Tiny models, their adapters, what PEFT answers, and real engines of SGLang on the CPU."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from helpers import sglang_engines as made
from helpers.sglang_engines import ADAPTERS, ENDS, LINEAR, MOE_ADAPTERS, Engine

ROOT = Path(__file__).parents[2]
if importlib.util.find_spec("sglang") is None:  # run by `make test-sglang`
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a random Llama, small enough to be quick."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=made.VOCAB,
        hidden_size=made.HIDDEN,
        intermediate_size=192,
        num_hidden_layers=made.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(tiny, tmp_path_factory):
    """Return the folder of each adapter by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: made.save_adapter(tiny, name, folder, config, seed)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="session")
def peft_model(tiny, adapters):
    """Return a function: PEFT's model with an adapter, or the base model for None."""
    import peft
    import transformers

    models = {}

    def model(name):
        if name not in models:
            base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
            models[name] = base.eval()
            if name is not None:
                models[name] = peft.PeftModel.from_pretrained(base, adapters[name]).eval()
        return models[name]

    return model


@pytest.fixture(scope="session")
def peft_tokens(peft_model):
    """Return a function: the greedy tokens of PEFT for a prompt, an adapter and a length."""
    answers = {}

    def tokens(prompt, name, length=6):
        key = tuple(prompt), name, length
        if key not in answers:
            answers[key] = made.greedy_tokens(peft_model(name), prompt, length)
        return answers[key]

    return tokens


@pytest.fixture(scope="module")
def make_engine(tiny, adapters):
    """Return a function that builds an engine; engines of a module end with it."""
    engines = []

    def make(backend="auto", model=tiny, adapters=adapters, targets=(*LINEAR, *ENDS), **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LORA_BACKENDS_SGLANG", backend)
            engines.append(Engine(model, adapters, list(targets), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    """Return the folders of a tiny mixture of experts and of its adapters."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=made.VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=made.WIDE,
        num_hidden_layers=made.LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=made.EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        dtype="float32",
    )
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("moe")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    adapters = {
        name: made.save_moe_adapter(folder / name, rank, seed)
        for seed, (name, rank) in enumerate(MOE_ADAPTERS.items())
    }
    return folder / "model", adapters


@pytest.fixture(scope="session")
def smollm2():
    """Return the folder of SmolLM2 as safetensors, which `make test-sglang` has saved."""
    folder = Path(os.environ.get("SMOLLM2", ROOT / ".venv-sglang" / "smollm2"))
    if not (folder / "model.safetensors").exists():
        pytest.skip("SmolLM2 is not saved as safetensors: run `make test-sglang`")
    return folder
