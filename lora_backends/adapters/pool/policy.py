"""Decisions of the pool and its store that need neither tensors nor a clock of their own."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar

PASS_S = 1.0
"""Seconds during which requests of loaded adapters may pass the first one in the line. They fill
the batch. Without a limit, a popular adapter would keep its slot for ever."""


class _Sized(Protocol):
    @property
    def bytes(self) -> int:
        """Bytes that it takes."""


T = TypeVar("T", bound=_Sized)


def keep(
    held: OrderedDict[str, T], name: str, item: T, budget: int, total: int | None = None
) -> int:
    """Put an item last, and drop items from the first on while all take more than a budget.

    Args:
        held: by name, the least recently used first.
        name: of the item.
        item: it goes, too, if it alone takes more.
        budget: in bytes.
        total: bytes of all that is held before; None: they are added up.

    Returns:
        The bytes of all that is held after.
    """
    if total is None:
        total = sum(each.bytes for each in held.values())
    total += item.bytes - (held[name].bytes if name in held else 0)
    held[name] = item
    held.move_to_end(name)
    while total > budget:
        total -= held.popitem(last=False)[1].bytes
    return total


def may_try(first_refused: float | None, is_loaded: bool, now: float) -> bool:
    """Return whether a request that waits for slots may try to take them.

    Args:
        first_refused: when the first request before it found no slot; None: all before it have
            not looked yet.
        is_loaded: whether its adapters have slots.
        now: on the same clock.
    """
    return first_refused is None or (is_loaded and now - first_refused < PASS_S)
