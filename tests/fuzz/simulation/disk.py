"""Folders of adapters whose reads may be torn or fail, with the times of the simulation's clock."""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .adapters import CONFIG, WEIGHTS
from .threads import Simulation

FilesOf = Callable[[str, int], dict[str, bytes]]  # of a name and a version: contents by file

GRAIN = 0.004
"""Seconds between two times that a file can have: Linux writes the time of its last timer tick."""

READ_ERRORS, TEARS = 0.01, 0.1
"""How likely a read fails, and a file changes while it is read."""


class Disk:
    """The folders of all adapters.

    Args:
        simulation: that runs.
        root: a real folder, where the files are.
        files_of: returns the files of a version.
    """

    def __init__(self, simulation: Simulation, root: Path, files_of: FilesOf) -> None:
        self._sim, self.root, self._files_of = simulation, root, files_of
        self._stats: dict[str, tuple[int, int]] = {}  # path to its time in ns and its inode
        self._next: dict[str, int] = {}  # name to its newest version
        self.versions: dict[str, int | None] = {}  # name to the version of its files, if whole
        self.newest: dict[str, int] = {}  # name to the version written last, even in part
        self.is_faulty = True
        self.on_write = lambda name, version: None

    def new_version(self, name: str) -> int:
        """Return a number that no version of a name has had."""
        self._next[name] = self._next.get(name, -1) + 1
        return self._next[name]

    def folder(self, name: str) -> Path:
        return self.root / name

    def save(self, name: str, version: int, how: str) -> None:
        """Write a version of an adapter: all files at once, file by file, or with one cut off."""
        folder = self.folder(name)
        folder.mkdir(exist_ok=True)
        self._begin_write(name, version)
        for file, content in self._files_of(name, version).items():
            path = folder / file
            if how == "moved":
                self._put(path, content, new=True)
            else:
                for end in (0, len(content) // 2, len(content)):
                    self._put(path, content[:end])
                    self._sim.pause("written")
                    if how == "cut off" and file == WEIGHTS and end:
                        return
        self.versions[name] = version

    def remove(self, name: str) -> None:
        """Delete the files of an adapter."""
        self.versions[name] = None
        for file in (CONFIG, WEIGHTS):
            (self.folder(name) / file).unlink(missing_ok=True)
            self._sim.pause("deleted")

    @contextlib.contextmanager
    def scandir(self, folder: Path) -> Iterator[list[Any]]:
        """List a folder as `os.scandir`, with the times of the simulation."""
        self._sim.pause("scandir")
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
        yield [SimpleNamespace(name=n, stat=lambda n=n: self._stat(Path(folder, n))) for n in names]

    def open(self, path: Path, flags: int) -> int:
        """Open a file as `os.open`."""
        self._sim.pause("open")
        if self.is_faulty and self._sim.draw.random() < READ_ERRORS:
            self._sim.seen.add("failed read")
            raise OSError(5, "Input/output error")
        descriptor = os.open(path, flags)
        self._opened = descriptor, path
        return descriptor

    def read(self, path: Path, file: Any, size: int) -> bytes:
        """Read a file; another program may write it in place meanwhile."""
        self._sim.pause("read")
        content: bytes = file.read(size)
        name = path.parent.name
        version = self.versions.get(name)
        if (
            self.is_faulty
            and path.name == WEIGHTS
            and version is not None
            and self._sim.draw.random() < TEARS
        ):
            new = self.new_version(name)
            written = self._files_of(name, new)[WEIGHTS]
            if len(written) == len(content):
                self._begin_write(name, new)
                self._put(path, written)
                self.versions[name] = new
                self._sim.seen.add("torn read")
                place = self._sim.draw.randrange(len(content))
                content = content[:place] + written[place:]
        return content

    def opener(self) -> Any:
        """Return the replacement of `open` for descriptors."""

        @contextlib.contextmanager
        def opened(descriptor: int, mode: str) -> Iterator[Any]:
            _, path = self._opened
            with open(descriptor, mode) as file:
                yield SimpleNamespace(read=lambda size: self.read(path, file, size))

        return opened

    def _begin_write(self, name: str, version: int) -> None:
        self.versions[name], self.newest[name] = None, version
        self._sim.tell(f"write version {version} of {name}")
        self.on_write(name, version)

    def _put(self, path: Path, content: bytes, new: bool = False) -> None:
        inode = self._stats.get(str(path), (0, 0))[1]
        if new:  # file systems reuse the inode of a deleted file
            temporary = path.with_suffix(".new")
            temporary.write_bytes(content)
            temporary.replace(path)
            inode = (inode + 1) % 2
        else:
            path.write_bytes(content)
        self._stats[str(path)] = int(self._sim.now / GRAIN) * int(GRAIN * 1e9), inode

    def _stat(self, path: Path) -> Any:
        real = os.stat(path)
        ns, inode = self._stats[str(path)]
        return SimpleNamespace(
            st_mtime_ns=ns, st_ctime_ns=ns, st_size=real.st_size, st_ino=inode, st_mode=stat.S_IFREG
        )
