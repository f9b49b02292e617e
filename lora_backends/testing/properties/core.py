"""`Property`, and the registry that `verify` runs in order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from lora_backends.backend import LoRABackend
from lora_backends.features import EIGHT_BIT, OUTPUT_SCALES, SLICE_TENSORS, TOKEN_SCALES
from lora_backends.testing.cases.dense import LoRACase
from lora_backends.testing.cases.kinds import Case

Check: TypeAlias = Callable[[LoRABackend, Any], None]  # of a case of the property's kind
Requirement: TypeAlias = Callable[[LoRABackend], str | None]

EXACT = "bit for bit"
BOUNDED = "within the bound"
BY_CLAIM = "bit for bit on integers and where claimed, else within the bound"

NONE: frozenset[str] = frozenset()
SCALES = frozenset({TOKEN_SCALES, OUTPUT_SCALES})
"""Features that cases of most properties may need."""
ANY_LAYER = SCALES | {SLICE_TENSORS, EIGHT_BIT}
"""The same for properties that do not look into lora_a and lora_b."""
ANY_EXPERTS = frozenset({TOKEN_SCALES, EIGHT_BIT})
"""Features that cases of experts may need."""


@dataclass(frozen=True)
class Property:
    """One rule that every backend keeps, checked on many drawn cases."""

    name: str  # as in --property
    rule: str  # the rule in one sentence
    agreement: str  # EXACT, BOUNDED or BY_CLAIM
    check: Check  # raises AssertionError on a case that breaks the rule
    examples: int  # cases drawn by the default profile
    kind: type[Case] = LoRACase  # of the cases
    cases: Mapping[str, Any] = field(default_factory=dict)  # arguments of the kind's strategy
    features: frozenset[str] = frozenset()  # that cases may need, where the backend has them
    requires: tuple[Requirement, ...] = ()  # each returns why it does not apply, or None

    def not_applicable(self, backend: LoRABackend) -> str | None:
        """Return why this property says nothing about `backend`; None if it applies."""
        reasons = (requirement(backend) for requirement in self.requires)
        return next((reason for reason in reasons if reason), None)


PROPERTIES: dict[str, Property] = {}
"""Every property by name, in the order in which they run."""


def prop(
    rule: str,
    *,
    agreement: str = EXACT,
    examples: int = 25,
    requires: tuple[Requirement, ...] = (),
    kind: type[Case] = LoRACase,
    features: frozenset[str] = SCALES,
    **cases: Any,
) -> Callable[[Check], Check]:
    """Register a check as a property under the name of its function; arguments as in `Property`."""

    def register(check: Check) -> Check:
        name = check.__name__
        if name in PROPERTIES:
            raise ValueError(f"there are two properties named {name!r}")
        PROPERTIES[name] = Property(
            name, rule, agreement, check, examples, kind, cases, features, requires
        )
        return check

    return register


either_prop = partial(prop, values="either", agreement=BY_CLAIM)
"""Registers a check that holds on real values and, bit for bit, on integers."""


def deterministic(backend: LoRABackend) -> str | None:
    """Require `LoRABackend.deterministic`."""
    return None if backend.deterministic else "the backend does not claim to be deterministic"


def batch_invariant(backend: LoRABackend) -> str | None:
    """Require `LoRABackend.batch_invariant`."""
    return None if backend.batch_invariant else "the backend does not claim batch invariance"


def differentiable(backend: LoRABackend) -> str | None:
    """Require `LoRABackend.differentiable`."""
    return None if backend.differentiable else "the backend does not claim to be differentiable"


def declares(feature: str) -> Requirement:
    """Require that a backend names a feature in `LoRABackend.features`."""

    def requirement(backend: LoRABackend) -> str | None:
        return None if feature in backend.features else f"the backend does not declare {feature}"

    return requirement


def no_interpreter(backend: LoRABackend) -> str | None:
    """Require that kernels do not run in Triton's interpreter.

    It patches the language while a kernel runs, one kernel at a time, and copies whole storages.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter runs one kernel at a time and copies whole storages"
    return None


def cuda_graphs(backend: LoRABackend) -> str | None:
    """Require a CUDA device and `LoRABackend.cuda_graphs`."""
    if backend.device.type != "cuda":
        return f"graphs are captured on CUDA devices, not on {backend.device.type}"
    return None if backend.cuda_graphs else "the backend does not claim that it can be captured"
