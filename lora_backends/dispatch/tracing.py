"""Tells whether a call is traced, and refuses what would record a call without its LoRA."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lora_backends.errors import UnsupportedInputError

is_jit_traced = torch._C._is_tracing
"""Whether `torch.jit.trace` records, in a third of the time of `torch.jit.is_tracing`."""


def is_traced() -> bool:
    """Return whether this thread is tracing a program."""
    # outside of Dynamo a flag that all threads share; inside, both calls below return True
    if not torch.compiler.is_compiling():
        return False
    # `torch.export` may trace without Dynamo, but only under dispatch modes
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0


def refuse_jit_trace(operation: str, engine: Any) -> NoReturn:
    """Refuse a call that `torch.jit.trace` would not record: the engine writes by address."""
    raise UnsupportedInputError(
        f"backend {engine.name!r} cannot run {operation} under torch.jit.trace, which would record "
        f"no LoRA\n  allowed: torch.compile and torch.export; of the backends, torch_ref"
    )
