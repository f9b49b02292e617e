"""The forward hooks: what runs at every module that an adapter may touch, thus short."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError
from lora_backends.hf.sites import Site
from lora_backends.weights import LoRAWeights

if TYPE_CHECKING:
    from lora_backends.hf.siblings import Siblings

Hook = Callable[[nn.Module, tuple[Any, ...], torch.Tensor], torch.Tensor | None]


class Call(Protocol):
    """What a forward pass asks of the call that it belongs to."""

    model: str  # whose call it is: a string, which a compiled program is sure to watch
    stacks: Mapping[str, LoRAWeights]  # path to stack of the modules that are adapted
    shared: Mapping[str, LoRAWeights]  # a leader's path to the stack of it and its siblings

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Note the shape of the forward pass that starts, or refuse it."""

    def plan(self, shape: tuple[int, ...], path: str) -> Any:
        """Return the plan for a module's input of `shape` (without its last axis)."""


class _Nothing:
    """No call of any model."""

    model = ""
    stacks: Mapping[str, LoRAWeights] = {}
    shared: Mapping[str, LoRAWeights] = {}

    def begin_forward(self, inputs: Mapping[str, Any]) -> None:
        """Never asked: no model has this one's name."""
        raise AssertionError("no call is running")

    def plan(self, shape: tuple[int, ...], path: str) -> Any:
        """Never asked."""
        raise AssertionError("no call is running")


NOTHING: Call = _Nothing()


@dataclass(eq=False)
class Kept:
    """What a leader has computed for its siblings, until they are called."""

    group: Siblings
    x: torch.Tensor  # the input that it holds for, this very tensor
    version: int  # of x: counts changes in place
    outputs: dict[nn.Module, torch.Tensor]  # with LoRA, of siblings that have not been called


class _Running(threading.local):
    # Thread-local and no context variable: torch.compile traces the one and not the other, and a
    # forward pass never awaits. No attribute of the class: torch 2.11 would trace that instead.
    def __init__(self) -> None:
        self.call = NOTHING
        self.kept: Kept | None = None


RUNNING = _Running()
"""The call that is running in this thread.

Hooks ask it for whatever may change. A compiled program watches what it reads from globals, but
not what it reads from a hook's own variables, nor whether there are hooks.
"""


@contextmanager
def running(call: Call | None) -> Iterator[None]:
    """Let forward passes of this thread belong to `call`, or to none."""
    outer = RUNNING.call, RUNNING.kept
    RUNNING.call, RUNNING.kept = call or NOTHING, None
    try:
        yield
    finally:
        RUNNING.call, RUNNING.kept = outer


def begin_hook(model: str) -> Callable[..., None]:
    """Return the hook that tells the running call which forward pass starts on the base model."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = RUNNING.call
        if call.model == model:
            if not torch.compiler.is_compiling():
                RUNNING.kept = None  # of a forward pass that has failed
            call.begin_forward({**kwargs, "input_ids": args[0]} if args else kwargs)

    return begin


def lora_hook(model: str, site: Site, backend: LoRABackend) -> Hook:
    """Return the hook that adds the running call's LoRA to the output of one module.

    Args:
        model: whose calls it serves.
        site: the module.
        backend: what adds.

    Returns:
        A forward hook.
    """
    path, width = site.path, site.spec.out_features
    is_embedding = site.spec.kind == "embedding"
    run = backend.run_embedding if is_embedding else backend.run_linear

    def add_lora(
        module: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        call = RUNNING.call
        if call.model != model:
            return None
        weights = call.stacks.get(path)
        if weights is None:
            return None
        x = args[0]
        plan = call.plan(x.shape if is_embedding else x.shape[:-1], path)
        output = output.contiguous()
        x = x.flatten() if is_embedding else as_rows(x)
        run(x, weights, plan, output.view(-1, width))
        return output

    return add_lora


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in_features] as [tokens, in_features], the last axis contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rows_and_length(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and the tokens per row that a forward pass is given.

    Raises:
        InvalidInputError: there are none.
    """
    for key in ("input_ids", "inputs_embeds"):
        tokens = inputs.get(key)
        if isinstance(tokens, torch.Tensor) and tokens.ndim >= 2 and tokens.shape[1]:
            return tokens.shape[0], tokens.shape[1]
    raise InvalidInputError(
        f"no tokens to run on\n  given: {', '.join(inputs) or 'nothing'}\n"
        f"  allowed: input_ids [rows, tokens] or inputs_embeds [rows, tokens, hidden]"
    )


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures what is launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
