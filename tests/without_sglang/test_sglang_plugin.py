"""The plug-in for SGLang, as far as it goes without SGLang: `make test-sglang` tests it inside."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from lora_backends import BackendUnavailableError, UnsupportedInputError
from lora_backends.common.names import SGLANG_VARIABLE
from lora_backends.integrations.sglang.settings import check_settings, check_version


def test_the_plugin_sleeps_until_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(SGLANG_VARIABLE, raising=False)
    (entry,) = entry_points(group="sglang.srt.plugins", name="lora_backends")
    module, _, function = entry.value.partition(":")
    code = f"import sys; from {module} import {function} as f; f(); f()\n"
    code += "print(sorted({'torch', 'numpy', 'sglang', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("version", ["0.5.16", "0.5.16.post1", "0.5.23rc1", "0.6.0", "1.0.0"])
def test_versions_from_the_oldest_on_are_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.15.post1", "0.4.10", "0.5", "dev"])
def test_older_versions_are_refused_by_their_number(version):
    with pytest.raises(BackendUnavailableError) as error:
        check_version(version)
    assert f"given: SGLang {version}" in str(error.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("enable_dp_attention", True),
        ("enable_two_batch_overlap", True),
        ("enable_pdmux", True),
        ("enable_attn_tp_input_scattered", True),
        ("enable_layernorm_sp", True),
        ("enable_prefill_cp", True),
        ("enable_torch_compile", True),
        ("enable_fused_moe_sum_all_reduce", True),
        ("enable_eplb", True),
        ("ep_num_redundant_experts", 4),
        ("init_expert_location", "experts.json"),
        ("attn_dp_size", 2),
        ("attn_cp_size", 2),
        ("pp_size", 2),
        ("moe_a2a_backend", "deepep"),
        ("moe_runner_backend", "lora_triton"),
    ],
)
def test_settings_under_which_rows_would_be_wrong_are_refused(setting, value):
    check_settings(None)
    defaults = {"moe_a2a_backend": "none", "moe_runner_backend": "auto"}
    defaults |= {"ep_num_redundant_experts": 0, "init_expert_location": "trivial"}
    check_settings(SimpleNamespace(**defaults))
    with pytest.raises(UnsupportedInputError, match=f"given: {setting}"):
        check_settings(SimpleNamespace(**{setting: value}))


def test_an_experiment_of_sglang_that_replaces_its_layers_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_LORA_OPTI", "1")
    with pytest.raises(UnsupportedInputError, match="SGLANG_EXPERIMENTAL_LORA_OPTI"):
        check_settings(None)


def test_names_that_a_version_lacks_are_told(tmp_path, capsys):
    import sglang_names

    file = tmp_path / "sglang/srt/lora/utils.py"
    file.parent.mkdir(parents=True)
    file.write_text("def generate_sequence_lengths(forward_batch): pass\n")
    assert sglang_names.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "utils.py: generate_sequence_lengths(device)\n" in printed
    assert "utils.py: get_lm_head_pruned_lens\n" in printed
    assert "lora.py: LoRAAdapter._normalize_weights\n" in printed


def test_the_benchmark_compares_answers_as_long_as_their_tokens_are_the_references(monkeypatch):
    monkeypatch.setattr("os.environ", os.environ.copy())  # an import sets variables
    import engine_processes

    every = [
        [[{"7": -(1.0 + adapter + k + row)} for row in range(2)] for k in range(3)]
        for adapter in range(2)
    ]
    reference = {"tokens": [[7, 7, 7], [7, 7, 7]], "every": every}

    def answer(tokens, adapter, row):
        return {"tokens": tokens, "tops": [every[adapter][k][row] for k in range(3)]}

    right = [answer([7, 7, 7], 0, 0), answer([7, 3, 7], 1, 1)]
    found = engine_processes.agreement(right, reference, 2)
    assert found == {"positions": 5, "steps": 3, "nearest": 5, "distance": 0.0, "next": 1.0}
    assert engine_processes.is_right(found)
    swapped = engine_processes.agreement([right[0], answer([7, 7, 7], 0, 1)], reference, 2)
    assert swapped["nearest"] == 3 and not engine_processes.is_right(swapped)
    alone = [answer([3, 7, 7], 0, 0), answer([3, 7, 7], 1, 1)]
    assert not engine_processes.is_right(engine_processes.agreement(alone, reference, 2))
    same = reference | {"every": every[:1] * 2}  # adapters that do nothing prove nothing
    assert not engine_processes.is_right(engine_processes.agreement(right, same, 2))


def test_the_benchmark_goes_on_without_an_engine_that_fails(monkeypatch):
    monkeypatch.setattr("os.environ", os.environ.copy())
    import engine_processes

    spec = {"backend": "", "options": {}, "names": []}
    for limit, reason in ((60, "ended with status 1"), (0, "no answer in 0 s")):
        with pytest.raises(engine_processes.EngineFailed, match=reason):  # SGLang is not installed
            engine_processes.Process("sglang_worker.py", spec, limit).answer()

    class Engine:
        def __init__(self, calls):
            self.calls = calls

        def ask(self, do, **work):
            self.calls -= 1
            if not self.calls:
                raise engine_processes.EngineFailed("gone")
            return work["tokens"]

    engines = {"off": Engine(99), "late": Engine(8), "auto": Engine(99)}
    options = SimpleNamespace(cells=[(8, 2)], rounds=2, steps=4, prompt=4, prefills=[8], rank=8)
    failed = []

    def drop(name, error):
        failed.append(f"{name} {error}")
        engines.pop(name)

    rows = list(engine_processes.timed(engines, drop, options, float("inf"), {}))
    assert failed == ["late gone"]
    found = [(row["step"], row["contender"], row["rounds"], row["ratio"]) for row in rows]
    assert found == [(s, e, 2, 1.0) for s in ("decode", "prefill") for e in ("off", "auto")]


def test_the_models_of_a_benchmark_share_its_time_and_its_engines_have_room(monkeypatch):
    monkeypatch.setattr("os.environ", os.environ.copy())
    import engine_processes

    ends, result = [], {}

    def measure(options, result, folder, kind, end):
        assert folder.is_dir()
        ends.append(end)
        yield {"model": kind}

    options = SimpleNamespace(cells=[(8, 2)], adapters=2, models=["dense", "experts"], seconds=60)
    rows = list(engine_processes.by_model(options, result, measure))
    assert [row["model"] for row in rows] == ["dense", "experts"] and "load" in result
    assert ends[1] - ends[0] == pytest.approx(30)
    options.adapters = 1
    with pytest.raises(SystemExit, match="more adapters than --adapters 1"):
        next(engine_processes.by_model(options, result, measure))
