"""Records of the adapters in the slots of a pool, without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class ExpertForm(NamedTuple):
    """How the matrices of experts lie; adapters of one form share a stack."""

    num_a: int  # 1: one A feeds gate and up
    one_a: bool  # all experts share A
    one_b: bool  # all experts share B


@dataclass(frozen=True)
class ModuleRecord:
    """The LoRA of one module, or of one parameter of experts, in a slot."""

    nbytes: int  # of the matrices and their scales, at the adapter's own rank
    error: float | None  # relative, of B A; None: not quantised
    has_bias: bool = False
    has_output_scales: bool = False  # DoRA
    form: ExpertForm | None = None  # of experts
    rank: int = 0  # of a module
    scaling: float = 0.0  # of a module

    @property
    def layout(self) -> tuple[bool, bool, ExpertForm | None]:
        """The part that an update in place has to leave as it is."""
        return self.has_bias, self.has_output_scales, self.form


@dataclass(frozen=True, eq=False)
class SlotRecord:
    """The adapter in a slot; a pool replaces it as one object, so no thread sees half of it."""

    modules: Mapping[str, ModuleRecord]  # with LoRA, by path of a module or parameter of experts
    replacements: Mapping[str, Any]  # of modules of the base model, by path

    @property
    def nbytes(self) -> int:
        """Bytes of the matrices, scales and replacements."""
        replacements = sum(getattr(module, "nbytes", 0) for module in self.replacements.values())
        return replacements + sum(module.nbytes for module in self.modules.values())


EMPTY = SlotRecord({}, {})
"""The record of a slot without an adapter."""
