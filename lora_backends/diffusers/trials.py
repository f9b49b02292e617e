"""Trial passes of denoisers, which show on which axis a module's input has the rows of a batch.

Rows differ in every input that a pipeline gives per image: latents, text, pooled text, timestep,
guidance and sizes. `lora_backends.hf.layout.probe` explains the method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lora_backends.errors import UnsupportedInputError, shown
from lora_backends.hf.layout.trial import TrialInputs

TEXT = 5
"""Tokens of text per row."""

TIME_IDS = 6
"""SDXL's time_ids: original size, crop offset and target size, each as height and width."""

LETTERS = ("a", "b", "ac", "d")
"""Rows, by the letters that `lora_backends.hf.layout.trial` explains."""


@dataclass(frozen=True)
class DenoiserTrial(TrialInputs):
    """One pass of a denoiser. The input "outer.inner" is the entry `inner` of a dict `outer`."""

    lists: Mapping[str, Any]  # the element per row, of inputs that are lists

    def prompt(self, rows: Sequence[str]) -> dict[str, Any]:
        """Return the inputs of the pass."""
        inputs: dict[str, Any] = {name: [value] * len(rows) for name, value in self.lists.items()}
        for name, value in super().prompt(rows).items():
            outer, dot, inner = name.partition(".")
            if dot:
                inputs.setdefault(outer, {})[inner] = value
            else:
                inputs[name] = value
        return inputs

    def step(self, rows: Sequence[str], output: Any) -> None:
        """Return None: a denoiser has no cache, so no pass continues another."""

    def untried(self, inputs: Mapping[str, Any]) -> str | None:
        """Return the name of the first input that the trial pass did not have, or None."""
        tried = {*self.values, *self.flags, *self.lists}
        for name, value in inputs.items():
            entries = value if isinstance(value, Mapping) else {"": value}
            for inner, entry in entries.items():
                # flags choose no rows
                full = f"{name}.{inner}" if inner else name
                if full not in tried and not isinstance(entry, bool | None):
                    return full
        return None


def unet_trial(denoiser: nn.Module) -> DenoiserTrial:
    """Return the trial of a `UNet2DConditionModel` whose inputs text-to-image pipelines give."""
    config = _config(denoiser)
    _refuse_options(
        denoiser,
        encoder_hid_dim_type=None,
        class_embed_type=None,
        num_class_embeds=None,
        addition_embed_type=(None, "text_time"),
    )
    width = config.cross_attention_dim
    if not isinstance(width, int):
        raise UnsupportedInputError(
            f"the UNet has several widths of text embeddings\n"
            f"  given: cross_attention_dim {shown(width)}\n  allowed: one int"
        )
    # the blocks halve height and width
    side = 2 ** len(config.down_block_types)
    shapes = {
        "sample": (config.in_channels, side, 2 * side),
        "timestep": (),
        "encoder_hidden_states": (TEXT, width),
    }
    if config.addition_embed_type == "text_time":
        sizes = TIME_IDS * config.addition_time_embed_dim
        pooled = config.projection_class_embeddings_input_dim - sizes
        if pooled < 1:
            raise UnsupportedInputError(
                f"the UNet has no room for SDXL's {TIME_IDS} time_ids and a text embedding\n"
                f"  given: projection_class_embeddings_input_dim {pooled + sizes}\n"
                f"  allowed: more than {sizes}"
            )
        shapes["added_cond_kwargs.text_embeds"] = (pooled,)
        shapes["added_cond_kwargs.time_ids"] = (TIME_IDS,)
    if config.time_cond_proj_dim is not None:
        shapes["timestep_cond"] = (config.time_cond_proj_dim,)
    return _trial(denoiser, shapes)


def flux_trial(denoiser: nn.Module) -> DenoiserTrial:
    """Return the trial of a `FluxTransformer2DModel`."""
    config = _config(denoiser)
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_states": (8, config.in_channels),
        "encoder_hidden_states": (TEXT, config.joint_attention_dim),
        "pooled_projections": (config.pooled_projection_dim,),
        "timestep": (),
    }
    if config.guidance_embeds:
        shapes["guidance"] = ()
    axes = len(config.axes_dims_rope)
    ids = {"img_ids": _positions(denoiser, 8, axes), "txt_ids": _positions(denoiser, TEXT, axes)}
    return _trial(denoiser, shapes, ids)


def qwen_image_trial(denoiser: nn.Module) -> DenoiserTrial:
    """Return the trial of a `QwenImageTransformer2DModel`."""
    config = _config(denoiser)
    # With these, some inputs have twice the rows, or layers see rows of their own.
    _refuse_options(
        denoiser, zero_cond_t=False, use_additional_t_cond=False, use_layer3d_rope=False
    )
    shapes: dict[str, tuple[int, ...]] = {
        "hidden_states": (8, config.in_channels),
        "encoder_hidden_states": (TEXT, config.joint_attention_dim),
        "timestep": (),
    }
    if config.guidance_embeds:
        shapes["guidance"] = ()
    trial = _trial(denoiser, shapes, lists={"img_shapes": [(1, 2, 4)]})
    mask = torch.ones(TEXT, dtype=torch.bool, device=next(denoiser.parameters()).device)
    values = {**trial.values, "encoder_hidden_states_mask": dict.fromkeys(LETTERS, mask)}
    return DenoiserTrial(None, values, trial.flags, trial.parameters, trial.lists)


def sd3_trial(denoiser: nn.Module) -> DenoiserTrial:
    """Return the trial of an `SD3Transformer2DModel`."""
    config = _config(denoiser)
    shapes = {
        "hidden_states": (config.in_channels, 2 * config.patch_size, 4 * config.patch_size),
        "encoder_hidden_states": (TEXT, config.joint_attention_dim),
        "pooled_projections": (config.pooled_projection_dim,),
        "timestep": (),
    }
    return _trial(denoiser, shapes)


TRIALS: Mapping[str, Callable[[nn.Module], DenoiserTrial]] = {
    "UNet2DConditionModel": unet_trial,
    "FluxTransformer2DModel": flux_trial,
    "QwenImageTransformer2DModel": qwen_image_trial,
    "SD3Transformer2DModel": sd3_trial,
}
"""Makers of trial passes, by class name of the denoiser."""


def _config(denoiser: nn.Module) -> Any:
    return denoiser.config


def _refuse_options(denoiser: nn.Module, **allowed: Any) -> None:
    """Refuse a configuration under which inputs or their rows differ from the trial's."""
    for name, value in allowed.items():
        given = _config(denoiser).get(name)
        choices = value if isinstance(value, tuple) else (value,)
        if given not in choices and (given or None) not in choices:
            raise UnsupportedInputError(
                f"{type(denoiser).__name__} takes inputs whose order of rows is not known\n"
                f"  given: {name} = {shown(given)}\n"
                f"  allowed: {' or '.join(map(str, choices))}"
            )


def _positions(denoiser: nn.Module, count: int, axes: int) -> torch.Tensor:
    device = next(denoiser.parameters()).device
    return torch.arange(count, device=device)[:, None].expand(count, axes).float()


def _trial(
    denoiser: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    flags: Mapping[str, Any] | None = None,
    lists: Mapping[str, Any] | None = None,
) -> DenoiserTrial:
    """Return a trial with random values, of these shapes per row."""
    like: Any = next(p for p in denoiser.parameters() if p.is_floating_point())
    dtype = getattr(denoiser, "dtype", like.dtype)
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        # The UNet takes sines and cosines of them, so rows must differ by 1 and more.
        wide = name.endswith(("timestep", "time_ids"))
        values = torch.randn(shape, generator=generator, device="cpu")
        values = values.abs() * 100 if wide and "sample" in shapes else values
        return values.to(like.device, dtype)

    values = {
        name: {letter: drawn(name, shape) for letter in LETTERS} for name, shape in shapes.items()
    }
    parameters = inspect.signature(denoiser.forward).parameters
    return DenoiserTrial(
        None, values, {**(flags or {}), "return_dict": False}, parameters, lists or {}
    )
