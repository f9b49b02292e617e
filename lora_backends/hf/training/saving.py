"""Writes a PEFT checkpoint, each of its files at once or not at all."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from lora_backends.adapters.files.formats import CONFIG_FILE, SAFETENSORS_FILE
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import InvalidInputError
from lora_backends.hf.layout.sharded import class_of


def save_checkpoint(
    folder: str | Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], base: nn.Module
) -> Path:
    """Write `adapter_config.json` and `adapter_model.safetensors`, and return the folder.

    A reader finds the old file or the new one, never a part. The weights come last, so that a new
    folder is complete once it has them. Files of an earlier checkpoint there are replaced.

    Raises:
        InvalidInputError: `folder` is none, or cannot be written.
    """
    path = as_path(folder, "the folder of a checkpoint")
    kind = kind_of(path)
    if kind not in (None, "a folder"):
        raise InvalidInputError(f"{path} is {kind}\n  allowed: a folder, or none yet")
    values = {**values, "inference_mode": True}
    if values.get("task_type") is None and values.get("auto_mapping") is None:
        # PEFT notes the class so that its AutoPeftModel finds it.
        kind_of_base = class_of(base)
        values["auto_mapping"] = {
            "base_model_class": kind_of_base.__name__,
            "parent_library": kind_of_base.__module__,
        }
    text = json.dumps(values, indent=2, sort_keys=True)
    copies = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write(path / CONFIG_FILE, lambda place: place.write_text(text, encoding="utf-8"))
        _write(
            path / SAFETENSORS_FILE,
            lambda place: safetensors.torch.save_file(copies, place, metadata={"format": "pt"}),
        )
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidInputError(
            f"cannot write a checkpoint to {path}\n  given: {type(error).__name__}: {error}\n"
            f"  to do: correct the path or its permissions, or free space"
        ) from error
    return path


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then move it there in one step."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(partial)
        with open(partial, "rb") as file:
            # else the name may reach the disk before the content
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        # nothing to remove where the file was moved
        partial.unlink(missing_ok=True)
