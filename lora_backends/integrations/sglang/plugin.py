"""Registers this library in place of SGLang's LoRA backends."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from lora_backends.common.names import SGLANG_VARIABLE
from lora_backends.errors import UnsupportedInputError
from lora_backends.integrations.asked import backend_asked_for
from lora_backends.integrations.sglang.settings import check_version, logger

REPLACED = ("csgmv", "triton", "torch_native")
"""The values of ``--lora-backend`` that this library replaces; SGLang's default is one."""

REFUSED = ("triton_v2", "ascend")
"""Other values, which choose more than the LoRA kernels, or another device."""


def activate() -> None:
    """Register this library under the names of SGLang's LoRA backends; a second call does nothing.

    SGLang builds the backend later. Everything but the version is checked then, because an error
    at that point stops the server.

    Raises:
        BackendUnavailableError: this SGLang is too old.
    """
    import sglang
    from sglang.srt.lora.backend import lora_registry

    check_version(sglang.__version__)
    supported = lora_registry.LORA_SUPPORTED_BACKENDS
    for name in REPLACED:
        made = supported.get(name)
        if made is not None and not hasattr(made, "replaced"):
            lora_registry.register_lora_backend(name)(_factory(made))
    for name in REFUSED:
        made = supported.get(name)
        if made is not None and not hasattr(made, "replaced"):
            lora_registry.register_lora_backend(name)(_refusing(name, made))


def _factory(replaced: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        # asked each time: a process may build engines with and without the variable
        if not os.environ.get(SGLANG_VARIABLE):
            return replaced()
        import sglang

        from lora_backends.integrations.sglang import backend, wrapping

        name = backend_asked_for(SGLANG_VARIABLE)
        wrapping.wrap()
        logger().info(
            "lora_backends %s takes over LoRA of SGLang %s: %s=%s",
            version("lora-backends"),
            sglang.__version__,
            SGLANG_VARIABLE,
            name,
        )
        return backend.BackendForSGLang

    make.replaced = replaced  # type: ignore[attr-defined]
    return make


def _refusing(name: str, replaced: Callable[[], Any]) -> Callable[[], Any]:
    def refuse() -> Any:
        if not os.environ.get(SGLANG_VARIABLE):
            return replaced()
        raise UnsupportedInputError(
            f"the plug-in for SGLang does not replace this LoRA backend\n"
            f"  given: --lora-backend {name}\n"
            f"  allowed: {', '.join(REPLACED)}; this library runs in place of each\n"
            f"  to do: leave --lora-backend out, or unset {SGLANG_VARIABLE}"
        )

    refuse.replaced = replaced  # type: ignore[attr-defined]
    return refuse
