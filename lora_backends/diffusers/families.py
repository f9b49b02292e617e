"""The pipelines whose rows are known, from diffusers' own code.

In all of them the images of prompt i are rows next to each other (`num_images_per_prompt`), and a
pass with classifier-free guidance has all rows twice: first with the negative prompts.
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
    """Pipelines with one denoiser."""

    pipelines: tuple[str, ...]  # names of classes of diffusers
    denoiser: str  # name of the component
    kind: str  # class of the denoiser
    encoders: tuple[str, ...]  # names of the components that encode text and may have LoRA
    copies: tuple[int, ...]  # how often a pass of the denoiser may have the rows of all images
    maps_blocks: bool = False  # whether diffusers' converter takes the UNet's configuration
    returns_alphas: bool = False  # whether it returns alphas only where it is asked to

    def trial(self, denoiser: nn.Module) -> DenoiserTrial:
        """Return the trial inputs of the denoiser."""
        make: Callable[[nn.Module], DenoiserTrial] = TRIALS[self.kind]
        return make(denoiser)


def _with_images(name: str) -> tuple[str, ...]:
    """Return the classes of one model: from text, from an image, and of a part of an image."""
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
        InvalidInputError: it is no pipeline.
        UnsupportedInputError: one whose order of rows is not known here, or with another denoiser.
    """
    kind = type(pipe)
    if not hasattr(pipe, "components") or not callable(pipe):
        raise InvalidInputError(
            f"no pipeline\n  given: {shown(pipe)}\n"
            f"  to do: pass what DiffusionPipeline.from_pretrained(...) returns"
        )
    known = [name for family in FAMILIES for name in family.pipelines]
    # A subclass may order rows in another way.
    is_of_diffusers = kind.__module__.partition(".")[0] == "diffusers"
    found = [family for family in FAMILIES if kind.__name__ in family.pipelines]
    if not found or not is_of_diffusers:
        raise UnsupportedInputError(
            f"it is not known which rows of this pipeline's passes belong to an image\n"
            f"  given: {kind.__module__}.{kind.__name__}\n  allowed: {', '.join(known)}"
        )
    family = found[0]
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
