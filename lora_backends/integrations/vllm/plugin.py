"""Waking up: which vLLM and which settings are supported, and where this library steps in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from lora_backends.common.names import VLLM_VARIABLE
from lora_backends.errors import BackendUnavailableError, UnsupportedInputError
from lora_backends.integrations import asked

OLDEST = (0, 26)
"""The first version of vLLM whose interface for LoRA the wrapper implements."""

WRAPPER = "lora_backends.integrations.vllm.wrapper.BackendWrapper"
"""The class that vLLM imports and instantiates in place of its own wrapper."""


def activate() -> None:
    """Replace the wrapper that vLLM's platform names; a second call changes nothing.

    Raises:
        BackendUnavailableError: the environment variable names no backend, or this vLLM is too old.
    """
    import vllm

    name = backend_asked_for()
    check_version(vllm.__version__)
    from vllm import envs
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if getattr(platform.get_punica_wrapper, "replaced", None) is not None:
        return
    platform.get_punica_wrapper = classmethod(_replacement(platform.get_punica_wrapper))
    # Compiled programs are cached on disk under a hash of vLLM's variables. With this one among
    # them, a program that calls vLLM's operators is never loaded for a run that calls ours.
    envs.environment_variables[VLLM_VARIABLE] = _hashed_setting
    from lora_backends.integrations.vllm.adapters import blends, invocations
    from lora_backends.integrations.vllm.live import core

    blends.register_resolver()
    invocations.follow_hashes()
    core.follow()
    logger().info(
        "lora_backends %s takes over LoRA of vLLM %s: %s=%s",
        version("lora-backends"),
        vllm.__version__,
        VLLM_VARIABLE,
        name,
    )


def backend_asked_for() -> str:
    """Return the name that the environment variable holds.

    Raises:
        BackendUnavailableError: no backend of that name is registered.
    """
    return asked.backend_asked_for(VLLM_VARIABLE)


def check_version(installed: str) -> None:
    """Refuse a vLLM whose interface is another one.

    Raises:
        BackendUnavailableError: it is too old, or its version cannot be read.
    """
    match = re.match(r"(\d+)\.(\d+)", installed)
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendUnavailableError(
            f"this version of vLLM is not supported\n  given: vLLM {installed}\n"
            f"  allowed: {oldest} or newer\n"
            f"  to do: install vllm>={oldest}, or unset {VLLM_VARIABLE}"
        )


def check_settings(config: Any) -> None:
    """Refuse settings under which LoRA layers get other rows than those that vLLM announces.

    Rows beyond those announced would be taken for padding.

    Args:
        config: vLLM's, or None.

    Raises:
        UnsupportedInputError: a model with an encoder, whose rows also reach the decoder's cross
            attention, or a setting that hands other tokens to a layer than those announced.
    """
    if config is None or config.model_config is None:
        return
    model = config.model_config
    unannounced = (
        (model, "is_encoder_decoder", f"{model.model}, with an encoder"),
        (config.cache_config, "kv_sharing_fast_prefill", "kv_sharing_fast_prefill"),
        (config.parallel_config, "use_ubatching", "microbatches (enable_dbo or ubatch_size)"),
        # the device chooses how many tokens each request has
        (config.speculative_config, "enable_adaptive_verification", "enable_adaptive_verification"),
    )
    for part, setting, refused in unannounced:
        if getattr(part, setting, False):  # which a version may lack
            raise UnsupportedInputError(
                f"LoRA layers get rows whose adapters vLLM does not announce\n"
                f"  given: {refused}\n"
                f"  to do: do without it, or unset {VLLM_VARIABLE}; vLLM's own operators do not "
                f"know these adapters either"
            )


def keep_whole(config: Any) -> None:
    """Let every process keep the A of its columns and the B of its rows whole.

    Fully sharded layers exchange h between the two products, in each layer. Such a message takes
    longer than the part of the products that it saves.

    Args:
        config: vLLM's LoRAConfig, before layers are built from it.
    """
    if getattr(config, "fully_sharded_loras", False):
        config.fully_sharded_loras = False
        logger().warning(
            "fully_sharded_loras is not followed: on several GPUs LoRA takes more memory and less "
            "time than with it"
        )


def own_wrapper_name() -> str:
    """Return the dotted name of the wrapper that vLLM uses on this platform by itself."""
    from vllm.platforms import current_platform

    name: str = type(current_platform).get_punica_wrapper.replaced()
    return name


def logger() -> Any:
    """Return a logger below vLLM's own, whose handlers show what it logs."""
    from vllm.logger import init_logger

    return init_logger("vllm.lora_backends")


def _replacement(replaced: Callable[[], str]) -> Callable[[Any], str]:
    def get_punica_wrapper(cls: Any) -> str:
        # asked again each time: a process may build engines with and without the variable
        return WRAPPER if os.environ.get(VLLM_VARIABLE) else replaced()

    get_punica_wrapper.replaced = replaced  # type: ignore[attr-defined]
    return get_punica_wrapper


def _hashed_setting() -> str:
    return f"{os.environ.get(VLLM_VARIABLE, '')} {version('lora-backends')}"
