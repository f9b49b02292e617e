"""Backends by name, with distributions made for the test in a temporary folder."""

import json
import os
import platform
import subprocess
import sys
import textwrap

import pytest
import torch

from lora_backends import (
    BackendUnavailableError,
    InvalidInputError,
    LoRAConfig,
    UnsupportedInputError,
    backend_names,
    get_backend,
    unavailable_reasons,
)
from lora_backends.cli import app
from lora_backends.torch_ref import TorchRefBackend

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
        "'lora_backends.selection.config','transformers','triton'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plugin_is_found_by_name_with_its_options(install):
    install("lb_plugin_a", PLUGIN.replace("PRIORITY", "0"), "plugin", "lb_plugin_a:Plugin")
    assert "plugin" in backend_names()
    assert get_backend("plugin", device="cpu", tile=32).tile == 32
    with pytest.raises(InvalidInputError, match="no option 'tiel'; did you mean 'tile'"):
        get_backend("plugin", device="cpu", tiel=3)


def test_a_switch_takes_a_bool_alone(install):
    code = PLUGIN.replace("PRIORITY", "0").replace("tile: int = 16", "tile: bool = False")
    install("lb_plugin_switch", code, "plugin", "lb_plugin_switch:Plugin")
    assert get_backend("plugin", device="cpu", tile=True).tile is True
    for name, option in (("plugin", "tile"), ("numba_cpu", "batch_invariant")):
        for value in ("no", 0, None):
            with pytest.raises(InvalidInputError, match=f"{option}.* is a switch"):
                get_backend(name, device="cpu", **{option: value})


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


EAGER = PLUGIN.replace("PRIORITY", "99")
PANIC = """
    class Panic(BaseException):
        pass
"""
REASONS = """
        @classmethod
        def unavailable_reasons(cls, device):
            {}
"""
BROKEN = {
    "leaves": "raise SystemExit(3)",
    "panics": PANIC + "    raise Panic('no_such_module_here')",
    "raises what cannot be shown": """
    class Silent(Exception):
        def __str__(self):
            raise SystemExit(3)
    raise Silent
""",
    "raises an error of the library": """
    from lora_backends import BackendUnavailableError
    raise BackendUnavailableError("no")
""",
    "cannot be shown": """
    class Silent:
        def __repr__(self):
            raise SystemExit(3)
    Plugin = Silent()
""",
    "cannot tell": EAGER + REASONS.format("raise ModuleNotFoundError('no_such_module_here')"),
    "leaves when asked": EAGER + REASONS.format("raise SystemExit(3)"),
    "gives no reasons": EAGER + REASONS.format("return None"),
    "gives one sentence": EAGER + REASONS.format("return 'it is Monday'"),
    "gives numbers": EAGER + REASONS.format("return [3]"),
    "cannot be made": EAGER.replace("self.tile = tile", "raise RuntimeError('no_such_module')"),
    "panics when made": PANIC + EAGER.replace("self.tile = tile", "raise Panic"),
    "leaves when made": EAGER.replace("self.tile = tile", "raise SystemExit(3)"),
    "makes something else": EAGER
    + """
        def __new__(cls, *args, **kwargs):
            return 3
""",
    "forgets its device": EAGER.replace("super().__init__(device)", "pass"),
    "takes no device": EAGER.replace('device="cpu", *, tile: int = 16', "").replace(
        "super().__init__(device)", "pass"
    ),
    "has no dtypes": EAGER + "        dtypes = None",
    "has names for dtypes": EAGER + "        dtypes = ('float32',)",
    "has 8 bits among its dtypes": EAGER
    + "        import torch\n        dtypes = (torch.float32, torch.int8)",
    "has not one dtype": EAGER + "        dtypes = ()",
    "lists its features": EAGER + "        features = ['token_scales']",
    "has a word for features": EAGER + "        features = 'token_scales'",
    "misspells a feature": EAGER + "        features = frozenset({'token_scale'})",
    "has no features at all": EAGER + "        features = None",
    "has a name for devices": EAGER + "        device_types = 'cpu'",
    "has no type of plan": EAGER + "        plan_type = None",
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
    assert all(isinstance(reason, str) for reason in unavailable_reasons("plugin", "cpu"))
    with pytest.raises(BackendUnavailableError, match="plugin"):
        get_backend("plugin", device="cpu")


def test_a_plugin_that_refuses_its_options_is_passed_over_by_auto(install):
    code = textwrap.dedent(EAGER.replace("self.tile = tile", "raise UnsupportedInputError('no')"))
    code = "from lora_backends import UnsupportedInputError\n" + code
    install("lb_plugin_x", code, "plugin", "lb_plugin_x:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    with pytest.raises(UnsupportedInputError):
        get_backend("plugin", device="cpu")


def listed(capsys):
    """Return what `lora-backends list --json` says of each backend."""
    app(["list", "--device", "cpu", "--json"], standalone_mode=False)
    return {backend["name"]: backend for backend in json.loads(capsys.readouterr().out)}


SEEN_WHEN_MADE = {
    "cannot be made",
    "panics when made",
    "leaves when made",
    "makes something else",
    "forgets its device",
    "takes no device",
    "is abstract",
}


@pytest.mark.parametrize("how", [how for how in BROKEN if how not in SEEN_WHEN_MADE])
def test_list_names_a_plugin_that_fails_and_describes_the_others(install, how, capsys):
    install("lb_plugin_x", BROKEN[how], "plugin", "lb_plugin_x:Plugin")
    found = listed(capsys)
    assert not found["plugin"]["runs_here"] and "plugin" in found["plugin"]["reasons"][0]
    assert found["torch_ref"]["runs_here"]


@pytest.mark.parametrize("priority", ["None", "'high'", "float('inf')", "float('nan')", "'9'"])
def test_list_says_that_auto_passes_over_a_wrong_priority(install, priority, capsys):
    value = priority if priority == "None" else f'{{"cpu": {priority}}}'
    code = PLUGIN.replace('{"cpu": PRIORITY}', value)
    install("lb_plugin_x", code, "plugin", "lb_plugin_x:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    assert "plugin.auto_priority" in listed(capsys)["plugin"]["not_in_auto"]
    assert listed(capsys)["torch_ref"]["not_in_auto"] is None


def test_list_prints_json_alone_when_a_plugin_prints(install, capsys):
    install(
        "lb_plugin_x", "print('hello')\n" + textwrap.dedent(EAGER), "plugin", "lb_plugin_x:Plugin"
    )
    assert listed(capsys)["plugin"]["runs_here"]


def test_an_interrupt_of_the_user_is_no_fault_of_the_plugin(install):
    install("lb_plugin_x", "raise KeyboardInterrupt", "plugin", "lb_plugin_x:Plugin")
    with pytest.raises(KeyboardInterrupt):
        get_backend("auto", device="cpu")


@pytest.mark.parametrize("text", ["[lora_backends]\nplugin\n", "[console_scripts]\nx\n", "\xff"])
def test_an_unreadable_list_of_entry_points_hides_no_other_backend(install, tmp_path, capsys, text):
    install("lb_plugin_x", EAGER, "plugin", "lb_plugin_x:Plugin")
    install("lb_plugin_bad", "", "bad", "lb_plugin_bad:Plugin")
    entries = tmp_path / "lb_plugin_bad-1.0.dist-info" / "entry_points.txt"
    entries.write_bytes(text.encode("latin-1"))
    assert {"plugin", "torch_ref"} <= set(backend_names())
    assert get_backend("auto", device="cpu").name == "plugin"
    app(["list", "--device", "cpu"], standalone_mode=False)
    assert "entry points of lb_plugin_bad 1.0 cannot be read" in capsys.readouterr().err
    with pytest.raises(BackendUnavailableError, match=r"entry points of lb_plugin_bad 1\.0"):
        get_backend("bad", device="cpu")


def test_auto_says_what_was_wrong_with_each_backend_when_none_runs(install):
    install("lb_plugin_x", "import no_such_module_here", "plugin", "lb_plugin_x:Plugin")
    with pytest.raises(BackendUnavailableError, match="no backend runs on meta") as raised:
        get_backend("auto", device="meta")
    assert "no_such_module_here" in str(raised.value)
    assert "torch_ref runs on cpu" in str(raised.value)


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


@pytest.mark.parametrize("value", ["lb_plugin_i:Plugin", "no_such_module_here:Plugin"])
def test_a_name_of_a_built_in_stays_the_built_ins(install, value, capsys):
    install("lb_plugin_i", EAGER, "torch_ref", value)
    assert type(get_backend("torch_ref", device="cpu")) is TorchRefBackend
    assert unavailable_reasons("torch_ref", "cpu") == []
    app(["list", "--device", "cpu"], standalone_mode=False)
    told = f"{value} of lb_plugin_i 1.0 is ignored: 'torch_ref' is the name of a built-in"
    assert told in capsys.readouterr().err


SHORT = {
    "prepare_batch": "self, batch",
    "prepare_experts": "self, plan, topk_ids, topk_weights, num_experts, expert_map=None",
    "run_lora_a": "self, x, weights",
    "run_linear": "self, x, weights, plan",
    "run_embedding": "token_ids, weights, plan, base_output=None",
    "run_experts": "self, x, weights, routing, base_output=None, *, rows='tokens'",
}


@pytest.mark.parametrize("method", SHORT)
def test_a_method_that_does_not_take_the_interfaces_arguments_is_refused(install, method):
    code = (
        EAGER
        + f"""
        def {method}({SHORT[method]}):
            raise AssertionError
"""
    )
    install("lb_plugin_j", code, "plugin", "lb_plugin_j:Plugin")
    assert get_backend("auto", device="cpu").name != "plugin"
    with pytest.raises(BackendUnavailableError, match=f"{method}.* does not take"):
        get_backend("plugin", device="cpu")


@pytest.mark.parametrize("place", ["import", "reasons", "constructor"])
def test_a_plugin_changes_no_setting_of_torch(install, place):
    changes = [
        "import torch",
        "torch.set_default_dtype(torch.float64)",
        "torch.set_default_device('meta')",
        f"torch.set_num_threads({torch.get_num_threads() + 1})",
        "torch.set_grad_enabled(False)",
        "torch.use_deterministic_algorithms(True)",
        "torch.autograd.set_detect_anomaly(True)",
        "torch.manual_seed(3)",
    ]
    change = "; ".join(changes)
    code = {
        "import": f"    {change}\n" + EAGER,
        "reasons": EAGER + REASONS.format(change + "; return []"),
        "constructor": EAGER.replace("self.tile = tile", change),
    }[place]
    install("lb_plugin_k", code, "plugin", "lb_plugin_k:Plugin")

    def settings():
        return (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_device(),
            torch.is_anomaly_enabled(),
            torch.get_rng_state().tolist(),
        )

    before = settings()
    try:
        assert get_backend("auto", device="cpu").name == "plugin"
        assert settings() == before
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
        torch.set_grad_enabled(before[2])
        torch.use_deterministic_algorithms(before[3])
        torch.set_default_device(None if before[4].type == "cpu" else before[4])
        torch.autograd.set_detect_anomaly(before[5])


def run_json(tmp_path, *arguments):
    """Return the JSON that a command prints in a process with the plugins, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", "from lora_backends.cli import main; main()", *arguments, "--json"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


WAYS_TO_PRINT = [
    "import os; os.write(1, b'hello')",
    "import os; os.system('echo hello')",
    "import ctypes; ctypes.CDLL(None).printf(b'hello')",
    "import sys; sys.stdout.write('hello')",
]


@pytest.mark.parametrize("how", WAYS_TO_PRINT)
def test_list_prints_json_alone_whatever_a_plugin_writes_to(install, tmp_path, how):
    install("lb_plugin_l", f"    {how}\n" + EAGER, "plugin", "lb_plugin_l:Plugin")
    backends, errors = run_json(tmp_path, "list", "--device", "cpu")
    assert "plugin" in {backend["name"] for backend in backends}
    assert "hello" in errors


COMMANDS = {
    "verify": "verify plugin --device cpu --property untouched_elements_keep_their_bits",
    "bench": "bench --backends plugin --device cpu --in-features 8 --output-slices 8 --tokens 1",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_json_alone_whatever_a_plugin_writes_to(install, tmp_path, command):
    code = (
        EAGER
        + """
        def prepare_batch(self, batch, out=None, capacity=None):
            import os
            os.write(1, b"hello")
            return super().prepare_batch(batch, out, capacity)
"""
    )
    install("lb_plugin_l", code, "plugin", "lb_plugin_l:Plugin")
    result, errors = run_json(tmp_path, *COMMANDS[command].split())
    assert isinstance(result, dict) and "hello" in errors


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


@pytest.mark.parametrize("device", ["cpuu", "x" * 10**6, "cpu\0", 3.5, 10**30, 10**5000], ids=type)
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(InvalidInputError, match="no such device"):
        get_backend("torch_ref", device=device)


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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="F16C is a feature of x86")
@pytest.mark.parametrize("features", ["", "+sse2,+avx2,-f16c", "+f16c,-f16c", "+f16c,-avx"])
def test_a_cpu_for_which_llvm_would_end_the_process_is_refused(features, monkeypatch):
    from numba.core import config

    from lora_backends.numba_cpu import NumbaCPUBackend

    monkeypatch.setattr(config, "CPU_FEATURES", features)  # of NUMBA_CPU_FEATURES
    assert "F16C" in unavailable_reasons("numba_cpu", "cpu")[0]
    assert get_backend("auto", device="cpu").name != "numba_cpu"
    with pytest.raises(BackendUnavailableError, match="F16C"):
        NumbaCPUBackend()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 is a feature of x86")
@pytest.mark.parametrize("enabled", [0, 1])
def test_an_instruction_that_numba_is_told_not_to_use_is_not_asked_for(enabled, monkeypatch):
    from llvmlite import binding
    from numba.core import config

    from lora_backends.numba_cpu.machine.cpu import has_bfloat16, missing_features

    found = binding.FeatureMap({"f16c": True, "avx512bf16": True})
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: found)
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    monkeypatch.setattr(config, "ENABLE_AVX", enabled)  # of NUMBA_ENABLE_AVX
    assert has_bfloat16() == (bool(enabled) and binding.llvm_version_info > (15, 99))
    assert not missing_features()
    monkeypatch.setattr(binding, "llvm_version_info", (15, 0, 7))
    assert not has_bfloat16()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 is a feature of x86")
@pytest.mark.parametrize("taken", ["", "-avx512bf16", "-avx512f", "-fma", "-avx", "-sha"])
def test_a_feature_that_is_taken_back_is_not_asked_for(taken, monkeypatch):
    """Compiling for `+avx512bf16,-avx512f` would end the process."""
    from llvmlite import binding
    from numba.core import config

    from lora_backends.numba_cpu.machine.cpu import has_bfloat16

    monkeypatch.setattr(binding, "llvm_version_info", (20, 0, 0))
    monkeypatch.setattr(config, "CPU_FEATURES", f"-avx,+f16c,+avx512bf16,{taken}")
    assert has_bfloat16() == (taken in ("", "-sha"))


@pytest.mark.parametrize(
    ("cpu", "features", "fast"),
    [
        ("znver4", "+avx512bf16", True),
        ("znver4", "+avx512f", False),
        ("sapphirerapids", "+avx512bf16,+avx512fp16", False),
    ],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-512 is a feature of x86")
def test_only_amd_multiplies_pairs_of_bfloat16_fast(cpu, features, fast, monkeypatch):
    from llvmlite import binding
    from numba.core import config

    from lora_backends.numba_cpu.machine.cpu import has_fast_pairs

    monkeypatch.setattr(binding, "llvm_version_info", (20, 0, 0))
    monkeypatch.setattr(config, "CPU_FEATURES", features)
    monkeypatch.setattr(config, "CPU_NAME", cpu)
    assert has_fast_pairs() == fast
    monkeypatch.setattr(config, "CPU_NAME", None)
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: cpu)
    assert has_fast_pairs() == fast
