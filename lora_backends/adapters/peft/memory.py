"""Adapters that are in memory: a `PeftModel`, or its tensors and configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lora_backends.adapters.peft.checkpoint import checked_checkpoint
from lora_backends.adapters.peft.config import checked_config
from lora_backends.adapters.specs import Checkpoint
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown

if TYPE_CHECKING:
    from lora_backends.adapters.pool.pool import AdapterPool

ALLOWED = (
    "a PeftModel; or a dict of tensors as peft.get_peft_model_state_dict(model) returns, with "
    "config=, a LoraConfig or a dict; or a Checkpoint"
)


def checkpoint_from_memory(
    pool: AdapterPool,
    adapter: Any,  # as `MultiLoRAModel.add_adapter`, and so are the others
    config: Any | None = None,
    adapter_name: str | None = None,
) -> Checkpoint:
    """Return the checkpoint of an adapter in memory, its tensors copied: training may go on.

    Raises:
        InvalidInputError: something else, no such adapter, or as `read_checkpoint`.
        UnsupportedInputError: as `read_checkpoint`.
    """
    if _is_peft_model(adapter):
        if config is not None:
            raise InvalidInputError(
                "config is given for a PeftModel, which has its own\n  to do: leave it out"
            )
        source = Path(f"<{type(adapter).__name__} in memory>")
        tensors, config = _of_peft_model(adapter, adapter_name)
    elif isinstance(adapter, Mapping) and adapter_name is None:
        source, tensors = Path("<state_dict in memory>"), adapter
    else:
        raise InvalidInputError(f"no adapter\n  given: {shown(adapter)}\n  allowed: {ALLOWED}")
    values = config_as_json(config)
    strange = [key for key, value in tensors.items() if not isinstance(value, Tensor)]
    if strange or not all(isinstance(key, str) for key in tensors):
        raise InvalidInputError(
            f"a state_dict holds something else than tensors by name\n"
            f"  given: {shown(strange or list(tensors))}\n  allowed: {ALLOWED}"
        )
    # In the order of a file, so that errors name the same tensor.
    copies = {name: _copied(tensors[name]) for name in sorted(tensors)}
    return checked_checkpoint(
        source,
        source,
        checked_config(values, source, pool.read_options.own_modules),
        copies,
        pool.read_options,
    )


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta:
        return tensor  # refused by its name, like one of a file
    return tensor.detach().to("cpu", copy=True)


def _is_peft_model(adapter: Any) -> bool:
    # By the class's name: peft takes seconds to import, and need not be installed.
    return any(
        kind.__name__ == "PeftModel" and kind.__module__.partition(".")[0] == "peft"
        for kind in type(adapter).__mro__
    )


def _of_peft_model(model: Any, adapter_name: str | None) -> tuple[Mapping[str, Tensor], Any]:
    from peft import get_peft_model_state_dict

    active = model.active_adapters  # of its layers; `active_adapter` may be an earlier one
    if adapter_name is None and len(active) > 1:
        raise InvalidInputError(
            f"several adapters of the PeftModel are active\n  given: {shown(active)}\n"
            f"  to do: add each with adapter_name=, and blend them in rows, {{name: 1.0, ...}}"
        )
    name = next(iter(active), None) if adapter_name is None else adapter_name
    if not isinstance(name, str) or name not in model.peft_config:
        raise InvalidInputError(
            f"the PeftModel has no adapter {shown(name)}\n"
            f"  allowed: adapter_name= one of {', '.join(map(repr, model.peft_config))}"
        )
    _check_scaling(model, name)
    # False: "auto" would ask the hub for the size of the vocabulary, and the base model's own
    # embedding is not the adapter's.
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return tensors, model.peft_config[name]


def _check_scaling(model: Any, name: str) -> None:
    """Refuse an adapter that PEFT scales by a factor that its configuration does not hold."""
    from peft.tuners.lora import LoraLayer  # there is a PeftModel, so there is PEFT

    config = model.peft_config[name]
    if config.peft_type != "LORA":  # refused by its name later
        return
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or name not in layer.scaling:
            continue
        scaling = layer.scaling
        rank, alpha = layer.r[name], layer.lora_alpha[name]
        configured = alpha / (math.sqrt(rank) if config.use_rslora else rank)
        if not math.isclose(scaling[name], configured, rel_tol=1e-6):
            raise UnsupportedInputError(
                f"the PeftModel scales adapter {name!r} by a factor of its own, e.g. of set_scale "
                f"or rescale_adapter_scale\n"
                f"  given: scaling {scaling[name]} at {path}, where lora_alpha {alpha} and rank "
                f"{rank} give {configured}\n"
                f"  to do: add it without the factor, and blend it in rows, {{name: factor}}"
            )


def config_as_json(config: Any) -> dict[str, Any]:
    """Return a configuration as `adapter_config.json` holds it: sets are lists, words are str."""
    values = config.to_dict() if hasattr(config, "to_dict") else config
    try:
        if not isinstance(values, dict):
            raise TypeError("not a dict")
        copied = json.loads(json.dumps(values, default=_listed))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"config is {shown(config)}: {error}\n"
            f"  allowed: a peft.LoraConfig, or the contents of adapter_config.json as a dict"
        ) from error
    assert isinstance(copied, dict)
    return copied


def _listed(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    raise TypeError(f"{type(value).__name__} is not JSON")
