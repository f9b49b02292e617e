"""Checks of SGLang's version and settings."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from lora_backends.common.names import SGLANG_VARIABLE
from lora_backends.errors import BackendUnavailableError, UnsupportedInputError

OLDEST = (0, 5, 16)
"""The first version of SGLang whose interface for LoRA the plug-in knows."""


def check_version(installed: str) -> None:
    """Refuse an SGLang whose LoRA interface the plug-in does not know.

    Raises:
        BackendUnavailableError: the version is too old, or cannot be parsed.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", installed)
    if match is None or tuple(map(int, match.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendUnavailableError(
            f"this version of SGLang is not supported\n  given: SGLang {installed}\n"
            f"  allowed: {oldest} or newer\n"
            f"  to do: install sglang>={oldest}, or unset {SGLANG_VARIABLE}"
        )


def check_settings(arguments: Any) -> None:
    """Refuse settings under which a LoRA layer's rows are not those that SGLang announces.

    Args:
        arguments: SGLang's `ServerArgs`, or None.

    Raises:
        UnsupportedInputError: such a setting, or one under which SGLang would run the experts' LoRA
            itself, lose it, or use that of other experts.
    """
    refused = [name for name, is_set in _settings(arguments) if is_set]
    if refused:
        raise UnsupportedInputError(
            f"the plug-in for SGLang does not run under these settings\n"
            f"  given: {', '.join(refused)}\n"
            f"  to do: turn them off, or unset {SGLANG_VARIABLE}"
        )


def most_rows(arguments: Any) -> int:
    """Return the rows of the largest prefill under SGLang's `ServerArgs`; 0 if they do not tell."""
    rows: int = setting(arguments, "chunked_prefill_size") or 0
    return rows if rows > 0 else setting(arguments, "max_prefill_tokens") or 0


def _settings(arguments: Any) -> list[tuple[str, bool]]:
    def value(name: str, default: Any = None) -> Any:
        return setting(arguments, name, default)

    switches = (
        "enable_dp_attention",  # tokens of several processes
        "enable_two_batch_overlap",  # half a batch at a time
        "enable_pdmux",  # two batches at once
        "enable_attn_tp_input_scattered",  # a part of the tokens
        "enable_layernorm_sp",
        "enable_prefill_cp",
        "enable_torch_compile",  # tracing would keep the first batch's plan
        "enable_fused_moe_sum_all_reduce",  # sums the experts before the LoRA of down is added
        "enable_eplb",  # moves experts, but not their LoRA
    )
    switched = [(name, bool(value(name, False))) for name in switches]
    switched.append(
        ("ep_num_redundant_experts above 0", (value("ep_num_redundant_experts") or 0) > 0)
    )
    placed = value("init_expert_location") or "trivial"
    switched.append((f"init_expert_location={placed}", placed != "trivial"))
    for name in ("attn_dp_size", "attn_cp_size", "pp_size"):
        switched.append((f"{name} above 1", (value(name, 1) or 1) > 1))
    exchange = value("moe_a2a_backend") or "none"
    switched.append((f"moe_a2a_backend={exchange}", exchange != "none"))
    runner = str(value("moe_runner_backend") or "auto")
    switched.append((f"moe_runner_backend={runner}", runner.startswith(("lora", "experimental"))))
    experimental = os.environ.get("SGLANG_EXPERIMENTAL_LORA_OPTI", "").lower()
    switched.append(("SGLANG_EXPERIMENTAL_LORA_OPTI", experimental in ("1", "true", "yes", "y")))
    return switched


def setting(arguments: Any, name: str, default: Any = None) -> Any:
    """Return a setting as SGLang has resolved it, or `default` if this version lacks it.

    Newer versions keep resolved values apart from `ServerArgs`.
    """
    if getattr(arguments, "_resolved_overrides", None):
        try:
            from sglang.srt.arg_groups.overrides import resolution_result
        except ImportError:  # a version that writes what it resolves into `ServerArgs`
            pass
        else:
            return resolution_result(arguments, name, default)
    return getattr(arguments, name, default)


def lacking(module: str, name: str) -> UnsupportedInputError:
    """Return the error for a version of SGLang without a name that the plug-in needs."""
    return UnsupportedInputError(
        f"this version of SGLang lacks a name that the plug-in wraps\n"
        f"  given: {module} without {name}\n"
        f"  to do: install a version of SGLang that is tested, or unset {SGLANG_VARIABLE}"
    )


def logger() -> logging.Logger:
    """Return the plug-in's logger; SGLang configures the root logger."""
    return logging.getLogger("sglang.lora_backends")
