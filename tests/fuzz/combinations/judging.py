"""Whether rows are those of PEFT: in float32, where two orders of sums differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from helpers.sweeps.sweep import BOUND, result

PEFTS_OWN = 4.0
"""Times PEFT's own error in float32 that a row may have, where that is larger than `BOUND`."""


def of_rows(given: dict[str, torch.Tensor], rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the inputs of some rows."""
    return {name: tensor[list(rows)] for name, tensor in given.items()}


def doubled(given: dict[str, Any]) -> dict[str, Any]:
    """Return inputs whose floats are float64."""
    return {n: t.double() if t.is_floating_point() else t for n, t in given.items()}


def fault_of(
    found: torch.Tensor, peft: torch.Tensor, in_float64: Callable[[], torch.Tensor]
) -> str | None:
    """Return how a row differs from PEFT's; None: equal.

    `BOUND` is relative to the largest value of the row where that is over 1. Some models amplify
    the rounding of float32 further: there the error against PEFT in float64 may be a few times
    PEFT's own.

    Args:
        found: values of one row.
        peft: PEFT's.
        in_float64: returns PEFT's in float64.
    """
    if found.shape != peft.shape:
        return f"the row is {list(found.shape)}, of PEFT {list(peft.shape)}"
    scale = max(1.0, peft.abs().max().item())
    error = (found - peft).abs().max().item()
    if error <= BOUND * scale:
        return None
    exact = in_float64()
    own, ours = ((x.double() - exact).abs().max().item() for x in (peft, found))
    if ours <= PEFTS_OWN * own + BOUND * scale:
        return None
    return f"off by {ours:.3g} of {scale:.3g}, PEFT in float32 by {own:.3g}"


class PeftError(Exception):
    """PEFT itself cannot run an adapter on a batch, e.g. aLoRA of OPT, which flattens its rows."""


@contextmanager
def of_peft() -> Iterator[None]:
    """Tell PEFT's errors from the library's."""
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        raise PeftError(f"{type(error).__name__}: {error}") from error


def logits_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return the values of PEFT's model that tell the rows of its output apart."""
    with of_peft():
        found: torch.Tensor = result(model(**given))
    return found


def changes(found: torch.Tensor, plain: torch.Tensor) -> bool:
    """Return whether an adapter changes a row."""
    return found.shape != plain.shape or bool((found - plain).abs().max() > 20 * BOUND)
