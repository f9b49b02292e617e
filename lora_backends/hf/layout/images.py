"""Finds the row of the batch that an image belongs to, for models with placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ImageModules:
    """The modules of one architecture whose input has images in order along its first axis.

    The features of all images replace the placeholder tokens of all rows, in order. So a row has
    the same share of the axis as of all placeholders.
    """

    parts: tuple[str, ...]  # of the model that hold these modules
    towers: tuple[str, ...]  # types of the vision model that keep images in order
    patches: bool  # the axis has the patches of all images, or their merged ones; else the images


_CLIP_LIKE = ("clip_vision_model", "siglip_vision_model")
_PROJECTED = ImageModules(("vision_tower", "multi_modal_projector"), _CLIP_LIKE, False)

KNOWN = {
    "gemma3": _PROJECTED,
    "idefics3": ImageModules(("vision_model", "connector"), ("idefics3_vision",), False),
    "llava": _PROJECTED,
    "paligemma": _PROJECTED,
    "qwen2_5_vl": ImageModules(("visual",), ("qwen2_5_vl", "qwen2_5_vl_vision"), True),
    "qwen2_vl": ImageModules(("visual",), ("qwen2_vl", "qwen2_vl_vision"), True),
    "smolvlm": ImageModules(("vision_model", "connector"), ("smolvlm_vision",), False),
}
"""Model type to modules, each read in Transformers' source and compared with PEFT by a test."""

OTHER_INPUTS = ("pixel_values_videos", "window_index")
"""Inputs that bring further elements to the axis, or another order."""


TEXT_INPUTS = frozenset(
    """attention_mask bbox cache_position cross_attn_head_mask cu_seq_lens_k cu_seq_lens_q
    decoder_attention_mask decoder_head_mask decoder_input_ids decoder_inputs_embeds
    decoder_position_ids encoder_attention_mask encoder_hidden_states encoder_outputs
    global_attention_mask head_mask input_ids input_mask inputs_embeds labels logits_to_keep
    mm_token_type_ids perm_mask position_ids rope_deltas target_mapping token_type_ids""".split()
)
"""Inputs that bring no elements besides the tokens of the rows."""

STATES = ("cache", "cache_params", "state", "mems")
"""States of earlier passes. Under any other name they count as untried, and more is refused."""


class Images:
    """The rows of the images in one base model's passes.

    `tried` is the input that the trial passes of the model give (`hf/layout/trial.py`).
    """

    def __init__(self, config: Any, tried: str = "input_ids") -> None:
        self._tried = tried
        self._token: Any = getattr(config, "image_token_id", None)
        known = KNOWN.get(getattr(config, "model_type", ""))
        vision = getattr(config, "vision_config", None)
        is_known = known is not None and getattr(vision, "model_type", "") in known.towers
        self._modules = known if is_known and isinstance(self._token, int) else None
        self._merged: int = getattr(vision, "spatial_merge_size", 1) ** 2  # patches in one

    def hold(self, path: str) -> bool:
        """Return whether a module has images along its input's first axis."""
        # With or without the head's wrapper around the model.
        part = path.removeprefix("model.").partition(".")[0]
        return self._modules is not None and part in self._modules.parts

    def untried(self, inputs: Mapping[str, Any]) -> tuple[str, bool] | None:
        """Return the first input that no trial pass gave, and whether the tried one is missing."""
        # images and sound may reach modules that text reaches, too: an embedding of the codes of
        # images for instance, which may be as many as the rows
        for name, value in inputs.items():
            if name in TEXT_INPUTS or name == self._tried or not _has_tensor(value):
                continue
            if name not in STATES and not name.startswith("past"):
                return name, inputs.get(self._tried) is None
        return None

    def placeholders(self, inputs: Mapping[str, Any], features: Any) -> list[int] | None:
        """Return how many placeholder tokens each row has, if `features` are one for each of all.

        `features` are [..., hidden] of the images of all rows, in order, or anything else. On a GPU
        this waits for the device.
        """
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or not isinstance(features, torch.Tensor):
            return None
        if not isinstance(self._token, int) or features.ndim < 2:
            return None
        counts: list[int] = ids.eq(self._token).sum(dim=1).tolist()
        return counts if sum(counts) == features.shape[:-1].numel() else None

    def elements(self, inputs: Mapping[str, Any], size: int) -> list[int] | None:
        """Return how many elements of an axis with images belong to each row, in their order.

        `size` is that of the axis; a row has None where it is not known. On a GPU this waits for
        the device.
        """
        ids, pixels = inputs.get("input_ids"), inputs.get("pixel_values")
        if not isinstance(ids, torch.Tensor) or not isinstance(pixels, torch.Tensor):
            return None
        if self._modules is None or any(inputs.get(name) is not None for name in OTHER_INPUTS):
            return None
        # The order of placeholders is that of the features.
        placeholders: list[int] = ids.eq(self._token).sum(dim=1).tolist()
        total = sum(placeholders)
        if self._modules.patches:
            # Merged patches are one for each placeholder.
            sizes = [total, total * self._merged]
            is_known = total * self._merged == pixels.shape[0]
        else:
            # Padding with zeros is no image, and the model drops it.
            owned = _owned(pixels)
            sizes = [pixels.shape[0] if owned is None else sum(owned)]
            is_known = owned is None or [count * total for count in owned] == [
                count * sizes[0] for count in placeholders
            ]
        if not is_known or size not in sizes or not total:
            return None
        # A remainder: elements are not shared out equally over placeholders.
        shares = [divmod(size * count, total) for count in placeholders]
        return None if any(rest for _, rest in shares) else [share for share, _ in shares]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _owned(pixels: torch.Tensor) -> list[int] | None:
    """Return the images of each row where pixels are [rows, images, ...], padded with zeros."""
    if pixels.ndim != 5:
        return None
    counts: list[int] = (pixels != 0).flatten(2).any(-1).sum(1).tolist()
    return counts
