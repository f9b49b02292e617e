"""Refuses or corrects adapters for which SGLang would compute other values than PEFT.

SGLang reads one rank and one scaling per adapter, and ignores all else of `adapter_config.json`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.config import checked_config
from lora_backends.adapters.peft.module_rules import ties_targets
from lora_backends.errors import UnsupportedInputError, shown
from lora_backends.integrations.sglang import places
from lora_backends.integrations.sglang.backend import BackendForSGLang

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    ("wq_du", "wk_dv", "wv_dv", "wr_du"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "x_proj"),
)
"""Projections that SGLang fuses."""

NEEDED = {"q_proj": "v_proj", "q_a_proj": "kv_a_proj_with_mqa"}
"""Projections that SGLang fuses only if this other one is there: it cannot fill in zeros for it."""


def check_config(
    original: Callable[..., Any], manager: Any, config: Any, ref: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse an adapter with a feature that SGLang ignores, before SGLang loads it.

    Raises:
        InvalidInputError: a value in `adapter_config.json` has a wrong type.
        UnsupportedInputError: the adapter has such a feature; SGLang's answer names it.
    """
    if isinstance(manager.lora_backend, BackendForSGLang):
        check_features(config.hf_config, ref.lora_name)
    return original(manager, config, ref, *args, **kwargs)


def check_features(values: dict[str, Any], name: str) -> None:
    """Refuse features of an adapter's configuration by name.

    Raises:
        InvalidInputError: a value has a wrong type.
        UnsupportedInputError: the adapter has features that SGLang ignores.
    """
    config = checked_config(values, Path(name))
    refused = [
        field
        for field in ("rank_pattern", "alpha_pattern", "lora_bias", "use_dora", "target_parameters")
        if getattr(config, field)
    ]
    if ties_targets(config, Path(name), LoadLimits()):
        refused.append("ensure_weight_tying")
    if refused:
        raise UnsupportedInputError(
            f"SGLang does not serve these features of adapter {shown(name)}\n"
            f"  given: {', '.join(refused)}\n"
            f"  allowed: one rank and one lora_alpha for all modules\n"
            f"  to do: merge the adapter into its base model, or train it without them"
        )


def check_name(
    original: Callable[..., Any], adapter: Any, name: str, loaded_weight: torch.Tensor
) -> Any:
    """Refuse a weight that SGLang would ignore or give to another module, before it takes it.

    A weight in memory shared with another process is copied, because SGLang reads it again for each
    load into a slot.

    Raises:
        UnsupportedInputError: such a weight.
    """
    if not isinstance(adapter.lora_backend, BackendForSGLang):
        return original(adapter, name, loaded_weight)
    places.check_name(name)
    places.check_copy(name, loaded_weight, getattr(adapter, "base_model", None))
    if loaded_weight.device.type == "cpu" and loaded_weight.untyped_storage().is_shared():
        loaded_weight = loaded_weight.clone()  # its sender may train it further
    done = original(adapter, name, loaded_weight)
    places.check_taken(name, adapter.embedding_layers)
    return done


def check_weights(original: Callable[..., Any], adapter: Any, *args: Any, **kwargs: Any) -> Any:
    """Set the scaling of rsLoRA, and refuse weights that SGLang would ignore or misplace.

    Raises:
        UnsupportedInputError: a projection lacks the others that SGLang fuses it with, or a weight
            has no place in the pool.
    """
    if not isinstance(adapter.lora_backend, BackendForSGLang):
        return original(adapter, *args, **kwargs)
    if adapter.config.hf_config.get("use_rslora"):
        adapter.scaling = adapter.config.lora_alpha / math.sqrt(adapter.config.r)
    for layer in adapter.layers:
        _refuse_parts_without_values(set(layer.weights))
    done = original(adapter, *args, **kwargs)
    _refuse_parts_left(adapter)
    if adapter.lora_backend.check_places is not None:  # else the pool is made later, and checks
        adapter.lora_backend.check_places(adapter)
    return done


def _refuse_parts_without_values(names: set[str]) -> None:
    """Refuse a part without the other that it needs; SGLang's own error is unclear or late."""
    for name in sorted(names):
        for part, needed in NEEDED.items():
            if f".{part}." in name and name.replace(f".{part}.", f".{needed}.") not in names:
                raise _incomplete(part)


def _refuse_parts_left(adapter: Any) -> None:
    """Refuse parts that SGLang has not fused, if the model's layer has no module of that name."""
    parts = {part for together in FUSED for part in together}
    for number, layer in enumerate(adapter.layers):
        last = {name.partition(".lora_")[0].rsplit(".", 1)[-1] for name in layer.weights}
        if stray := (last & parts) - _modules_of(adapter, number):
            raise _incomplete(", ".join(sorted(stray)))


def _modules_of(adapter: Any, number: int) -> set[str]:
    """Return the last names of the modules of the language model's layer; none if unknown."""
    model = getattr(adapter, "base_model", None)
    if model is None:
        return set()
    names = set()
    for name, _ in model.named_modules():
        before, layer, inside = name.partition(f"layers.{number}.")
        if layer and not places.is_tower(before):
            names.add(inside.rsplit(".", 1)[-1])
    return names


def _incomplete(given: str) -> UnsupportedInputError:
    sets = "; ".join(", ".join(together) for together in FUSED)
    return UnsupportedInputError(
        f"an adapter targets only some of the projections that SGLang fuses\n"
        f"  given: {given}\n"
        f"  allowed: whole sets: {sets}; k_proj and up_proj may be absent\n"
        f"  to do: train it on all of them, or add weights of zeros for those it lacks"
    )
