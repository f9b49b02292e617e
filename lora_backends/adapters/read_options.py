"""Options for reading a checkpoint: the base model, the room in a pool, and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.specs import ExpertSpec, ModuleSpec


@dataclass(frozen=True, eq=False)
class ReadOptions:
    """The arguments of `read_checkpoint` other than the folder, by the same names.

    `unused` is as in `AdapterPool`.
    """

    modules: Mapping[str, ModuleSpec] | None
    max_rank: int | None
    limits: LoadLimits
    experts: Mapping[str, ExpertSpec] | None
    max_expert_rank: int | None
    own_modules: bool
    unused: Callable[[str], str | None] | None = None

    @property
    def room_of_experts(self) -> int | None:
        """The largest rank of experts; None sets no limit."""
        return self.max_rank if self.max_expert_rank is None else self.max_expert_rank

    @property
    def known_experts(self) -> Mapping[str, ExpertSpec] | None:
        """The parameters of experts; None if the base model is not known."""
        return self.experts if self.modules is None else self.experts or {}
