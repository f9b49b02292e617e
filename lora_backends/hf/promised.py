"""Refuses files that lack what their `adapter_config.json` promises for this base model.

The base model's own values would answer in its place: a head that nobody trained, for instance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lora_backends.adapters import Checkpoint
from lora_backends.adapters.formats import CONFIG_FILE
from lora_backends.adapters.messages import MOST_FACTS
from lora_backends.adapters.old_names import renamed
from lora_backends.adapters.promises import TO_DO
from lora_backends.errors import InvalidInputError
from lora_backends.hf.sites import token_embedding_of


def check_promises(base: nn.Module, checkpoint: Checkpoint) -> None:
    """Compare saved modules, rows of tokens and biases with the base model's modules.

    Args:
        base: the model that the adapter is for.
        checkpoint: of the adapter.

    Raises:
        InvalidInputError: the file lacks some of them; the message names each.
    """
    modules = dict(base.named_modules())
    missing = [
        *_saved(checkpoint, modules),
        *_tokens(checkpoint, modules, token_embedding_of(base)),
        *_biases(checkpoint, modules),
    ]
    if missing:
        given = [f"\n  given: {fact}" for fact in missing[:MOST_FACTS]]
        given += [f"\n  given: ... and {len(missing) - MOST_FACTS} more"] * (
            len(missing) > MOST_FACTS
        )
        raise InvalidInputError(
            f"{checkpoint.folder} lacks what its {CONFIG_FILE} promises{''.join(given)}\n"
            f"  allowed: a tensor for each of them\n  to do: {TO_DO}"
        )


def _saved(checkpoint: Checkpoint, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    ends = checkpoint.own.promises.saved
    if not ends:
        return
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
        kept = [n for n in inner._buffers if n not in inner._non_persistent_buffers_set]
        for name in (*inner._parameters, *kept):
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
    held = {id(_bias(modules.get(path))) for path in places}
    for path, module in modules.items():
        bias = _bias(module)
        is_meant = promises.bias == "all" or path in adapted
        if bias is not None and is_meant and id(bias) not in held:
            yield f'bias = "{promises.bias}", and no tensor for {path}.bias'


def _bias(module: nn.Module | None) -> nn.Parameter | None:
    return None if module is None else module._parameters.get("bias")
