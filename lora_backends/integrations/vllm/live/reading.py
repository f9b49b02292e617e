"""Reads a live adapter so that nothing about it can fail once a batch needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.config import checked_config
from lora_backends.adapters.peft.module_rules import targets_among
from lora_backends.errors import InvalidInputError
from lora_backends.integrations.vllm.adapters.load import extras_of, load
from lora_backends.integrations.vllm.layers import check_factors


def read(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    worker: Any,
    adapter_id: int,
    source: Path,
) -> Any:
    """Return an adapter as vLLM keeps it on the host, its modules packed.

    Every process of a tensor-parallel group calls it in the same order, as `load`.

    Args:
        config: the contents of `adapter_config.json`.
        tensors: by PEFT's keys.
        worker: vLLM's `WorkerLoRAManager`.
        adapter_id: of the adapter in vLLM.
        source: of the tensors, for errors.

    Raises:
        InvalidInputError: tensors are missing, not finite, or of wrong shapes.
        UnsupportedInputError: a feature that cannot be reproduced here.
        ValueError: vLLM refuses it.
    """
    manager = worker._adapter_manager
    lora = load(config, tensors, worker, adapter_id, source, by_our_reader=True)
    _check_complete(config, lora, manager, source)
    for target in extras_of(lora).factors:
        check_factors(manager.modules[target.layer])
    lora.is_3d_lora_weight = any(name.endswith(".experts") for name in lora.loras)
    manager._create_merged_loras_inplace(lora)  # as vLLM does it; a second time changes nothing
    return lora


def _check_complete(config: Mapping[str, Any], lora: Any, manager: Any, source: Path) -> None:
    """Refuse an adapter without tensors for a module of the engine that it targets."""
    packed = {layer for layer, modules in manager.packed_modules.items() if modules != [layer]}
    pieces = [name for modules in manager.packed_modules.values() for name in modules]
    names = dict.fromkeys([*(name for name in manager.modules if name not in packed), *pieces])
    # experts may be stacked in the model that PEFT saw, and then have other names
    asked = [name for name in names if "experts" not in name.split(".") and name not in lora.loras]
    rules = checked_config(dict(config), source, own_modules=True)
    missing = targets_among(rules, asked, source, LoadLimits.of(None))
    if missing:
        more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InvalidInputError(
            f"a live adapter lacks tensors\n  file: {source}\n"
            f"  given: no LoRA of {', '.join(missing[:3])}{more}\n"
            f"  allowed: LoRA of every module that target_modules names\n"
            f"  to do: pass all tensors, or correct target_modules"
        )
