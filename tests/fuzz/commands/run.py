"""Runs one random configuration or command line, and judges its result or its message."""

import io
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub

from lora_backends import LoRABackendError, LoRAConfig
from lora_backends import cli as command_line
from lora_backends.adapters import LoadLimits
from lora_backends.bench.job import BenchRun
from lora_backends.cli.generating.config import GenerateConfig
from lora_backends.testing import suite

from ..running import Ran, RunCase, ending_hangs, fault_of_message, untyped
from .cases import CommandCase, bench_result
from .configs import ConfigCase

CONFIG_SHARE = 0.5
STATUSES = {0: "done", 1: "done, status 1", 2: "refused"}


@contextmanager
def opened(seed: int) -> Iterator[RunCase]:
    """Yield a function that runs one case in a folder of its own."""
    home, environment = os.getcwd(), dict(os.environ)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.object(BenchRun, "run", _measure_nothing))
        stack.enter_context(mock.patch.object(suite, "_run_cases", lambda _: None))
        stack.enter_context(mock.patch.object(suite, "_run_machine", lambda _: None))
        stack.enter_context(mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
        model = Model(root / "model")

        def run(number: int) -> Ran:
            draw = random.Random(f"{seed}/{number}")
            folder = root / "case"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            os.chdir(folder)
            try:
                if draw.random() < CONFIG_SHARE:
                    return _configure(ConfigCase(draw, draw.random() < 0.5), folder)
                return _execute(CommandCase(folder, draw), model)
            finally:
                os.chdir(home)
                os.environ.clear()
                os.environ.update(environment)

        yield run


def _measure_nothing(
    job: BenchRun, path: Any, notify: Any, result: dict[str, Any]
) -> dict[str, Any]:
    result |= bench_result(random.Random(0))
    return result


class Model:
    """A tiny model and an adapter, saved when a case asks for them first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, case: CommandCase) -> None:
        """Link them into the folder of a case whose command line names them."""
        for name in ("model", "adapter"):
            if any(word in (name, f"a={name}") for word in case.arguments):
                self._save()
                (case.folder / name).symlink_to(self.folder / name)

    def _save(self) -> None:
        if self.folder.exists():
            return
        import peft
        import tokenizers
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        transformers.logging.disable_progress_bar()
        model.save_pretrained(self.folder / "model")
        words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
        vocabulary = {word: number for number, word in enumerate(words)}
        levels = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
        tokenizer = tokenizers.Tokenizer(levels)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(self.folder / "model")
        lora = peft.LoraConfig(r=2, target_modules="all-linear")
        peft.get_peft_model(model, lora).save_pretrained(self.folder / "adapter")


def _configure(case: ConfigCase, folder: Path) -> Ran:
    """Make a configuration from a case's file, environment and arguments."""
    kind, steps = GenerateConfig if case.job else LoRAConfig, ["config", *case.steps]
    path = folder / "lora.toml"
    path.write_bytes((case.text or "").encode("utf-8", "surrogatepass"))
    os.environ.update(case.environment)
    try:
        with ending_hangs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = kind.from_file(path, **case.arguments)
    except LoRABackendError as error:
        fault = fault_of_message(str(error))
        if case.expected is not None:
            fault = f"a valid configuration is refused: {error}"
        return Ran(f"config refused: {type(error).__name__}", fault, steps)
    except TypeError as error:  # what Python says of names that no caller can pass by keyword
        if any(not isinstance(name, str) or name in ("path", "cls") for name in case.arguments):
            return Ran("config: no keyword", None, steps)
        return untyped(error, steps)
    except BaseException as error:
        return untyped(error, steps)
    return Ran("config made", _fault_of_config(case.expected, found), steps)


def _fault_of_config(expected: dict[str, Any] | None, found: LoRAConfig) -> str | None:
    """Return what differs from the strongest source of each field."""
    if expected is None:
        return None
    wanted = expected | {
        "limits": LoadLimits(**expected["limits"]),
        "adapters": {name: Path(folder) for name, folder in expected["adapters"].items()},
    }
    given = {name: getattr(found, name) for name in wanted}
    wrong = {name for name in wanted if given[name] != wanted[name]}
    return "; ".join(f"{name} is {given[name]!r}, not {wanted[name]!r}" for name in wrong) or None


def _execute(case: CommandCase, model: Model) -> Ran:
    """Run a command line as the installed command does; return its status, or what it raised."""
    steps = [" ".join(case.argv)[:300], *case.steps]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    case.arguments = [word.replace("\0", "") for word in case.arguments]  # no process takes them
    model.place(case)
    os.environ.update(case.environment)
    try:
        with (
            ending_hangs(),
            warnings.catch_warnings(),
            mock.patch.object(sys, "argv", case.argv),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            warnings.simplefilter("ignore")
            command_line.main()
        status: Any = 0
    except SystemExit as error:
        status = error.code or 0
    except BaseException as error:
        return untyped(error, steps)
    told = _text(err)
    outcome = f"{case.command}: {STATUSES.get(status, f'status {status}')}"
    if status not in STATUSES:
        return Ran(outcome, f"ended with status {status}: {told[-600:]}", steps)
    if case.valid and status != 0:
        return Ran(outcome, f"a valid command line ended with {status}: {told[-600:]}", steps)
    if status == 0 or told.startswith("Usage:"):  # the latter repeats what was given, at length
        return Ran(outcome, None, steps)
    return Ran(outcome, fault_of_message(told), steps)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer: Any = stream.buffer
    return bytes(buffer.getvalue()).decode("utf-8", "backslashreplace")
