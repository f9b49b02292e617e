"""A tiny model, its PEFT adapters, what PEFT answers, and real engines of vLLM in this process."""

import gc
import importlib.util
import os
import warnings
from pathlib import Path

import pytest
import torch
from helpers.vllm_engines import ADAPTERS, HIDDEN, LAYERS, VOCAB, Engine

ROOT = Path(__file__).parents[2]
if (
    importlib.util.find_spec("vllm") is None
):  # run by `make test-vllm`, in an environment of its own
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a random Llama, small enough to be quick."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def adapters(tiny, tmp_path_factory):
    """Return the folder of each adapter by name."""
    import peft
    import transformers

    parent = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **config))
            generator = torch.Generator().manual_seed(seed)
            for path, parameter in model.named_parameters():
                if "lora_" in path:
                    values = torch.randn(parameter.shape, generator=generator)
                    parameter.data.copy_(0.15 * values)
            model.save_pretrained(parent / name, save_embedding_layers=False)
    return {name: parent / name for name in ADAPTERS}


@pytest.fixture(scope="session")
def peft_tokens(tiny, adapters):
    """Return a function: the greedy tokens of PEFT for a prompt, an adapter and a length."""
    import peft
    import transformers

    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()

    models, answers = {None: load()}, {}

    def tokens(prompt, name, length):
        key = tuple(prompt), name, length
        if key not in answers:
            if name not in models:
                models[name] = peft.PeftModel.from_pretrained(load(), adapters[name]).eval()
            ids = torch.tensor([prompt])
            with torch.no_grad():
                out = models[name].generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=length,
                    min_new_tokens=length,
                    do_sample=False,
                    pad_token_id=0,
                )
            answers[key] = out[0, len(prompt) :].tolist()
        return answers[key]

    return tokens


@pytest.fixture(scope="module")
def make_engine(tiny, adapters):
    """Return a function that builds an engine; engines of a module end with it."""
    made = []

    def make(backend="auto", **options):
        with pytest.MonkeyPatch.context() as patch:
            if backend is None:
                patch.delenv("LORA_BACKENDS_VLLM", raising=False)
            else:
                patch.setenv("LORA_BACKENDS_VLLM", backend)
            from lora_backends.integrations.vllm import register

            register()  # vLLM itself calls it once a process; the variable counts when asked
            made.append(Engine(tiny, adapters, **options))
        return made[-1]

    yield make
    made.clear()
    gc.collect()


@pytest.fixture(scope="session")
def smollm2():
    """Return the folder of SmolLM2 as safetensors, which `make test-vllm` has saved."""
    folder = Path(os.environ.get("SMOLLM2", ROOT / ".venv-vllm" / "smollm2"))
    if not (folder / "model.safetensors").exists():
        pytest.skip("SmolLM2 is not saved as safetensors: run `make test-vllm`")
    return folder
