"""How checkpoints name the LoRA of experts.

Below the path of the experts' module, "model.layers.0.mlp.experts" for instance:

stacked   lora_A.weight, base_layer.lora_A.weight                 PEFT's `target_parameters`
named     gate_up_proj.lora_A, w1.lora_A.weight                   one tensor [experts or 1, ...]
numbered  3.gate_proj.lora_A.weight, gate_up_projs.3.lora_A.weight   a module per expert
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from lora_backends.adapters.peft.old_names import renamed
from lora_backends.adapters.specs import ExpertSpec, ModuleSpec

Parts: TypeAlias = Mapping[str, Tensor]  # by the end of a tensor's name, e.g. "lora_A.weight"
Style: TypeAlias = Literal["stacked", "named", "numbered"]

GATED, PLAIN, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""The parameters of experts: gate and up together, up where there is no gate, and down."""

PROJECTIONS = {
    "gate_proj": (GATED, 0),
    "w1": (GATED, 0),
    "up_proj": (GATED, 1),
    "w3": (GATED, 1),
    "gate_up_proj": (GATED, None),
    "w13": (GATED, None),
    "gate_up_projs": (GATED, None),
    "down_proj": (DOWN, None),
    "w2": (DOWN, None),
    "down_projs": (DOWN, None),
}
"""Name of a projection to the parameter that holds it, and its slice there; None: all of it."""

_PROJECTION = r"gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3"
_PATH = re.compile(
    r"(?P<experts>(?:.*\.)?experts)(?:"
    r"(?P<stacked>|\.base_layer)|"
    rf"\.(?P<named>{_PROJECTION})|"
    rf"\.(?P<number>\d{{1,9}})\.(?P<of_number>{_PROJECTION})|"
    r"\.(?P<list>gate_up_projs|down_projs)\.(?P<item>\d{1,9}))"
)


@dataclass(frozen=True)
class ExpertGroup:
    """The LoRA tensors under one path below an experts' module."""

    path: str  # as the file has it
    experts: str  # path of the module that holds all experts, as the base model has it
    style: Style
    projection: str  # a key of `PROJECTIONS`; stacked: "" or "base_layer"
    number: int | None  # of the expert, where every expert has a module of its own
    parts: Parts


def take_experts(
    groups: Mapping[str, Parts],
    modules: Mapping[str, ModuleSpec] | None,
    experts: Mapping[str, ExpertSpec] | None,
) -> tuple[dict[str, Parts], dict[str, list[ExpertGroup]]]:
    """Tell the tensors of experts from those of modules.

    Returns:
        The groups that are left, and those of experts by the path of the module that holds them.
    """
    others: dict[str, Parts] = {}
    taken: dict[str, list[ExpertGroup]] = {}
    # Paths of the modules that hold the parameters.
    known = {path.rpartition(".")[0] for path in experts or ()}
    for path, parts in groups.items():
        match = None if modules is not None and path in modules else _PATH.fullmatch(path)
        if match is None:
            others[path] = parts
            continue
        group = _group(match, path, renamed(match["experts"], known), parts)
        taken.setdefault(group.experts, []).append(group)
    return others, taken


def _group(match: re.Match[str], path: str, experts: str, parts: Parts) -> ExpertGroup:
    if match["named"]:
        return ExpertGroup(path, experts, "named", match["named"], None, parts)
    if match["number"]:
        number = int(match["number"])
        return ExpertGroup(path, experts, "numbered", match["of_number"], number, parts)
    if match["list"]:
        return ExpertGroup(path, experts, "numbered", match["list"], int(match["item"]), parts)
    return ExpertGroup(path, experts, "stacked", match["stacked"].removeprefix("."), None, parts)


def ruled_names(taken: Mapping[str, Sequence[ExpertGroup]]) -> list[str]:
    """Return every name that rank, scaling and target of experts may be looked up by."""
    names: dict[str, None] = {}
    for experts, groups in taken.items():
        for group in groups:
            if group.style == "stacked":
                names |= dict.fromkeys(f"{experts}.{name}" for name in (GATED, PLAIN, DOWN))
            names |= dict.fromkeys((group.path, group.path.rpartition(".")[0]))
    return [name for name in names if name]
