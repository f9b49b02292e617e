"""Leaves out modules of an adapter that the base model lacks and does not need."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.specs import OwnModules
from lora_backends.errors import InvalidInputError


def without_unused(
    path: Path,
    groups: dict[str, dict[str, Tensor]],  # LoRA tensors by path of the module
    own: OwnModules,
    unused: Callable[[str], str | None],  # `ReadOptions.unused`
) -> tuple[dict[str, dict[str, Tensor]], OwnModules]:
    """Leave out modules that the base model lacks and does not need, with a warning, unless all."""
    owners = {name.rpartition(".")[0] for name in own.parameters}
    reasons = {name: reason for name in {*groups, *owners} if (reason := unused(name))}
    if not reasons:
        return groups, own
    told = [f"{name!r}: {reason}" for name, reason in sorted(reasons.items())]
    left = {name: parts for name, parts in groups.items() if name not in reasons}
    kept = {
        name: parameter
        for name, parameter in own.parameters.items()
        if name.rpartition(".")[0] not in reasons
    }
    own = replace(own, parameters=kept)
    if not left and not own:
        what = "the base model has no use for any module of the adapter"
        to_do = "load it on the model it was trained on"
        raise InvalidInputError(problem(path, what, told, "modules that it runs", to_do))
    warnings.warn(
        f"{path}: {len(told)} of its {len({*groups, *owners})} modules are left out: the base "
        f"model lacks them and has no use for them\n  given: {'; '.join(told[:3])}"
        f"{'; ...' * (len(told) > 3)}",
        RuntimeWarning,
        stacklevel=2,
    )
    return left, own
