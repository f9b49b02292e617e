"""The methods of SGLang that the plug-in wraps where SGLang's interface does not suffice.

SGLang's own hooks only log a missing target. Here a version without one is refused, because its
rows would be wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from lora_backends.integrations.sglang import adapters, experts, pool, warm_up
from lora_backends.integrations.sglang.settings import lacking

WRAPPED: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("sglang.srt.lora.lora_manager", "LoRAManager", "init_memory_pool", pool.adopt_after),
    ("sglang.srt.lora.lora_manager", "LoRAManager", "update_lora_info", warm_up.warm_up_after),
    ("sglang.srt.lora.lora_manager", "LoRAManager", "validate_new_adapter", adapters.check_config),
    ("sglang.srt.lora.lora", "LoRAAdapter", "_process_weight", adapters.check_name),
    ("sglang.srt.lora.lora", "LoRAAdapter", "_normalize_weights", adapters.check_weights),
    ("sglang.srt.lora.layers", "FusedMoEWithLoRA", "_get_lora_info", experts.lora_info),
    ("sglang.srt.lora.lora_moe_runners", "", "build_lora_hooks", experts.build_hooks),
)
"""Module, class or "" for the module itself, name, and the function that is called instead.

Its first argument is the wrapped method. It only calls that one for engines of the process that do
not run on this library's backend.
"""


def wrap() -> None:
    """Wrap all of `WRAPPED`; a second call changes nothing.

    Raises:
        UnsupportedInputError: this version of SGLang lacks one.
    """
    for module, owner, name, around in WRAPPED:
        holder: Any = import_module(module)
        holder = getattr(holder, owner, None) if owner else holder
        original = getattr(holder, name, None)
        if original is None:
            raise lacking(module, f"{owner}{'.' if owner else ''}{name}")
        if not getattr(original, "is_wrapped", False):
            setattr(holder, name, _wrapped(original, around))


def _wrapped(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    method.is_wrapped = True  # type: ignore[attr-defined]
    return method
