"""Paths that a user names and files that a stranger wrote: typed errors, and no endless waiting."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from lora_backends.errors import InvalidInputError, shown

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
# Code that a reader of files calls; torch, safetensors and numpy belong to readers of tensors.
_READERS = sys.stdlib_module_names | {"lora_backends", "numpy", "safetensors", "torch"}

TEXT_BYTES = 2**24
"""The largest file of settings that is read."""


def as_path(path: object, meaning: str) -> Path:
    """Return a path with "~" expanded; `meaning` is for the error: "the folder of a checkpoint".

    Raises:
        InvalidInputError: another type, a NUL byte, or the home of an unknown user.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInputError(
            f"{meaning} is no path\n  given: {shown(path)}\n  allowed: a str or a Path"
        )
    # __fspath__ of a PathLike may return bytes
    text = os.fspath(path)
    if not isinstance(text, str) or "\0" in text:
        raise InvalidInputError(
            f"{meaning} is no path\n  given: {shown(text)}\n  allowed: text without NUL bytes"
        )
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidInputError(
            f"{meaning} is in the home of a user that is not known\n  given: {shown(text)}\n"
            f"  to do: write the path without ~"
        ) from error


def kind_of(path: Path) -> str | None:
    """Return what is at a path, "a file" for instance, or None; refuse what is hidden."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return _kind(mode)


def new_file(place: object, meaning: str) -> Path:
    """Return the path of a file to be written; it may exist.

    Raises:
        InvalidInputError: no path, or one that leads to something else: opening a FIFO waits for a
            reader, and a device would be replaced by a file.
    """
    path = as_path(place, meaning)
    kind = kind_of(path)
    if kind not in (None, "a file"):
        raise InvalidInputError(
            f"{meaning}: {_text(path)} is {kind}\n  allowed: a file, or none yet"
        )
    return path


TooLarge: TypeAlias = Callable[[Path, int], InvalidInputError]
"""Makes the error for a file from its path and its bytes."""


def read_bytes(path: Path, limit: int, too_large: TooLarge) -> bytes:
    """Return the content of a regular file, at most `limit` bytes, read once into memory.

    Nothing stays mapped, so a file that is cut off later cannot end the process. `too_large` makes
    the error for a file beyond the limit.

    Raises:
        InvalidInputError: no such file, a folder, FIFO or device, too large, not readable, or
            changed while it was read.
    """
    _check_is_file(path, kind_of(path) or "no such file")
    try:
        # O_NONBLOCK: a FIFO that has just replaced the file is opened without waiting for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _check_is_file(path, _kind(status.st_mode))
            if status.st_size > limit:
                raise too_large(path, status.st_size)
            content = file.read(status.st_size + 1)
    except OSError as error:
        if is_from_outside(error):
            raise
        raise unreadable(path, error) from error
    if len(content) != status.st_size:
        raise InvalidInputError(
            f"a file changed while it was read\n  file: {path}\n"
            f"  given: {status.st_size} bytes at first, then {len(content)} or more\n"
            f"  allowed: a file that stays as it is\n  to do: read it when it is complete"
        )
    return content


def read_text(path: Path) -> str:
    """Return the content of a small UTF-8 file, e.g. of settings, as `read_bytes` does."""
    content = read_bytes(path, TEXT_BYTES, _no_settings)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"a file is not text\n  file: {path}\n  given: {error}\n  allowed: UTF-8"
        ) from error


def is_from_outside(error: BaseException) -> bool:
    """Return whether an error was raised by code that no reader calls: the handler of a signal."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))
    # such an error interrupts the reading and says nothing about the file
    return module.partition(".")[0] not in _READERS


def unreadable(path: Path, error: Exception) -> InvalidInputError:
    """Return the error for a path that the system does not let us read."""
    reason = getattr(error, "strerror", None) or str(error)
    return InvalidInputError(
        f"cannot read {_text(path)}\n  given: {type(error).__name__}: {reason}\n"
        f"  allowed: a file that this user may read\n  to do: correct the path or its permissions"
    )


def _no_settings(path: Path, size: int) -> InvalidInputError:
    return InvalidInputError(
        f"cannot read {_text(path)}\n  given: {size} bytes\n"
        f"  allowed: a file of settings, at most {TEXT_BYTES} bytes"
    )


def _check_is_file(path: Path, kind: str) -> None:
    if kind != "a file":
        raise InvalidInputError(
            f"cannot read {_text(path)}\n  given: {kind}\n  allowed: a regular file"
        )


def _text(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() and len(text) <= 500 else shown(text)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")
