"""LoRA files for tiny pipelines, and images as diffusers makes them with these files."""

import torch
from torch import nn

from helpers.diffusion.tiny_pipelines import make, run
from lora_backends.diffusers import MultiLoRAPipeline

RANK = 3

PARTS = {
    "Stable Diffusion": ["unet", "text_encoder"],
    "SDXL": ["unet", "text_encoder", "text_encoder_2"],
    "SD3": ["transformer", "text_encoder", "text_encoder_2"],
    "Flux": ["transformer", "text_encoder"],
    "Qwen-Image": ["transformer"],
}
"""Components that take LoRA, of each pipeline."""

BOUND = 600 * 2**-24
"""Most that float32 images may differ, relative to the largest value. The longest sums have 576
terms (patches of a 3x3 convolution of 64 channels), each rounded by at most 2^-24. Images without
an adapter differ by 1e-6, for they are in a batch of another size."""

PROMPTS = ["a cat", "two dogs", "three birds"]
ENTRIES = ["anime", None, {"anime": 0.7, "ink": -0.3}]


def modules_of(pipe, component):
    """Return the paths and modules that a file may adapt in a component."""
    linear = (
        (path, module)
        for path, module in getattr(pipe, component).named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d))
    )
    encodes = component.startswith("text_encoder")
    return {path: m for path, m in linear if not encodes or ".layers." in path}


def tensors_of(pipe, components, seed, rank=RANK, strength=0.3):
    """Return random LoRA of all modules of components, by diffusers' own names."""
    torch.manual_seed(seed)
    tensors = {}
    for component in components:
        for path, module in modules_of(pipe, component).items():
            out, *patch = module.weight.shape
            scale = strength * patch[0] ** -0.5
            ones = [1] * (len(patch) - 1)
            key = f"{component}.{path}"
            tensors[f"{key}.lora_A.weight"] = scale * torch.randn(rank, *patch)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, *ones)
    return tensors


class Reference:
    """Images of one pipeline by diffusers' own adapters, one image at a time."""

    def __init__(self, name, files, task=""):
        self.pipe = make(name, task)
        for adapter, file in files.items():
            self.pipe.load_lora_weights(file, adapter_name=adapter)

    def image(self, prompt, entry, images=1, **changes):
        """Return the latents of the images of one prompt, with the adapters of its entry."""
        if entry is None:
            self.pipe.disable_lora()
        else:
            blend = entry if isinstance(entry, dict) else {entry: 1.0}
            self.pipe.enable_lora()
            self.pipe.set_adapters(list(blend), list(blend.values()))
        return run(self.pipe, [prompt], images, **changes)


def compared(name, task=""):
    """Return how images of one batch with an adapter each differ from diffusers' own.

    Returns:
        The largest difference of an image, relative to its largest value, and the least effect of
        adapters on an image, in the same way.
    """
    pipe = make(name, task)
    # Two images per prompt where a pass has the rows twice: the order of both must be right.
    images = 2 if name == "SDXL" and not task else 1
    files = {"anime": tensors_of(pipe, PARTS[name], seed=1)}
    files["ink"] = tensors_of(pipe, PARTS[name][:1], seed=2, rank=5)  # the denoiser alone
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    loaded = [model.load_adapter(adapter, file) for adapter, file in files.items()]
    assert loaded == [PARTS[name], PARTS[name][:1]]
    batch = run(pipe, PROMPTS, images, call=model, adapters=ENTRIES)
    base = run(model.detach(), PROMPTS, images)
    reference = Reference(name, files, task)
    differences, effects = [], []
    for row, (prompt, entry) in enumerate(zip(PROMPTS, ENTRIES, strict=True)):
        rows = slice(row * images, (row + 1) * images)
        expected = reference.image(prompt, entry, images)
        differences.append(_difference(batch[rows], expected))
        if entry is None:
            assert torch.equal(batch[rows], base[rows])
        else:
            effects.append(_difference(base[rows], expected))
    # unlike `max` and `min` these keep a NaN
    return torch.tensor(differences).max().item(), torch.tensor(effects).min().item()


def _difference(image, expected):
    return float((image - expected).abs().max() / expected.abs().max())
