"""Whether a call is traced."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Return whether this thread traces a program; torch's flag is one for all threads.

    Dynamo takes the first two answers for True. `torch.export` may trace without it, under modes.
    """
    if not torch.compiler.is_compiling():
        return False
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
