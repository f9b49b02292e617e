"""The attention of a base model, which continuous batching may have to replace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

from lora_backends.errors import UnsupportedInputError


class Attention:
    """Switches a base model between its own attention and one that reads only paged caches."""

    def __init__(self, base: nn.Module) -> None:
        self._base: Any = base
        self._lock = Lock()
        self._users = 0
        self._own = ""
        self.is_paged = False
        """Whether the model runs a paged attention, so that other calls would fail."""

    @contextmanager
    def paged(self, name: str) -> Iterator[None]:
        """Run the model with attention `name` inside the block; blocks of one name may overlap."""
        with self._lock:
            config = self._base.config
            if not self._users:
                self._own = config._attn_implementation
                self._base.set_attn_implementation(name)
                self.is_paged = True
            elif config._attn_implementation != name:
                raise UnsupportedInputError(
                    f"the model runs attention {config._attn_implementation!r} for another "
                    f"manager\n  given: {name!r}\n  to do: stop() that manager first"
                )
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._base.set_attn_implementation(self._own)
                    self.is_paged = False

    def check(self) -> None:
        """Raise UnsupportedInputError for a forward pass outside of continuous batching."""
        if self.is_paged:
            raise UnsupportedInputError(
                f"the model has attention {self._own!r}, which continuous batching replaces from "
                f"start() to stop(); no other call can run meanwhile\n"
                f"  to do: add a request, stop() the manager, or load the model with "
                f"attn_implementation='sdpa', if it supports that: transformers>=5.19 keeps it"
            )
