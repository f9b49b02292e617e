"""A part of the sweep, all of it with ``-m sweep``, and what its result file says."""

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.sweeps import sweep, sweep_bases, sweep_variants

from lora_backends.bench.results import read_result

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "peft_sweep.json"

SAMPLE = ["GPT2", "Roberta (tokens)", "Llama (classes)", "T5", "Whisper", "ViT", "Swin", "Wav2Vec2"]
SAMPLE += ["Qwen3_5", "Gemma4"]  # vllm 49354, 41754: adapters that loaded and changed nothing
PLAIN = [
    name
    for name, (_, config) in sweep_variants.VARIANTS.items()
    if isinstance(config, str)
    or not {"modules_to_save", "trainable_token_indices", "bias", "task_type"} & {*config}
]
"""Variants that other tests run with every backend."""


def known(case):
    """Return what the result file says of a case: refused, or the bound."""
    return next(row for row in read_result(RESULT)["rows"] if row["name"] == case)


def check(case, found):
    expected = known(case)
    if isinstance(found, float):
        assert "worst" in expected and not expected.get("split")
        assert found <= sweep.BOUND
    else:
        assert expected.get("split") or expected["refused"] == found


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_of_an_architecture_are_those_of_peft(name):
    assert sweep.run(name) <= sweep.BOUND


@pytest.mark.parametrize("name", [n for n in sweep_variants.VARIANTS if n not in PLAIN])
def test_rows_of_a_variant_are_those_of_peft(name):
    assert sweep_variants.run(name) <= sweep.BOUND


@pytest.mark.parametrize("name", sweep_variants.FILES)
def test_files_in_another_form_give_the_same_rows(name):
    assert sweep_variants.run_file(name) <= sweep.BOUND


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep.NAMES)
def test_an_architecture_of_the_sweep_is_as_the_result_file_says(name):
    check(name, sweep.run(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", sweep_variants.VARIANTS)
def test_a_variant_of_the_sweep_is_as_the_result_file_says(name):
    check(name, sweep_variants.run(name))


def test_the_result_file_is_of_these_cases_and_none_is_wrong():
    rows = read_result(RESULT)["rows"]

    def of(kind):
        return {row["name"]: row for row in rows if row["kind"] == kind}

    assert [*of("architectures")] == sweep.NAMES
    assert [*of("variants")] == [*sweep_variants.VARIANTS]
    assert [*of("files")] == [*sweep_variants.FILES]
    assert [*of("bases")] == [*sweep_bases.BASES]
    assert [*of("layers")] == [*sweep_bases.LAYERS]
    assert all(row["package"] for row in of("bases").values())
    assert all(row.get("worst", 0) <= sweep.BOUND for row in rows)
    assert sum("worst" in case for case in of("architectures").values()) >= 55
    assert sum("worst" in case for case in of("variants").values()) >= 30


def test_a_wrong_row_fails_the_sweep(monkeypatch):
    """The sweep would see rows in the wrong order."""
    real = sweep.MultiLoRAModel.__call__

    def shifted(self, *args, adapters, **inputs):
        return real(self, *args, adapters=adapters[1:] + adapters[:1], **inputs)

    monkeypatch.setattr(sweep.MultiLoRAModel, "__call__", shifted)
    assert sweep.run("GPT2") > 20 * sweep.BOUND


def test_a_nan_fails_the_sweep(monkeypatch):
    real = sweep.MultiLoRAModel.__call__

    def broken(self, *args, **inputs):
        output = real(self, *args, **inputs)
        output.logits[0, 0, 0] = float("nan")
        return output

    monkeypatch.setattr(sweep.MultiLoRAModel, "__call__", broken)
    worst = sweep.run("GPT2")
    script = runpy.run_path(str(RESULT.parents[2] / "tools" / "sweep.py"))
    rows = [{"name": "GPT2", "worst": worst}, {"name": "T5", "refused": "its rows"}]
    assert script["_wrong"]({"bound": sweep.BOUND, "rows": rows}) == ["GPT2"]


@pytest.fixture
def sweep_with(monkeypatch):
    """Return a function that runs `tools/sweep.py`, and returns the kinds run and the exit code."""
    script = runpy.run_path(str(RESULT.parents[2] / "tools" / "sweep.py"))
    main, ran = script["main"], []

    def note(kind):
        ran.append(kind)
        return [f"one of the {kind}"]

    for kind in ("pipelines", "encoders"):
        monkeypatch.setitem(main.__globals__, kind, partial(note, kind))
    monkeypatch.setitem(main.__globals__, "peft", lambda kinds: ran.extend(kinds) or [])

    def run(*arguments):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments])
        try:
            main()
        except SystemExit as error:
            return {*ran}, error.code
        return {*ran}, None

    run.kinds = {"pipelines", "encoders", *script["PEFT_KINDS"]}
    return run


def test_the_script_of_the_sweep_runs_the_kinds_asked_for(sweep_with):
    wrong = "not equal: one of the pipelines, one of the encoders"
    assert sweep_with() == (sweep_with.kinds, wrong)
    assert sweep_with("encoders", "pipelines") == ({"pipelines", "encoders"}, wrong)
    assert sweep_with("bases", "layers") == ({"bases", "layers"}, None)
    assert sweep_with("encoders", "files") == (
        {"encoders", "files"},
        "not equal: one of the encoders",
    )
    assert sweep_with("bases", "layer") == (set(), 2)
