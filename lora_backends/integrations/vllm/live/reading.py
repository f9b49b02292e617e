"""Reads and checks a live adapter, so that nothing can fail later, when a batch needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.peft.checkpoint import checked_checkpoint
from lora_backends.adapters.peft.config import checked_config
from lora_backends.adapters.peft.module_rules import targets_among
from lora_backends.adapters.read_options import ReadOptions
from lora_backends.errors import InvalidInputError
from lora_backends.integrations.vllm.adapters.load import check_shapes, extras_of, load
from lora_backends.integrations.vllm.experts import is_experts
from lora_backends.integrations.vllm.layers import check_factors


def read(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    worker: Any,
    adapter_id: int,
    source: Path,
) -> Any:
    """Return an adapter as vLLM keeps it on the host, its modules packed.

    As with `load`, every process of a tensor-parallel group must call it in the same order.

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
    if any("experts" in key.split(".") for key in tensors):
        lora = _with_experts(config, tensors, worker, adapter_id, source)
    else:
        lora = load(config, tensors, worker, adapter_id, source, by_our_reader=True)
    _check_complete(config, lora, manager, source)
    for target in extras_of(lora).factors:
        check_factors(manager.modules[target.layer])
    manager._create_merged_loras_inplace(lora)
    lora.lora_backends_packed = True
    for name, module in manager.modules.items():
        if is_experts(module) and name in lora.loras:
            _check_experts(module, lora.loras[name], name, source)
    return lora


def pack_once(original: Callable[..., Any], manager: Any, lora: Any) -> None:
    """Pack an adapter's modules as vLLM does when it registers one, unless they are packed."""
    if not getattr(lora, "lora_backends_packed", False):
        original(manager, lora)


def _with_experts(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    worker: Any,
    adapter_id: int,
    source: Path,
) -> Any:
    """Load an adapter with LoRA of experts by vLLM's loader, checked by our reader."""
    options = ReadOptions(
        modules=None,
        max_rank=worker.lora_config.max_lora_rank,
        limits=LoadLimits.of(None),
        experts=None,
        max_expert_rank=None,
        own_modules=True,
    )
    rules = checked_config(dict(config), source, own_modules=True)
    checkpoint = checked_checkpoint(source, source, rules, tensors, options)
    check_shapes(checkpoint, worker, source)
    return load(config, tensors, worker, adapter_id, source, is_3d=bool(checkpoint.experts))


def _check_experts(module: Any, weights: Any, name: str, source: Path) -> None:
    """Refuse experts of other widths than a layer's: vLLM would write a part of the slot.

    Args:
        module: vLLM's layer of a mixture.
        weights: of the adapter, [experts, ...]: gate (or gate and up), down, and possibly up.
        name: of the layer.
        source: of the tensors, for the error.
    """
    first = module.w13_lora_a_stacked[0], module.w13_lora_b_stacked[0]
    second = module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
    for index, pair in enumerate(zip(weights.lora_a, weights.lora_b, strict=True)):
        stacks = second if index == 1 else first
        for given, stack, axis in zip(pair, stacks, (2, 1), strict=True):
            size, mine = given.shape[axis], stack.shape[axis + 1]
            # a process may have a part of one of the axes
            fits = size in (mine, mine * module.tp_size)
            if not fits or given.shape[0] not in (1, stack.shape[1]):
                raise InvalidInputError(
                    f"the LoRA of experts {name!r} does not fit the base model\n"
                    f"  file: {source}\n  given: {list(given.shape)}\n"
                    f"  allowed: {stack.shape[1]} experts of width {mine}\n"
                    f"  to do: update it on the base model that it was trained on"
                )


def _check_complete(config: Mapping[str, Any], lora: Any, manager: Any, source: Path) -> None:
    """Refuse an adapter without tensors for a module of the engine that it targets."""
    packed = {layer for layer, modules in manager.packed_modules.items() if modules != [layer]}
    pieces = [name for modules in manager.packed_modules.values() for name in modules]
    names = dict.fromkeys([*(name for name in manager.modules if name not in packed), *pieces])
    # PEFT may have seen stacked experts, which have other names
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
