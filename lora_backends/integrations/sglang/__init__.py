"""The plug-in for SGLang: its LoRA layers run on a backend of this library.

SGLang calls `register` in every process before it reads its arguments, through the entry point
group ``sglang.srt.plugins``. Nothing changes, and nothing is imported, unless the environment
variable ``LORA_BACKENDS_SGLANG`` names a backend, or is "auto".
"""

import os

from lora_backends.common.names import SGLANG_VARIABLE

__all__ = ["register"]


def register() -> None:
    """Take LoRA over from SGLang, if the environment variable asks for it.

    Raises:
        SystemExit: the plug-in does not support this SGLang. After any other exception of a
            plug-in, SGLang would go on and serve with its own kernels.
    """
    if not os.environ.get(SGLANG_VARIABLE):
        return
    from lora_backends.errors import LoRABackendError
    from lora_backends.integrations.sglang.plugin import activate

    try:
        activate()
    except (LoRABackendError, ImportError) as error:
        raise SystemExit(f"lora_backends cannot take over LoRA of SGLang:\n{error}") from error
