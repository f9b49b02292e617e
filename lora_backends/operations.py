"""The operations of the interface, one value each: the only list of them.

Checks, torch's library, cached calls and the conformance kit read this list, so an operation is
added here and to `LoRABackend`, and nowhere else by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lora_backends.errors import InvalidInputError, did_you_mean

if TYPE_CHECKING:
    import torch  # takes seconds, and commands read this list to describe themselves


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class Input(Enum):
    """The input that an operation reads."""

    ROWS = "rows"  # [num_tokens, in_features]
    TOKEN_IDS = "token ids"  # [num_tokens] integers: the rows are one-hot
    H = "h"  # [num_slices, num_tokens, max_rank], from `run_lora_a`
    ROUTED_ROWS = "routed rows"  # a row per token or per (token, expert) pair, with a routing


class Option(NamedTuple):
    """A keyword argument of an operation."""

    name: str
    values: tuple[bool | str, ...]  # allowed; the first is the default


@dataclass(frozen=True)
class Operation:
    """One `run_*` method of `LoRABackend`."""

    name: str  # of the method
    input: Input  # kind of the first argument
    argument: str  # name of the first argument
    result: Literal["h", "y"] = "y"  # y is added to base_output, h has none
    num_slices: int | None = None  # slices that the layer must have; None: any number
    same_as: str | None = None  # the operation that this one is a case of
    options: tuple[Option, ...] = ()  # keyword arguments after base_output

    @property
    def is_dense(self) -> bool:
        """Whether it takes a `LoRAWeights` and a plan."""
        return self.input is not Input.ROUTED_ROWS

    def output_shape(
        self, first: torch.Tensor, weights: Any, plan: Any, options: Mapping[str, Any] = NO_OPTIONS
    ) -> tuple[int, ...]:
        """Return the shape of y for arguments that are checked; `plan` may be a routing."""
        if self.input is Input.ROUTED_ROWS:
            pairs = (plan.num_tokens,) if options["reduce"] else (plan.num_tokens, plan.top_k)
            return *pairs, weights.out_features
        tokens = first.shape[1] if self.input is Input.H else first.shape[0]
        return tokens, weights.out_features


OPERATIONS = (
    Operation("run_lora_a", Input.ROWS, "x", result="h"),
    Operation("run_lora_b", Input.H, "h"),
    Operation("run_linear", Input.ROWS, "x"),
    Operation("run_qkv", Input.ROWS, "x", num_slices=3, same_as="run_linear"),
    Operation("run_gate_up", Input.ROWS, "x", num_slices=2, same_as="run_linear"),
    Operation("run_embedding", Input.TOKEN_IDS, "token_ids"),
    Operation("run_logits", Input.ROWS, "hidden", same_as="run_linear"),
    Operation(
        "run_experts",
        Input.ROUTED_ROWS,
        "x",
        options=(
            Option("rows", ("tokens", "pairs")),
            Option("weighted", (False, True)),
            Option("reduce", (False, True)),
        ),
    ),
)

BY_NAME = MappingProxyType({operation.name: operation for operation in OPERATIONS})
"""Every operation by the name of its method."""

DENSE = MappingProxyType({name: each for name, each in BY_NAME.items() if each.is_dense})
"""Those of them that `bench` times and `explain` draws."""


def find_operation(name: str) -> Operation:
    """Return the operation on dense layers that has a name; InvalidInputError if none has."""
    if name not in DENSE:
        raise InvalidInputError(
            f"no operation of a dense layer named {name!r}{did_you_mean(name, DENSE)}\n"
            f"  allowed: {', '.join(DENSE)}"
        )
    return DENSE[name]
