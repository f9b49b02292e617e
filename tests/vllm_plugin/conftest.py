"""A tiny model, its PEFT adapters, what PEFT answers, and real engines of vLLM in this process."""

import gc
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from helpers.adapters.peft_models import PeftAnswers, save_adapter, save_tiny, smollm2_in
from helpers.servers.vllm_engines import ADAPTERS, KINDS, Engine
from helpers.servers.vllm_layers import IDS, INDEX_TO_ID, SLOTS, WIDTH, mapping

if (
    importlib.util.find_spec("vllm") is None
):  # run by `make test-vllm`, in an environment of its own
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a random Llama."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), attention_bias=True)


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
    return PeftAnswers(tiny, adapters).tokens


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
    """Return the folder of SmolLM2, which `make test-vllm` has saved."""
    return smollm2_in("vllm")
