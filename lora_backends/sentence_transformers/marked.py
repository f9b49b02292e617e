"""Texts and pairs that carry their adapter through the sorting and batching of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_backends.errors import UnsupportedInputError, shown


class Mark:
    """What a marked input is, and the adapter of its row."""

    value: Any
    entry: Any


class _Text(str, Mark):
    """A text."""


class _List(list[Any], Mark):
    """A pair, or a conversation."""


class _Tuple(tuple[Any, ...], Mark):
    """A pair."""


class _Fields(dict[str, Any], Mark):
    """Fields of several kinds."""


_KINDS: Sequence[tuple[type, Any]] = (
    (str, _Text), (list, _List), (tuple, _Tuple), (dict, _Fields),
)  # fmt: skip


def marked(value: Any, entry: Any) -> Any:
    """Return an equal input that carries the adapter of its row.

    Raises:
        UnsupportedInputError: it is neither text nor made of texts.
    """
    for kind, of_kind in _KINDS:
        if isinstance(value, kind):
            made = of_kind(value)
            made.value, made.entry = value, entry
            return made
    raise UnsupportedInputError(
        f"adapters go with texts\n  given: {shown(value)}\n"
        f"  allowed: a str, a pair or a dict of them\n"
        f"  to do: call the encoder itself for inputs without adapters"
    )


def unmarked(value: Any) -> tuple[Any, list[Any]]:
    """Return an input as its user gave it, and the adapters that it carries: one, or none.

    A pair that an encoder made of a query and a marked text has the adapter of the text.
    """
    if isinstance(value, Mark):
        return value.value, [value.entry]
    if isinstance(value, (list, tuple)) and any(isinstance(part, Mark) for part in value):
        parts = [unmarked(part) for part in value]
        return type(value)(p for p, _ in parts), [entry for _, each in parts for entry in each]
    return value, []
