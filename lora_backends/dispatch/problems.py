"""Collects all problems of one call, so that one error lists them."""

from __future__ import annotations

from typing import Any

import torch

from lora_backends.dispatch.engine import Engine
from lora_backends.dtypes import dtype_name, dtype_names
from lora_backends.errors import InvalidInputError, UnsupportedInputError


class Problems:
    """Contradictions, and missing support of the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.invalid: list[str] = []
        self.unsupported: list[str] = []

    def refuse(self, text: str) -> None:
        """Note a contradiction."""
        self.invalid.append(text)

    def lack(self, text: str) -> None:
        """Note missing support of the engine."""
        self.unsupported.append(text)

    def need(self, feature: str, who: str) -> None:
        """Note a feature that the engine lacks; `who` begins the line, e.g. "the batch has"."""
        features = self.engine.features
        if feature not in features:
            supported = ", ".join(sorted(features)) or "the plain interface alone"
            self.lack(f"{who} {feature}, which this backend does not have; it has: {supported}")

    @property
    def dtypes(self) -> str:
        """Names of the dtypes that the engine supports."""
        return dtype_names(self.engine.dtypes)

    def check_type(self, name: str, value: Any, kind: type, allowed: str) -> bool:
        """Return whether an argument is of a class; note a problem if not."""
        if isinstance(value, kind):
            return True
        named = "" if kind.__name__ in allowed else f" ({kind.__name__})"
        self.refuse(f"{name} is a {type(value).__name__}; allowed: {allowed}{named}")
        return False

    def raise_if_any(self, method: str, **arguments: Any) -> None:
        """Raise the typed error that lists the problems and the arguments given."""
        if not self.invalid and not self.unsupported:
            return
        lines = [f"backend {self.engine.name!r} cannot run {method}:"]
        lines += [f"  - {problem}" for problem in self.invalid + self.unsupported]
        described = ", ".join(f"{k} {describe(v)}" for k, v in arguments.items() if v is not None)
        lines.append(f"  given: {described}")
        # a contradiction is the caller's to mend, whatever else is missing
        error = InvalidInputError if self.invalid else UnsupportedInputError
        raise error("\n".join(lines))


def _describe_stacks(weights: Any) -> str:
    """Return A, or B where the layer has no A; of a tuple, the first tensor and their number."""
    name = "lora_b" if weights.lora_a is None else "lora_a"
    stack = getattr(weights, name)
    if isinstance(stack, tuple):
        return f"{name} {len(stack)} tensors, the first {describe(stack[0])}"
    return f"{name} {describe(stack)}"


def describe(value: Any) -> str:
    """Return ``[12, 4096] float64 cuda:0`` for a tensor, a short text for anything else."""
    if isinstance(value, torch.Tensor):
        shape = "nested" if value.is_nested else list(value.shape)
        layout = "" if value.layout == torch.strided else f" {value.layout}"
        return f"{shape} {dtype_name(value.dtype)} {value.device}{layout}"
    is_layer = hasattr(value, "lora_a") and hasattr(value, "lora_b")  # explain has others
    if is_layer and isinstance(getattr(value, "output_slices", None), tuple):
        return f"{_describe_stacks(value)}, output_slices {value.output_slices}"
    if isinstance(getattr(value, "num_tokens", None), int):
        return f"of {value.num_tokens} tokens, {getattr(value, 'num_slots', '?')} slots"
    return f"({type(value).__name__})"
