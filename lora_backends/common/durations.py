"""Reads lengths of time such as "5m"."""

from __future__ import annotations

import re

from lora_backends.errors import InvalidInputError, shown

_SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str, meaning: str) -> float:
    """Return the seconds of "90s", "5m" or "1h"; `meaning` begins the error for another text."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh])", text.strip(), re.ASCII)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if seconds <= 0:
        raise InvalidInputError(f"{meaning} {shown(text)}\n  allowed: e.g. 90s, 5m, 1h")
    return seconds
