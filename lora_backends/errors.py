"""The errors of the library: each names the input, the allowed values and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST, _MOST_WORDS = 200, 10_000  # characters and words that are compared for a suggestion


class LoRABackendError(Exception):
    """The base of every error that this library raises on purpose."""

    def __str__(self) -> str:
        # A message quotes names from strangers' files. Their control characters would act on the
        # terminal, and a lone surrogate cannot be printed at all.
        return "".join(
            character
            if character.isprintable() or character in "\n\t"
            else character.encode("unicode_escape").decode()
            for character in super().__str__()
        )


class InvalidInputError(LoRABackendError, ValueError):
    """The arguments contradict each other, the plan, the weights or the interface."""


class UnsupportedInputError(LoRABackendError, NotImplementedError):
    """The request is meaningful, but this backend or loader cannot carry it out exactly."""


class BackendUnavailableError(LoRABackendError, RuntimeError):
    """The backend asked for by name is not registered, not importable or does not run here."""


class UnknownBackendError(BackendUnavailableError, InvalidInputError):
    """No backend of that name is registered: given as an argument or in a configuration."""


class RequestFailedError(LoRABackendError, RuntimeError):
    """A request of continuous batching has no answer: it failed, or no thread runs it."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest allowed word, or an empty string."""
    words = list(allowed)
    # Comparing takes time with the square of the length, and with the number of words.
    if len(word) > _LONGEST or len(words) > _MOST_WORDS:
        return ""
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def told(error: BaseException) -> str:
    """Return the type and the message of a foreign error, whose ``__str__`` may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"{type(error).__name__} (its message cannot be shown)"


def shown(value: object, most: int = 200) -> str:
    """Return a short repr of a value, which may be huge, nested deeply or unable to show itself."""
    try:
        text = repr(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # an int of 5,000 digits, a list in a list in a list, a foreign object
        return f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}..."
