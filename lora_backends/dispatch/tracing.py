"""Tells whether a call is traced."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Return whether this thread is tracing a program.

    Outside of Dynamo, `is_compiling` reads a flag that all threads share. Inside, both calls below
    return True. `torch.export` may trace without Dynamo, but only under dispatch modes.
    """
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
