"""The command: what it prints, its exit status, and plain output when piped."""

import copy
import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lora_backends.bench.job import BenchRun
from lora_backends.cli import COMMANDS, app, main
from lora_backends.errors import BackendUnavailableError, InvalidInputError, LoRABackendError
from lora_backends.operations import DENSE
from lora_backends.selection.option_text import option_texts, read_options


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_no_engine(argument):
    code = (
        "import sys; from lora_backends.cli import COMMANDS, app\n"
        f"app([{argument!r}], standalone_mode=False)\n"
        "slow = {'torch', 'numpy', 'pydantic', 'numba', 'triton', 'transformers'}\n"
        "assert not slow & sys.modules.keys(), slow & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_is_that_of_the_package():
    assert run("--version").stdout == f"lora-backends {version('lora-backends')}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["--version"], ["list", "--json"]])
def test_an_output_that_cannot_be_written_is_one_message(arguments):
    command = [sys.executable, "-c", "from lora_backends.cli import main; main()", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["list"], ["list", "--json"], ["explain", "--slots", "0"], ["lits"]],
)
def test_a_command_whose_output_nobody_reads_ends_quietly(arguments):
    command = [sys.executable, "-c", "from lora_backends.cli import main; main()", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    errors = writer if arguments == ["lits"] else subprocess.PIPE
    done = subprocess.run(command, stdout=writer, stderr=errors, text=True)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert not done.stderr


def test_the_broken_pipe_of_another_file_is_one_message(monkeypatch, capsys):
    def fail(*_):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe", "another file")

    monkeypatch.setattr("lora_backends.cli.explain.show", fail)
    monkeypatch.setattr(sys, "argv", ["lora-backends", "explain", "--slots", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 32] Broken pipe: 'another file'\n"


def test_options_are_read_as_they_are_shown():
    options = {"a": True, "b": "true", "c": 16, "d": "auto", "e": "1 = '2'", "f": [None], "g": ""}
    assert read_options(option_texts(options)) == options
    assert read_options(["a=True", "b=False", "c=None"]) == {"a": True, "b": False, "c": None}
    assert option_texts({"path": Path("x"), "object": {1j: 2}}) == ('path="x"', "object={1j: 2}")


def test_help_lists_every_command_and_describes_each():
    listed = run("--help").stdout
    for name, (function, summary) in COMMANDS.items():
        assert f"{name} " in listed and summary.split(",")[0][:30] in listed
        module = importlib.import_module(f"lora_backends.cli.{name}")
        described = " ".join(run(name, "--help").stdout.replace("│", "").split())
        first = getattr(module, function).__doc__.split(".")[0]
        assert " ".join(first.split()) in described


def test_a_misspelt_command_gets_a_suggestion():
    result = run("lits")
    assert result.exit_code == 2 and "Did you mean 'list'?" in result.output


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


def test_an_error_is_one_message_without_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lora-backends", "generate", "--prompt", "hi"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-3].startswith("error: which model?")
    assert "Traceback" not in printed


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


def test_generate_answers_checks_and_compares(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--check", "--compare", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [row["adapter"] for row in report["rows"]] == [None, "one"]
    assert all(row["same_alone"] for row in report["rows"])
    speeds = report["tokens_per_second"]
    assert list(speeds)[0] == "base model, no adapters" and "PEFT, mixed batch" in speeds
    assert "lora_backends, torch_ref" in speeds and all(speed > 0 for speed in speeds.values())


def test_generate_prints_plain_text_when_piped(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--check")
    assert result.exit_code == 0, result.output
    assert "2 of 2 rows give the same tokens as when run alone" in result.stdout
    assert "\x1b" not in result.output and "\r" not in result.output and result.stdout.isascii()
    assert re.search("answering 2 prompts in one batch with [a-z_]+ \\.\\.\\.\n", result.stderr)


def test_a_long_step_gives_signs_of_life_in_a_log(monkeypatch, capsys):
    from lora_backends.cli import console

    monkeypatch.setattr(console, "LOG_SECONDS", 0.01)
    with console.step("loading") as progress:
        shown, end = "", time.monotonic() + 60
        for wanted in ("loading: still running, ", "loading: 3 of 4, "):
            while wanted not in shown and time.monotonic() < end:
                time.sleep(0.01)
                shown += capsys.readouterr().err
            assert wanted in shown
            progress.note("3 of 4")


def test_answers_are_printed_before_the_timings(tiny_job, monkeypatch, capsys):
    from lora_backends.cli import generate

    printed = []
    monkeypatch.setattr(generate, "_compare", lambda *_: printed.append(capsys.readouterr().out))
    monkeypatch.setattr(generate, "_print_speeds", lambda speeds: None)
    generate.generate(config=tiny_job, check=True, compare=True)
    assert printed[0].count("  [one]\n") == printed[0].count("  [(base)]\n") == 1
    assert "2 of 2 rows" in printed[0]


@pytest.mark.parametrize(
    ("speed", "text"), [(0.01234, "0.0123"), (9.876, "9.88"), (45.67, "45.7"), (12345.6, "12,346")]
)
def test_speeds_have_three_digits(speed, text):
    from lora_backends.cli.generate import three_digits

    assert three_digits(speed) == text


def test_the_command_line_replaces_the_prompts_of_the_file(tiny_job):
    result = run(
        "generate", "--config", str(tiny_job), "--json", "--prompt", "e f", "--prompt", "g",
        "--use", "one", "--use", "-", "--max-new-tokens", "2",
    )  # fmt: skip
    rows = json.loads(result.stdout)["rows"]
    assert [(row["prompt"], row["adapter"]) for row in rows] == [("e f", "one"), ("g", None)]


def test_rows_may_blend_adapters_from_the_command_line_and_the_file(tiny_job, save_adapter):
    save_adapter(name="two", std=0.5, seed=5, r=2, target_modules=["q_proj"], use_dora=True)
    save_adapter(name="three", std=0.5, seed=6, r=2, target_modules=["q_proj"])
    text = tiny_job.read_text().replace(
        "one = 'one'", "one = 'one'\ntwo = 'two'\n'a:1+b' = 'three'"
    )
    table = "adapter = {one = 0.5, 'a:1+b' = -1}"
    tiny_job.write_text(text.replace("adapter = 'one'", table))
    result = run("generate", "--config", str(tiny_job), "--check", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["adapter"] for row in rows] == [None, {"one": 0.5, "a:1+b": -1.0}]
    assert all(row["same_alone"] for row in rows)
    uses = ["one:0.5", "two:2", "a:1+b"]
    command = ["generate", "--config", str(tiny_job), "--check"]
    for use in uses:
        command += ["--prompt", "a", "--use", use]
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert all(use in result.stdout for use in uses)
    assert "3 of 3 rows give the same tokens" in result.stdout


@pytest.mark.parametrize("use", ["one:0.5", "dora"])
def test_a_comparison_tells_who_cannot_run_the_batch(use, tiny_job, save_adapter, monkeypatch):
    numba_cpu = pytest.importorskip("lora_backends.numba_cpu")
    monkeypatch.setattr(numba_cpu.NumbaCPUBackend, "features", frozenset())
    folder = save_adapter(name="dora", r=2, target_modules=["q_proj"], use_dora=True)
    tiny_job.write_text(
        tiny_job.read_text().replace("[adapters]", f"[adapters]\ndora = '{folder}'")
    )
    arguments = ["--prompt", "a", "--use", use, "--compare", "--json"]
    if use != "dora":
        arguments += ["--adapter", f"one={folder.parent / 'one'}"]
    result = run("generate", "--config", str(tiny_job), *arguments)
    assert result.exit_code == 0, result.output
    speeds = json.loads(result.stdout)["tokens_per_second"]
    assert speeds["PEFT, mixed batch"] is None  # it has neither strengths nor DoRA in a batch
    assert speeds["lora_backends, numba_cpu"] is None
    assert speeds["lora_backends, torch_ref"] > 0


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("one:0.7+two", "given: 'two', for prompt 1"),
        ("one:0.7+one:1", "given: 'one:1' a second time, for prompt 1"),
        ("one:nan", "given: 'one:nan'"),
        ("one:", "given: 'one:'"),
        (":1", "given: ':1'"),
        ("one:0.7+onne:1", "no adapter named 'onne'; did you mean 'one'"),
    ],
)
def test_a_blend_that_cannot_be_read_is_refused_before_the_model(use, told, tiny_job, no_model):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--use", use)
    assert isinstance(result.exception, InvalidInputError)
    assert told in str(result.exception)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("{}", "a blend has an empty table"),
        ("{one = nan}", "a blend has 'one' = nan"),
        ("{one = '0.5'}", "a blend has 'one' = '0.5'"),
        ("{one = true}", "a blend has 'one' = True"),
        ("{one = 1e39}", "a blend has 'one' = 1e+39"),
        ("{one = {a = 1}}", "a blend has 'one' = "),
        ("3", "allowed: an adapter's name, "),
        ("['one']", "allowed: an adapter's name, "),
        ("{nobody = 1}", "no adapter named 'nobody'"),
    ],
)
def test_a_wrong_table_of_strengths_is_refused_before_the_model(table, told, tiny_job, no_model):
    tiny_job.write_text(tiny_job.read_text().replace("adapter = 'one'", f"adapter = {table}"))
    result = run("generate", "--config", str(tiny_job))
    assert isinstance(result.exception, InvalidInputError)
    assert told in str(result.exception)


def test_a_row_that_differs_when_run_alone_is_status_1(tiny_job, monkeypatch):
    from lora_backends.hf.generating import greedy as generation

    monkeypatch.setattr(generation, "rows_that_differ_alone", lambda *_: [1])
    result = run("generate", "--config", str(tiny_job), "--check")
    assert result.exit_code == 1 and "not: 2" in result.stdout


@pytest.mark.parametrize(
    "config",
    [
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"bias": "all"},
        {"trainable_token_indices": [1, 2]},
        {"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"},
    ],
)
def test_commands_take_the_adapters_that_a_model_takes(config, tiny_job, save_adapter):
    save_adapter(name="one", std=0.5, r=2, target_modules=["q_proj"], **config)
    result = run("generate", "--config", str(tiny_job), "--check")
    assert result.exit_code == 0, result.output
    listed = run("adapters", str(tiny_job.parent / "one"))
    assert listed.exit_code == 0 and "q_proj" in listed.stdout


@pytest.fixture
def no_model(monkeypatch):
    """Fail where a model is loaded."""
    import transformers

    def fail(*_, **__):
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)


def test_an_unknown_adapter_is_named_before_the_model_is_loaded(tiny_job, no_model):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--use", "onne")
    assert isinstance(result.exception, InvalidInputError)
    message = str(result.exception)
    assert "no adapter named 'onne'; did you mean 'one'" in message
    assert "prompt 1 uses it; adapters: one" in message
    assert "to do: give --adapter onne=FOLDER" in message and "load_adapter" not in message


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--adapter", "two=nowhere"], "given: no such folder"),
        (["--adapter", "two=~nosuchuser/x"], "is in the home of a user that is not known"),
        (["--adapter", "two=someone/an-adapter"], "hf download someone/an-adapter"),
        (["--adapter", "two=a", "--adapter", "two=b"], "--adapter names 'two' twice"),
    ],
)
def test_adapters_are_looked_at_before_the_model_is_loaded(arguments, told, tiny_job, no_model):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--use", "-", *arguments)
    assert isinstance(result.exception, InvalidInputError)
    assert told in str(result.exception)


def test_more_adapters_than_slots_are_named_before_the_model_is_loaded(tiny_job, no_model):
    text = tiny_job.read_text()
    tiny_job.write_text(
        f"max_adapters = 1\n{text.replace('one = ', 'two = {0}one{0}{1}one = ')}".format("'", "\n")
    )
    result = run("generate", "--config", str(tiny_job))
    assert "write max_adapters = 2 in the configuration" in str(result.exception)


def test_a_limit_of_the_configuration_holds(tiny_job, no_model):
    tiny_job.write_text(f"{tiny_job.read_text()}[limits]\ntensors = 3\n")
    result = run("generate", "--config", str(tiny_job))
    assert "write tensors = 42 under [limits]" in str(result.exception)


def _edit(name, **values):
    def edit(model):
        path = model / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return edit


def _write(name, content):
    return lambda model: (model / name).write_bytes(content)


def _drop_a_tensor(model):
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def _make_fifo(model):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")


BROKEN = {
    "weights are noise": (_write("model.safetensors", b"\x07" * 5000), "cannot load the model"),
    "weights are empty": (_write("model.safetensors", b""), "cannot load the model"),
    "no weights": (lambda model: (model / "model.safetensors").unlink(), "cannot load the model"),
    "a tensor lacks": (
        _drop_a_tensor,
        "not complete\n  given: no model.layers.1.mlp.up_proj.weight",
    ),
    "more layers": (_edit("config.json", num_hidden_layers=5), "not complete"),
    "another width": (_edit("config.json", hidden_size=32), "cannot load the model"),
    "no heads": (_edit("config.json", num_attention_heads=0), "cannot load the model"),
    "an unknown type": (_edit("config.json", model_type="nonsense"), "cannot load the model"),
    "code": (
        _edit("config.json", model_type="x", auto_map={"AutoModelForCausalLM": "a.B"}),
        "cannot load the model",
    ),
    "config is noise": (_write("config.json", b"\xff\xfe"), "cannot load the model"),
    "config is deep": (_write("config.json", b"[" * 100_000), "cannot load the model"),
    "tokenizer is noise": (_write("tokenizer.json", b"\xff"), "cannot load the tokenizer"),
    "tokenizer is empty": (_write("tokenizer.json", b"{}"), "cannot load the tokenizer"),
    "no end": (
        _edit("tokenizer_config.json", pad_token=None, eos_token=None),
        "neither a padding nor an end token",
    ),
    "template": (_edit("tokenizer_config.json", chat_template="{{ no("), "cannot encode"),
    "no tokens": (
        _edit("tokenizer_config.json", chat_template=" "),
        "does not belong to the model",
    ),
    "generation": (_edit("generation_config.json", repetition_penalty=-1.0), "cannot answer"),
    "a FIFO": (_make_fifo, "model.safetensors is a FIFO"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_is_one_message(fault, tiny_job):
    breaks, told = BROKEN[fault]
    breaks(tiny_job.parent / "model")
    result = run("generate", "--config", str(tiny_job))
    assert isinstance(result.exception, InvalidInputError), result.exception
    assert told in str(result.exception)


@pytest.mark.parametrize("name", ["no.such", "", ".x", "os.path", "a b"])
def test_a_package_is_an_identifier_that_is_not_imported(name, tiny_job, monkeypatch):
    text = tiny_job.read_text().replace("path = ", "package = ")
    tiny_job.write_text(text.replace(str(tiny_job.parent / "model"), name))
    result = run("generate", "--config", str(tiny_job))
    assert "allowed: the name of a package" in str(result.exception)


PATH_OPTIONS = {
    "generate": ["--config", "--model"],
    "explain": ["--batch"],
    "bench": ["--output", "--plot", "--from-json", "--config-json"],
}


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300])
@pytest.mark.parametrize("option", [f"{c} {o}" for c, found in PATH_OPTIONS.items() for o in found])
def test_what_is_no_path_is_refused_wherever_one_is_taken(option, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, name = option.split()
    more = ["--prompt", "a"] if command == "generate" else []
    result = run(command, name, path, *more)
    assert isinstance(result.exception, LoRABackendError), result.exception


@pytest.mark.parametrize("command", ["explain --slots 0 --svg", "bench --output"])
def test_nothing_is_written_into_a_fifo(command, tmp_path, monkeypatch):
    monkeypatch.setattr(BenchRun, "run", lambda *_: pytest.fail("measured"))
    os.mkfifo(tmp_path / "fifo")
    result = run(*command.split(), str(tmp_path / "fifo"))
    assert isinstance(result.exception, InvalidInputError)
    assert "is a FIFO" in str(result.exception)


def test_output_needs_no_encoding_that_has_every_character(tmp_path, monkeypatch):
    """A name from the command line may be no text, and a terminal may know ASCII alone."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xc3\xa9\xff.svg")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "argv", ["lora-backends", "explain", "--slots", "0", "--svg", path])
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit) as ended:
        main()
    terminal.flush()
    assert not ended.value.code
    assert b"\\xe9\\udcff.svg" in terminal.buffer.getvalue()


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300])
def test_a_drawing_needs_a_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("explain", "--slots", "0", "--svg", path)
    assert isinstance(result.exception, InvalidInputError)


@pytest.mark.parametrize("option", ["generate --config", "explain --batch", "bench --from-json"])
def test_a_fifo_is_not_waited_for(option, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    result = run(*option.split(), str(tmp_path / "fifo"))
    assert "given: a FIFO" in str(result.exception)


def test_a_device_that_is_not_here_is_refused_before_the_model_is_loaded(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--device", "cuda:99")
    assert isinstance(result.exception, BackendUnavailableError)
    assert "does not run on cuda:99" in str(result.exception)


def test_base_rows_alone_can_be_compared(tiny_job):
    result = run("generate", "--config", str(tiny_job), "--prompt", "a", "--compare", "--json")
    assert result.exit_code == 0, result.output
    assert "base model, no adapters" in json.loads(result.stdout)["tokens_per_second"]


SMALL = ["--in-features", "16", "--output-slices", "8,4", "--tokens", "3,9", "--rank", "2"]


@pytest.fixture
def small_copies(monkeypatch):
    from lora_backends.bench import layers, timing

    monkeypatch.setitem(layers.ROTATED_BYTES, "cpu", 1.0)
    monkeypatch.setitem(timing.COPIED_VALUES, "cpu", 2**12)


def bench(*arguments):
    return run("bench", "--device", "cpu", "--backends", "torch_ref", *map(str, arguments))


def test_bench_prints_a_table_and_keeps_results_and_plots(small_copies, tmp_path):
    pytest.importorskip("matplotlib")
    file, folder = tmp_path / "new" / "bench.json", tmp_path / "plots"
    result = bench(*SMALL, "--output", file, "--plot", folder)
    assert result.exit_code == 0, result.output
    assert "torch_ref" in result.stdout and "uniform" in result.stdout
    assert "\x1b" not in result.stdout and result.stdout.isascii()
    found = json.loads(file.read_text())
    assert found["complete"] and [cell["tokens"] for cell in found["rows"]] == [3, 9]
    assert (folder / "time_against_tokens.svg").exists() and (folder / "roofline.png").exists()

    again = run("bench", "--from-json", str(file), "--plot", str(tmp_path / "later"))
    assert again.exit_code == 0, again.output
    assert again.stdout.splitlines()[:6] == result.stdout.splitlines()[:6]
    assert (tmp_path / "later" / "efficiency.png").exists()
    assert json.loads(run("bench", "--from-json", str(file), "--json").stdout) == found


CELLS = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/bench_smollm2_cpu.json").read_text()
)


def _edited(value, *path):
    """Return a function that changes one value of a result, or leaves it out if it is None."""

    def edit(result):
        for key in path[:-1]:
            result = result[key]
        result[path[-1]] = value
        if value is None:
            del result[path[-1]]

    return edit


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_edited(None, "contenders"), "contenders: Field required"),
        (_edited({"torch_ref": {}}, "contenders"), "contenders.torch_ref.timing"),
        (_edited([3], "rows"), "rows.0: Input should be"),
        (_edited(None, "rows", 0, "limit_us"), "rows.0.limit_us: Field required"),
        (_edited("16", "rows", 0, "tokens"), "rows.0.tokens: Input should be a valid integer"),
        (
            _edited({"a": {"us": 0, "efficiency": 1}}, "rows", 0, "results"),
            "a.us: Input should be greater",
        ),
        (_edited({"a": {"us": 1, "efficiency": -1}}, "rows", 0, "results"), "greater than 0"),
        (_edited(float("nan"), "limits", "copy_gb_per_s"), "limits.copy_gb_per_s"),
        (_edited(["x"] * 3 + [3] * 9, "notes"), "and 4 more"),
    ],
)
def test_a_damaged_file_of_results_is_refused_by_what_is_wrong(edit, told, tmp_path):
    result = copy.deepcopy(CELLS)
    edit(result)
    (tmp_path / "cells.json").write_text(json.dumps(result))
    refused = run("bench", "--from-json", str(tmp_path / "cells.json"))
    assert isinstance(refused.exception, InvalidInputError), refused.exception
    assert told in str(refused.exception) and "cells.json" in str(refused.exception)


def test_bench_times_every_operation_on_request(small_copies):
    result = bench(*SMALL, "--operations", "all", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    expected = [operation.name for operation in DENSE.values() if operation.same_as is None]
    assert list(dict.fromkeys(row["operation"] for row in rows)) == expected
    assert all(row["results"]["torch_ref"]["us"] > 0 for row in rows)


def test_bench_prints_json_and_nothing_else_on_request(small_copies):
    result = bench(*SMALL, "--json")
    assert [cell["tokens"] for cell in json.loads(result.stdout)["rows"]] == [3, 9]


def test_bench_tells_who_is_not_timed_and_why(small_copies):
    result = run("bench", "--device", "cpu", *SMALL)
    assert result.exit_code == 0, result.output
    assert "not timed: vllm: vllm is not installed." in result.stdout


def test_bench_shows_a_wrong_result_as_an_error(small_copies, monkeypatch):
    from lora_backends.torch_ref import TorchRefBackend

    right = TorchRefBackend.run_linear

    def wrong(self, x, weights, plan, y):
        return right(self, x, weights, plan, y).mul_(1.1)

    monkeypatch.setattr(TorchRefBackend, "run_linear", wrong)
    result = bench(*SMALL)
    assert result.exit_code == 0
    assert "| error |" in result.stdout.replace("  ", "") or "error |" in result.stdout
    assert "WrongResultError: wrong result" in result.stdout


def test_bench_keeps_what_it_has_when_it_is_interrupted(small_copies, monkeypatch, tmp_path):
    import importlib

    measuring = importlib.import_module("lora_backends.bench.measure")
    right = measuring.time_contenders

    def interrupted(contenders, work):
        if work.batch.num_tokens == 9:
            raise KeyboardInterrupt
        return right(contenders, work)

    monkeypatch.setattr(measuring, "time_contenders", interrupted)
    file = tmp_path / "bench.json"
    result = bench(*SMALL, "--output", file)
    assert result.exit_code == 130
    assert f"interrupted after 1 cells; they are in {file}" in result.stderr
    assert json.loads(file.read_text())["complete"] is False and "torch_ref" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--preset", "lama3-8b"], "did you mean 'llama3-8b'"),
        (["--device", "banana"], "no such device"),
        (["--config-json", "nowhere.json"], "cannot read nowhere.json"),
        (["--output", "."], "is a folder"),
        (["--output", "/proc/none/bench.json"], "cannot write to /proc/none"),
        (["--plot", "/proc/none"], "nothing has been measured"),
        (["--from-json", "nowhere.json"], "cannot read nowhere.json"),
        (["--from-json", "some.json", "--tokens", "3"], "--from-json measures nothing"),
        (["--mixes", "skew"], "did you mean 'skewed'"),
        (["--adapters", "9" * 5000], "adapters is not a list of sizes"),
        (["--tokens", "1,2147483648"], "allowed: 1 to 2147483647 each"),
        (["--in-features", "9" * 4000, "--output-slices", "8"], "sizes from 1 to 2147483647"),
    ],
)
def test_bench_refuses_what_it_cannot_do_before_it_measures(arguments, told, monkeypatch):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")

    measuring = importlib.import_module("lora_backends.bench.measure")
    monkeypatch.setattr(measuring, "measure_limits", lambda *_: pytest.fail("measured"))
    result = run("bench", *arguments)
    assert isinstance(result.exception, InvalidInputError)
    assert told in str(result.exception)


def test_bench_plots_need_a_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("bench", "--plot", str(tmp_path))
    assert "pip install 'lora-backends[bench]'" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["tritn"], "did you mean 'triton'"),
        (["torch_ref"], "has no tiles to tune"),
        (["triton", "--device", "cpu"], "tune measures on a GPU"),
        (["triton", "--budget", "soon"], "allowed: e.g. 90s, 5m, 1h"),
    ],
)
def test_tune_refuses_what_it_cannot_measure(arguments, told):
    result = run("tune", *arguments)
    assert isinstance(result.exception, LoRABackendError) and told in str(result.exception)
    assert result.stdout == ""


@pytest.fixture
def tuning(monkeypatch, tmp_path):
    """Let `tune` run on made-up times: the tuned sizes take a third less."""
    import torch

    from lora_backends.bench.cells import Cell
    from lora_backends.bench.tune import Tuning, make_points

    class Lab:
        def prepare(self, tiles):
            return None

        def sample(self, tiles):
            return 20.0 if tiles.shrink.num_warps == 8 else 30.0

        def keep(self, kept):
            pass

    points = make_points([Cell("o", 64, (64,), 16, 8, 16)], torch.bfloat16)
    path = tmp_path / "t.json"
    job = Tuning("triton", torch.device("cpu"), torch.bfloat16, points, path, 60)
    command = importlib.import_module("lora_backends.cli.tune")  # the package's name is a function
    monkeypatch.setattr(command, "make_tuning", lambda *_, **__: job)
    monkeypatch.setattr("lora_backends.bench.tune_gpu.gpu_lab", lambda _: lambda _: Lab())
    return job


def test_tune_prints_the_gain_of_the_table_and_its_path(tuning):
    result = run("tune", "triton")
    assert result.exit_code == 0, result.output
    assert "1.500 times as fast as the rules" in result.stdout
    assert f"written to {tuning.path}" in result.stdout
    assert tuning.path.exists() and "\x1b" not in result.stdout


def test_tune_interrupted_says_what_is_kept(tuning, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lora_backends.bench.tune_gpu.gpu_lab", interrupted)
    result = run("tune", "triton")
    assert result.exit_code == 130
    assert f"{tuning.path} has the results so far" in result.output.replace("\n", "")


@pytest.mark.parametrize("backend", ["triton", "csgmv", "torch_ref", "numba_cpu"])
def test_explain_draws_in_the_terminal_and_to_a_file(tmp_path, backend):
    svg = tmp_path / "batch.svg"
    result = run(
        "explain", "--slots", "2,-1,0,2,2", "--ranks", "16,16,8", "--backend", backend,
        "--svg", str(svg),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"{backend}, run_linear: 5 tokens" in result.stdout
    assert "kernel order: 2 0 3-4" in result.stdout and "shrink" in result.stdout
    assert "\x1b" not in result.stdout and result.stdout.isascii()
    assert svg.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "which batch"),
        (["--slots", "0", "--backend", "tritn"], "did you mean 'triton'"),
        (["--slots", "0", "--svg", "/nowhere/at/all.svg"], "cannot write"),
        (["--slots", "0", "--ranks", "3,4"], "one for each of 1 slots"),
    ],
)
def test_explain_refuses_what_it_cannot_draw(arguments, told):
    result = run("explain", *arguments)
    assert isinstance(result.exception, InvalidInputError) and told in str(result.exception)
