"""`lora-backends agree`: its report, its exit status and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from lora_backends.cli import app
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.numba_cpu import NumbaCPUBackend


def run(*arguments):
    return CliRunner().invoke(app, ["agree", *arguments])


@pytest.fixture
def job(tiny_job):
    """Arguments of a comparison with the adapter of the job."""
    folder = tiny_job.parent
    named = ["--model", str(folder / "model"), "--adapter", f"it={folder / 'one'}"]
    return [*named, "--backend", "numba_cpu", "--max-new-tokens", "3"]


def test_prompts_are_compared_one_by_one(job):
    result = run(*job, "--prompt", "a b c", "--prompt", "d", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["backend"] == "numba_cpu" and report["batch_invariant"]
    assert [row["prompt"] for row in report["rows"]] == ["a b c", "d"]
    for row in report["rows"]:
        assert row["adapter"] == "it" and row["same_lora"] and row["different_loras"] == []
        assert row["compared_loras"] == 21  # 7 of each layer
        assert row["tokens"] == len(row["differences"]) == 3
        assert row["largest_difference"] == max(row["differences"]) < 1e-3


def test_a_lora_that_differs_is_status_1(job, monkeypatch):
    plain = NumbaCPUBackend.run_linear

    def slipping(self, x, weights, plan, base_output=None):
        y = plain(self, x, weights, plan, base_output)
        return y.add_(0.125) if len(x) == 1 else y

    monkeypatch.setattr(NumbaCPUBackend, "run_linear", slipping)
    result = run(*job, "--prompt", "a b c")
    assert result.exit_code == 1, result.output
    assert "differs in 21 of 21 modules: model.layers.0.self_attn.q_proj" in result.stdout
    assert result.stdout.isascii() and "\x1b" not in result.stdout


def test_the_job_of_a_file_needs_an_adapter_for_each_prompt(tiny_job):
    result = run("--config", str(tiny_job))  # its first prompt has none
    assert isinstance(result.exception, InvalidInputError)
    assert "prompt 1 uses no adapter" in str(result.exception)
    result = run("--config", str(tiny_job), "--prompt", "a b", "--use", "one", "--json")
    assert result.exit_code in (0, 1)  # torch_ref promises nothing
    report = json.loads(result.stdout)
    assert not report["batch_invariant"] and report["rows"][0]["adapter"] == "one"


@pytest.mark.parametrize("use", ["one:0.5", "two"])
def test_blends_and_unknown_names_are_refused(use, tiny_job):
    result = run("--config", str(tiny_job), "--prompt", "a", "--use", use)
    assert isinstance(result.exception, InvalidInputError)


def test_an_adapter_that_cannot_be_trained_is_refused_by_its_feature(tiny_job, save_adapter):
    folder = save_adapter(name="dora", r=2, target_modules=["q_proj"], use_dora=True)
    model = str(tiny_job.parent / "model")
    result = run("--model", model, "--adapter", f"d={folder}", "--prompt", "a")
    assert isinstance(result.exception, UnsupportedInputError)
    assert "use_dora" in str(result.exception)
