"""Refuses files that hold less, or more, than their `adapter_config.json` says of this base model.

Otherwise the base model's values would silently replace what a file lacks, e.g. a trained head.
Other tensors of a file are refused if PEFT ignores them, or loads them into other modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lora_backends.adapters import Checkpoint
from lora_backends.adapters.files.formats import CONFIG_FILE
from lora_backends.adapters.files.messages import MOST_FACTS
from lora_backends.adapters.peft.old_names import renamed
from lora_backends.adapters.peft.promises import TO_DO
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.layout.quantized_base import is_plain
from lora_backends.hf.layout.sites import token_embedding_of


def check_promises(base: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise InvalidInputError if saved modules, rows of tokens or biases are not in the file."""
    modules = dict(base.named_modules())
    missing = [
        *_saved(checkpoint, modules),
        *_tokens(checkpoint, modules, token_embedding_of(base)),
        *_biases(checkpoint, modules),
    ]
    if missing:
        raise InvalidInputError(
            f"{checkpoint.folder} lacks what its {CONFIG_FILE} promises{_facts(missing)}\n"
            f"  allowed: a tensor for each of them\n  to do: {TO_DO}"
        )


def check_unpromised(base: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse weights that PEFT ignores, and copies of base weights that change other modules.

    PEFT wraps a module with LoRA or rows of tokens, and reads no tensor under its plain name. It
    loads copies beside an adapter's own tensors into the base model.

    Raises:
        UnsupportedInputError: such a tensor differs from the base model's; the message names each.
    """
    modules = dict(base.named_modules())
    brought, promises = checkpoint.own, checkpoint.own.promises
    adapted = {*checkpoint.modules, *promises.untrained}
    with_rows = {
        id(getattr(modules.get(renamed(p, modules)), "weight", None)) for p in brought.tokens
    }
    # Shared tensors: PEFT's copy would change the other module as well.
    holders = Counter(id(p) for _, p in base.named_parameters(remove_duplicate=False))
    surplus = []
    for name, parameter in brought.parameters.items():
        path, leaf, value = _place(name, modules)
        wrapped = path in adapted or (leaf == "weight" and id(value) in with_rows)
        # PEFT had no base_layer in its first versions: their biases have the plain name.
        is_bias = leaf == "bias" and promises.bias != "none" and promises.is_old
        if parameter.plain and wrapped and not is_bias and _differs(parameter.value, value):
            surplus.append(f"{name}, which PEFT ignores beside its LoRA or rows of tokens")
    for name, original in brought.originals.items():
        _, _, value = _place(name, modules)
        if (holders[id(value)] > 1 or id(value) in with_rows) and _differs(original, value):
            surplus.append(f"a copy of the base model's {name} with other values")
    if surplus:
        raise UnsupportedInputError(
            f"{checkpoint.folder} holds tensors that its {CONFIG_FILE} does not promise"
            f"{_facts(surplus)}\n  allowed: values equal to the base model's\n"
            f"  to do: remove these tensors, or load the base model that the adapter was saved with"
        )


def _place(name: str, modules: Mapping[str, nn.Module]) -> tuple[str, str, torch.Tensor | None]:
    """Return the path of a parameter's module, its name there and the base model's value."""
    module_name, _, leaf = name.rpartition(".")
    path = renamed(module_name, modules)
    return path, leaf, modules[path]._parameters.get(leaf) if path in modules else None


def _differs(value: torch.Tensor, base: torch.Tensor | None) -> bool:
    if base is None or value.shape != base.shape or not is_plain(base):
        return True
    return not value.to(base.device, base.dtype).equal(base)


def _facts(facts: Sequence[str]) -> str:
    lines = [f"\n  given: {fact}" for fact in facts[:MOST_FACTS]]
    more = len(facts) - MOST_FACTS
    return "".join([*lines, *[f"\n  given: ... and {more} more"] * (more > 0)])


def _saved(checkpoint: Checkpoint, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    ends = checkpoint.own.promises.saved
    if not ends:
        return
    # Names from before Transformers renamed its modules.
    old = {renamed(end, modules) for end in ends}
    names = (name.rpartition(".") for name in checkpoint.own.parameters)
    held = {f"{renamed(path, modules)}.{leaf}" for path, _, leaf in names}
    for path, module in modules.items():
        if path.endswith(ends) or path in old:
            for name in _state(module):
                if f"{path}.{name}" not in held:
                    yield f"modules_to_save, and no tensor for {path}.{name}"


def _state(module: nn.Module) -> Iterator[str]:
    """Yield the names in a module's `state_dict`, without those that quantisation adds."""
    for path, inner in module.named_modules():
        buffers = [n for n in inner._buffers if n not in inner._non_persistent_buffers_set]
        for name in (*inner._parameters, *buffers):
            if getattr(inner, name) is not None:
                yield f"{path}.{name}" if path else name


def _tokens(
    checkpoint: Checkpoint, modules: Mapping[str, nn.Module], embedding: nn.Module | None
) -> Iterator[str]:
    held = {renamed(path, modules): rows for path, rows in checkpoint.own.tokens.items()}
    done: set[str] = set()  # the first entry that names an embedding counts
    for end, ids in checkpoint.own.promises.tokens:
        for path, module in modules.items():
            is_meant = module is embedding if end is None else path.endswith(end)
            if not is_meant or path in done:
                continue
            done.add(path)
            weight = getattr(module, "weight", None)
            shared = [
                rows
                for place, rows in held.items()
                if place == path or getattr(modules.get(place), "weight", None) is weight
            ]
            if not any(rows.ids == ids for rows in shared):
                yield f"trainable_token_indices, and no rows of {path} for them"


def _biases(checkpoint: Checkpoint, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    promises = checkpoint.own.promises
    if promises.bias == "none":
        return
    adapted = {*checkpoint.modules, *promises.untrained}
    names = (name.rpartition(".") for name in checkpoint.own.parameters)
    places = (renamed(path, modules) for path, _, leaf in names if leaf == "bias")
    # By tensor, since tied modules save one bias.
    held = {id(_bias(modules.get(path))) for path in places}
    for path, module in modules.items():
        bias = _bias(module)
        is_meant = promises.bias == "all" or path in adapted
        if bias is not None and is_meant and id(bias) not in held:
            yield f'bias = "{promises.bias}", and no tensor for {path}.bias'


def _bias(module: nn.Module | None) -> nn.Parameter | None:
    return None if module is None else module._parameters.get("bias")
