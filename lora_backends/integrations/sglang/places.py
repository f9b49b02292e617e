"""Each weight of an adapter has a place in SGLang's pool, or the adapter is refused when it loads.

SGLang looks for a weight's place when its adapter first enters a slot. A weight without one then
ends the server, and a weight whose layer has no such module is left out without an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lora_backends.errors import UnsupportedInputError, shown

_HALF = re.compile(r"^(.+)\.lora_(?:embedding_)?([AB])(?:\.|$)")
_LAYER = re.compile(r"layers\.\d+\.")  # as SGLang finds the number of a layer
_TOWER = re.compile(r"vision|visual|image|audio|speech")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
_NUMBERED = re.compile(r"experts\.\d+\.")
_ENDS = ("embed_tokens", "lm_head", "unembed_tokens", "input_embeddings", "output_embeddings")


def check_name(name: str) -> None:
    """Refuse a weight that SGLang would leave out, or take for one of the language model.

    Raises:
        UnsupportedInputError: it is outside of the layers, or in another model's layers.
    """
    layer = _LAYER.search(name)
    if layer is None and not any(end in name for end in _ENDS):
        raise _refused(name, "SGLang leaves it out: its name has no number of a layer")
    if is_tower(name if layer is None else name[: layer.start()]):
        raise _refused(name, "SGLang takes it for the language model's layer of that number")


def check_copy(name: str, weight: torch.Tensor, model: torch.nn.Module | None) -> None:
    """Refuse a whole embedding or head in an adapter's file, unless it equals the model's own.

    PEFT writes a copy beside LoRA of an embedding, and a trained one if the vocabulary has grown.
    SGLang reads past both.

    Args:
        name: of the weight in the file.
        weight: its values.
        model: SGLang's; None where the version does not hand it to an adapter.

    Raises:
        UnsupportedInputError: it differs, or there is nothing to compare it with.
    """
    if _LAYER.search(name) or _HALF.match(name):
        return
    end = "embed_tokens" if "embed_tokens" in name and "unembed" not in name else "lm_head"
    suffixes = f"{end}.weight", f"{end}.base_layer.weight"
    found = [] if model is None else model.named_parameters(remove_duplicate=False)
    own = [parameter for path, parameter in found if path.endswith(suffixes)]
    # SGLang pads the vocabulary
    if not any(
        weight.dim() == 2
        and weight.shape[1:] == each.shape[1:]
        and torch.equal(each.detach()[: len(weight)].cpu(), weight.cpu().to(each.dtype))
        for each in own
    ):
        raise _refused(name, "it is not LoRA, and not equal to the base model's")


def is_tower(path: str) -> bool:
    """Return whether a path in front of ``layers.`` names an encoder beside the language model."""
    return _TOWER.search(path) is not None


def check_places(pool: Any, modules: Sequence[Mapping[str, Any]], adapter: Any) -> None:
    """Refuse an adapter with a weight that has no place of its own, or another shape.

    Args:
        pool: SGLang's `LoRAMemoryPool`.
        modules: by layer, LoRA layers by name.
        adapter: a `LoRAAdapter` with normalized weights.

    Raises:
        UnsupportedInputError: the first such weight.
    """
    for name in adapter.embedding_layers:
        if not any(
            end in name and end in pool.target_modules for end in ("embed_tokens", "lm_head")
        ):
            raise _refused(name, f"--lora-target-modules are {sorted(pool.target_modules)}")
    for number, layer in enumerate(adapter.layers):
        halves: dict[str, str] = {}  # of each place
        for name, weight in layer.weights.items():
            match = _HALF.match(name)
            if match is None:
                raise _refused(name, "it is neither A nor B of LoRA")
            path, half = match.groups()
            target = _target(path, pool.target_modules)
            if target is None:
                raise _refused(
                    name, f"--lora-target-modules are {sorted(pool.target_modules)}, once fused"
                )
            is_expert = _EXPERTS.search(path) is not None
            if not any(
                _takes(place, module, target, is_expert)
                for place, module in modules[number].items()
            ):
                raise _refused(name, "this layer of the model has no LoRA there")
            place = _LAYER.split(path)[-1] if is_expert else target
            if half in halves.setdefault(place, ""):
                raise _refused(name, f"another weight is {half} of the same {target}")
            halves[place] += half
            if is_expert and not _NUMBERED.search(path) and weight.dim() != 3:
                raise _refused(
                    name, "it has neither the number of an expert nor an axis of experts"
                )
            if not is_expert:
                _check_shape(pool, number, target, half, name, weight, adapter.config.r)
        for place, found in halves.items():
            if len(found) != 2:
                raise _refused(f"{place} of layer {number}", f"it has {found} alone")


def _target(path: str, targets: set[str]) -> str | None:
    """Return the longest target that a path ends with, if it is the one that SGLang picks.

    SGLang picks the longest that stands anywhere in the name.
    """
    ends = [each for each in targets if f".{path}".endswith(f".{each}")]
    inside = [each for each in targets if each in path]
    longest = max(inside, key=len, default=None)
    return longest if longest in ends else None


def _takes(place: str, module: Any, target: str, is_expert: bool) -> bool:
    if is_expert:
        return hasattr(module, "slice_moe_lora_a_weights")
    return f".{place}".endswith(f".{target}")


def _check_shape(
    pool: Any, number: int, target: str, half: str, name: str, weight: Any, rank: int
) -> None:
    stack = (pool.A_buffer if half == "A" else pool.B_buffer)[target][number]
    if half == "A":
        wanted = rank * (stack.shape[1] // pool.max_lora_rank), stack.shape[2]
    else:
        wanted = stack.shape[1], rank
    of_rank = 0 if half == "A" else 1
    # the other axis may be split over processes
    axes = (0, 1) if pool.tp_size == 1 else (of_rank,)
    if weight.dim() != 2 or any(weight.shape[axis] != wanted[axis] for axis in axes):
        raise _refused(name, f"its shape is {tuple(weight.shape)}, not {wanted}")


def _refused(name: str, reason: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"SGLang cannot serve a weight of an adapter\n"
        f"  given: {shown(name)}: {reason}\n"
        f"  to do: train the adapter without it, or start SGLang with --lora-target-modules that "
        f"hold it"
    )
