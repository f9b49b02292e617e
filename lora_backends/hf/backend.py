"""The backend of a wrapper, by name or as an instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lora_backends.adapters.pool.quantized import as_adapter_dtype
from lora_backends.backend import LoRABackend
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown
from lora_backends.features import EIGHT_BIT
from lora_backends.selection.choice import get_backend


def backend_for(
    backend: str | LoRABackend | None,
    options: Any,
    device: torch.device,
    dtype: torch.dtype,
    adapter_dtype: torch.dtype | str | None,
) -> LoRABackend:
    """Return the backend of a wrapper, made by name unless an instance is given.

    Raises:
        InvalidInputError: `options` is no dict, or comes with an instance; or `adapter_dtype` is no
            dtype of adapters.
        UnsupportedInputError: `adapter_dtype` has 8 bits, and the backend does not take them.
        BackendUnavailableError: the backend does not run on `device`.
    """
    if not (options is None or isinstance(options, Mapping)):
        raise InvalidInputError(
            f"backend_options is {shown(options)}\n"
            f'  allowed: a dict, e.g. {{"batch_invariant": True}}, or None'
        )
    if not isinstance(backend, LoRABackend):
        backend = get_backend(backend, device=device, **(options or {}))
    elif options:
        raise InvalidInputError(
            f"backend_options {dict(options)} for a backend that is made already\n"
            f"  to do: give its name with the options, or the backend without"
        )
    if as_adapter_dtype(adapter_dtype, dtype) is not None and EIGHT_BIT not in backend.features:
        raise UnsupportedInputError(
            f"backend {backend.name!r} cannot run adapters of 8 bits\n"
            f"  given: adapter_dtype {shown(adapter_dtype)}; it lacks {EIGHT_BIT}\n"
            f"  to do: use another backend, e.g. torch_ref, or adapter_dtype=None"
        )
    return backend
