"""Wraps methods of vLLM, where no public interface tells which rows a LoRA layer gets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lora_backends.common.names import VLLM_VARIABLE
from lora_backends.errors import UnsupportedInputError

FIRST, SECOND = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
"""The modules of vLLM's two model runners."""


def replace(
    module: str,
    owner: str,
    name: str,
    around: Callable[..., Any],
    runner: str = "",
    is_optional: bool = False,
) -> None:
    """Let ``around(original, *args)`` take the calls of a method; a second call changes nothing.

    Args:
        module: of vLLM. Nothing happens if neither it nor `runner` is imported.
        owner: a class of the module, or "" for a function of the module itself.
        name: of the method or function.
        around: gets the replaced method first.
        runner: the model runner that uses the module; vLLM imports it before it loads LoRA.
        is_optional: whether a version of vLLM may lack the method.

    Raises:
        UnsupportedInputError: this version of vLLM lacks the method.
    """
    if sys.modules.keys().isdisjoint((module, runner)):
        return
    try:
        holder: Any = import_module(module)
    except ModuleNotFoundError:
        holder = None
    holder = getattr(holder, owner, None) if owner else holder
    original = getattr(holder, name, None)
    if original is None and not is_optional:  # rows would get the adapters of other rows
        raise lacking(module, f"{owner}{'.' if owner else ''}{name}")
    arounds = getattr(original, "arounds", ())
    if original is None or around in arounds:
        return

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    method.arounds = (*arounds, around)  # type: ignore[attr-defined]
    setattr(holder, name, method)


def lacking(module: str, name: str) -> UnsupportedInputError:
    """Return the error for a version of vLLM without a name that the plug-in needs."""
    return UnsupportedInputError(
        f"this version of vLLM lacks a name that the plug-in wraps or sets\n"
        f"  given: {module} without {name}\n"
        f"  to do: install a version of vLLM that is tested, or unset {VLLM_VARIABLE}"
    )


@contextmanager
def replaced_on(model: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object while a block runs."""
    state = vars(model)
    before = state.get(name)
    state[name] = method
    try:
        yield
    finally:
        state.pop(name) if before is None else state.update({name: before})
