"""Finds the adapters in a folder, and tells whether their files have changed."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.common.files import kind_of, unreadable
from lora_backends.errors import InvalidInputError

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""For each file of an adapter: name, mtime and ctime in ns, size and inode number.

`mv` and `rsync` keep the mtime of a file, but not its ctime.
"""

TICK_S = 0.01
"""The longest tick of Linux' timer in seconds: writes in one tick give a file the same times."""

_FILES = re.compile(r"adapter_(config\.json|model.*)$")


def adapter_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of adapters in a readable `folder` by name, sorted; none hidden."""
    kind = kind_of(folder)
    if kind != "a folder":
        raise InvalidInputError(
            f"{folder} is no folder of adapters\n  given: {kind or 'nothing there'}\n"
            f"  allowed: a folder with a folder for each adapter, as PEFT's save_pretrained writes"
        )
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if not e.name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error
    return {name: folder / name for name in names if (folder / name / CONFIG_FILE).is_file()}


def stamp_of(folder: Path) -> Stamp | None:
    """Return a stamp that differs if the files of an adapter differ; None if it has no files."""
    try:
        with os.scandir(folder) as entries:
            files = [(e.name, e.stat()) for e in entries if _FILES.match(e.name)]
    except FileNotFoundError:  # the folder, or a file that has just gone
        return None
    except OSError as error:
        raise unreadable(folder, error) from error
    # `os.scandir` returns entries in any order.
    stamps = sorted(
        (name, s.st_mtime_ns, s.st_ctime_ns, s.st_size, s.st_ino)
        for name, s in files
        if stat.S_ISREG(s.st_mode)
    )
    return tuple(stamps) or None


@contextmanager
def unchanged(folder: Path) -> Iterator[Stamp | None]:
    """Raise InvalidInputError if an adapter's files change in the block; yields their stamp."""
    before = stamp_of(folder)
    # A second write in the same tick would not change the stamp, so wait for the next tick.
    while before is not None and 0 <= (age := time.time() - newest(before)) < TICK_S:
        time.sleep(TICK_S - age)
        before = stamp_of(folder)
    yield before
    if stamp_of(folder) != before:
        raise InvalidInputError(
            f"the files of {folder} changed while they were read\n"
            f"  to do: load it when they are complete"
        )


def newest(stamp: Stamp) -> float:
    """Return when the last of the files changed, in seconds as `time.time` counts."""
    return max(max(mtime, ctime) for _, mtime, ctime, _, _ in stamp) / 1e9
