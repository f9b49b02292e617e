"""The attributes of a backend that dispatch reads."""

from __future__ import annotations

from typing import Any, Protocol

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
    def plan_type(self) -> type[Any]:
        """The type that `prepare_batch` returns."""

    @property
    def routing_type(self) -> type[Any]:
        """The type that `prepare_experts` returns."""

    @property
    def features(self) -> frozenset[str]:
        """What it supports beyond the plain interface: names of `lora_backends.features`."""

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow."""

    @property
    def cuda_graphs(self) -> bool:
        """Whether a CUDA graph may capture its calls."""

    @property
    def storing(self) -> frozenset[str]:
        """Operations whose calls the engine stores on its plans."""
