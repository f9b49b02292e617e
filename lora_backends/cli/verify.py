"""`lora-backends verify`: the conformance suite against one backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lora_backends.cli.console import output, output_of_plugins_aside
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.selection.choice import get_backend
from lora_backends.selection.option_text import read_options

if TYPE_CHECKING:
    from lora_backends.backend import LoRABackend
    from lora_backends.testing import Property, PropertyResult, Report

_COLOURS = {"passed": "green", "failed": "bold red", "not applicable": "dim"}


def verify(
    name: Annotated[str, typer.Argument(help="A registered backend.")],
    device: Annotated[
        str | None, typer.Option(help="Where it runs; default: the best device here.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Backend option; repeatable.")
    ] = None,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Larger cases, and eight times as many.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of all cases; default: 0.")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", help="Run this property alone; may be repeated."),
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Run --property on this case alone: an expression from a report."),
    ] = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop after the first property that fails.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check that a backend computes what the interface says; exit status 1 if it does not.

    A property that fails is reported with the smallest case found, what differs, and the command
    that repeats it.
    """
    flags = {"--thorough": thorough, "--seed": seed is not None, "--fail-fast": fail_fast}
    if case is not None and any(flags.values()):
        raise InvalidInputError(
            f"--case runs one given case\n  given: {', '.join(f for f in flags if flags[f])}\n"
            f"  allowed beside it: --property, --device, --option, --json"
        )
    with output_of_plugins_aside(as_json):
        backend = get_backend(name, device=device, **read_options(option or ()))
        if case is not None:
            report = _one_case(backend, properties or [], case)
            show = None if as_json else _Progress(1)
            if show:
                show.finished(report.results[0])
        else:
            report = _all_cases(backend, thorough, seed or 0, properties, fail_fast, as_json)
    if as_json:
        typer.echo(report.to_json())
    else:
        _print_end(report)
    raise typer.Exit(0 if report.passed else 1)


def _testing() -> Any:
    """Return `lora_backends.testing`; it needs Hypothesis, which the library itself does not."""
    try:
        import lora_backends.testing as testing
    except ModuleNotFoundError as error:
        raise UnsupportedInputError(
            f"verify needs a package that is not installed: {error.name}\n"
            f"  to do: pip install 'lora-backends[test]'"
        ) from error
    return testing


def _all_cases(
    backend: LoRABackend,
    thorough: bool,
    seed: int,
    only: list[str] | None,
    fail_fast: bool,
    quiet: bool,
) -> Report:
    testing = _testing()
    show = _Progress(len(only or testing.properties()), quiet)
    with show.status:
        report: Report = testing.verify(
            backend,
            profile="thorough" if thorough else "default",
            seed=seed,
            only=only,
            fail_fast=fail_fast,
            progress=show,
        )
    return report


def _one_case(backend: LoRABackend, names: list[str], text: str) -> Report:
    if len(names) != 1:
        raise InvalidInputError(
            f"--case goes with one --property\n  given: {', '.join(names) or 'none'}"
        )
    testing = _testing()
    report: Report = testing.check_case(backend, names[0], testing.case_from(text))
    return report


class _Progress:
    """A line per finished property; a terminal also shows the running one, on standard error."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        stderr = Console(stderr=True, highlight=False)
        # a status line in a log file would be noise
        self._live = stderr.is_terminal
        self._quiet = quiet
        self._total, self._begun = total, 0
        self._output = output()
        self.status: Any = stderr.status("drawing cases") if self._live else nullcontext()

    def __call__(self, prop: Property, result: PropertyResult | None) -> None:
        if result is not None:
            self.finished(result)
            return
        self._begun += 1
        if self._live:
            self.status.update(f"{self._begun}/{self._total} {prop.name}")

    def finished(self, result: PropertyResult) -> None:
        """Print the line of one property."""
        from lora_backends.testing.report import result_line

        if not self._quiet:
            self._output.print(
                result_line(result), style=_COLOURS[result.status], markup=False, soft_wrap=True
            )


def _print_end(report: Report) -> None:
    """Print every failure, then the summary."""
    from lora_backends.testing.report import failure_text

    for result in report.failures:
        typer.echo(failure_text(result))
    output().print(report.summary(), markup=False, soft_wrap=True)
