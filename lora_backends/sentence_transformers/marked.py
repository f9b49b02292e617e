"""Texts and pairs that carry their adapter through an encoder's sorting and batching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_backends.errors import UnsupportedInputError, shown


class Mark:
    """An input that carries the adapter of its row."""

    value: Any  # the input, unmarked
    entry: Any  # an adapter's name, a blend or None


class _Text(str, Mark):
    """A text."""


class _List(list[Any], Mark):
    """A pair, or a conversation."""


class _Tuple(tuple[Any, ...], Mark):
    """A pair."""


class _Fields(dict[str, Any], Mark):
    """Named fields, such as a text and an image."""


_KINDS: Sequence[tuple[type, Any]] = (
    (str, _Text), (list, _List), (tuple, _Tuple), (dict, _Fields),
)  # fmt: skip


def marked(value: Any, entry: Any) -> Any:
    """Return an equal str, list, tuple or dict that carries the adapter of its row."""
    for kind, of_kind in _KINDS:
        if isinstance(value, kind):
            made = of_kind(value)
            made.value, made.entry = value, entry
            return made
    raise UnsupportedInputError(
        f"adapters go with texts alone\n  given: {shown(value)}\n"
        f"  allowed: a str, or a pair or a dict of them\n"
        f"  to do: pass other inputs to the encoder itself, which runs without adapters"
    )


def unmarked(value: Any) -> tuple[Any, list[Any]]:
    """Return an input without its mark, and the entries that it carries: one or none."""
    if isinstance(value, Mark):
        return value.value, [value.entry]
    if isinstance(value, (list, tuple)) and any(isinstance(part, Mark) for part in value):
        # a pair that the encoder built from a query and a marked text carries the entry of the text
        parts = [unmarked(part) for part in value]
        return type(value)(p for p, _ in parts), [entry for _, each in parts for entry in each]
    return value, []
