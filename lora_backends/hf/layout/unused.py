"""Finds modules that a base model lacks and does not need, so that their LoRA can be left out."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from lora_backends.adapters.peft.old_names import renamed

_MEDIA = frozenset(
    """audio_projector audio_tower connector embed_audio embed_vision image_projector mm_projector
    multi_modal_projector vision_embed_tokens vision_model vision_tower visual""".split()
)
"""Names of the parts beside the language model in models of images or sound."""

_OF_MIXED = ("audio", "text", "vision", "vq")
"""A configuration with `vision_config` or the like is of such a model; a text model's has none."""


def unused_by(base: nn.Module) -> Callable[[str], str | None]:
    """Return a function that says why the model does not need a missing module; None: it may."""
    modules = dict(base.named_modules())
    patterns = getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ()
    config = getattr(base, "config", None)
    # A model of images or sound may have another name for the part. `input_modalities` does not
    # tell: Gemma3ForCausalLM inherits it from the model of images around it.
    is_text = (
        getattr(base, "main_input_name", "input_ids") == "input_ids"
        and not any(map(_is_media, modules))
        and not any(hasattr(config, f"{part}_config") for part in _OF_MIXED)
    )

    def reason(path: str) -> str | None:
        if renamed(path, modules) in modules:
            return None
        parent, _, name = path.rpartition(".")
        owner = modules.get(renamed(parent, modules))
        if name in ("k_proj", "v_proj") and getattr(owner, "is_kv_shared_layer", False) is True:
            return "the layer takes the keys and values of another"
        # From the start: patterns of a part of the model would match names in other parts.
        if any(re.match(pattern, f"{path}.weight") for pattern in patterns):
            return "the base model's class leaves these weights out"
        if is_text and _is_media(path):
            return "the base model takes text alone"
        return None

    return reason


def _is_media(path: str) -> bool:
    return not _MEDIA.isdisjoint(path.split(".")[:2])
