"""Calls that a program which torch traces makes outside of its graph.

A module of its own: the decorator imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``."""
    return function(*args, **kwargs)
