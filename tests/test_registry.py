"""Backends by name, with distributions made for the test in a temporary folder."""

import subprocess
import sys
import textwrap

import pytest
import torch

from lora_backends import (
    BackendUnavailableError,
    InvalidInputError,
    LoRAConfig,
    backend_names,
    get_backend,
    unavailable_reasons,
)

PLUGIN = """
    from lora_backends.torch_ref import TorchRefBackend

    class Plugin(TorchRefBackend):
        name = "plugin"
        auto_priority = {"cpu": PRIORITY}

        def __init__(self, device="cpu", *, tile: int = 16):
            super().__init__(device)
            self.tile = tile
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a distribution with one entry point importable."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(module, code, name, value, version="1.0"):
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[lora_backends]\n{name} = {value}\n")

    yield write
    for module in [m for m in sys.modules if m.startswith("lb_plugin")]:
        del sys.modules[module]


def test_built_ins_are_registered_like_anybody_elses():
    assert "torch_ref" in backend_names()
    assert backend_names() == sorted(backend_names())


def test_asking_for_names_imports_no_engine():
    code = (
        "import sys, lora_backends; lora_backends.backend_names();"
        "assert not [m for m in sys.modules if m.startswith(('lora_backends.torch_ref',"
        "'lora_backends.config','transformers','triton'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plugin_is_found_by_name_with_its_options(install):
    install("lb_plugin_a", PLUGIN.replace("PRIORITY", "0"), "plugin", "lb_plugin_a:Plugin")
    assert "plugin" in backend_names()
    assert get_backend("plugin", device="cpu", tile=32).tile == 32
    with pytest.raises(InvalidInputError, match="no option 'tiel'; did you mean 'tile'"):
        get_backend("plugin", device="cpu", tiel=3)


def test_auto_takes_the_highest_priority_that_runs(install):
    install("lb_plugin_b", PLUGIN.replace("PRIORITY", "99"), "plugin", "lb_plugin_b:Plugin")
    assert get_backend("auto", device="cpu").name == "plugin"


def test_auto_never_takes_a_backend_that_declares_no_priority(install):
    code = PLUGIN.replace('{"cpu": PRIORITY}', "{}")
    install("lb_plugin_c", code, "plugin", "lb_plugin_c:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"


def test_a_broken_plugin_hurts_only_the_one_who_asks_for_it(install):
    install("lb_plugin_d", "import no_such_module_here", "plugin", "lb_plugin_d:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    with pytest.raises(BackendUnavailableError, match="no_such_module_here") as raised:
        get_backend("plugin", device="cpu")
    assert "lb_plugin_d 1.0" in str(raised.value)
    assert "no_such_module_here" in unavailable_reasons("plugin", "cpu")[0]


BROKEN = {
    "leaves": "raise SystemExit(3)",
    "cannot tell": PLUGIN.replace("PRIORITY", "99")
    + """
        @classmethod
        def unavailable_reasons(cls, device):
            raise ModuleNotFoundError("no_such_module_here")
""",
    "cannot be made": PLUGIN.replace("PRIORITY", "99").replace(
        "self.tile = tile", "raise RuntimeError('no_such_module_here')"
    ),
    "takes no device": PLUGIN.replace("PRIORITY", "99")
    .replace('device="cpu", *, tile: int = 16', "")
    .replace("super().__init__(device)", "pass"),
    "is abstract": """
    from lora_backends import LoRABackend

    class Plugin(LoRABackend):
        auto_priority = {"cpu": 99}
""",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_plugin_that_fails_in_any_way_is_passed_over_by_auto(install, how):
    install("lb_plugin_x", BROKEN[how], "plugin", "lb_plugin_x:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    unavailable_reasons("plugin", "cpu")
    with pytest.raises(BackendUnavailableError, match="plugin"):
        get_backend("plugin", device="cpu")


@pytest.mark.parametrize("priority", ["None", "'high'"])
def test_a_priority_that_is_none_is_passed_over(install, priority):
    code = PLUGIN.replace('{"cpu": PRIORITY}', priority)
    install("lb_plugin_y", code, "plugin", "lb_plugin_y:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    assert get_backend("plugin", device="cpu").name == "plugin"


def test_a_backend_is_called_by_the_name_that_it_is_registered_under(install):
    install("lb_plugin_z", PLUGIN.replace("PRIORITY", "0"), "other", "lb_plugin_z:Plugin")
    assert get_backend("other", device="cpu").name == "other"


def test_a_name_given_does_not_ask_the_environment_for_one(monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_BACKEND", "nosuch")
    monkeypatch.setenv("LORA_BACKENDS_DEVICE", "cpu")
    assert get_backend("torch_ref").device == torch.device("cpu")


def test_an_entry_point_that_is_no_backend_is_named(install):
    install("lb_plugin_e", "Plugin = dict", "plugin", "lb_plugin_e:Plugin")
    with pytest.raises(BackendUnavailableError, match="no subclass of LoRABackend"):
        get_backend("plugin", device="cpu")


def test_two_backends_of_one_name_are_an_error_that_prints_both(install):
    install("lb_plugin_f", PLUGIN.replace("PRIORITY", "0"), "plugin", "lb_plugin_f:Plugin")
    install("lb_plugin_g", PLUGIN.replace("PRIORITY", "0"), "plugin", "lb_plugin_g:Plugin")
    assert backend_names().count("plugin") == 1
    with pytest.raises(BackendUnavailableError, match="more than once") as raised:
        get_backend("plugin", device="cpu")
    assert "lb_plugin_f:Plugin" in str(raised.value) and "lb_plugin_g:Plugin" in str(raised.value)


def test_an_unknown_name_gets_a_suggestion_and_the_list():
    with pytest.raises(BackendUnavailableError, match="'torch_ref'") as raised:
        get_backend("torch_rfe", device="cpu")
    assert "did you mean 'torch_ref'? registered:" in str(raised.value)
    assert unavailable_reasons("torch_rfe", "cpu") == [str(raised.value)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_name_that_does_not_run_here_is_refused_with_the_reason():
    assert unavailable_reasons("torch_ref", "cpu") == []
    assert "no CUDA or ROCm device" in unavailable_reasons("torch_ref", "cuda")[0]
    with pytest.raises(BackendUnavailableError, match="no CUDA or ROCm device"):
        get_backend("torch_ref", device="cuda")


def test_a_device_that_is_none_is_refused():
    with pytest.raises(InvalidInputError, match="no such device"):
        get_backend("torch_ref", device="cpuu")


def test_arguments_override_the_environment(monkeypatch, install):
    install("lb_plugin_h", PLUGIN.replace("PRIORITY", "0"), "plugin", "lb_plugin_h:Plugin")
    monkeypatch.setenv("LORA_BACKENDS_BACKEND", "plugin")
    monkeypatch.setenv("LORA_BACKENDS_DEVICE", "cpu")
    assert get_backend().name == "plugin"
    assert get_backend("torch_ref").name == "torch_ref"
    config = LoRAConfig(backend="plugin", backend_options={"tile": 8})
    assert get_backend(config).tile == 8
    assert get_backend(config, tile=4).tile == 4


def test_something_else_than_a_name_is_refused():
    with pytest.raises(InvalidInputError, match="a name or a LoRAConfig|its name or a LoRAConfig"):
        get_backend(3, device="cpu")
