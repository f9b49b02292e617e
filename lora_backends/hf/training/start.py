"""A new adapter as PEFT makes it: its own code draws the values, on a twin of the base model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lora_backends.adapters.peft.memory import config_as_json
from lora_backends.errors import InvalidInputError, LoRABackendError, shown, told
from lora_backends.hf.layout.twin import twin_of
from lora_backends.hf.training.features import check_config


def new_tensors(base: nn.Module, config: Any, name: str) -> tuple[dict[str, Tensor], Any]:
    """Return the tensors of a new adapter, by PEFT's names, and the values of its configuration.

    The tensors, and the draws from torch's generators, are those of ``get_peft_model(base,
    config)`` at this moment; model and configuration stay as they are.

    Raises:
        InvalidInputError: `config` is no LoraConfig, or PEFT refuses it for this model.
        UnsupportedInputError: the configuration uses a feature that cannot be trained.
    """
    kinds = {
        f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(config).__mro__
    }
    if "peft.LoraConfig" not in kinds:
        raise InvalidInputError(
            f"config is {shown(config)}\n  allowed: a peft.LoraConfig, e.g. "
            f'peft.LoraConfig(r=8, target_modules="all-linear")'
        )
    from peft import get_peft_model, get_peft_model_state_dict  # there is a LoraConfig

    source = f"the configuration of {name!r}"
    check_config(config_as_json(config), source, is_new=True)
    # PEFT writes into it
    config = copy.deepcopy(config)
    # else PEFT freezes what it makes
    config.inference_mode = False
    twin: Any = twin_of(base)[0]
    twin.config = copy.copy(getattr(base, "config", None))  # PEFT sets a field of it
    with _flags_kept(base), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = get_peft_model(twin, config)
            # False: the base model's own embedding is not the adapter's.
            tensors = get_peft_model_state_dict(made, save_embedding_layers=False)
        except LoRABackendError:
            raise
        except Exception as error:  # PEFT raises errors of many kinds
            raise InvalidInputError(
                f"PEFT makes no adapter of this configuration\n  given: {told(error)[:500]}\n"
                f"  to do: correct {source}"
            ) from error
    values = config_as_json(made.peft_config["default"])
    check_config(values, source, is_new=True)  # PEFT adds modules_to_save for some tasks
    return {key: tensor.detach() for key, tensor in tensors.items()}, values


@contextmanager
def _flags_kept(base: nn.Module) -> Iterator[None]:
    """Restore which parameters require a gradient: PEFT freezes those that its twin shares."""
    flags: Mapping[nn.Parameter, bool] = {p: p.requires_grad for p in base.parameters()}
    try:
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
