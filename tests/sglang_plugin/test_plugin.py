"""The plug-in registers itself inside the real SGLang."""

import logging

import pytest
import torch

from lora_backends import BackendUnavailableError, UnsupportedInputError
from lora_backends.integrations.sglang import register, wrapping
from lora_backends.integrations.sglang.settings import check_settings


@pytest.fixture
def registry(monkeypatch):
    """Return SGLang's registry of LoRA backends, as it is without the plug-in."""
    from sglang.srt.lora.backend import lora_registry

    own = {
        name: getattr(made, "replaced", made)
        for name, made in lora_registry.LORA_SUPPORTED_BACKENDS.items()
    }
    monkeypatch.setattr(lora_registry, "LORA_SUPPORTED_BACKENDS", own)
    return lora_registry


def test_sglang_finds_the_plugin_by_its_entry_point():
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group

    found, distribution = load_plugins_by_group(GENERAL_PLUGINS_GROUP)["lora_backends"]
    assert found is register and distribution == "lora-backends"


def test_each_name_of_a_lora_backend_stands_for_ours_while_the_variable_is_set(
    registry, monkeypatch, caplog
):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "torch_ref")
    register()
    made = dict(registry.LORA_SUPPORTED_BACKENDS)
    register()
    assert made == registry.LORA_SUPPORTED_BACKENDS, "a second call changes nothing"
    with caplog.at_level(logging.INFO, "sglang.lora_backends"):
        for name in ("csgmv", "triton", "torch_native"):
            assert registry.get_backend_from_name(name).__name__ == "BackendForSGLang"
    assert "LORA_BACKENDS_SGLANG=torch_ref" in caplog.text
    monkeypatch.delenv("LORA_BACKENDS_SGLANG")
    own = registry.get_backend_from_name("torch_native")
    assert own.__name__ == "TorchNativeLoRABackend"


def test_without_the_variable_nothing_changes(registry, monkeypatch):
    before = dict(registry.LORA_SUPPORTED_BACKENDS)
    monkeypatch.delenv("LORA_BACKENDS_SGLANG", raising=False)
    register()
    assert before == registry.LORA_SUPPORTED_BACKENDS


def test_lora_backends_that_are_more_than_kernels_are_refused(registry, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "auto")
    register()
    with pytest.raises(UnsupportedInputError, match="--lora-backend ascend(.|\n)*csgmv"):
        registry.get_backend_from_name("ascend")


def test_a_wrong_name_stops_lora_with_the_names_that_exist(registry, monkeypatch):
    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "numba")
    register()
    with pytest.raises(BackendUnavailableError, match="registered: .*numba_cpu"):
        registry.get_backend_from_name("csgmv")


def test_an_sglang_that_is_too_old_ends_the_process(registry, monkeypatch):
    import sglang

    monkeypatch.setenv("LORA_BACKENDS_SGLANG", "auto")
    monkeypatch.setattr(sglang, "__version__", "0.5.15.post1")
    # SGLang logs a plug-in's exceptions and goes on with its own kernels
    with pytest.raises(SystemExit, match=r"0\.5\.15(.|\n)*0\.5\.16 or newer"):
        register()


def test_a_version_without_a_wrapped_name_is_refused(monkeypatch):
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    monkeypatch.delattr(FusedMoEWithLoRA, "_get_lora_info")
    with pytest.raises(UnsupportedInputError, match="FusedMoEWithLoRA._get_lora_info"):
        wrapping.wrap()


def test_settings_are_read_as_sglang_has_resolved_them():
    from sglang.srt.arg_groups import overrides
    from sglang.srt.server_args import ServerArgs

    if not hasattr(overrides, "resolution_result"):
        pytest.skip("this version writes what it resolves into the arguments")
    arguments = ServerArgs(model_path="none", device="cpu")
    check_settings(arguments)
    arguments._resolved_overrides = [("a hook", {"moe_a2a_backend": "deepep"})]
    with pytest.raises(UnsupportedInputError, match="moe_a2a_backend=deepep"):
        check_settings(arguments)


def test_wrapping_twice_wraps_once():
    from sglang.srt.lora.lora_manager import LoRAManager

    wrapping.wrap()
    method = LoRAManager.init_memory_pool
    wrapping.wrap()
    assert LoRAManager.init_memory_pool is method


def test_what_runs_on_another_backend_is_left_alone():
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
    from sglang.srt.lora.lora import LoRAAdapter

    wrapping.wrap()
    adapter = LoRAAdapter.__new__(LoRAAdapter)
    torch.nn.Module.__init__(adapter)
    adapter.lora_backend, adapter.layers = TorchNativeLoRABackend(2, torch.device("cpu")), []
    adapter._normalize_weights()
    assert not hasattr(adapter, "scaling")


def test_this_version_has_every_name_that_the_plugin_relies_on(capsys):
    from pathlib import Path

    import sglang
    import sglang_names

    folder = Path(sglang.__file__).parents[1]
    assert sglang_names.main([str(folder)]) == 0, capsys.readouterr().out
    relied = {name for names in sglang_names.RELIED.values() for name in names}
    for _, owner, name, _ in wrapping.WRAPPED:
        assert f"{owner}.{name}".lstrip(".") in relied
