"""Ends a command after the reader of its output has gone, as `head` does after its last line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READER_GONE = 141
"""Exit status, as of a program that SIGPIPE ends."""


class _ReaderGone(BaseException):
    """A BaseException: for an Exception, Rich and click end with status 1, a failed check."""


class _Piped:
    """A stream whose own broken pipe raises `_ReaderGone`."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        """Write as the stream does."""
        try:
            return self._stream.write(text)
        except BrokenPipeError as error:
            raise _ReaderGone from error

    def flush(self) -> None:
        """Flush as the stream does."""
        try:
            self._stream.flush()
        except BrokenPipeError as error:
            raise _ReaderGone from error


@contextmanager
def end_without_reader() -> Iterator[None]:
    """End the process with status `READER_GONE` once its output or its errors have no reader."""
    sys.stdout, sys.stderr = (  # None where it was closed
        None if stream is None else _Piped(stream) for stream in (sys.stdout, sys.stderr)
    )
    try:
        yield
    except _ReaderGone:
        sys.stdout = sys.stderr = None  # else Python tries again to write the rest
        raise SystemExit(READER_GONE) from None
