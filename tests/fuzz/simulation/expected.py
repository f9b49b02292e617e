"""The versions of adapters that a row may get after what the threads have done."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class Change:
    """A running operation that gives a name another adapter."""

    name: str
    versions: set[int]  # it gives one of them
    from_files: bool  # whether it reads the files, which may change meanwhile
    begun: int  # time of its start


class Expected:
    """The versions of each adapter that a row may get after the operations so far.

    An operation that has succeeded rules out the versions that were offered before it began,
    except those of operations that run at the same time.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._offered: dict[str, dict[int, int]] = {name: {} for name in names}  # version to when
        self._changes: list[Change] = []
        self._calls: list[dict[str, set[int]]] = []
        self._count = 0

    def offer(self, name: str, version: int) -> None:
        """Allow a version from now on, also in running calls."""
        self._count += 1
        self._offered[name][version] = self._count
        for allowed in self._calls:
            allowed[name].add(version)

    def write(self, name: str, version: int) -> None:
        """Record that some files of a name have a version from now on."""
        self.offer(name, version)
        for change in self._changes:
            if change.name == name and change.from_files:
                change.versions.add(version)

    def open(self) -> dict[str, set[int]]:
        """Return the versions that a new call may get, kept up to date until `close`."""
        allowed = {name: set(versions) for name, versions in self._offered.items()}
        self._calls.append(allowed)
        return allowed

    def close(self, allowed: dict[str, set[int]]) -> None:
        self._calls = [each for each in self._calls if each is not allowed]

    def begin(self, name: str, version: int | None, from_files: bool) -> Change:
        """Begin to give a name a version, or that of its files."""
        change = Change(name, set() if version is None else {version}, from_files, self._count)
        self._changes.append(change)
        for each in change.versions:
            self.offer(name, each)
        return change

    def end(self, change: Change, outcome: str) -> None:
        """Record how a change has ended."""
        self._changes.remove(change)
        name = change.name
        if outcome == "done":
            for version in change.versions:
                self.offer(name, version)
            running = {v for each in self._changes if each.name == name for v in each.versions}
            offered = self._offered[name].items()
            kept = {v: count for v, count in offered if count > change.begun or v in running}
            self._offered[name] = kept
        elif outcome != "interrupted" and not change.from_files:
            for version in change.versions:
                del self._offered[name][version]
