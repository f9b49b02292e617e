"""Refuses or corrects adapters for which SGLang would compute other values than PEFT.

SGLang reads one rank and one scaling per adapter, and ignores all else of `adapter_config.json`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_backends.adapters.peft.config import checked_config
from lora_backends.errors import UnsupportedInputError, shown
from lora_backends.integrations.sglang.backend import BackendForSGLang

PARTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that SGLang fuses."""

_PART = re.compile(r"\.(q_proj|k_proj|v_proj|up_proj)\.lora_")


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
    if refused:
        raise UnsupportedInputError(
            f"SGLang does not serve these features of adapter {shown(name)}\n"
            f"  given: {', '.join(refused)}\n"
            f"  allowed: one rank and one lora_alpha for all modules\n"
            f"  to do: merge the adapter into its base model, or train it without them"
        )


def check_weights(original: Callable[..., Any], adapter: Any, *args: Any, **kwargs: Any) -> Any:
    """Set the scaling of rsLoRA, and refuse weights that SGLang would ignore or misplace.

    Raises:
        UnsupportedInputError: a projection lacks the others that SGLang fuses it with.
    """
    if not isinstance(adapter.lora_backend, BackendForSGLang):
        return original(adapter, *args, **kwargs)
    if adapter.config.hf_config.get("use_rslora"):
        adapter.scaling = adapter.config.lora_alpha / math.sqrt(adapter.config.r)
    names = {name for layer in adapter.layers for name in layer.weights}
    _refuse_parts_without_values(names)
    done = original(adapter, *args, **kwargs)
    left = sorted(
        {
            match[1]
            for layer in adapter.layers
            for name in layer.weights
            if (match := _PART.search(name))
        }
    )
    fused = {part for parts in PARTS for part in parts if _is_fused(adapter, parts)}
    if stray := [part for part in left if part in fused]:
        raise _incomplete(", ".join(stray))
    return done


def _refuse_parts_without_values(names: set[str]) -> None:
    """Refuse q_proj without v_proj, for which SGLang's own error gives no reason."""
    for name in sorted(names):
        if ".q_proj." in name and name.replace(".q_proj.", ".v_proj.") not in names:
            raise _incomplete("q_proj")


def _is_fused(adapter: Any, parts: tuple[str, ...]) -> bool:
    """Return whether the model has these projections in one layer; True where it is not known."""
    model = getattr(adapter, "base_model", None)
    if model is None:
        return True
    last = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    return last.isdisjoint(parts)


def _incomplete(given: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"an adapter targets only some of the projections that SGLang fuses\n"
        f"  given: {given}\n"
        f"  allowed: q_proj and v_proj, with or without k_proj; gate_proj, with or without "
        f"up_proj\n"
        f"  to do: train it on all of them, or add weights of zeros for those it lacks"
    )
