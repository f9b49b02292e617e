"""Reads a LoRA file for a pipeline: its tensors, under the file's own names, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lora_backends.adapters.files.formats import names_in
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import problem
from lora_backends.adapters.files.pickle_file import read_pickle
from lora_backends.adapters.files.safetensors_file import read_with_metadata
from lora_backends.adapters.files.tensor_checks import check_dtype, check_finite
from lora_backends.common.files import as_path, kind_of
from lora_backends.errors import InvalidInputError, shown

METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers stores PEFT's configurations, one JSON object for all components."""

_OWN_NAMES = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, eq=False)
class LoRAFile:
    """The content of one file."""

    path: Path
    tensors: Mapping[str, Tensor]  # by name; finite, and floating-point but for alphas
    metadata: Mapping[str, Any] | None  # diffusers' own, by keys such as "unet.r"

    def refuse(self, what: str, given: str | list[str], allowed: str, to_do: str = "") -> NoReturn:
        """Raise `error`."""
        raise self.error(what, given, allowed, to_do)

    def error(
        self, what: str, given: str | list[str], allowed: str, to_do: str = ""
    ) -> InvalidInputError:
        """Return the error for a problem of this file."""
        return InvalidInputError(problem(self.path, what, given, allowed, to_do, "LoRA file"))


def read_file(source: Any, limits: LoadLimits) -> LoRAFile:
    """Read a LoRA file: the path of one or of a folder with one, or tensors by name.

    Raises:
        InvalidInputError: there is no such file, the folder has none or several, the file is
            damaged or exceeds a limit, or a value is not finite.
    """
    if isinstance(source, Mapping):
        path = Path("<state_dict in memory>")
        if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in source.items()):
            raise InvalidInputError(
                f"a state_dict maps names to something else than tensors\n  given: {shown(source)}"
            )
        file = LoRAFile(path, {name: source[name] for name in sorted(source)}, None)
    else:
        path = _file_in(as_path(source, "the LoRA file"))
        with torch.device("cpu"):  # whatever the caller's default device is
            file = _read(path, limits)
    if not file.tensors:
        file.refuse("there are no tensors", "none", "at least one module with LoRA")
    for name, tensor in file.tensors.items():
        if not name.endswith(".alpha"):  # alphas may be integers
            check_dtype(file.error, name, tensor)
        check_finite(file.error, name, tensor.reshape(-1) if tensor.ndim < 2 else tensor)
    return file


def _read(path: Path, limits: LoadLimits) -> LoRAFile:
    if path.suffix in _PICKLES:
        return LoRAFile(path, read_pickle(path, limits), None)
    tensors, words = read_with_metadata(path, limits)
    try:
        metadata = json.loads(words[METADATA_KEY]) if METADATA_KEY in words else None
    except (ValueError, RecursionError):
        # refused below with what the file has
        metadata = ""
    if metadata is not None and not isinstance(metadata, dict):
        raise InvalidInputError(
            f"the metadata of a LoRA file cannot be read\n  file: {path}\n"
            f"  given: {shown(words[METADATA_KEY])}\n  allowed: a JSON object in {METADATA_KEY}"
        )
    return LoRAFile(path, tensors, metadata)


def _file_in(path: Path) -> Path:
    """Return the LoRA file at a path: the file itself, or the one in a folder."""
    kind = kind_of(path)
    if kind == "a file":
        if path.suffix not in (".safetensors", *_PICKLES):
            raise InvalidInputError(
                f"the LoRA file has an unknown suffix\n  given: {path}\n"
                f"  allowed: .safetensors, {', '.join(_PICKLES)}"
            )
        return path
    if kind != "a folder":
        raise InvalidInputError(
            f"no LoRA file\n  given: {path}, {kind or 'which does not exist'}\n"
            f"  allowed: a file, or a folder with one\n"
            f"  to do: download a LoRA of the Hugging Face hub: `hf download NAME`"
        )
    names = names_in(path)
    known = [name for name in _OWN_NAMES if name in names]
    candidates = known[:1] or [name for name in names if name.endswith(".safetensors")]
    if len(candidates) != 1:
        raise InvalidInputError(
            f"the folder of a LoRA holds {len(candidates)} files\n  given: {path}"
            f"{': ' * bool(candidates)}{', '.join(candidates[:5])}\n"
            f"  allowed: {_OWN_NAMES[0]}, or one .safetensors file\n  to do: pass the file itself"
        )
    return path / candidates[0]
