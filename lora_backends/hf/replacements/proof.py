"""Compares replacing a module's output with replacing its parameters, on a trial input.

A model may read a parameter without calling its module, `self.embed.weight` for instance. A hook on
the module misses that, so an adapter is run on a trial input in both ways when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lora_backends.dispatch.any_axes import as_rows
from lora_backends.hf.calls.running import IDLE, running
from lora_backends.hf.layout.trial import TrialInputs, trial_of
from lora_backends.hf.layout.twin import twin_of
from lora_backends.hf.replacements.rows import ReplacedRows, Replacement, replace_rows

ROWS = ("a", "b")

MOST = 1e-3
"""Most that the two ways may differ, relative to what the adapter changes."""

MOST_ROUNDED = 0.05
"""The same, and relative to the output, too, where values of 16 bits are rounded."""


@torch.no_grad()
def reason_against(
    base: nn.Module,
    parameters: Mapping[str, Mapping[str, torch.Tensor]],  # values of their parameters, by path
    replacements: Mapping[str, Replacement],  # of their outputs, by path
) -> str | None:
    """Return why modules cannot take the place of the base's, or None; the base is not changed."""
    try:
        trial = trial_of(base)
        # The effect of the adapter is the scale of the tolerance.
        plain = _run(base, trial, lambda path, module: None)

        def replaced(path: str, module: nn.Module) -> None:
            for name, value in parameters.get(path, {}).items():
                module._parameters[name] = nn.Parameter(value, requires_grad=False)

        def hooked(path: str, module: nn.Module) -> None:
            if path in replacements:
                _hook(module, replacements[path])

        truth = _run(base, trial, replaced)
        hooked_values = _run(base, trial, hooked)
    except Exception as error:  # whatever a model of any author raises
        return f"the model does not run on a trial input ({type(error).__name__}: {error!s:.200})"
    # In 16 bits the order of operations shows in the last digits.
    exact = next(base.parameters()).dtype == torch.float32
    for name, expected in truth.items():
        ours, before = hooked_values[name], plain[name]
        if ours.shape != expected.shape:
            return f"its {name} would have shape {list(ours.shape)}, not {list(expected.shape)}"
        effect = expected.norm() if before.shape != expected.shape else (expected - before).norm()
        wrong = (ours - expected).norm()
        most, rounding = (MOST, 1e-5) if exact else (MOST_ROUNDED, MOST_ROUNDED / 10)
        if not bool(wrong <= most * effect + rounding * expected.norm()):
            return f"the model reads a parameter in another way than through its module ({name})"
    return None


def _run(
    base: nn.Module, trial: TrialInputs, change: Callable[[str, nn.Module], None]
) -> dict[str, torch.Tensor]:
    """Return the floating outputs of a changed twin of a model."""
    twin, _ = twin_of(base)
    for path, module in twin.named_modules():
        change(path, module)
    with running(IDLE), trial.fixed_random_numbers():
        output = twin(**trial.prompt(ROWS))
    tensors = {name: x for name, x in output.items() if isinstance(x, torch.Tensor)}
    return {name: x.float() for name, x in tensors.items() if x.is_floating_point()}


def _hook(module: nn.Module, replacement: Replacement) -> None:
    rows = ReplacedRows({0: replacement}, replacement.width)
    embeds = isinstance(module, nn.Embedding)

    def replace(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        x = args[0].flatten() if embeds else as_rows(args[0])
        numbers = torch.zeros(x.shape[0], dtype=torch.int64, device="cpu")
        return replace_rows(rows, x, replace_rows(rows, x, output, numbers, False), numbers, True)

    module.register_forward_hook(replace)
