"""Consoles, progress and tables of the commands; plain text when piped."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress

from rich import box
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 110
LOG_SECONDS = 10.0
"""Seconds between two lines of a log about a running step."""
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


class Progress:
    """Shows a running step: an animated line on a terminal, a line every so often in a log."""

    def __init__(self, what: str, console: Console) -> None:
        self._what, self._console, self._text = what, console, "still running"
        self._status = console.status(f"{what} ...") if console.is_terminal else None
        self._start, self._over = time.perf_counter(), threading.Event()

    def note(self, text: str) -> None:
        """Show how far the step has come."""
        self._text = text
        if self._status is not None:
            self._status.update(f"{self._what}: {text} ...")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the line while the block prints to the same terminal."""
        if self._status is not None:
            self._status.stop()
        yield
        if self._status is not None:
            self._status.start()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the step until the block ends, and then the time that it took."""
        if self._status is None:
            self._log(" ...")
            threading.Thread(target=self._beat, daemon=True).start()
        try:
            with self._status or nullcontext():
                yield
        finally:
            self._over.set()
        self._log(f": {time.perf_counter() - self._start:.1f} s")

    def _beat(self) -> None:
        while not self._over.wait(LOG_SECONDS):
            self._log(f": {self._text}, {time.perf_counter() - self._start:.0f} s ...")

    def _log(self, text: str) -> None:
        self._console.print(f"{self._what}{text}", style="dim", markup=False)


@contextmanager
def step(what: str) -> Iterator[Progress]:
    """Show on standard error that `what` is running, then how long it took."""
    progress = Progress(what, Console(stderr=True, highlight=False))
    with progress.shown():
        yield progress


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
