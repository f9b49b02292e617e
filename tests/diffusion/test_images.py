"""Images of one batch with an adapter each, against diffusers' own adapters image by image."""

import pytest
import torch
from helpers.diffusion_loras import Reference, tensors_of
from helpers.tiny_pipelines import PIPELINES, run

from lora_backends.diffusers import MultiLoRAPipeline

pytestmark = pytest.mark.xdist_group("diffusion")  # importing diffusers takes long

PARTS = {
    "Stable Diffusion": ["unet", "text_encoder"],
    "SDXL": ["unet", "text_encoder", "text_encoder_2"],
    "SD3": ["transformer", "text_encoder", "text_encoder_2"],
    "Flux": ["transformer", "text_encoder"],
    "Qwen-Image": ["transformer"],
}

BOUND = 600 * 2**-24
"""Most that float32 images may differ, relative to the largest value. The longest sums have 576
terms (patches of a 3x3 convolution of 64 channels), each rounded by half of 2^-23: in another
order, they differ by less than this. Images without an adapter differ by 1e-6, for they are in a
batch of another size."""

PROMPTS = ["a cat", "two dogs", "three birds"]
ENTRIES = ["anime", None, {"anime": 0.7, "ink": -0.3}]


def difference(image, expected):
    return float((image - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", PIPELINES)
def test_each_image_is_that_of_its_adapter_alone(name):
    pipe = PIPELINES[name]()
    # Two images per prompt where a pass has the rows twice: the order of both must be right.
    images = 2 if name == "SDXL" else 1
    files = {"anime": tensors_of(pipe, PARTS[name], seed=1)}
    files["ink"] = tensors_of(pipe, PARTS[name][:1], seed=2, rank=5)  # the denoiser alone
    model = MultiLoRAPipeline(pipe, backend="torch_ref")
    loaded = [model.load_adapter(adapter, file) for adapter, file in files.items()]
    assert loaded == [PARTS[name], PARTS[name][:1]]
    batch = run(pipe, PROMPTS, images, call=model, adapters=ENTRIES)
    base = run(pipe, PROMPTS, images)
    reference = Reference(name, files)
    for row, (prompt, entry) in enumerate(zip(PROMPTS, ENTRIES, strict=True)):
        rows = slice(row * images, (row + 1) * images)
        expected = reference.image(prompt, entry, images)
        assert difference(batch[rows], expected) < BOUND
        if entry is not None:  # so that a lost or exchanged adapter shows
            assert difference(base[rows], expected) > 1000 * BOUND
    assert torch.equal(base, run(model.detach(), PROMPTS, images))
