"""Handles: ints in place of objects, for programs that hold only tensors and numbers."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from lora_backends.errors import InvalidInputError

# weak: a handle must not keep a model's weights alive
_OBJECTS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NEXT = count()


class Handled:
    """Has a `handle`, an int that identifies the object as long as it lives.

    A copy has its own.
    """

    handle: int
    _transient: ClassVar[tuple[str, ...]] = ("handle",)  # attributes that a copy makes anew

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give the object its handle, whatever a subclass's constructor does."""
        self = super().__new__(cls)
        # past __setattr__, which frozen dataclasses forbid
        self.__dict__["handle"] = next(_NEXT)
        _OBJECTS[self.handle] = self
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: Any = object.__getstate__(self)
        # a class with __slots__ has a pair of states
        plain, slots = state if isinstance(state, tuple) else (state, None)
        state = {**(plain or {}), **(slots or {})}
        return {name: value for name, value in state.items() if name not in self._transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


def lookup(handle: int) -> Any:
    """Return the object of a handle."""
    target = _OBJECTS.get(handle)
    if target is None:
        raise InvalidInputError(
            f"handle {handle} stands for nothing: its backend, weights or plan no longer exist\n"
            f"  to do: keep them for as long as a compiled program or a captured graph uses them"
        )
    return target
