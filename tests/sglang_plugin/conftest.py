"""Tiny models, their adapters, what PEFT answers, and real engines of SGLang on the CPU."""

import importlib.util

import pytest
import torch
from helpers.adapters.peft_models import (
    LAYERS,
    LINEAR,
    VOCAB,
    PeftAnswers,
    save_adapter,
    save_tiny,
    smollm2_in,
)
from helpers.servers import sglang_engines as made
from helpers.servers.sglang_engines import ADAPTERS, ENDS, MOE_ADAPTERS, Engine

if importlib.util.find_spec("sglang") is None:  # run by `make test-sglang`
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a random Llama."""
    # requests ignore the end of a text
    return save_tiny(tmp_path_factory.mktemp("tiny"), eos_token_id=None, bos_token_id=None)


@pytest.fixture(scope="session")
def adapters(tiny, tmp_path_factory):
    """Return the folder of each adapter by name."""
    parent = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(parent / name, tiny, seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="session")
def of_peft(tiny, adapters):
    """Return PEFT's models and their answers."""
    return PeftAnswers(tiny, adapters)


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
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=made.WIDE,
        num_hidden_layers=LAYERS,
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
    """Return the folder of SmolLM2, which `make test-sglang` has saved."""
    return smollm2_in("sglang")
