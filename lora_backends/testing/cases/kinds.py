"""The kinds of cases, and how each is drawn and read back."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

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
    try:
        case = _value(ast.parse(text.strip(), mode="eval").body)
    except Exception as error:  # of the parser, or of a constructor with wrong fields
        raise InvalidInputError(
            f"the case cannot be read: {type(error).__name__}: {error}\n  given: {text}\n"
            f"  allowed: {_ALLOWED}, as a report prints it"
        ) from error
    if not isinstance(case, tuple(KINDS)):
        raise InvalidInputError(f"the case is a {type(case).__name__}\n  allowed: {_ALLOWED}")
    return cast(Case, case)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression as cases print it: nothing in it is run."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        kinds = {kind.__name__: kind for kind in KINDS}
        named = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
        if node.func.id in kinds and None not in named:  # None: `**fields`
            return kinds[node.func.id](*map(_value, node.args), **named)  # type: ignore[arg-type]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        dtype = getattr(torch, node.attr, None)
        if node.value.id == "torch" and isinstance(dtype, torch.dtype):
            return dtype
    if isinstance(node, ast.Tuple):
        return tuple(map(_value, node.elts))
    if isinstance(node, ast.List):
        return list(map(_value, node.elts))
    return ast.literal_eval(node)  # numbers, strings, None; refuses everything else
