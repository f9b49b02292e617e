"""Wraps methods of vLLM around which nothing public tells what the LoRA layers need."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lora_backends.errors import UnsupportedInputError
from lora_backends.names import VLLM_VARIABLE


def replace(
    module: str,
    owner: str,
    name: str,
    around: Callable[..., Any],
    is_optional: bool = False,
) -> None:
    """Let ``around(own, *args)`` take the calls of a method; a second call changes nothing.

    Args:
        module: of vLLM; nothing happens if it is not imported.
        owner: a class of the module, or "" for a function of the module itself.
        name: of the method or function.
        around: gets the replaced method first.
        is_optional: whether a version of vLLM may lack the method.

    Raises:
        UnsupportedInputError: this version of vLLM lacks the method.
    """
    if module not in sys.modules:  # a runner is imported before its LoRA
        return
    found = getattr(sys.modules[module], owner, None) if owner else sys.modules[module]
    own = getattr(found, name, None)
    if own is None and not is_optional:  # rows would get the adapters of other rows
        raise UnsupportedInputError(
            f"this version of vLLM runs models in an unknown way\n"
            f"  given: {module} without {owner}{'.' if owner else ''}{name}\n"
            f"  to do: install a version of vLLM that is tested, or unset {VLLM_VARIABLE}"
        )
    if own is None or getattr(own, "is_replaced", False):
        return

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(own, *args, **kwargs)

    method.is_replaced = True  # type: ignore[attr-defined]
    setattr(found, name, method)


@contextmanager
def replaced_on(model: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object within a block."""
    state = vars(model)
    before = state.get(name)
    state[name] = method
    try:
        yield
    finally:
        state.pop(name) if before is None else state.update({name: before})
