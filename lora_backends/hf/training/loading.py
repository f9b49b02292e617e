"""Loads a PEFT checkpoint to train it further."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lora_backends.adapters import Checkpoint, Loaded
from lora_backends.adapters.files.hub import local_folder
from lora_backends.common.files import as_path
from lora_backends.errors import InvalidInputError, UnsupportedInputError
from lora_backends.hf.training.adapter import saved_tensors
from lora_backends.hf.training.features import check_config

if TYPE_CHECKING:
    from lora_backends.adapters import AdapterPool
    from lora_backends.adapters.pool.store import AdapterStore
    from lora_backends.hf.wrapped import WrappedModel


def load_trainable(
    wrapped: WrappedModel,
    name: str,
    folder: str | Path,
    replace_existing: bool,
    dtype: torch.dtype | None,
    store: AdapterStore | None,
) -> Loaded:
    """Read a checkpoint into a slot and make its parameters, as `MultiLoRAModel.load_adapter`."""
    from lora_backends.adapters.files.formats import CONFIG_FILE
    from lora_backends.adapters.peft.config import read_json_object

    training, pool = wrapped.training, wrapped.pool
    training.check_possible(dtype, store is not None)
    pool.check_new(name, replace_existing)
    path = as_path(local_folder(folder), "the folder of a checkpoint")
    checkpoint = pool.read(path)
    # as they are in the file: what this library ignores is saved again, too
    values = read_json_object(path / CONFIG_FILE, pool.limits)
    check_config(values, checkpoint.folder, is_new=False)
    # the parameters get the base model's names, and the configuration keeps its own
    _check_names(pool, checkpoint, values)
    return training.add(name, checkpoint, values, dtype, replace_existing)


def _check_names(pool: AdapterPool, checkpoint: Checkpoint, values: dict[str, object]) -> None:
    """Raise UnsupportedInputError for other names: of an older Transformers, or a split model."""
    from lora_backends.adapters.peft.memory import checkpoint_from_memory

    if checkpoint.own or checkpoint.experts:
        return  # refused by its feature
    try:
        again = checkpoint_from_memory(pool, saved_tensors(pool, checkpoint), values)
        pairs = ((again.modules[path], delta) for path, delta in checkpoint.modules.items())
        same = all(new.rank == old.rank and new.scaling == old.scaling for new, old in pairs)
    except InvalidInputError:
        same = False
    if not same:
        # an adapter is saved with the base model's names, so that its configuration would miss them
        raise UnsupportedInputError(
            f"{checkpoint.folder} has other names for modules than the base model: those of an "
            f"older Transformers, or of a model that splits or fuses them otherwise\n"
            f"  allowed: the base model's names, under which a trained adapter is saved\n"
            f"  to do: load it without trainable=True, or train it on the model it was made for"
        )
