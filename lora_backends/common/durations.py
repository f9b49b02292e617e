"""Lengths of time as users write them."""

from __future__ import annotations

import re

from lora_backends.errors import InvalidInputError, shown

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str, meaning: str) -> float:
    """Return the seconds of "90s", "5m" or "1h".

    Args:
        text: what a user wrote.
        meaning: the option or variable, for the error.

    Raises:
        InvalidInputError: another text, or no time at all.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text.strip(), re.ASCII)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise InvalidInputError(f"{meaning} {shown(text)}\n  allowed: e.g. 90s, 5m, 1h")
    return seconds
