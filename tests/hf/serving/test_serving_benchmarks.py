"""The scripts that measure serving and training run, on small models."""

import json

import pytest
from helpers.scripts import run_script

pytestmark = pytest.mark.slow


@pytest.fixture
def summary_of(tmp_path, monkeypatch):
    """Return a function that runs a script with arguments, and returns the summary it writes."""

    def run(script, *arguments):
        output = tmp_path / "result.json"
        run_script(monkeypatch, script, *arguments, "--output", output)
        return json.loads(output.read_text())["summary"]

    return run


def test_continuous_batching_answers_as_alone(summary_of):
    arguments = ("--tiny", "--rounds", "1", "--backend", "torch_ref")
    summary = summary_of("continuous_smollm2", *arguments)
    assert summary["answers_as_alone"] == summary["requests"] == 12


def test_swaps_serve_no_wrong_row(summary_of):
    summary = summary_of("adapter_swaps", "--swaps", "60")
    assert summary["wrong_rows"] == 0 and summary["swaps"] >= 60
    assert summary["rows"] > summary["swaps"] / 2


def test_a_training_step_is_measured_beside_the_base_and_peft(summary_of):
    arguments = ("--tiny", "--rounds", "1", "--tokens", "4", "--backend", "torch_ref")
    summary = summary_of("training_model", *arguments)
    assert summary["base"] == 1 and min(summary.values()) > 0 and len(summary) == 5


def test_a_training_step_is_measured_in_a_process_of_its_own(summary_of):
    """That two have the gradients of one is a test of training."""
    arguments = ("--tiny", "--samples", "1", "--rows", "8", "--tokens", "4", "--processes", "1")
    summary = summary_of("training_scale", *arguments, "--backend", "torch_ref")
    assert list(summary) == ["1 processes, whole base", "1 processes, sharded base"]
    assert min(summary.values()) > 0


def test_the_cost_of_a_swap_is_measured(summary_of):
    arguments = ("--tiny", "--steps", "2", "--backend", "torch_ref")
    assert min(summary_of("prefetch_h200", *arguments).values()) > 0
