"""JSON values as dataclasses, without pydantic: engines run where only torch and Triton are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints


class StrictError(ValueError):
    """A value does not have the type that its place asks for; the message names the place."""


def parse(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as `kind`. Keys must match the fields exactly; nothing is converted.

    `kind` is a dataclass, int, float, str, ``tuple[T, ...]`` or ``Mapping[str, T]``; `where` names
    the value in a `StrictError`.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        _require(isinstance(value, list), where, "a list", value)
        return tuple(parse(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping:
        _require(isinstance(value, dict), where, "an object", value)
        return {key: parse(arguments[1], v, f"{where}.{key}") for key, v in value.items()}
    number = isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        _require(number or isinstance(value, float), where, "a number", value)
        return float(value)
    fits = number if kind is int else isinstance(value, str)
    _require(fits, where, "a whole number" if kind is int else "a string", value)
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    _require(isinstance(value, dict), where, "an object", value)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names]
    if missing:
        raise StrictError(f"{where} lacks {', '.join(missing)}")
    if unknown:
        raise StrictError(f"{where} has unknown keys: {', '.join(unknown)}")
    return kind(**{name: parse(hints[name], value[name], f"{where}.{name}") for name in names})


def _require(fits: bool, where: str, expected: str, value: Any) -> None:
    if not fits:
        raise StrictError(f"{where} is not {expected}: {repr(value)[:60]}")
