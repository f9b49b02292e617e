"""The generated parts of the reference: tables of class data, settings and the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import griffe
from typer.cli import app as typer_cli
from typer.testing import CliRunner

from lora_backends import LoRABackend, backend_names
from lora_backends.cli import COMMANDS
from lora_backends.common.names import ENV_PREFIX
from lora_backends.dtypes import dtype_name
from lora_backends.selection.registry import backend_class

ROOT = Path(__file__).resolve().parents[1]
HELP_OPTION = "* `--help`: Show this message and exit.\n"


def backend_list() -> str:
    """Return a line per backend, in the order of "auto": its devices and how it works."""
    found = _own_backends().items()
    order = sorted(found, key=lambda item: -max(item[1].auto_priority.values(), default=0))
    rows = [[f"`{name}`", ", ".join(cls.auto_priority), _first_line(cls)] for name, cls in order]
    return table(["backend", "devices", "how it works"], rows)


def support() -> str:
    """Return the properties of every backend of the library, a column each."""
    found = _own_backends()
    rows = {
        "devices": [", ".join(cls.device_types) for cls in found.values()],
        '"auto" priority': [_priorities(cls) for cls in found.values()],
        "dtypes": [", ".join(map(dtype_name, cls.dtypes)) for cls in found.values()],
        "deterministic": [_promise(cls, "deterministic") for cls in found.values()],
        "batch-invariant": [_promise(cls, "batch_invariant") for cls in found.values()],
        "CUDA graphs": [_yes(cls.cuda_graphs) for cls in found.values()],
        "differentiable": [_yes(cls.differentiable) for cls in found.values()],
        "narrow h": [_yes(cls.narrow_intermediate) for cls in found.values()],
        "options": [_options(cls) for cls in found.values()],
    }
    return table(["", *(f"`{name}`" for name in found)], [[k, *v] for k, v in rows.items()])


def backends() -> str:
    """Return the reference of every backend's class: its options and further members."""
    entries = []
    for name, cls in _own_backends().items():
        own = [n for n in vars(cls) if not (n.startswith("_") or hasattr(LoRABackend, n))]
        options = f"    options:\n      members: [{', '.join(own)}]"
        entries.append(f"## `{name}`\n\n::: {cls.__module__}.{cls.__name__}\n{options}")
    return "\n\n".join(entries)


def configuration() -> str:
    """Return the fields of `LoRAConfig`."""
    rows = [
        [f"`{name}`", f"`{ENV_PREFIX}{name.upper()}`", default, meaning]
        for name, default, meaning in _fields("lora_backends.selection.config", "LoRAConfig")
    ]
    return table(["key", "variable", "default", "meaning"], rows)


def generate_configuration() -> str:
    """Return the fields that only the file of `generate` has."""
    module = "lora_backends.cli.generating.config"
    tables = (("", "GenerateConfig"), ("model.", "ModelConfig"), ("prompts.", "PromptConfig"))
    rows = [
        [f"`{prefix}{name}`", default, meaning]
        for prefix, cls in tables
        for name, default, meaning in _fields(module, cls)
    ]
    return table(["key", "default", "meaning"], rows)


def commands() -> str:
    """Return a line per command."""
    return table(["command", ""], [[f"`{name}`", line] for name, (_, line) in COMMANDS.items()])


def command_line() -> str:
    """Return every command with its options, as typer writes it."""
    arguments = ["lora_backends.cli", "utils", "docs", "--name", "lora-backends"]
    result = CliRunner().invoke(typer_cli, arguments)
    if result.exit_code != 0:
        raise RuntimeError(f"typer cannot describe the command: {result.output}")
    commands = result.output[result.output.index("\n## ") :]  # the list before cuts sentences short
    for written, wanted in (("&#x27;", "'"), ("&quot;", '"'), (HELP_OPTION, "")):
        commands = commands.replace(written, wanted)
    return commands


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a column whose name starts with ">" is aligned to the right."""
    rules = ["---:" if column.startswith(">") else "---" for column in columns]
    names = [column.removeprefix(">") for column in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, rules, *rows))


def _own_backends() -> dict[str, type[LoRABackend]]:
    """Return the backends that come with the library; installed plugins have docs of their own."""
    found = {name: backend_class(name) for name in backend_names()}
    return {k: cls for k, cls in found.items() if cls.__module__.startswith("lora_backends.")}


def _first_line(cls: type[LoRABackend]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _promise(cls: type[LoRABackend], attribute: str) -> str:
    """Return whether a backend promises something: by class, or by an option of that name."""
    option = inspect.signature(cls).parameters.get(attribute)
    if option is None:
        return _yes(getattr(cls, attribute))
    return "yes" if option.default else f"with `{attribute}=True`"


def _priorities(cls: type[LoRABackend]) -> str:
    return ", ".join(f"{kind} {number}" for kind, number in cls.auto_priority.items()) or "never"


def _options(cls: type[LoRABackend]) -> str:
    parameters = inspect.signature(cls).parameters.values()
    options = [f"`{p.name}={p.default!r}`" for p in parameters if p.name != "device"]
    return ", ".join(options) or "none"


def _fields(module: str, cls: str) -> list[tuple[str, str, str]]:
    """Return name, default and docstring of every field that a settings class adds."""
    found = griffe.load(module, search_paths=[ROOT])[cls]
    return [
        (name, _default(str(field.value)), " ".join(field.docstring.value.split()))
        for name, field in found.attributes.items()
        if name != "model_config" and not field.inherited
    ]


def _default(source: str) -> str:
    """Return a default as a reader writes it, from its source."""
    stands = re.match(r"Field\(default=([^,]+)", source)
    if stands:
        source = stands[1]
    elif source.startswith("Field(default_factory="):
        return "empty"
    elif source.startswith("Field("):
        return "required"
    known = {"AUTO": '"auto"', "'auto'": '"auto"', "True": "true", "False": "false"}
    return "none" if source == "None" else f"`{known.get(source, source)}`"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
