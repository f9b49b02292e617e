"""The kinds of cases, and how each is drawn and read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from hypothesis.strategies import SearchStrategy

from lora_backends.errors import InvalidInputError
from lora_backends.testing.cases.dense import EDGES, LoRACase
from lora_backends.testing.cases.expert_strategies import expert_cases
from lora_backends.testing.cases.experts import EXPERT_EDGES, ExpertCase
from lora_backends.testing.cases.strategies import lora_cases

Case: TypeAlias = LoRACase | ExpertCase


class Kind(NamedTuple):
    """A kind of cases, as the suite draws it and reads it back."""

    strategy: Callable[..., SearchStrategy[Any]]  # of (dtypes, *, profile, ...)
    edges: Mapping[str, Callable[[Any], bool]]  # name to the predicate on a case


KINDS: Mapping[type[Case], Kind] = {
    LoRACase: Kind(lora_cases, EDGES),
    ExpertCase: Kind(expert_cases, EXPERT_EDGES),
}
"""Every kind of case."""

_ALLOWED = " or ".join(f"{kind.__name__}(...)" for kind in KINDS)


def case_from(text: str) -> Case:
    """Return the case that an expression such as ``LoRACase(...)`` names, as a report prints it.

    Raises:
        InvalidInputError: the text is no such expression.
    """
    names = {kind.__name__: kind for kind in KINDS} | {"torch": torch, "__builtins__": {}}
    try:
        case = eval(text, names)  # the user's own command line
    except Exception as error:
        raise InvalidInputError(
            f"the case cannot be read: {type(error).__name__}: {error}\n  given: {text}\n"
            f"  allowed: {_ALLOWED}, as a report prints it"
        ) from error
    if not isinstance(case, tuple(KINDS)):
        raise InvalidInputError(f"the case is a {type(case).__name__}\n  allowed: {_ALLOWED}")
    return case  # type: ignore[return-value]
