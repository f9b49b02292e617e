"""Converts the tensor names of other trainers with diffusers' own converters.

Diffusers drops tensors that it does not support, sometimes without a warning. Here a tensor that
reaches no component is refused by name, unless all its values are 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_backends.diffusers.families import Family
from lora_backends.diffusers.files import LoRAFile
from lora_backends.errors import told

ALPHA = ".alpha"


@dataclass(frozen=True, eq=False)
class ComponentTensors:
    """One component's part of a file."""

    tensors: Mapping[str, Tensor]  # by PEFT's names: "mid_block.attentions.0.proj_in.lora_A.weight"
    alphas: Mapping[str, float]  # by path of the module
    metadata: Mapping[str, Any] | None  # PEFT's configuration


def convert(pipe: Any, family: Family, file: LoRAFile) -> dict[str, ComponentTensors]:
    """Return the tensors of each component of a pipeline, by the component's name.

    Raises:
        InvalidInputError: diffusers cannot convert the file, or a tensor, an alpha or metadata in
            it reaches no component.
    """
    state, alphas = _converted(pipe, family, file)
    names = (family.denoiser, *family.encoders)
    # diffusers drops what has another prefix, without an error
    strays = [key for key in (*state, *alphas) if not key.startswith(tuple(f"{n}." for n in names))]
    if strays:
        file.refuse(
            "tensors are for no component that this pipeline loads LoRA into, and diffusers would "
            "drop them",
            strays,
            f"names that begin with {', '.join(names)} after diffusers' conversion",
        )
    parts = {}
    for name in names:
        tensors = _without_prefix(state, name)
        numbers = _without_prefix(alphas, name)
        metadata = None if file.metadata is None else _without_prefix(file.metadata, name)
        if tensors:
            is_encoder = name != family.denoiser
            parts[name] = _renamed(
                file, name, getattr(pipe, name), is_encoder, tensors, numbers, metadata
            )
        elif numbers or metadata:
            rest = [f"{name}.{key}" for key in (*numbers, *(metadata or ()))]
            file.refuse(f"there are no tensors for {name}", rest, "alphas of LoRA matrices")
    if file.metadata is not None:
        # metadata of another component would go unused
        rest = [key for key in file.metadata if not key.startswith(tuple(f"{n}." for n in names))]
        if rest:
            file.refuse("the metadata is for another component", rest, ", ".join(names))
    return parts


def _without_prefix(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def _converted(
    pipe: Any, family: Family, file: LoRAFile
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the tensors and the alphas of a file, both by diffusers' names."""
    arguments: dict[str, Any] = {"return_lora_metadata": True}
    if family.maps_blocks:
        arguments["unet_config"] = getattr(pipe, family.denoiser).config
    if family.returns_alphas:
        arguments["return_alphas"] = True
    leaves = {n: t.detach() for n, t in file.tensors.items() if not n.endswith(ALPHA)}
    numbers = {n: _number(file, n, t) for n, t in file.tensors.items() if n.endswith(ALPHA)}
    try:
        # Autograd's graph shows which tensors the result depends on. Clones, because a converter
        # may scale a tensor in place.
        with torch.inference_mode(False), torch.enable_grad():
            given = {n: leaf.requires_grad_().clone() for n, leaf in leaves.items()} | numbers
            result = type(pipe).lora_state_dict(given, **arguments)
    except MemoryError:
        raise
    except Exception as error:  # converters fail by assertions, failed lookups and more
        raise file.error(
            "diffusers cannot convert it", told(error), "names of diffusers, kohya, XLabs or BFL"
        ) from error
    state: dict[str, Tensor] = result[0]
    alphas = (result[1] or {}) if len(result) == 3 else {}
    _check_nothing_lost(file, leaves, numbers, state)
    return (
        {name: tensor.detach() for name, tensor in state.items()},
        {name: float(alpha) for name, alpha in alphas.items()},
    )


def _number(file: LoRAFile, name: str, tensor: Tensor) -> Tensor:
    if tensor.numel() != 1:
        file.refuse("an alpha is no number", f"{name} {list(tensor.shape)}", "one number")
    # Converters take a floating-point scalar, and call item() on it.
    return tensor.detach().reshape(()).float()


def _check_nothing_lost(
    file: LoRAFile,
    leaves: Mapping[str, Tensor],
    numbers: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
) -> None:
    """Refuse a file if some of its tensors or alphas do not reach the converted tensors."""
    used = _leaves_of(state.values())
    lost = [
        name
        for name, leaf in leaves.items()
        # Dropping LoRA of zeros changes nothing. Dropping a scale of 0 would.
        if id(leaf) not in used and ("scale" in name or bool(leaf.any()))
    ]
    modules = {name.partition(".lora")[0] for name, leaf in leaves.items() if id(leaf) in used}
    # an alpha of a module without matrices scales nothing
    lost += [name for name in numbers if name.removesuffix(ALPHA) not in modules]
    if lost:
        file.refuse(
            "diffusers drops a part of it",
            lost,
            "LoRA matrices and alphas of modules that diffusers loads LoRA into",
            "train it without these parts, or merge it into the base model",
        )


def _leaves_of(results: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves of autograd's graph that the results depend on."""
    leaves: set[int] = set()
    pending: list[Any] = []
    for result in results:
        if result.grad_fn is None:
            leaves.add(id(result))
        else:
            pending.append(result.grad_fn)
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):  # AccumulateGrad, the node of a leaf
            leaves.add(id(node.variable))
        # a node may be reached in many ways
        new = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= new
        pending += new
    return leaves


def _renamed(
    file: LoRAFile,
    name: str,
    module: nn.Module,
    is_encoder: bool,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, float],
    metadata: Mapping[str, Any] | None,
) -> ComponentTensors:
    """Return the tensors of a component by PEFT's names, as diffusers' loaders rename them."""
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    renamed = dict(tensors)
    try:
        if is_encoder:
            renamed = convert_state_dict_to_peft(convert_state_dict_to_diffusers(renamed))
            if not hasattr(module, "text_model"):  # files have the paths of older Transformers
                renamed = {k.removeprefix("text_model."): v for k, v in renamed.items()}
        elif "lora_A" not in next(iter(renamed)):
            renamed = convert_unet_state_dict_to_peft(renamed)
    except ValueError as error:
        raise file.error(
            f"diffusers cannot convert the part for {name}",
            [told(error), *tensors],
            "LoRA matrices of modules",
        ) from error
    # the later of two would silently replace the earlier
    if len(renamed) != len(tensors):
        file.refuse(f"two tensors for {name} get one name", [*tensors], "one of them")
    if metadata is not None and not metadata:
        file.refuse(f"the metadata has no entry for {name}", [*tensors], "metadata for all parts")
    # both say what the alpha of a module is
    if metadata is not None and numbers:
        file.refuse(f"{name} has metadata and alphas", [*numbers], "one of them")
    # Old and new names pair by position, because the converters keep the order.
    names = dict(zip(tensors, renamed, strict=True))
    alphas = {}
    for key, alpha in numbers.items():
        module_name = key.removesuffix(ALPHA)
        downs = (module_name, f"{module_name}.lora.down.weight", f"{module_name}.lora_A.weight")
        matching = [names[down] for down in downs if down in names]
        if len(matching) != 1:
            file.refuse(f"an alpha belongs to no module of {name}", key, "alphas of LoRA matrices")
        alphas[matching[0].partition(".lora_A")[0]] = alpha
    return ComponentTensors(renamed, alphas, metadata)
