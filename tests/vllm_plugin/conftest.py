"""A tiny model, its PEFT adapters, what PEFT answers, and real engines of vLLM in this process."""

import gc
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.vllm_engines import ADAPTERS, KINDS, Engine, save_adapter, save_tiny
from helpers.vllm_layers import IDS, INDEX_TO_ID, SLOTS, WIDTH, mapping

ROOT = Path(__file__).parents[2]
if (
    importlib.util.find_spec("vllm") is None
):  # run by `make test-vllm`, in an environment of its own
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a random Llama."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def adapters(tiny, tmp_path_factory):
    """Return the folder of each adapter by name."""
    parent = tmp_path_factory.mktemp("adapters")
    every = {**ADAPTERS, **KINDS}
    return {
        name: save_adapter(parent / name, tiny, seed, **config)
        for seed, (name, config) in enumerate(every.items())
    }


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


@pytest.fixture
def wrapper(monkeypatch):
    """Return a wrapper with a batch of rows of several adapters."""
    monkeypatch.setenv("LORA_BACKENDS_VLLM", "torch_ref")
    from lora_backends.integrations.vllm.wrapper import BackendWrapper

    made = BackendWrapper(64, 16, "cpu", lora_config=SimpleNamespace(max_loras=SLOTS))
    made.update_metadata(mapping(IDS), INDEX_TO_ID, SLOTS + 1, 100)
    return made


@pytest.fixture
def x():
    """Return an input of every row of that batch."""
    return torch.randn(len(IDS), WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def make_engine(tiny, adapters):
    """Return a function that builds an engine; engines of a module end with it."""
    made = []

    def make(backend="auto", model=tiny, adapters=adapters, **options):
        with pytest.MonkeyPatch.context() as patch:
            if backend is None:
                patch.delenv("LORA_BACKENDS_VLLM", raising=False)
            else:
                patch.setenv("LORA_BACKENDS_VLLM", backend)
            from lora_backends.integrations.vllm import register

            register()  # vLLM itself calls it once a process; the variable counts when asked
            made.append(Engine(model, adapters, **options))
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
