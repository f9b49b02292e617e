"""Splits off the parts of a checkpoint that are not LoRA: modules, biases, rows of tokens.

modules_to_save           <mod>.weight, <mod>.bias        of that module alone
bias all, lora_only       <mod>.bias, <mod>.base_layer.bias
resized embedding         <mod>.weight                    wherever the base model shares it
trainable_token_indices   <mod>.token_adapter.trainable_tokens_delta
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lora_backends.adapters.files.formats import CONFIG_FILE, LONGEST_NAME
from lora_backends.adapters.files.messages import as_json, problem
from lora_backends.adapters.files.tensor_checks import check_dtype, check_finite, typed
from lora_backends.adapters.peft.config import PeftLoraConfig
from lora_backends.adapters.peft.module_rules import saved_names
from lora_backends.adapters.specs import OwnModules, OwnParameter, TokenRows
from lora_backends.errors import InvalidInputError, UnsupportedInputError

_PREFIX = "base_model.model."
_TOKEN_DELTA = ".token_adapter.trainable_tokens_delta"
_SAVED = ".modules_to_save."
_UNUSED = (".original_module.", ".token_adapter.base_layer.")
"""Copies of the base model's tensors, which PEFT writes beside an adapter's own."""


def take_replacements(
    path: Path, tensors: Mapping[str, Tensor], config: PeftLoraConfig
) -> tuple[OwnModules, dict[str, Tensor]]:
    """Split the tensors of a checkpoint into LoRA and all others.

    Returns:
        The parts that are not LoRA, by paths as in the file; and the LoRA tensors.

    Raises:
        InvalidInputError: a tensor has a wrong type or shape, or is not finite.
        UnsupportedInputError: modules to save that lie one inside another: PEFT cannot read the
            file that it writes of them; a saved module that the configuration does not name; rows
            of embeddings that PEFT cannot tie.
    """
    rest: dict[str, Tensor] = {}
    parameters: dict[str, OwnParameter] = {}
    tokens: dict[str, TokenRows] = {}
    originals: dict[str, Tensor] = {}

    def error(what: str, given: str, allowed: str, to_do: str) -> InvalidInputError:
        return InvalidInputError(problem(path, what, given, allowed, to_do))

    for key, tensor in tensors.items():
        name = _base_name(key, config)
        if name is None:
            rest[key] = tensor
            continue
        if not name:
            originals |= _original(key, tensor)
            continue
        check_dtype(error, key, tensor)
        # Flat: the check walks over the first axis, which a scalar lacks.
        check_finite(error, key, tensor.flatten())
        if name.endswith(_TOKEN_DELTA):
            module = name.removesuffix(_TOKEN_DELTA)
            tokens[module] = _token_rows(path, key, module, tensor, config)
        else:
            saved = _saved_modules(name, config)
            if len(saved) > 1:
                what = "modules_to_save names modules one inside another"
                allowed, to_do = "the outer ones alone", "correct modules_to_save and train again"
                raise UnsupportedInputError(problem(path, what, saved, allowed, to_do))
            if _SAVED in key and not key.partition(_SAVED)[0].endswith(saved_names(config)):
                what = f"a saved module that modules_to_save of {CONFIG_FILE} does not name"
                to_do = "add it to modules_to_save, or remove the tensor: PEFT ignores it"
                facts = [typed(key, tensor), f"modules_to_save = {as_json(config.modules_to_save)}"]
                raise UnsupportedInputError(problem(path, what, facts, "modules it names", to_do))
            plain = not saved and key == _PREFIX + name
            # PEFT may write one parameter under several names.
            before = parameters.setdefault(name, OwnParameter(tensor, bool(saved), plain))
            same = before.value.dtype == tensor.dtype and torch.equal(before.value, tensor)
            if not same:
                raise error(
                    f"two tensors give parameter {name!r} of the base model different values",
                    typed(key, tensor),
                    "one value",
                    "save the adapter again",
                )
    if config.ensure_weight_tying and len({rows.ids for rows in tokens.values()}) > 1:
        what = "PEFT does not tie embeddings with different tokens"
        given = f"ensure_weight_tying = true, rows of {', '.join(tokens)}"
        raise UnsupportedInputError(problem(path, what, given, "ensure_weight_tying = false"))
    invocation = tuple(config.alora_invocation_tokens or ())
    own = OwnModules(
        parameters, tokens, invocation, originals=originals, task_type=config.task_type
    )
    return own, rest


def _original(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor that a file copies from the base model by its name there; {} for LoRA."""
    name = key.removeprefix(_PREFIX)
    for mark in _UNUSED:
        name = name.replace(mark, ".")
    return {} if ".lora_" in name else {name: tensor}


def _base_name(key: str, config: PeftLoraConfig) -> str | None:
    """Return the base model's name of a tensor; "" if PEFT does not use it, None if it is LoRA."""
    name = key.removeprefix(_PREFIX)
    if not key.startswith(_PREFIX) or len(key) > LONGEST_NAME or not name.isprintable():
        return None
    if ".lora_" in name or name.endswith(".base_layer.weight"):
        return "" if any(mark in name for mark in _UNUSED) else None
    if any(mark in name for mark in _UNUSED):
        return ""
    name = name.replace(_SAVED, ".")
    if name.endswith(".base_layer.bias"):
        return name.removesuffix(".base_layer.bias") + ".bias"
    is_replacement = name.endswith((".weight", ".bias", _TOKEN_DELTA)) or _saved_modules(
        name, config
    )
    return name if is_replacement else None


def _saved_modules(name: str, config: PeftLoraConfig) -> list[str]:
    """Return the modules of modules_to_save that hold a tensor: ends of paths, as in PEFT."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[: end + 1]) for end in range(len(parts))]
    ends = tuple(config.modules_to_save or ())
    return [path for path in paths if path.endswith(ends)]


def _token_rows(
    path: Path, key: str, module: str, values: Tensor, config: PeftLoraConfig
) -> TokenRows:
    ids = config.trainable_token_indices
    if isinstance(ids, dict):
        # Keys are ends of paths, at whole components.
        ids = next((v for k, v in ids.items() if f".{module}".endswith(f".{k}")), None)
    if not ids or values.ndim != 2 or values.shape[0] != len(ids) or len(set(ids)) != len(ids):
        what = f"the rows of {module!r} and trainable_token_indices disagree"
        given = [typed(key, values), f"{0 if ids is None else len(ids)} ids in {CONFIG_FILE}"]
        raise InvalidInputError(problem(path, what, given, "one row for each distinct id"))
    return TokenRows(tuple(ids), values)
