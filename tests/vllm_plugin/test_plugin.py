"""Waking up inside the real vLLM."""

import pytest
from helpers.vllm_engines import SETTINGS  # noqa: F401  # before vLLM is imported


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
