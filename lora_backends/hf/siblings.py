"""Modules that are called with one input, as one layer: q, k and v, or gate and up.

The first of them to be called, the leader, computes the base outputs of all, adds the LoRA of all
in one call of the backend, and keeps what belongs to its siblings. A sibling that is called with
the very same tensor takes its part and computes nothing; called with anything else it runs alone.
So a model may call them in any order and with any input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from lora_backends.backend import LoRABackend
from lora_backends.hf.hooks import RUNNING, Hook, Kept
from lora_backends.hf.sites import Site

GROUPS = (
    (("q_proj", "k_proj", "v_proj"), "run_qkv"),
    (("gate_proj", "up_proj"), "run_gate_up"),
)
"""Names of modules under one parent, the leader first, and the operation that runs them."""


@dataclass(eq=False)
class Siblings:
    """Linear modules of one parent that a leader may run."""

    paths: tuple[str, ...]  # the leader's first, in the order of the slices
    modules: tuple[nn.Linear, ...]
    operation: str  # of the interface
    apart: bool = False  # whether the model was seen to call them with different inputs


def find_siblings(sites: Mapping[str, Site]) -> list[Siblings]:
    """Return the groups of plain linear modules with nothing of anybody else's on them."""
    groups = []
    for path in sites:
        parent, dot, name = path.rpartition(".")
        for names, operation in GROUPS:
            paths = tuple(f"{parent}{dot}{other}" for other in names)
            if name == names[0] and all(other in sites for other in paths):
                modules = tuple(sites[other].module for other in paths)
                if all(sites[other].refusal is None for other in paths) and _are_plain(modules):
                    groups.append(Siblings(paths, modules, operation))  # type: ignore[arg-type]
    return groups


def _are_plain(modules: tuple[nn.Module, ...]) -> bool:
    """Return whether the leader may compute what calling each of the modules would."""
    kinds = set()
    for module in modules:
        if (
            type(module) is not nn.Linear
            or "forward" in vars(module)
            or module._forward_hooks
            or module._forward_pre_hooks
        ):
            return False
        kinds.add((module.in_features, module.weight.dtype, module.weight.device))
    return len(kinds) == 1


def leader_hook(model: str, group: Siblings, backend: LoRABackend, alone: Hook) -> Hook:
    """Return the leader's forward hook.

    Args:
        model: whose calls it serves.
        group: the leader and its siblings.
        backend: what adds.
        alone: the leader's hook where it runs without the others.

    Returns:
        A forward hook.
    """
    path, (leader, *others) = group.paths[0], group.modules
    in_features, widths = leader.in_features, [module.out_features for module in group.modules]
    width, run = sum(widths), getattr(backend, group.operation)

    def add_lora(
        module: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return alone(module, args, output)
        left, RUNNING.kept = RUNNING.kept, None
        if left is not None:
            left.group.apart = True
        call = RUNNING.call
        x: torch.Tensor = args[0]
        weights = call.shared.get(path) if call.model == model else None
        if weights is None or group.apart or module is not leader or x.is_inference():
            return alone(module, args, output)  # no version tells of a change in inference mode
        plan = call.plan(x.shape[:-1], path)
        y = torch.cat([output, *(nn.Linear.forward(other, x) for other in others)], -1)
        run(x.reshape(-1, in_features), weights, plan, y.view(-1, width))
        mine, *theirs = _columns(y, widths)
        RUNNING.kept = Kept(group, x, x._version, dict(zip(others, theirs, strict=True)))
        return mine

    return add_lora


def _columns(y: torch.Tensor, widths: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the columns of every module.

    Copies on a CPU: activations round the ends of strided rows in another way than those of
    contiguous ones there, and rows without an adapter have to stay the base model's.
    """
    columns = torch.split_with_sizes(y, widths, -1)
    return tuple(c.contiguous() for c in columns) if y.device.type == "cpu" else columns


def sibling_hook(alone: Hook) -> Hook:
    """Return a sibling's forward hook: `alone`, unless the leader has added its LoRA already."""

    def add_lora(
        module: nn.Module, args: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if not torch.compiler.is_compiling() and RUNNING.served is module:
            RUNNING.served = None
            return None
        return alone(module, args, output)

    return add_lora


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Take what the leader has kept for this module and this input, or compute as ever."""
    if not torch.compiler.is_compiling():
        RUNNING.served = None
        kept = RUNNING.kept
        if kept is not None and kept.x is input and kept.version == input._version:
            output = kept.outputs.pop(self, None)
            if not kept.outputs:
                RUNNING.kept = None
            if output is not None:
                RUNNING.served = self
                return output
    return nn.Linear.forward(self, input)


class ForwardOverride:
    """The `forward` of one sibling, until it is removed.

    A bound method, so that a deep copy of the model computes with its own weights.
    """

    def __init__(self, module: nn.Linear) -> None:
        self._module, self._forward = module, MethodType(_forward, module)
        module.forward = self._forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the module its own `forward` back, unless somebody has put another one there."""
        if vars(self._module).get("forward") is self._forward:
            del self._module.forward
