"""A launch without the Python of Triton's launcher, which takes 2 us of it or more.

The launcher hands a kernel, its metadata and its arguments on to a function in C. What that takes
differs between versions of Triton, so the launcher is asked: it runs with marks in place of what a
later launch changes, and with a function that notes what the one in C would be given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, Self


class DirectLaunch(NamedTuple):
    """The function in C, and what it is given."""

    function: Callable[..., Any]
    given: list[Any]
    inner: list[Any] | None  # the last of what is given, where that is a tuple with the pointers
    grid: tuple[int, int, int]  # where programs, rows and stream stand in `given`
    pointers: tuple[int, int]  # where both pointers stand in `inner`, else in `given`

    @classmethod
    def of(cls, compiled: Any, arguments: tuple[Any, ...], second: int) -> Self | None:
        """Return the launch of a compiled kernel, or None where it cannot be told what changes.

        Args:
            compiled: Triton's compiled kernel.
            arguments: all of the kernel's.
            second: which of them moves besides the first one.
        """
        marks = [_Mark() for _ in range(5)]  # programs, rows, stream, both pointers
        moved = list(arguments)
        moved[0], moved[second] = marks[3:]
        given, again = (_noted(compiled, marks, moved) for _ in range(2))
        if given is None or again is None:
            return None
        nested = isinstance(given[-1], tuple) and _place(marks[3], given[-1]) is not None
        inner = given[-1] if nested else None
        if not _same(given, again, but_last=nested) or (inner and not _same(inner, again[-1])):
            return None  # a number that counts launches, for instance
        holder = given if inner is None else inner
        places = [_place(mark, given) for mark in marks[:3]]
        places += [_place(mark, holder) for mark in marks[3:]]
        if None in places:
            return None
        grid, pointers = tuple(places[:3]), tuple(places[3:])
        kept = None if inner is None else list(inner)
        return cls(compiled.run.launch, list(given), kept, grid, pointers)  # type: ignore[arg-type]

    def launch(self, programs: int, rows: int, stream: int, first: int, second: int) -> None:
        """Launch with the values that move."""
        given = self.given.copy()
        x, y, where = self.grid
        given[x], given[y], given[where] = programs, rows, stream
        a, b = self.pointers
        if self.inner is None:
            given[a], given[b] = first, second
        else:
            inner = self.inner.copy()
            inner[a], inner[b] = first, second
            given[-1] = tuple(inner)
        self.function(*given)


class _Mark:
    """Stands for a value that each launch has of its own.

    The launcher passes it on, or computes with it, as with the grid where a kernel needs memory
    for every program: then it raises a TypeError.
    """


def _noted(compiled: Any, marks: list[_Mark], arguments: list[Any]) -> tuple[Any, ...] | None:
    """Return what the launcher gives to the function in C, or None where it has none."""
    launcher = compiled.run
    if not callable(getattr(launcher, "launch", None)):
        return None
    noted: list[tuple[Any, ...]] = []
    double = copy.copy(launcher)
    double.launch = lambda *given: noted.append(given)
    programs, rows, stream = marks[:3]
    told = (compiled.packed_metadata, None, None, None)
    try:
        double(programs, rows, 1, stream, compiled.function, *told, *arguments)
    except TypeError:
        return None
    return noted[0] if len(noted) == 1 else None


def _same(one: tuple[Any, ...], other: tuple[Any, ...], but_last: bool = False) -> bool:
    end = len(one) - but_last
    return len(one) == len(other) and all(a is b for a, b in zip(one[:end], other, strict=False))


def _place(mark: _Mark, given: tuple[Any, ...]) -> int | None:
    """Return the only place of a mark."""
    places = [i for i, value in enumerate(given) if value is mark]
    return places[0] if len(places) == 1 else None
