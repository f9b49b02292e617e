"""The adapter of a prompt: a name, a blend such as pirate:0.7+json:0.3, or none."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from lora_backends.errors import InvalidInputError, did_you_mean, shown

Entry: TypeAlias = str | dict[str, float] | None
"""An adapter's name, or names with strengths, or None for the base model."""

ALLOWED = 'an adapter\'s name, "NAME:STRENGTH+NAME:STRENGTH", or a table of names to finite numbers'


def checked(value: Any) -> Any:
    """Return a prompt's adapter as a configuration has it; ValueError unless a name or a table."""
    if isinstance(value, Mapping):
        wrong = [name for name, strength in value.items() if not _is_strength(strength)]
        if wrong or not value:
            fault = f"{shown(wrong[0])} = {shown(value[wrong[0]])}" if wrong else "an empty table"
            raise ValueError(f"a blend has {fault}; allowed: {ALLOWED}")
        return {name: float(strength) for name, strength in value.items()}
    if value is not None and not isinstance(value, str):
        raise ValueError(f"allowed: {ALLOWED}")
    return value


def entry_of(named: Entry, adapters: Collection[str], prompt: int) -> Entry:
    """Return the adapter or blend that prompt number `prompt` names.

    A string that is the name of an adapter is never read as a blend.

    Raises:
        InvalidInputError: an unknown name, or a blend that cannot be read.
    """
    entry = named
    # a name may hold a colon, and then wins over a blend
    if isinstance(named, str) and named not in adapters and ":" in named:
        entry = _read_blend(named, prompt)
    for name in entry if isinstance(entry, Mapping) else [entry]:
        if name is not None and name not in adapters:
            raise InvalidInputError(
                f"no adapter named {shown(name)}{did_you_mean(name, adapters)}\n"
                f"  given: prompt {prompt} uses it; adapters: {', '.join(adapters) or 'none'}\n"
                f"  to do: give --adapter {name}=FOLDER, or write it under [adapters]"
            )
    return entry


def described(entry: Entry) -> str:
    """Return an entry as the command line takes it; the base model is "(base)"."""
    if isinstance(entry, Mapping):
        return "+".join(f"{name}:{strength:g}" for name, strength in entry.items())
    return entry or "(base)"


def _read_blend(text: str, prompt: int) -> dict[str, float]:
    blend: dict[str, float] = {}
    for term in text.split("+"):
        name, _, number = term.rpartition(":")
        try:
            strength = float(number)
        except ValueError:
            strength = math.nan
        if not name or name in blend or not _is_strength(strength):
            raise InvalidInputError(
                f"cannot read the blend {shown(text)}\n"
                f"  given: {shown(term)}{' a second time' * (name in blend)}, for prompt {prompt}\n"
                f"  allowed: NAME:STRENGTH+NAME:STRENGTH with finite numbers, e.g. "
                f"pirate:0.7+json:0.3"
            )
        blend[name] = strength
    return blend


def _is_strength(value: Any) -> bool:
    """Return whether a value is a number within float32."""
    return type(value) in (int, float) and abs(value) < 3.4e38
