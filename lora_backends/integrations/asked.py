"""The backend that an environment variable selects for a plug-in."""

from __future__ import annotations

import os

from lora_backends.common.names import AUTO
from lora_backends.selection.registry import backend_class, backend_names


def backend_asked_for(variable: str) -> str:
    """Return the name that an environment variable holds.

    Raises:
        BackendUnavailableError: no backend of that name is registered.
    """
    name = os.environ.get(variable, "")
    if name != AUTO and name not in backend_names():
        backend_class(name)  # its error lists the registered names
    return name
