"""Refuses calls of `generate` that drop, repeat or move rows of a mixed batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.calls.request import Request
from lora_backends.hf.generating.config_words import check_rows_are_kept, shown_words

KNOWN_ARGUMENTS = frozenset(
    """self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn
    synced_gpus assistant_model streamer negative_prompt_ids
    negative_prompt_attention_mask""".split()
)
"""Of `generate`: with them it keeps each row at its place, or repeats it next to itself."""


def check_generate(
    base: nn.Module, request: Request, inputs: Mapping[str, Any], generates: bool
) -> None:
    """Refuse rows with different adapters where a model may move them.

    Args:
        base: the model.
        request: the adapters of its rows.
        inputs: of the call.
        generates: whether it is a call of `generate`.

    Raises:
        UnsupportedInputError: an encoder-decoder whose adapters differ by token, or guidance of
            such rows; a `generate` of the model's own, or a word or argument that may drop, repeat
            or move rows; long sound; continuous batching, which runs in a thread without adapters.
    """
    config: Any = getattr(base, "config", None)
    name = type(base).__name__
    if request.per_token and getattr(config, "is_encoder_decoder", False):
        raise UnsupportedInputError(
            f"adapters differ by token, and {name} is an encoder-decoder\n"
            f"  allowed: one adapter per row"
        )
    if not generates:
        return
    if inputs.get("cache_implementation") == "paged":
        raise UnsupportedInputError(
            "cache_implementation='paged' runs continuous batching, in a thread without adapters\n"
            "  to do: call generate_batch(prompts, adapters=[...])"
        )
    if request.per_token:
        _check_guidance(base, inputs)
    # With one adapter everywhere no row can get another's adapter.
    if not request.differ and not request.per_token:
        return
    # A method from outside of Transformers' mixin may do anything with rows.
    generate = getattr(base, "generate", None)
    module = getattr(generate, "__module__", "")
    # Whisper's generate keeps rows for short sound; its long form drops those that end.
    if module.endswith(".generation_whisper"):
        _check_sound(name, config, inputs)
    elif "generate" in vars(base) or not module.startswith("transformers.generation."):
        raise UnsupportedInputError(
            f"{name} has a generate of its own, which may drop, repeat or move rows\n"
            f"  allowed: one adapter for all rows\n  to do: split the batch by adapter"
        )
    else:
        _check_arguments(base, inputs)
    check_rows_are_kept(base, inputs)


def _check_arguments(base: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse arguments of `generate` that may move rows, e.g. custom_generate."""
    # By the installed signature: arguments of later versions are refused, not missed.
    names = inspect.signature(type(base).generate).parameters.keys() - KNOWN_ARGUMENTS
    others = {name: inputs[name] for name in sorted(names) if inputs.get(name) is not None}
    if others:
        raise UnsupportedInputError(
            f"adapters differ by row or token, and generate may move rows with "
            f"{shown_words(others)}\n  allowed: one adapter for all rows\n"
            f"  to do: split the batch by adapter"
        )


def _check_guidance(base: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse guidance: entries per token do not say which adapter its other prompt uses."""
    configs = inputs.get("generation_config"), getattr(base, "generation_config", None)
    scales = [inputs.get("guidance_scale")]
    scales += [getattr(config, "guidance_scale", None) for config in configs]
    scale = next((scale for scale in scales if scale is not None), 1)
    if scale != 1:
        raise UnsupportedInputError(
            f"adapters differ by token (aLoRA's do, too), and guidance runs another prompt, "
            f"whose tokens have no entries\n  given: guidance_scale={scale}\n"
            f"  allowed: one adapter per row, or guidance_scale=1"
        )


def _check_sound(name: str, config: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse inputs for which Whisper's `generate` drops or repeats rows."""
    # Longer sound runs in segments, whose batch loses rows.
    frames = 2 * config.max_source_positions
    features = inputs.get("input_features")
    reasons = {
        f"sound of {frames} frames or less": isinstance(features, torch.Tensor)
        and features.shape[-1] <= frames,
        "num_beams=1": inputs.get("num_beams") in (None, 1),
        "num_return_sequences=1": inputs.get("num_return_sequences") in (None, 1),
    }
    if not all(reasons.values()):
        broken = [allowed for allowed, holds in reasons.items() if not holds]
        raise UnsupportedInputError(
            f"{name} drops or repeats rows as it generates, so rows cannot use different adapters\n"
            f"  allowed: {', '.join(broken)}\n  to do: split the batch by adapter"
        )
