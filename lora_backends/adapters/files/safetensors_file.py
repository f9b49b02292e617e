"""Reading `adapter_model.safetensors` from memory."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
from torch import Tensor

from lora_backends.adapters.files.formats import check_pointer
from lora_backends.adapters.files.limits import LoadLimits
from lora_backends.adapters.files.messages import problem
from lora_backends.common.files import is_from_outside, read_bytes
from lora_backends.errors import InvalidInputError, shown


def read_safetensors(path: Path, limits: LoadLimits) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, sorted by name, in memory of their own."""
    return read_with_metadata(path, limits)[0]


def read_with_metadata(path: Path, limits: LoadLimits) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors as `read_safetensors`, and the header's ``__metadata__``."""
    content = read_bytes(path, limits.file_bytes, limits.file_too_large)
    check_pointer(path, content)
    _check_size(content, path, limits)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except MemoryError:
        raise
    except Exception as error:  # SafetensorError, or torch's error for an odd dtype or shape
        if is_from_outside(error):
            raise
        given = f"{type(error).__name__}: {shown(str(error))}"
        to_do = "copy or download the file again: it may be cut off"
        message = problem(path, "the file is damaged", given, "a safetensors file", to_do)
        raise InvalidInputError(message) from error
    length = int.from_bytes(content[:8], "little")
    # safetensors has checked the header: an object whose metadata maps text to text.
    metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    # safetensors returns them in any order.
    return {name: tensors[name] for name in sorted(tensors)}, metadata


def _check_size(content: bytes, path: Path, limits: LoadLimits) -> None:
    """Refuse a header that takes long to parse, before it is parsed."""
    length = int.from_bytes(content[:8], "little")
    unpacked = len(content) - 8 - length
    if unpacked < 0:  # the library says how the file is damaged
        return
    if length > limits.header_bytes:
        raise limits.exceeded("header_bytes", path, f"a header of {length} bytes", length)
    if unpacked > limits.unpacked_bytes:
        raise limits.exceeded("unpacked_bytes", path, f"tensors of {unpacked} bytes", unpacked)
    try:
        names = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return
    count = len(names) - ("__metadata__" in names) if isinstance(names, dict) else 0
    if count > limits.tensors:
        raise limits.exceeded("tensors", path, f"{count} tensors", count)
