"""The command: what it prints, its exit status, and plain output when piped."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lora_backends.cli import app
from lora_backends.errors import BackendUnavailableError, InvalidInputError


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_list_tells_what_runs_here_and_what_each_supports():
    result = run("list", "--device", "cpu")
    assert result.exit_code == 0
    assert "torch_ref" in result.stdout and "yes" in result.stdout
    assert "\x1b" not in result.stdout  # plain when piped


def test_list_as_json():
    backends = {b["name"]: b for b in json.loads(run("list", "--device", "cpu", "--json").stdout)}
    assert backends["torch_ref"]["runs_here"] is True
    assert "float64" in backends["torch_ref"]["dtypes"]
    assert backends["torch_ref"]["differentiable"] is True


def test_list_says_why_a_backend_does_not_run():
    backends = json.loads(run("list", "--device", "cuda:99", "--json").stdout)
    assert all(not b["runs_here"] and b["reasons"] for b in backends)


def test_an_error_is_one_message_without_traceback():
    command = [sys.executable, "-c", "from lora_backends.cli import main; main()"]
    result = subprocess.run(
        [*command, "generate", "--prompt", "hi"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-3].startswith("error: which model?")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no prompts"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--prompt", "a", "--adapter", "pirate"], "allowed: NAME=FOLDER"),
        (["--prompt", "a", "--prompt", "b", "--use", "x", "--use", "y", "--use", "z"], "3 times"),
        (["--use", "x"], "--use goes with --prompt"),
        (["--prompt", ""], "prompts.0.text"),
        (["--prompt", "a", "--model", "m", "--device", "banana"], "no such device"),
        (["--prompt", "a", "--model", "nowhere/at/all"], "cannot load the model"),
        (["--prompt", "a", "--model", "m", "--backend", "tritn"], "no backend named 'tritn'"),
        (["--prompt", "a", "--model", "m", "--max-new-tokens", "0"], "max_new_tokens"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_do(arguments, told):
    result = run("generate", *arguments)
    assert isinstance(result.exception, InvalidInputError)
    assert told in str(result.exception)


def test_a_package_that_is_not_installed_is_named(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[model]\npackage = 'no_such_package'\n[[prompts]]\ntext = 'hi'\n")
    result = run("generate", "--config", str(file))
    assert "'no_such_package' that carries the model is not installed" in str(result.exception)


@pytest.fixture
def tiny_job(tmp_path, make_base, save_adapter):
    """Return a configuration with a tiny model on disk, a tokenizer and one adapter."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    make_base("llama").save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")
    save_adapter(name="one", std=0.5, r=4, target_modules="all-linear")
    file = tmp_path / "job.toml"
    file.write_text(
        f"backend = 'torch_ref'\nmax_new_tokens = 4\n[model]\npath = '{tmp_path / 'model'}'\n"
        "[adapters]\none = 'one'\n"
        "[[prompts]]\ntext = 'a b c'\n[[prompts]]\ntext = 'd'\nadapter = 'one'\n"
    )
    return file


def test_generate_answers_checks_and_compares(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--check", "--compare", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["adapter"] for row in report["rows"]] == [None, "one"]
    assert all(row["same_alone"] for row in report["rows"])
    speeds = report["tokens_per_second"]
    assert list(speeds)[0] == "base model, no adapters" and "PEFT, mixed batch" in speeds
    assert "lora_backends, torch_ref" in speeds and all(speed > 0 for speed in speeds.values())


def test_generate_prints_a_plain_table_when_piped(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--check")
    assert result.exit_code == 0, result.output
    assert "2 of 2 rows give the same tokens as when run alone" in result.stdout
    assert "\x1b" not in result.stdout and result.stdout.isascii()


def test_the_command_line_replaces_the_prompts_of_the_file(tiny_job):
    result = run(
        "generate", "--config", str(tiny_job), "--json", "--prompt", "e f", "--prompt", "g",
        "--use", "one", "--use", "-", "--max-new-tokens", "2",
    )  # fmt: skip
    rows = json.loads(result.stdout)["rows"]
    assert [(row["prompt"], row["adapter"]) for row in rows] == [("e f", "one"), ("g", None)]


def test_a_row_that_differs_when_run_alone_is_status_1(tiny_job, monkeypatch):
    from lora_backends.hf import generation

    monkeypatch.setattr(generation, "rows_that_differ_alone", lambda *_: [1])
    result = run("generate", "--config", str(tiny_job), "--check")
    assert result.exit_code == 1 and "NO" in result.stdout


def test_an_unknown_adapter_is_named(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--use", "onne")
    assert "no adapter named 'onne'; did you mean 'one'" in str(result.exception)


def test_a_device_that_is_not_here_is_refused_before_the_model_is_loaded(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--device", "cuda:99")
    assert isinstance(result.exception, BackendUnavailableError)
    assert "does not run on cuda:99" in str(result.exception)


def test_base_rows_alone_can_be_compared(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--compare", "--json")
    assert result.exit_code == 0, result.output
    assert "base model, no adapters" in json.loads(result.stdout)["tokens_per_second"]
