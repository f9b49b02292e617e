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

    `held` is changed in place. `budget` and `total`, the size of `held` before the call (None:
    computed), are bytes. The new item is dropped, too, if it alone exceeds the budget. Returns the
    bytes of `held` after the call.
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

    `first_refused` is the time at which the first request ahead of it found no slot, None if none
    was refused; `is_loaded` says whether its adapters have slots. Times are seconds of one clock.
    """
    return first_refused is None or (is_loaded and now - first_refused < PASS_S)
