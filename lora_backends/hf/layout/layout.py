"""Layouts: the row of the batch for each position of a module's input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lora_backends.errors import UnsupportedInputError

Order = Literal["rows", "rows of tokens", "tokens of rows", "rows of parts"]
"""The meaning of the positions of one axis: rows; the rows * length tokens, row after row or token
after token; or as many parts of every row, row after row: windows of images for instance."""

Spread = tuple[int, int]
"""(before, after): position p of a flat input belongs to row (p // after) % rows.

The input has before * rows * after positions. (1, 5) is 5 positions of row 0, then 5 of row 1;
(5, 1) is one position of every row, 5 times.
"""


@dataclass(frozen=True)
class InputForm:
    """One way in which a module's input, without its last axis, holds the rows of a batch."""

    ndim: int  # axes of the input
    axis: int  # the one with the rows
    order: Order
    step: bool  # seen with one token per row and a cache; else with several and no cache

    def spread(self, shape: Sequence[int], rows: int, length: int) -> Spread | None:
        """Return how rows lie in an input of `shape`, or None if it does not have this form."""
        # A size that differs from this is another form, of images for instance.
        size = rows if self.order == "rows" else rows * length
        if self.order == "rows of parts" and len(shape) == self.ndim:
            size = shape[self.axis] // rows * rows
        if len(shape) != self.ndim or shape[self.axis] != size:
            return None
        before = after = 1
        for other in shape[: self.axis]:
            before *= other
        for other in shape[self.axis + 1 :]:
            after *= other
        if self.order == "rows of tokens":
            return before, length * after
        if self.order == "tokens of rows":
            return before * length, after
        if self.order == "rows of parts":
            return before, shape[self.axis] // rows * after
        return before, after


@dataclass(frozen=True, eq=False)
class Layout:
    """The forms in which a module's input was seen; one object for all modules that are alike.

    Without forms, `reason` says why nothing is known.
    """

    forms: tuple[InputForm, ...]
    in_order: bool  # tokens of a row lie in their order, and depend on no later ones
    reason: str  # a clause, e.g. "no pass of plain text reaches it"; or why `steps` is False
    steps: bool  # whether passes with one token per row have these forms, too
    calls: int  # of the module in a trial pass

    def spread(self, shape: Sequence[int], rows: int, length: int) -> Spread | None:
        """Return how the rows lie in an input of `shape`, without its last axis, or None.

        `length` are the tokens per row of the forward pass.
        """
        if length == 1 and not self.steps:
            return None
        # Forms of a step first: a prompt of one token may look like either.
        steps = [form for form in self.forms if form.step and length == 1]
        for forms in (steps, [form for form in self.forms if not form.step]):
            spreads = {form.spread(shape, rows, length) for form in forms} - {None}
            if spreads:
                # forms may disagree
                return spreads.pop() if len(spreads) == 1 else None
        return None


class UnknownRowsError(UnsupportedInputError):
    """It is not known which row of the batch each position of a module's input belongs to."""


def commonest(layouts: Iterable[Layout]) -> Layout:
    """Return the layout of most modules."""
    counted = Counter(layouts).most_common(1)
    return counted[0][0] if counted else Layout((), False, "there is no module", False, 0)


class Untried:
    """Counts the calls of modules in a forward pass with inputs that no trial pass gave.

    A module that text and images reach sees as many images as rows by chance. But then it is called
    more often than in the trial. `alone`: modules run on input `name` without the trial's input, so
    that calls prove nothing.
    """

    def __init__(self, name: str, alone: bool) -> None:
        self._name, self._alone = name, alone
        self._calls: Counter[str] = Counter()

    def reason_against(self, key: str, allowed: int) -> str | None:
        """Count a call, of `allowed` in the trial; return why its form is unknown, or None."""
        self._calls[key] += 1
        if self._alone:
            return f"{self._name} may reach it without token ids"
        if self._calls[key] > allowed:
            return f"{self._name} may reach it, too: text alone calls it {allowed} times"
        return None


def misfit_of(args: Sequence[object], output: object) -> str:
    """Return, as a clause, what a module took first or returned instead of a tensor, or ""."""
    for verb, value in (("returned", output), *(("was given", x) for x in args[:1])):
        if not isinstance(value, torch.Tensor):
            kind = "None" if value is None else f"a {type(value).__name__}"
            if isinstance(value, tuple | list):
                kind += f" of {', '.join(type(each).__name__ for each in value)}"
            return f"it {verb} {kind} instead of one tensor"
    return ""


def unknown_rows(
    path: str,
    shape: Sequence[int],  # without the last axis
    rows: int,
    length: int,
    reason: str,  # "": only the shape is unknown
    per_token: bool = False,  # the adapters of a row differ by token
) -> UnknownRowsError:
    """Return the error for an input whose positions cannot be assigned to rows or tokens."""
    cure = "split the batch by adapter"
    if per_token:  # splitting does not help a row with several adapters
        cure = "give all rows of a call one entry, the same for each"
    return UnknownRowsError(
        f"module {path} sees an input of shape {list(shape)} (without its last axis) in a forward "
        f"pass of {rows} rows of {length} tokens, and it is not known which row each position "
        f"belongs to: {reason or 'the shape is none of those it was seen with'}\n"
        f"  allowed: one adapter for all rows, or adapters without this module\n"
        f"  to do: {cure}, or leave the module out of target_modules"
    )
