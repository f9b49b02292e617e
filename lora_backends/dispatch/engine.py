"""`Engine`: the attributes of a backend that dispatch reads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from lora_backends.dispatch.handles import Handled


class Engine(Handled):
    """A backend as dispatch sees it; `LoRABackend` documents the attributes and sets defaults."""

    name: str
    device: torch.device
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    differentiable: ClassVar[bool]
    plain_torch: ClassVar[bool]
    cuda_graphs: ClassVar[bool]
    plan_type: ClassVar[type]
    routing_type: ClassVar[type]

    features: ClassVar[frozenset[str]] = frozenset()
    """Supported features beyond the plain interface: names of `lora_backends.features`."""
    storing: ClassVar[frozenset[str]] = frozenset()
    """Operations whose calls the class stores: on its plans, those of experts in `routed_calls`."""
    routed_calls: Any
    """A `RoutedCalls`; an engine whose `run_experts` is marked by `stores_calls` must set it."""

    def prepare_together(self, batch: Any, out: Any, capacity: int | None) -> Any:
        """Return the data of a batch of several adapters per token for `add_together`, or None.

        None: each adapter has a pass of its own.

        Args:
            batch: a `LoRABatch` with at most as many adapters per token as that of `out`.
            out: an earlier result of this engine, refilled in place and returned; None: a new one.
            capacity: as in `prepare_batch`.
        """
        return None

    def add_together(
        self, operation: str, x: torch.Tensor, weights: Any, joint: Any, y: torch.Tensor
    ) -> Any:
        """Add all adapters of each token to y in one pass, rounded once.

        The arguments are checked; `joint` is a result of `prepare_together`.

        Returns:
            False, with nothing written, if the call needs a pass for each adapter; else True, or a
            `CachedCall` that repeats it and takes `joint` as the plan.
        """
        return False
