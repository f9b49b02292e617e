"""The errors of the library: each says what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 200  # characters of a value in a message


class LoRABackendError(Exception):
    """The base of every error that this library raises on purpose."""


class InvalidInputError(LoRABackendError, ValueError):
    """The arguments contradict each other, the plan, the weights or the interface."""


class UnsupportedInputError(LoRABackendError, NotImplementedError):
    """The request is meaningful, but this backend or loader cannot carry it out exactly."""


class BackendUnavailableError(LoRABackendError, RuntimeError):
    """The backend asked for by name is not registered, not importable or does not run here."""


class UnknownBackendError(BackendUnavailableError, InvalidInputError):
    """No backend of that name is registered: given as an argument or in a configuration."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest allowed word, or an empty string."""
    if len(given) > _LONGEST:  # comparing takes time with the square of the length
        return ""
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """Return the repr of a value for a message: cut where it is long, its type where it has none.

    An int of thousands of digits and a list nested too deep have no repr.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
