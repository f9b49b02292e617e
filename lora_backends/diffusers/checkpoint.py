"""Makes the checkpoint of one component from its tensors, alphas and metadata.

The scaling of a module is alpha / rank, or 1 in a file without alphas. Metadata gives scalings by
PEFT's rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lora_backends.adapters import Checkpoint, LoadLimits, ModuleDelta
from lora_backends.adapters.peft.config import checked_config
from lora_backends.adapters.peft.module_rules import module_rules
from lora_backends.diffusers.conversion import ComponentTensors
from lora_backends.diffusers.files import LoRAFile
from lora_backends.errors import did_you_mean
from lora_backends.hf.layout.sites import ModuleSite

A, B, BIAS, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector"
_PARTS = (A, B, BIAS, MAGNITUDE)


def checkpoint_of(
    file: LoRAFile,
    name: str,  # of the component
    part: ComponentTensors,  # of the component in the file
    sites: Mapping[str, ModuleSite],  # of the component, by path
    max_rank: int,
    limits: LoadLimits,  # for matching metadata
) -> Checkpoint:
    """Return the checkpoint of one component, from its part of a file.

    Raises:
        InvalidInputError: the part does not fit the component, or contradicts itself.
        UnsupportedInputError: the metadata asks for a feature that is not reproduced exactly.
    """
    modules = _modules(file, name, part)
    scalings = _scalings(file, name, part, modules, limits)
    deltas = {}
    for path in sorted(modules):
        site = sites.get(path)
        if site is None:
            file.refuse(
                f"{name} has no module {path!r}{did_you_mean(path, sites)}",
                f"{len([p for p in modules if p not in sites])} of {len(modules)} modules that "
                f"{name} lacks",
                "LoRA of linear layers and convolutions",
                "load it into the model that it was trained for",
            )
        deltas[path] = _delta(file, name, site, modules[path], scalings[path], max_rank)
    return Checkpoint(file.path, deltas, {})


def _modules(file: LoRAFile, name: str, part: ComponentTensors) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each module, by the names in `_PARTS`."""
    modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
    strange = []
    for key, tensor in part.tensors.items():
        path, dot, end = key.rpartition(".lora_")
        end = f"lora_{end}" if end != "magnitude_vector.weight" else MAGNITUDE
        if dot and end in _PARTS:
            modules[path][end] = tensor
        else:
            strange.append(f"{name}.{key}")
    if strange:
        file.refuse("some tensors are not understood", strange, f"the parts {', '.join(_PARTS)}")
    # If one module has a bias or magnitudes, PEFT makes them for all modules. Those that the file
    # lacks would keep their initial values.
    needed = [A, B, *(end for end in (BIAS, MAGNITUDE) if any(end in m for m in modules.values()))]
    for path, parts in modules.items():
        missing = [end for end in needed if end not in parts]
        if missing:
            file.refuse(f"{name}.{path} lacks {missing[0]}", [*parts], " and ".join(needed))
    return modules


def _scalings(
    file: LoRAFile,
    name: str,
    part: ComponentTensors,
    modules: Mapping[str, Mapping[str, Tensor]],
    limits: LoadLimits,
) -> dict[str, float]:
    """Return the scaling of each module."""
    ranks = {path: parts[A].shape[0] for path, parts in modules.items()}
    if part.metadata is None:
        without = [f"{name}.{path}" for path in modules if path not in part.alphas]
        if part.alphas and without:
            file.refuse(
                "some modules have an alpha and others have none",
                without,
                "alphas for all modules of a component, or for none",
            )
        alphas = part.alphas
        return {path: alphas[path] / rank if alphas else 1.0 for path, rank in ranks.items()}
    # metadata of PEFT has patterns by module, which are matched as in a checkpoint
    config = checked_config(dict(part.metadata), file.path)
    rules = module_rules(config, list(modules), file.path, limits)
    for path, rule in rules.items():
        if rule.rank != ranks[path]:
            file.refuse(
                f"the metadata and {name}.{path} disagree",
                f"rank {ranks[path]} in {A}, {rule.rank} in the metadata",
                "one rank",
            )
    for key, end in (("lora_bias", BIAS), ("use_dora", MAGNITUDE)):
        if getattr(config, key) != any(end in parts for parts in modules.values()):
            file.refuse(
                f"the metadata and the tensors of {name} disagree",
                f"{key} = {getattr(config, key)}",
                f"{end} where {key} is true",
            )
    return {path: rule.scaling for path, rule in rules.items()}


def _delta(
    file: LoRAFile,
    name: str,
    site: ModuleSite,
    parts: Mapping[str, Tensor],
    scaling: float,
    max_rank: int,
) -> ModuleDelta:
    """Return the LoRA of one module; that of a convolution becomes matrices for patches."""
    rank, spec = parts[A].shape[0] if parts[A].ndim else 0, site.spec
    shape_a: tuple[int, ...] = (rank, spec.in_features)
    shape_b: tuple[int, ...] = (spec.out_features, rank)
    if isinstance(site.module, nn.Conv2d):
        shape_a = (rank, site.module.in_channels, *site.module.kernel_size)
        shape_b = (*shape_b, 1, 1)
    width = (spec.out_features,)
    allowed = {A: shape_a, B: shape_b, BIAS: width, MAGNITUDE: width}
    for end, tensor in parts.items():
        if tuple(tensor.shape) != allowed[end] or not 1 <= rank <= max_rank:
            file.refuse(
                f"{name}.{site.path}.{end} does not fit",
                f"{list(tensor.shape)}",
                f"{list(allowed[end])} of a rank from 1 to {max_rank} (max_rank)",
                "load it into the model that it was trained for, or raise max_rank",
            )
    # PEFT scales the bias with the rest of B; the pool adds a bias as it is
    bias = parts[BIAS].to(torch.float32) * scaling if BIAS in parts else None
    # of a convolution: the patch of an output position is a row of x
    a, b = parts[A].flatten(1), parts[B].flatten(1)
    return ModuleDelta(site.path, "linear", rank, scaling, a, b, bias, parts.get(MAGNITUDE))
