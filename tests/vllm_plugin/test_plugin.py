"""Waking up inside the real vLLM."""

import ast
import importlib.util
from pathlib import Path

import pytest
from helpers.servers.vllm_engines import SETTINGS  # noqa: F401  # before vLLM is imported


def test_waking_up_twice_changes_nothing_more(monkeypatch):
    from vllm import envs
    from vllm.platforms import current_platform

    from lora_backends.integrations.vllm import register
    from lora_backends.integrations.vllm.plugin import own_wrapper_name

    monkeypatch.setenv("LORA_BACKENDS_VLLM", "auto")
    register()
    method = type(current_platform).get_punica_wrapper
    register()
    assert type(current_platform).get_punica_wrapper == method
    assert current_platform.get_punica_wrapper().endswith("BackendWrapper")
    assert own_wrapper_name().endswith("PunicaWrapperCPU")
    # compiled programs are cached under a hash of the variables, this one among them
    auto = envs.compile_factors()
    monkeypatch.setenv("LORA_BACKENDS_VLLM", "torch_ref")
    assert envs.compile_factors() != auto
    monkeypatch.delenv("LORA_BACKENDS_VLLM")
    assert current_platform.get_punica_wrapper().endswith("PunicaWrapperCPU")


def test_vllm_finds_the_plugin_by_its_entry_point(monkeypatch):
    from vllm.plugins import load_plugins_by_group

    from lora_backends.integrations.vllm import register

    assert load_plugins_by_group("vllm.general_plugins")["lora_backends"] is register


def test_a_wrong_name_stops_the_engine_with_the_names_that_exist(monkeypatch):
    from lora_backends import BackendUnavailableError
    from lora_backends.integrations.vllm import register

    monkeypatch.setenv("LORA_BACKENDS_VLLM", "numba")
    with pytest.raises(BackendUnavailableError, match="registered: .*numba_cpu"):
        register()


def test_a_vllm_that_is_too_old_is_refused_by_its_number(monkeypatch):
    import vllm

    from lora_backends import BackendUnavailableError
    from lora_backends.integrations.vllm import register

    monkeypatch.setenv("LORA_BACKENDS_VLLM", "auto")
    monkeypatch.setattr(vllm, "__version__", "0.25.1")
    with pytest.raises(BackendUnavailableError, match=r"0\.25\.1(.|\n)*0\.26 or newer"):
        register()


@pytest.fixture(scope="module")
def names():
    path = Path(__file__).parents[2] / "tools" / "vllm_names.py"
    spec = importlib.util.spec_from_file_location("vllm_names", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_this_vllm_has_every_name_that_the_plugin_relies_on(names, monkeypatch):
    import vllm

    package = Path(vllm.__file__).parent
    assert names.missing(package) == []
    wrong = ["LoRAModel.from_lora_tensors(tensor)", "LoRAModel.nothing", "nothing", "LoRAModel.id"]
    monkeypatch.setattr(names, "NAMES", {"lora/lora_model.py": wrong, "nothing.py": []})
    lacking = [line.partition(": ")[2] for line in names.missing(package)]
    assert lacking == [*wrong[:3], "no such file"]


def test_every_method_that_is_wrapped_is_looked_for(names):
    known = {name for each in names.NAMES.values() for name in each}
    known = {name.partition("(")[0].rpartition(".")[2] for name in known}
    sources = Path(__file__).parents[2] / "lora_backends" / "integrations" / "vllm"
    wrapped = set()
    for path in sources.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace":
                texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
                wrapped |= {text for text in texts if text and "." not in text}
    optional = {"compute_prompt_token_id_logprobs"}  # of newer versions alone
    classes = {"GPUModelRunner", "LoRAModelManager", "WorkerLoRAManager", "SpecDecodeBaseProposer"}
    classes |= {"EngineCore", "Executor", "LLMEngine"}
    assert {"_load_adapter", "generate_block_hash_extra_keys"} <= wrapped
    assert wrapped - optional - classes <= known
