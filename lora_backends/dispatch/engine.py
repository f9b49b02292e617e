"""What dispatch asks of a backend, so that it need not import `LoRABackend`."""

from __future__ import annotations

from typing import Protocol

import torch


class Engine(Protocol):
    """The attributes of a `LoRABackend` that checks and torch's library look at."""

    @property
    def name(self) -> str:
        """For error messages."""

    @property
    def handle(self) -> int:
        """An int that stands for the engine in a traced program."""

    @property
    def device(self) -> torch.device:
        """Where tensors have to be."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of x, the weights and base_output."""

    @property
    def plan_type(self) -> type:
        """What `prepare_batch` returns."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow."""

    @property
    def cuda_graphs(self) -> bool:
        """Whether a CUDA graph may capture its calls."""
