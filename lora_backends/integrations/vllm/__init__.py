"""The plug-in for vLLM: its LoRA layers run on a backend of this library.

vLLM calls `register` in every process, possibly several times, through the entry point group
``vllm.general_plugins``. Nothing changes, and nothing is imported, unless the environment variable
``LORA_BACKENDS_VLLM`` names a backend, or is "auto".
"""

import os

from lora_backends.common.names import VLLM_VARIABLE

__all__ = ["register"]


def register() -> None:
    """Take LoRA over from vLLM, if the environment variable asks for it.

    Raises:
        BackendUnavailableError: the variable names no backend, or this vLLM is too old.
    """
    if os.environ.get(VLLM_VARIABLE):
        from lora_backends.integrations.vllm.plugin import activate

        activate()
