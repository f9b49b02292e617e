"""Consoles, progress and tables of the commands; plain text when piped."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress

from rich import box
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 110
INTERRUPTED = 130
"""Exit status of a command that the user interrupts."""


def output() -> Console:
    """Return the console of standard output: no colour and a fixed width when piped."""
    console = Console(highlight=False, emoji=False)
    # Rich would take 80 columns, and wrap tables that a script reads
    return console if console.is_terminal else Console(width=PIPED_WIDTH, highlight=False)


def note(text: str) -> None:
    """Print a line to standard error as it is."""
    Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)


@contextmanager
def output_of_plugins_aside(wanted: bool = True) -> Iterator[None]:
    """Send to standard error all that is printed, by Python, C or a write to descriptor 1."""
    if not wanted:
        yield
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of both is closed: nothing written there can be seen
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            with suppress(OSError, TypeError, AttributeError):  # a system without a shared libc
                ctypes.CDLL(None).fflush(None)  # printf keeps its text until then
            os.dup2(kept, 1)
            os.close(kept)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Show on standard error that `what` is running, then how long it took."""
    console = Console(stderr=True, highlight=False)
    start = time.perf_counter()
    with console.status(f"{what} ..."):
        yield
    console.print(f"{what}: {time.perf_counter() - start:.1f} s", style="dim", markup=False)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], lines: bool = True
) -> None:
    """Print a table; a column whose name starts with ">" is aligned to the right."""
    console = output()
    # pipes and files may have an encoding without box characters
    style = box.ROUNDED if console.is_terminal else box.ASCII
    view = Table(title=title or None, box=style, title_justify="left", show_lines=lines)
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        view.add_column(column.removeprefix(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        # Rich takes brackets for markup
        view.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(view)
