"""`Engine`: the attributes of a backend that dispatch reads."""

from __future__ import annotations

from typing import ClassVar

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
    """Operations whose calls the class stores on its plans."""
