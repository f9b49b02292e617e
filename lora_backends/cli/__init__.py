"""The `lora-backends` command: one file per subcommand, imported when it runs."""

from __future__ import annotations

import io
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lora_backends.cli.pipes import end_without_reader
from lora_backends.errors import LoRABackendError

COMMANDS = {
    "list": ("list_backends", "List every registered backend, and whether it runs here."),
    "explain": ("explain", "Draw how a backend cuts a batch for a layer."),
    "generate": ("generate", "Answer prompts in one batch, every row with its own adapter."),
    "agree": ("agree", "Compare a training forward with generate, token by token."),
    "adapters": ("adapters", "List the PEFT adapters in a folder."),
    "tune": ("tune", "Search tile sizes on this GPU, and write them to a table."),
    "verify": ("verify", "Check that a backend computes what the interface says."),
    "plan": ("plan", "Say how many adapters fit on how many cards, and how long requests wait."),
    "bench": ("bench", "Time backends side by side, and against what the device allows."),
}
"""Name of a subcommand, which is its module's, to its function and one line of help."""


class Commands(TyperGroup):
    """Imports a subcommand only to run or describe it: most of them import torch, for seconds."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()
        }
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a subcommand; while they are listed, its name and its line of help."""
        if self._listing or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        module = import_module(f"lora_backends.cli.{cmd_name}")
        # typer makes a command only of a whole app
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(module, COMMANDS[cmd_name][0]))
        return typer.main.get_command(single)

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; click alone would end without a message where a pipe is broken."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # of another file than those of `end_without_reader`
            raise LoRABackendError(str(error)) from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help of the group itself."""
        # click asks `get_command` for every name while it prints the help
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    name="lora-backends",
    cls=Commands,
    help="Multi-LoRA compute: every row of a batch its own adapter, on the engine of your choice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"lora-backends {version('lora-backends')}")
        except PackageNotFoundError:
            # run from a checkout
            typer.echo("lora-backends, not installed as a package")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Multi-LoRA compute: every row of a batch its own adapter, on the engine of your choice."""


def main() -> None:
    """Run the command; an error of the library is printed without a traceback, status 2.

    So is an output that cannot be written, e.g. because the disk is full. Where its reader has
    gone, as `head` goes after its last line, the command ends with status 141.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and answers need not fit its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    with end_without_reader():
        _run()


def _run() -> None:
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # it is None where it was closed
                sys.stdout.flush()
    except LoRABackendError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    # e.g. a full disk at the last flush
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.stdout = None  # else Python tries again to write the rest
        raise SystemExit(2) from error
