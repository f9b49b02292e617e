"""Times denoising with different adapters per image, against denoising without adapters.

Pipelines have random weights. On a GPU, the UNet of SDXL is whole and Flux has 6 of its 57 blocks;
images are 1024x1024 in bfloat16. On a CPU, widths and layers are few, and images are 128x128 in
float32. A batch of 8 images uses 4 adapters on all linear layers of the denoiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make the block's modules on a device and in a dtype: several GB need no copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make_sdxl(tiny: bool, device: torch.device, dtype: torch.dtype) -> tuple[Any, Inputs]:
    """Return a pipeline with SDXL's UNet, with 2 transformer layers per block if `tiny`."""
    parts = 8 if tiny else 1
    width, pooled = 2048 // parts, 1280 // parts
    with made_on(device, dtype):
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64, 128) if tiny else (320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 2) if tiny else (1, 2, 10),
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


def make_flux(tiny: bool, device: torch.device, dtype: torch.dtype) -> tuple[Any, Inputs]:
    """Return a pipeline with 2 double and 4 single blocks of Flux instead of 19 and 38."""
    parts = 8 if tiny else 1
    with made_on(device, dtype):
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


SHAPES: dict[str, Callable[[bool, torch.device, torch.dtype], tuple[Any, Inputs]]] = {
    "sdxl": make_sdxl,
    "flux": make_flux,
}


def lora_of(
    name: str, denoiser: nn.Module, rank: int, modules: str = "all"
) -> dict[str, torch.Tensor]:
    """Return random LoRA of all linear layers, or of those of attention, by diffusers' names."""
    return {
        f"{name}.{path}.{part}": torch.randn(*shape) * 0.03
        for path, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and (modules == "all" or "attn" in path)
        for part, shape in (
            ("lora_A.weight", (rank, module.in_features)),
            ("lora_B.weight", (module.out_features, rank)),
        )
    }


def measure(options: Options, result: Result) -> Iterator[Row]:
    """Time the contenders of each shape in turns, and yield one row per contender."""
    result["summary"] = {}
    for shape in options.shapes:
        for row in _rows_of(shape, options, result):
            result["summary"][f"{shape}: {row['contender']}"] = row["ratio_to_base"]
            yield row


def _rows_of(shape: str, options: Options, result: Result) -> list[Row]:
    """Return a row per contender."""
    device, dtype, side = _where(options)
    pipe, inputs = SHAPES[shape](device.type != "cuda" or options.tiny, device, dtype)
    pipe.to(device, dtype)
    pipe.set_progress_bar_config(disable=True)
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    kwargs = {"height": side, "width": side, "num_inference_steps": STEPS}
    kwargs["output_type"] = "latent"
    part = "unet" if shape == "sdxl" else "transformer"
    denoiser = getattr(pipe, part).eval()
    files = [lora_of(part, denoiser, options.rank, options.modules) for _ in range(ADAPTERS)]
    model = MultiLoRAPipeline(pipe, options.backend, ADAPTERS, options.rank)
    result["backend"] = model.backend.name
    for at, file in enumerate(files):
        model.load_adapter(f"adapter{at}", file)
    names = [f"adapter{at % ADAPTERS}" for at in range(IMAGES)]

    def base() -> torch.Tensor:
        images: torch.Tensor = pipe(**inputs, **kwargs, generator=_seeds(device)).images
        return images

    def ours() -> torch.Tensor:
        given = inputs | kwargs | {"generator": _seeds(device)}
        images: torch.Tensor = model(adapters=names, **given).images
        return images

    time = clock(device)
    steps = {"base": base, "4 adapters in one batch": ours}
    clocks = {name: partial(time, step) for name, step in steps.items()}
    times = in_turns(clocks, options.rounds, warmup=2)
    images = {name: step() for name, step in steps.items()}
    errors = {}
    if options.diffusers:
        model.detach()
        one_by_one = _one_by_one(pipe, files, inputs, kwargs)
        clocks = {"diffusers one after another": partial(time, one_by_one)}
        times |= in_turns(clocks, options.rounds, warmup=1)
        own = one_by_one()
        errors = {name: {"error": _difference(those, own)} for name, those in images.items()}
    return [
        {"shape": shape, "contender": name}
        | middle(series, 2)
        | {"ratio_to_base": round(median_ratio(series, times["base"]), 3)}
        | errors.get(name, {})
        for name, series in times.items()
    ]


def _seeds(device: torch.device, images: Iterable[int] = range(IMAGES)) -> list[torch.Generator]:
    """Return a generator of the noise for each image, the same in every batch."""
    return [torch.Generator(device).manual_seed(image) for image in images]


def _difference(images: torch.Tensor, others: torch.Tensor) -> float:
    """Return the largest relative difference of an image from its pair in `others`, by the norm."""
    rows, norms = images.double().flatten(1), others.double().flatten(1)
    found = ((rows - norms).norm(dim=1) / norms.norm(dim=1)).max().item()
    if not math.isfinite(found):
        raise SystemExit("images are not finite: these weights measure nothing")
    return float(f"{found:.3g}")


def _one_by_one(
    pipe: Any, files: list[dict[str, torch.Tensor]], inputs: Inputs, kwargs: Inputs
) -> Callable[[], torch.Tensor]:
    """Return a function that runs diffusers' own adapters, one call for the images of each."""
    for at, file in enumerate(files):
        pipe.load_lora_weights(file, adapter_name=f"adapter{at}")
    rows = [range(at, IMAGES, ADAPTERS) for at in range(ADAPTERS)]
    own = [{key: value[at::ADAPTERS] for key, value in inputs.items()} for at in range(ADAPTERS)]
    device = next(iter(inputs.values())).device

    def run() -> torch.Tensor:
        parts = []
        for at, given in enumerate(own):
            pipe.set_adapters(f"adapter{at}")
            parts.append(pipe(**given, **kwargs, generator=_seeds(device, rows[at])).images)
        # part j has images j, j + ADAPTERS, ...
        return torch.stack(parts, 1).flatten(0, 1)

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
        f"without text encoders and VAE, in {dtype}, eager. SDXL: guidance doubles the rows; Flux: "
        f"2 double and 4 single blocks"
        f"{'' if on_gpu else '; fewer transformer layers in SDXL, widths divided by about 8'}. "
        f"{ADAPTERS} adapters of rank {options.rank} on {options.modules} linear layers; image i "
        f"has adapter i mod {ADAPTERS}. 'diffusers one after another' calls set_adapters and the "
        f"pipeline once per adapter, with that adapter's images. The other contenders take turns; "
        f"this one is timed after them. "
        f"Milliseconds are medians, and a ratio is the median of the ratios of all rounds. error: "
        f"the largest difference of an image from diffusers' own, as a share of its norm; that of "
        f"base shows what the adapters change."
    )
    return {"method": method, "device": device, "dtype": dtype, "backend": options.backend}


DIFFUSION = Measurement(
    rows=measure,
    file=lambda _: f"diffusion_{'gpu' if device_of().type == 'cuda' else 'cpu'}.json",
    settings=settings,
    partial=True,
    options={
        "--shapes": flag(list(SHAPES), choices=list(SHAPES)),
        "--backend": flag("auto"),
        "--rank": flag(16),
        "--modules": flag("all", "linear layers with LoRA", choices=["all", "attention"]),
        "--side": flag(0, "side of an image in pixels; 0: 1024 on a GPU, 128 on a CPU"),
        "--rounds": flag(7),
        "--threads": flag(2, "CPU threads"),
        "--diffusers": flag(False, "time diffusers' own adapters too"),
        "--tiny": flag(False, "use small widths on a GPU too"),
    },
)
