"""Options of a backend as text: KEY=VALUE, as command lines take them and reports show them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lora_backends.errors import InvalidInputError, shown

EXAMPLE = "batch_invariant=true"
_WORDS = {"True": True, "False": False, "None": None}  # as Python and the pages write them
_OTHERS = ("name", "device")  # arguments of `get_backend` that are no options


def read_options(texts: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return options KEY=VALUE by key; messages put `prefix` before each, as on a command line."""
    options: dict[str, Any] = {}
    for item in texts:
        key, equals, value = item.partition("=")
        if not (equals and key.isidentifier()) or key in _OTHERS:
            raise InvalidInputError(
                f"option {shown(prefix + item)}\n  allowed: {prefix}KEY=VALUE, where KEY is an "
                f"option of the backend, e.g. {prefix}{EXAMPLE}"
            )
        if key in options:
            raise InvalidInputError(
                f"option {shown(prefix + item)}\n  {prefix}{key} has a value already\n"
                f"  allowed: one value for each KEY"
            )
        options[key] = option_value(value)
    return options


def option_value(text: str) -> Any:
    """Return a value of a command line: JSON, a word of Python, else the string itself."""
    try:
        # JSON first: numbers, lists and true have their types
        return json.loads(text)
    except (ValueError, RecursionError):
        return _WORDS.get(text, text)


def option_texts(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return options as KEY=VALUE, which `read_options` reads back."""
    return tuple(f"{key}={_text(value)}" for key, value in options.items())


def _text(value: Any) -> str:
    if isinstance(value, str) and option_value(value) == value:
        return value
    try:
        return json.dumps(value, default=os.fspath)
    except (TypeError, ValueError, RecursionError):  # an object that only a program can give
        return shown(value)
