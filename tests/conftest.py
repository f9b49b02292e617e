"""Tiny random models, adapters that PEFT saved for them, and an environment without settings."""

import gc
import importlib.util
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from lora_backends.adapters.files import folders

folders.TICK_S = 0.0
"""Tests write a file once, before they read it, and need not wait for the timer's next tick."""

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # a machine that is busy for a moment is no fault of what is tested
    settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("no clock")

PEFT_MODELS = [
    f"hf/{name}.py"
    for name in (
        "adapters/test_memory",
        "adapters/test_model",
        "adapters/test_own_modules",
        "adapters/test_other_names",
        "adapters/test_own_modules_elsewhere",
        "adapters/test_store",
        "calls/test_blends",
        "calls/test_generate",
        "calls/test_rows",
        "calls/test_words",
        "layers/test_experts",
        "layers/test_fused",
        "models/test_hf_rows",
        "models/test_kinds",
        "models/test_moe_hf_rows",
        "models/test_peft_equality",
        "models/test_smollm2",
        "models/test_sweep",
        "serving/test_adapter_kinds",
        "serving/test_serving_benchmarks",
        "training/test_agreement",
        "training/test_bases",
        "training/test_gradients",
        "training/test_modes",
        "training/test_program",
        "training/test_start",
        "training/test_steps",
    )
]
NEEDS = {
    "peft": ["adapters", "diffusion", "encoders", "fuzz", "planning", *PEFT_MODELS],
    "pydantic": ["adapters", "diffusion", "encoders", "fuzz", *PEFT_MODELS],
    "pydantic_settings": [
        f"command/test_{name}.py" for name in ("agree", "cli", "config", "registry")
    ],
    "diffusers": ["diffusion"],
    "sentence_transformers": ["encoders"],
    "typer": [
        *(f"command/test_{name}.py" for name in ("agree", "cli", "registry")),
        "planning/test_command.py",
    ],
}
MISSING = [package for package in NEEDS if importlib.util.find_spec(package) is None]
collect_ignore = [path for package in MISSING for path in NEEDS[package]]


def pytest_report_header():
    """Tell what a machine with torch and Triton alone cannot collect."""
    return [f"without {package}, not collected: {', '.join(NEEDS[package])}" for package in MISSING]


AHEAD_OF_TIME = "sgmv/test_compile.py"
LONGEST = (AHEAD_OF_TIME, "sgmv/test_interpreter.py", "numba_cpu", "test_conformance.py")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Run what takes longest first, so that no process is left with it at the end."""

    def place(item):
        return next((i for i, part in enumerate(LONGEST) if part in item.nodeid), len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_make_scheduler(config, log):
    """Let one process of `--dist loadgroup` compile for the CPU and fill a GPU.

    The tests of another file share a process, and so what the file builds for all of them; the
    kernels of each target compile apart. pytest-xdist's own groups fail under pytest 9.2, which
    keeps the names of tests elsewhere.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if "numba_cpu" in nodeid or "test_conformance.py" in nodeid:
                return "compiled here"
            return nodeid if AHEAD_OF_TIME in nodeid else nodeid.split("::")[0]

    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # the order of the items stays
    return ByFile(config, log)


def pytest_collection_finish():
    """Hide the imported modules from the collector of garbage: they live to the end.

    It would visit all their objects each time, and Transformers, dynamo and tests call it often.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Let the end of the process free them: Triton counts what is left."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("LORA_BACKENDS_"):
            monkeypatch.delenv(name)


@pytest.fixture
def fresh_programs():
    """Compile anew, without gradients."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


VOCAB, DIM = 40, 16


def _llama(tied=False, attention_bias=False):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2():
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=DIM, n_layer=2, n_head=2, n_positions=32
    )
    return transformers.GPT2LMHeadModel(config)


def _gemma():
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return transformers.Gemma3ForCausalLM(config)


_BUILDERS = {
    "llama": _llama,
    "llama_tied": lambda: _llama(tied=True),
    "llama_bias": lambda: _llama(attention_bias=True),
    "gpt2": _gpt2,
    "gemma": _gemma,
}


@pytest.fixture(scope="session")
def make_base():
    """Return a function that builds the same tiny model at each call."""

    def make(name):
        torch.manual_seed(7)
        return _BUILDERS[name]().eval()

    return make


@pytest.fixture
def save_adapter(tmp_path, make_base):
    """Return a function that saves a PEFT adapter with random A, B and bias, and its folder."""

    def save(base="llama", *, name="adapter", std=1.0, seed=11, safetensors=True, **config):
        import peft

        folder = tmp_path / name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(make_base(base), peft.LoraConfig(**config))
            generator = torch.Generator().manual_seed(seed)
            for path, parameter in model.named_parameters():
                if "lora_" in path and "monteclora" not in path:
                    values = std * torch.randn(parameter.shape, generator=generator)
                    parameter.data.copy_(values)
            model.save_pretrained(folder, safe_serialization=safetensors)
        return folder

    return save
