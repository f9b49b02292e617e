"""Decisions of the pool and its store, as functions without tensors or clocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, TypeVar

PASS_S = 1.0
"""Seconds during which requests for loaded adapters may overtake the first request in line, to fill
the batch. Without a limit, a popular adapter would keep its slot forever."""


class _Sized(Protocol):
    @property
    def bytes(self) -> int:
        """Bytes that it takes."""


T = TypeVar("T", bound=_Sized)


def keep(
    held: OrderedDict[str, T], name: str, item: T, budget: int, total: int | None = None
) -> int:
    """Put an item last, then drop the least recently used items until the rest fit a budget.

    Args:
        held: items by name, the least recently used first; changed in place.
        name: of the item.
        item: dropped, too, if it alone exceeds the budget.
        budget: in bytes.
        total: bytes of `held` before the call; None: computed.

    Returns:
        The bytes of `held` after the call.
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
        first_refused: time in seconds at which the first request ahead of it found no slot; None:
            none ahead of it has been refused.
        is_loaded: whether its adapters have slots.
        now: time in seconds on the same clock.
    """
    return first_refused is None or (is_loaded and now - first_refused < PASS_S)
