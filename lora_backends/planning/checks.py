"""Range checks of the numbers in a plan's arguments."""

from __future__ import annotations

from lora_backends.errors import InvalidInputError, shown

MOST = 10**6
"""The most adapters, requests or rows; a simulation of so many takes minutes."""


def check_whole(name: str, value: object, least: int = 1, most: int = MOST) -> None:
    """Raise InvalidInputError unless `value` is an int from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidInputError(
            f"{name} is {shown(value)}\n  allowed: a whole number, {least} to {most:,}"
        )


def check_number(name: str, value: object, least: float = 1e-9, most: float = 1e18) -> None:
    """Raise InvalidInputError unless `value` is an int or float from `least` to `most`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        raise InvalidInputError(
            f"{name} is {shown(value)}\n  allowed: a number, {least:g} to {most:g}"
        )
