"""Gradient checkpointing: the parts of a forward pass that its backward computes again.

They run after the call has ended, on the GPU in a thread of autograd's. Transformers runs each of
them through a function on the module, which is replaced here by one that remembers the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lora_backends.hf.calls.running import IDLE, NOTHING, RUNNING, running

FUNCTION = "_gradient_checkpointing_func"
"""Attribute that Transformers sets on modules which checkpoint parts of themselves."""


class Checkpointing:
    """Lets checkpointed parts of a base model be computed again by the call that ran them."""

    def __init__(self, base: nn.Module, model: str) -> None:
        self._modules, self._model = list(base.modules()), model

    def install(self) -> None:
        """Serve modules whose checkpointing was enabled since the last time."""
        for module in self._modules:
            function = vars(module).get(FUNCTION)
            if function is not None and not isinstance(function, _Served):
                setattr(module, FUNCTION, _Served(function, self._model))

    def remove(self) -> None:
        """Give the modules their own functions back."""
        for module in self._modules:
            function = vars(module).get(FUNCTION)
            if isinstance(function, _Served):
                setattr(module, FUNCTION, function.plain)


class _Served:
    """A module's checkpointing function: `plain(run, *args)` with a `run` that knows its call."""

    def __init__(self, plain: Callable[..., Any], model: str) -> None:
        self.plain, self._model = plain, model
        words = getattr(plain, "keywords", {})  # a partial of torch's `checkpoint`
        self._is_reentrant = words.get("use_reentrant", True) is not False

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if RUNNING.call.trains == self._model and self._is_reentrant:
            args = _with_gradient(args)
        # `run` is called again in the backward, when another call may run in this thread
        return self.plain(_Run(run), *args, **kwargs)


class _Run:
    """A part of a forward pass: first in the running call, later again for its backward."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, self._call, self._has_run = run, RUNNING.call, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._has_run:
            self._has_run = True
            return self._run(*args, **kwargs)
        self._call.check_recomputation()
        # The base model's own pass: no call means that nobody knows whose pass it is.
        with running(IDLE if self._call is NOTHING else self._call):
            return self._run(*args, **kwargs)


def _with_gradient(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of which one requires a gradient: else reentrant checkpoints have none."""
    floating = [
        i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]
    if not floating or not torch.is_grad_enabled() or any(args[i].requires_grad for i in floating):
        return args
    first = floating[0]
    return *args[:first], args[first].detach().requires_grad_(), *args[first + 1 :]
