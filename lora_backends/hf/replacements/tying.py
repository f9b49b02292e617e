"""Checks adapters with `ensure_weight_tying` against the weights that the base model ties.

PEFT keeps one tensor for the embedding and the head of such a model, and reads both from the file:
its rows are those of the file if the two are equal there. Else the last one counts for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lora_backends.adapters import Checkpoint
from lora_backends.adapters.peft.old_names import renamed
from lora_backends.errors import UnsupportedInputError


def check_tying(base: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise UnsupportedInputError for tied tensors other than PEFT would compute with."""
    tying = checkpoint.own.tying
    if tying is None:
        return
    tied = _tied_with_embedding(base)
    if not tied:
        if tying.untargeted:
            head = tying.untargeted[0]
            raise _refused(checkpoint, f"LoRA for {head!r}, which this base model does not tie")
        return
    modules = dict(base.named_modules())
    strange = [path for path in tied if not _is_plain_head(modules.get(path))]
    if strange:
        raise _refused(checkpoint, f"a base model that ties {strange[0]!r}")
    embedding: Any = base.get_input_embeddings()  # type: ignore[operator]
    source = next(path for path, module in modules.items() if module is embedding)
    # LoRA ties by its factors, saved modules by their weights.
    values = _matrices(checkpoint) if tying.what == "LoRA" else _weights(checkpoint, modules)
    for path in tied:
        if not _are_equal(values.get(source), values.get(path)):
            raise _refused(checkpoint, f"other tensors for {path!r} than for {source!r}")


def _tied_with_embedding(base: nn.Module) -> list[str]:
    """Return the modules that PEFT takes for tied with the embedding, whatever they share."""
    # PEFT reads these two names: a model without them has no tied weights for PEFT either
    keys: Any = getattr(base, "_tied_weights_keys", None)
    if not keys or getattr(getattr(base, "config", None), "tie_word_embeddings", None) is False:
        return []
    # A list in Transformers before 5: the names of tied parameters.
    if not isinstance(keys, dict):
        return sorted({name.rpartition(".")[0] for name in keys})
    every: dict[str, str] = {}
    for path, module in base.named_modules():
        start = f"{path}." * bool(path)
        inner: Any = getattr(module, "_tied_weights_keys", None)
        every |= {f"{start}{name}": f"{start}{source}" for name, source in (inner or {}).items()}
    shared = {id(p) for p in base.get_input_embeddings().parameters()}  # type: ignore[operator]
    parameters = base.named_parameters(remove_duplicate=False)
    sources = {name for name, parameter in parameters if id(parameter) in shared}
    return sorted({k.rpartition(".")[0] for k, source in every.items() if source in sources})


def _is_plain_head(module: nn.Module | None) -> bool:
    """Return whether PEFT's stand-in, a linear layer without a bias, is the same."""
    return isinstance(module, nn.Linear) and module.bias is None


def _weights(
    checkpoint: Checkpoint, modules: Mapping[str, nn.Module]
) -> dict[str, tuple[Tensor, ...]]:
    names = checkpoint.own.parameters.items()
    return {
        renamed(name.removesuffix(".weight"), modules): (parameter.value,)
        for name, parameter in names
    }


def _matrices(checkpoint: Checkpoint) -> dict[str, tuple[Tensor, ...]]:
    """Return A and B of every module, those of embeddings as a tied head has them."""
    return {
        path: (d.lora_b.T, d.lora_a.T) if d.kind == "embedding" else (d.lora_a, d.lora_b)
        for path, d in checkpoint.modules.items()
    }


def _are_equal(first: tuple[Tensor, ...] | None, second: tuple[Tensor, ...] | None) -> bool:
    if first is None or second is None:
        return False
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _refused(checkpoint: Checkpoint, other: str) -> UnsupportedInputError:
    return UnsupportedInputError(
        f"{checkpoint.folder} ties embedding and head in another way than its tensors\n"
        f"  given: ensure_weight_tying = true, and {other}\n"
        f"  allowed: equal tensors for both, on a base model that ties its head alone\n"
        f"  to do: load it on the model that it was trained on"
    )
