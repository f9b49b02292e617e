"""Which row of the batch every image belongs to, for models that say so by placeholder tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ImageModules:
    """The modules of one architecture whose input has one image after the other on its first axis.

    The features of all images replace the placeholder tokens of all rows, in order, so the
    placeholders of a row say how many of the images are its own. Every image has as many.
    """

    parts: tuple[str, ...]  # of the model that hold these modules
    towers: tuple[str, ...]  # types of the vision model that are known to keep images apart


_CLIP_LIKE = ("clip_vision_model", "siglip_vision_model")

KNOWN = {
    "gemma3": ImageModules(("vision_tower", "multi_modal_projector"), _CLIP_LIKE),
    "idefics3": ImageModules(("vision_model", "connector"), ("idefics3_vision",)),
    "llava": ImageModules(("vision_tower", "multi_modal_projector"), _CLIP_LIKE),
    "paligemma": ImageModules(("vision_tower", "multi_modal_projector"), _CLIP_LIKE),
    "smolvlm": ImageModules(("vision_model", "connector"), ("smolvlm_vision",)),
}
"""Model type to modules, each read in Transformers' source and compared with PEFT by a test."""


class Images:
    """The rows of the images of one base model's forward passes.

    Args:
        config: of the base model, or None.
    """

    def __init__(self, config: Any) -> None:
        self._token = getattr(config, "image_token_id", None)
        known = KNOWN.get(getattr(config, "model_type", ""))
        tower = getattr(getattr(config, "vision_config", None), "model_type", "")
        self._parts = known.parts if known is not None and tower in known.towers else ()

    def holds(self, path: str) -> bool:
        """Return whether a module has images on its input's first axis."""
        return path.removeprefix("model.").partition(".")[0] in self._parts

    def rows(self, inputs: Mapping[str, Any]) -> list[int] | None:
        """Return the row of every image of a forward pass, or None where it is not known.

        On a GPU this waits for the device.

        Args:
            inputs: of the base model.
        """
        ids, pixels = inputs.get("input_ids"), inputs.get("pixel_values")
        if not isinstance(ids, torch.Tensor) or not isinstance(pixels, torch.Tensor):
            return None
        if not isinstance(self._token, int):
            return None
        placeholders: list[int] = ids.eq(self._token).sum(1).tolist()
        if pixels.ndim == 5:  # [rows, images, ...], padded with images of zeros
            owned: list[int] | None = (pixels != 0).flatten(2).any(-1).sum(1).tolist()
        else:
            owned = None
        images = pixels.shape[0] if owned is None else sum(owned)
        each, rest = divmod(sum(placeholders), images) if images else (0, 0)
        if not each or rest or any(count % each for count in placeholders):
            return None
        counts = [count // each for count in placeholders]
        if owned is not None and owned != counts:
            return None
        return [row for row, count in enumerate(counts) for _ in range(count)]
