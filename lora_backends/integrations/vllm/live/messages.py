"""Messages about live adapters between a client, an engine's core and its workers.

They hold strings, numbers, bytes and dicts only: vLLM pickles nothing between processes by default,
and its HTTP route takes JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from lora_backends import errors
from lora_backends.errors import InvalidInputError, LoRABackendError, UnsupportedInputError, shown

METHOD = "lora_backends_live"
"""The method that clients call through vLLM's `collective_rpc`; workers have it, too."""

SCHEME = "live:"
"""Before the name of a live adapter, in the `lora_path` of a `LoRARequest`."""

LARGEST = 2**32 - 1
"""The largest message of vLLM in bytes."""


def packed(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return tensors in the format of safetensors, copied to the host.

    Raises:
        InvalidInputError: not a dict of tensors by name, or an empty one.
        UnsupportedInputError: too many bytes for one message of vLLM.
    """
    import safetensors.torch

    items = tensors.items() if isinstance(tensors, Mapping) else [(None, tensors)]
    wrong = [
        (key, value)
        for key, value in items
        if not isinstance(key, str) or not isinstance(value, torch.Tensor) or value.is_meta
    ]
    if wrong or not tensors:
        given = f"{shown(wrong[0][0])}: {type(wrong[0][1]).__name__}" if wrong else "no tensors"
        raise InvalidInputError(
            f"the tensors of a live adapter must be a dict of tensors\n  given: {given}\n"
            f"  allowed: tensors by PEFT's names, as peft.get_peft_model_state_dict or "
            f"MultiLoRAModel.adapter_parameters returns them"
        )
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size + 2**20 > LARGEST:
        raise UnsupportedInputError(
            f"the adapter is too large for a message of vLLM\n  given: {size} bytes\n"
            f"  allowed: {LARGEST - 2**20}\n  to do: update it in a 16-bit dtype"
        )
    host = {key: tensor.detach().to("cpu").contiguous() for key, tensor in tensors.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in host.values()]
    if len(set(places)) < len(places):  # safetensors refuses tensors that share memory
        host = {key: tensor.clone() for key, tensor in host.items()}
    data: bytes = safetensors.torch.save(host)
    return data


def unpacked(data: bytes | str) -> dict[str, torch.Tensor]:
    """Return the tensors of a message; text is base64, as it comes through HTTP.

    Raises:
        InvalidInputError: the message is not in the format of safetensors.
    """
    import safetensors
    import safetensors.torch

    try:
        content = base64.b64decode(data, validate=True) if isinstance(data, str) else bytes(data)
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(content)
    except (binascii.Error, TypeError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise InvalidInputError(
            f"the tensors of a live adapter cannot be read\n"
            f"  given: {type(error).__name__}: {error}\n"
            f"  allowed: safetensors, as bytes or base64 text"
        ) from error
    return tensors


def config_text(config: Any) -> str:
    """Return a configuration of PEFT as JSON, as `adapter_config.json` holds it.

    Raises:
        InvalidInputError: neither a `LoraConfig` nor a dict, or a value has no form in JSON.
    """
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise InvalidInputError(
            f"a live adapter needs its configuration\n  given: {type(config).__name__}\n"
            f"  allowed: a peft.LoraConfig, or the contents of adapter_config.json as a dict"
        )
    try:
        return json.dumps(dict(values), default=_plain)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"the configuration of a live adapter cannot be written as JSON\n  given: {error}"
        ) from error


def config_of(text: str) -> dict[str, Any]:
    """Return the configuration in a message.

    Raises:
        InvalidInputError: the text is not a JSON object.
    """
    try:
        values = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidInputError(
            f"the configuration of a live adapter is not a JSON object\n  given: {shown(text)}"
        )
    return values


def failure(error: Exception) -> dict[str, Any]:
    """Return an error as an answer: if a worker raised, vLLM would leave other answers unread."""
    if isinstance(error, LoRABackendError):
        return {"error": {"type": type(error).__name__, "message": str(error)}}
    name = InvalidInputError if isinstance(error, ValueError) else LoRABackendError
    return {"error": {"type": name.__name__, "message": f"{type(error).__name__}: {error}"}}


def checked(answer: Any) -> dict[str, Any]:
    """Return an answer, or raise the error that it holds.

    Raises:
        LoRABackendError: the answer's error, by its type.
    """
    fields = answer if isinstance(answer, dict) else {}
    error = fields.get("error")
    if error is None and isinstance(answer, dict):
        return fields
    kind = getattr(errors, str((error or {}).get("type")), LoRABackendError)
    raise kind((error or {}).get("message", f"vLLM has answered {shown(answer)}"))


def _plain(value: object) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__}: {shown(value)}")
