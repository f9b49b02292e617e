"""Refuses calls of `generate` that drop, repeat or move rows of a mixed batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lora_backends.errors import UnsupportedInputError
from lora_backends.hf.request import Request


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
        UnsupportedInputError: an encoder-decoder whose adapters differ by token; a `generate` of
            the model's own, which may drop or repeat rows; long sound.
    """
    config: Any = getattr(base, "config", None)
    name = type(base).__name__
    if request.per_token and getattr(config, "is_encoder_decoder", False):
        raise UnsupportedInputError(
            f"adapters differ by token, and {name} is an encoder-decoder\n"
            f"  allowed: one adapter per row"
        )
    if not generates or not request.differ:
        return
    module = getattr(getattr(type(base), "generate", None), "__module__", "")
    if module.endswith(".generation_whisper"):
        _check_sound(name, config, inputs)
    elif module.startswith("transformers.") and not module.startswith("transformers.generation."):
        raise UnsupportedInputError(
            f"{name} has a generate of its own, which may drop or repeat rows\n"
            f"  allowed: one adapter for all rows\n  to do: split the batch by adapter"
        )


def _check_sound(name: str, config: Any, inputs: Mapping[str, Any]) -> None:
    """Refuse inputs for which Whisper's `generate` drops or repeats rows."""
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
