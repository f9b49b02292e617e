"""Tiny random pipelines with the architectures of Stable Diffusion, SDXL, SD3, Flux and Qwen-Image.

They are built from configurations and a vocabulary of letters: nothing is downloaded. Images are
latents of 8x8, in float32 on the CPU, and the schedulers draw no random numbers.
"""

import inspect
import json
import tempfile
from functools import cache
from pathlib import Path

import diffusers
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

diffusers.utils.logging.set_verbosity_error()

WIDTH = 32


@cache
def _tokenizer():
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocabulary.write_text(json.dumps({word: i for i, word in enumerate(words)}))
        merges.write_text("#version: 0.2\n")
        return CLIPTokenizer(str(vocabulary), str(merges), model_max_length=16)


def _clip(kind):
    end = len(_tokenizer()) - 1
    config = CLIPTextConfig(
        vocab_size=end + 1,
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        projection_dim=WIDTH,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    return _spread(kind(config))


def _t5():
    config = T5Config(
        vocab_size=len(_tokenizer()), d_model=WIDTH, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    return _spread(T5EncoderModel(config))


def _vae(**changes):
    return AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=["DownEncoderBlock2D", "DownEncoderBlock2D"],
        up_block_types=["UpDecoderBlock2D", "UpDecoderBlock2D"],
        **changes,
    ).eval()


def _spread(module):
    """Add noise to biases and norms, which start as zeros and ones, and set eval mode."""
    for parameter in module.parameters():
        if parameter.ndim < 2:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return module.eval()


def _unet(**changes):
    sizes = {
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "sample_size": 8,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    return _spread(UNet2DConditionModel(**sizes | changes))


def stable_diffusion():
    """Return a tiny Stable Diffusion 1.5."""
    torch.manual_seed(0)
    return StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_tokenizer(),
        unet=_unet(cross_attention_dim=WIDTH),
        scheduler=EulerDiscreteScheduler(steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl():
    """Return a tiny SDXL."""
    torch.manual_seed(0)
    unet = _unet(
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=2 * WIDTH,
    )
    return StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_clip(CLIPTextModel),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(steps_offset=1),
    )


def sd3():
    """Return a tiny Stable Diffusion 3, without T5."""
    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=WIDTH,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=16,
    )
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(latent_channels=16, shift_factor=0.0609, scaling_factor=1.5),
        transformer=_spread(transformer),
        text_encoder=_clip(CLIPTextModelWithProjection),
        text_encoder_2=_clip(CLIPTextModelWithProjection),
        text_encoder_3=None,
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        tokenizer_3=None,
    )


def flux():
    """Return a tiny Flux."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(latent_channels=1, shift_factor=0.0609, scaling_factor=1.5),
        text_encoder=_clip(CLIPTextModel),
        tokenizer=_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_tokenizer(),
        transformer=_spread(transformer),
    )


def qwen_image():
    """Return a tiny Qwen-Image without a text encoder; it takes embeddings of prompts."""
    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.eval(),
        text_encoder=None,
        tokenizer=None,
        transformer=_spread(transformer),
    )


PIPELINES = {
    "Stable Diffusion": stable_diffusion,
    "SDXL": sdxl,
    "SD3": sd3,
    "Flux": flux,
    "Qwen-Image": qwen_image,
}
"""Makers of pipelines, by name of the model."""


TASKS = ("Img2Img", "Inpaint")
"""Tasks with an image, as in the names of pipeline classes."""


def make(name, task=""):
    """Return a pipeline of a model for text to image, or for one of `TASKS`."""
    pipe = PIPELINES[name]()
    if not task:
        return pipe
    kind = getattr(diffusers, type(pipe).__name__.replace("Pipeline", f"{task}Pipeline"))
    names = inspect.signature(kind.__init__).parameters
    components = {key: value for key, value in pipe.components.items() if key in names}
    if "requires_safety_checker" in names:
        components["requires_safety_checker"] = False
    return kind(**components)


def arguments(pipe, prompts, images=1, **changes):
    """Return the arguments of a call with guidance, few steps, and latents as output."""
    given = {
        "height": 16,
        "width": 16,
        "num_inference_steps": 2,
        "num_images_per_prompt": images,
        "output_type": "latent",
        "generator": [
            torch.Generator("cpu").manual_seed(7 * len(p) + i)
            for p in prompts
            for i in range(images)
        ],
    }
    if type(pipe).__name__.startswith("QwenImage"):
        given |= {**_embeddings(prompts), "true_cfg_scale": 3.0}
        negative = _embeddings(["" for _ in prompts])
        given |= {f"negative_{name}": value for name, value in negative.items()}
    elif type(pipe).__name__.startswith("Flux"):
        given |= {"prompt": prompts, "negative_prompt": [""] * len(prompts), "true_cfg_scale": 3.0}
        given["max_sequence_length"] = 16
    else:
        given |= {"prompt": prompts, "negative_prompt": [""] * len(prompts), "guidance_scale": 3.0}
    names = inspect.signature(type(pipe).__call__).parameters
    if "image" in names:  # one per prompt; with one for all, every image has the same noise
        image = torch.rand(1, 3, 16, 16, generator=torch.Generator("cpu").manual_seed(3))
        mask = torch.zeros(len(prompts), 1, 16, 16)
        mask[..., 4:12] = 1
        given |= {"image": image.repeat(len(prompts), 1, 1, 1), "mask_image": mask}
        given |= {"strength": 0.9, "num_inference_steps": 3}
        given = {key: value for key, value in given.items() if key in names}
    return given | changes


def _embeddings(prompts):
    """Return random embeddings, one per prompt."""
    rows = [
        torch.randn(7, 16, generator=torch.Generator("cpu").manual_seed(len(p))) for p in prompts
    ]
    return {
        "prompt_embeds": torch.stack(rows),
        "prompt_embeds_mask": torch.ones(len(prompts), 7, dtype=torch.int64),
    }


def run(pipe, prompts, images=1, call=None, **changes):
    """Return the latents of the images that a call makes."""
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return (call or pipe)(**arguments(pipe, prompts, images, **changes)).images
