"""The pipelines whose order of rows is known, from the source code of diffusers.

In all of them the images of one prompt are adjacent rows (`num_images_per_prompt`), and a pass with
classifier-free guidance has all rows twice, first with the negative prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_backends.diffusers.trials import TRIALS, DenoiserTrial
from lora_backends.errors import InvalidInputError, UnsupportedInputError, shown


@dataclass(frozen=True)
class Family:
    """Pipelines of one model: from text, from an image, or inpainting."""

    pipelines: tuple[str, ...]  # class names in diffusers
    denoiser: str  # component name of the denoiser
    kind: str  # class name of the denoiser
    encoders: tuple[str, ...]  # component names of the text encoders that may have LoRA
    copies: tuple[int, ...]  # allowed numbers of copies of all rows in a pass of the denoiser
    maps_blocks: bool = False  # whether diffusers' converter takes `unet_config`
    returns_alphas: bool = False  # whether diffusers' converter takes `return_alphas`

    def trial(self, denoiser: nn.Module) -> DenoiserTrial:
        """Return the trial pass of the denoiser."""
        make: Callable[[nn.Module], DenoiserTrial] = TRIALS[self.kind]
        return make(denoiser)


def _with_images(name: str) -> tuple[str, ...]:
    """Return a model's pipeline classes: from text, from an image, and inpainting."""
    return tuple(f"{name}{task}Pipeline" for task in ("", "Img2Img", "Inpaint"))


FAMILIES = (
    Family(
        _with_images("StableDiffusion"), "unet", "UNet2DConditionModel", ("text_encoder",), (1, 2)
    ),
    Family(
        _with_images("StableDiffusionXL"),
        "unet",
        "UNet2DConditionModel",
        ("text_encoder", "text_encoder_2"),
        (1, 2),
        maps_blocks=True,
    ),
    Family(
        _with_images("StableDiffusion3"),
        "transformer",
        "SD3Transformer2DModel",
        ("text_encoder", "text_encoder_2"),
        (1, 2),
    ),
    Family(
        _with_images("Flux"),
        "transformer",
        "FluxTransformer2DModel",
        ("text_encoder",),
        (1,),
        returns_alphas=True,
    ),
    Family(_with_images("QwenImage"), "transformer", "QwenImageTransformer2DModel", (), (1,)),
)


def family_of(pipe: Any) -> Family:
    """Return the family of a pipeline.

    Raises:
        InvalidInputError: `pipe` is no pipeline.
        UnsupportedInputError: the order of rows is not known for its class, or its denoiser has
            another class than the family's.
    """
    kind = type(pipe)
    if not hasattr(pipe, "components") or not callable(pipe):
        raise InvalidInputError(
            f"pipe is no pipeline of diffusers\n  given: {shown(pipe)}\n"
            f"  to do: pass what DiffusionPipeline.from_pretrained(...) returns"
        )
    known = [name for family in FAMILIES for name in family.pipelines]
    # A subclass outside of diffusers may order rows in another way.
    is_of_diffusers = kind.__module__.partition(".")[0] == "diffusers"
    matching = [family for family in FAMILIES if kind.__name__ in family.pipelines]
    if not matching or not is_of_diffusers:
        raise UnsupportedInputError(
            f"the order of rows is not known for this class of pipeline\n"
            f"  given: {kind.__module__}.{kind.__name__}\n  allowed: {', '.join(known)}"
        )
    family = matching[0]
    denoiser = type(getattr(pipe, family.denoiser, None)).__name__
    if denoiser != family.kind:
        to_do = ""
        if denoiser == "OptimizedModule":
            to_do = "\n  to do: wrap the pipeline without torch.compile"
        raise UnsupportedInputError(
            f"the pipeline's {family.denoiser} is of another class\n  given: {denoiser}\n"
            f"  allowed: {family.kind}{to_do}"
        )
    return family
