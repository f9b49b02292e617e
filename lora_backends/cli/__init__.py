"""The `lora-backends` command: one file per subcommand."""

from __future__ import annotations

import sys

import typer

from lora_backends.cli.bench import bench
from lora_backends.cli.explain import explain
from lora_backends.cli.generate import generate
from lora_backends.cli.list import list_backends
from lora_backends.cli.tune import tune
from lora_backends.cli.verify import verify
from lora_backends.errors import LoRABackendError

app = typer.Typer(
    name="lora-backends",
    help="Multi-LoRA compute: every row of a batch its own adapter, on the engine of your choice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_backends)
app.command("explain")(explain)
app.command("generate")(generate)
app.command("tune")(tune)
app.command("verify")(verify)
app.command("bench")(bench)


def main() -> None:
    """Run the command; an error of the library is printed without a traceback, status 2."""
    try:
        app()
    except LoRABackendError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
