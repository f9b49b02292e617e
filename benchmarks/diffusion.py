"""Times denoising with different adapters per image, against denoising without adapters.

Pipelines have the shapes of SDXL and Flux, random weights and few layers. A batch of 8 images uses
4 adapters on all linear layers of the denoiser. Images are 1024x1024 in bfloat16 on a GPU, and
128x128 in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import diffusers
import torch
from measuring import Measurement, Options, Result, Row, flag, in_turns, median_ratio
from measuring import middle_and_ends as middle
from torch import nn
from training import clock, device_of

from lora_backends.diffusers import MultiLoRAPipeline
from lora_backends.dtypes import dtype_name

IMAGES, ADAPTERS, STEPS = 8, 4, 4

WITHOUT_TEXT = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
"""Components that a pipeline does not need where prompts are given as embeddings."""

Inputs = dict[str, Any]


def make_vae() -> nn.Module:
    """Return a VAE that shrinks images 8 times. It never runs, because outputs are latents."""
    return diffusers.AutoencoderKL(
        block_out_channels=(32,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )


def make_sdxl(tiny: bool) -> tuple[Any, Inputs]:
    """Return a pipeline with SDXL's UNet, with 2 transformer layers per block instead of 10."""
    parts = 8 if tiny else 1
    width, pooled = 2048 // parts, 1280 // parts
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64, 128) if tiny else (320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 2),
        attention_head_dim=(2, 4, 8) if tiny else (5, 10, 20),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256 // parts,
        projection_class_embeddings_input_dim=pooled + 6 * (256 // parts),
        cross_attention_dim=width,
    )
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=make_vae(), unet=unet, scheduler=diffusers.EulerDiscreteScheduler(), **WITHOUT_TEXT
    )
    text, pooled_text = torch.randn(IMAGES, 77, width), torch.randn(IMAGES, pooled)
    # guidance doubles the rows of a pass to 16
    inputs = {
        "prompt_embeds": text,
        "pooled_prompt_embeds": pooled_text,
        "negative_prompt_embeds": -text,
        "negative_pooled_prompt_embeds": -pooled_text,
    }
    return pipe, inputs


def make_flux(tiny: bool) -> tuple[Any, Inputs]:
    """Return a pipeline with 2 double and 4 single blocks of Flux instead of 19 and 38."""
    parts = 8 if tiny else 1
    transformer = diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=24 // parts,
        joint_attention_dim=4096 // parts,
        pooled_projection_dim=768,
        guidance_embeds=True,
    )
    pipe = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=make_vae(),
        transformer=transformer,
        **WITHOUT_TEXT,
    )
    inputs = {
        "prompt_embeds": torch.randn(IMAGES, 512 // parts, 4096 // parts),
        "pooled_prompt_embeds": torch.randn(IMAGES, 768),
    }
    return pipe, inputs


SHAPES: dict[str, Callable[[bool], tuple[Any, Inputs]]] = {"sdxl": make_sdxl, "flux": make_flux}


def lora_of(name: str, denoiser: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """Return random LoRA of all linear layers, by diffusers' names."""
    return {
        f"{name}.{path}.{part}": torch.randn(*shape) * 0.01
        for path, module in denoiser.named_modules()
        if isinstance(module, nn.Linear)
        for part, shape in (
            ("lora_A.weight", (rank, module.in_features)),
            ("lora_B.weight", (module.out_features, rank)),
        )
    }


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Time the contenders of each shape in turns, and yield one row per contender."""
    device, dtype, side = _where(options)
    on_gpu = device.type == "cuda"
    result["summary"] = {}
    for shape in options.shapes:
        pipe, inputs = SHAPES[shape](not on_gpu or options.tiny)
        pipe.to(device, dtype)
        pipe.set_progress_bar_config(disable=True)
        inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
        part = "unet" if shape == "sdxl" else "transformer"
        denoiser = getattr(pipe, part).eval()
        files = [lora_of(part, denoiser, options.rank) for _ in range(ADAPTERS)]
        kwargs = {"height": side, "width": side, "num_inference_steps": STEPS}
        kwargs |= {"output_type": "latent", "generator": torch.Generator(device).manual_seed(0)}
        base = partial(pipe, **inputs, **kwargs)
        model = MultiLoRAPipeline(pipe, options.backend, ADAPTERS, options.rank)
        result["backend"] = model.backend.name
        for at, file in enumerate(files):
            model.load_adapter(f"adapter{at}", file)
        names = [f"adapter{at % ADAPTERS}" for at in range(IMAGES)]
        ours = partial(model, adapters=names, **inputs, **kwargs)
        steps = {"base": base, "4 adapters in one batch": ours}
        time = clock(device)
        clocks = {name: partial(time, step) for name, step in steps.items()}
        times = in_turns(clocks, options.rounds, warmup=2)
        if options.diffusers:
            model.detach()
            clocks = {
                "diffusers one after another": partial(
                    time, _one_by_one(pipe, files, inputs, kwargs)
                )
            }
            times |= in_turns(clocks, options.rounds, warmup=1)
        for name, series in times.items():
            ratio = round(median_ratio(series, times["base"]), 3)
            result["summary"][f"{shape}: {name}"] = ratio
            yield {"shape": shape, "contender": name} | middle(series, 2) | {"ratio_to_base": ratio}


def _one_by_one(
    pipe: Any, files: list[dict[str, torch.Tensor]], inputs: Inputs, kwargs: Inputs
) -> Callable[[], None]:
    """Return a function that runs diffusers' own adapters, one call for the images of each."""
    for at, file in enumerate(files):
        pipe.load_lora_weights(file, adapter_name=f"adapter{at}")
    own = [{key: value[at::ADAPTERS] for key, value in inputs.items()} for at in range(ADAPTERS)]

    def run() -> None:
        for at, given in enumerate(own):
            pipe.set_adapters(f"adapter{at}")
            pipe(**given, **kwargs)

    return run


def _where(options: Options) -> tuple[torch.device, torch.dtype, int]:
    """Return the device, the dtype and the side of an image in pixels."""
    device = device_of()
    if device.type == "cuda":
        return device, torch.bfloat16, options.side or 1024
    return device, torch.float32, options.side or 128


def settings(options: Options) -> dict[str, Any]:
    """Return the settings for the result file."""
    device, torch_dtype, side = _where(options)
    on_gpu, dtype = device.type == "cuda", dtype_name(torch_dtype)
    method = (
        f"One call of a pipeline: {STEPS} denoising steps for {IMAGES} images of {side}x{side}, "
        f"without text encoders and VAE, in {dtype}, eager. SDXL: the UNet with 2 transformer "
        f"layers per block, guidance doubles the rows; Flux: 2 double and 4 single blocks"
        f"{'' if on_gpu else '; widths divided by about 8'}. {ADAPTERS} adapters of rank "
        f"{options.rank} on all linear layers; image i has adapter i mod {ADAPTERS}. 'diffusers "
        f"one after another' calls set_adapters and the pipeline once per adapter, with that "
        f"adapter's images. The other contenders take turns; this one is timed after them. "
        f"Milliseconds are medians, and a ratio is the median of the ratios of all rounds."
    )
    return {"method": method, "device": device, "dtype": dtype, "backend": options.backend}


DIFFUSION = Measurement(
    rows=measure,
    file=lambda _: f"diffusion_{'h100' if device_of().type == 'cuda' else 'cpu'}.json",
    settings=settings,
    options={
        "--shapes": flag(list(SHAPES), choices=list(SHAPES)),
        "--backend": flag("auto"),
        "--rank": flag(16),
        "--side": flag(0, "side of an image in pixels; 0: 1024 on a GPU, 128 on a CPU"),
        "--rounds": flag(7),
        "--threads": flag(2, "CPU threads"),
        "--diffusers": flag(False, "time diffusers' own adapters too"),
        "--tiny": flag(False, "use small widths on a GPU too"),
    },
)
