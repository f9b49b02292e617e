"""The kernels that the launcher makes for a spread of layers and batches."""

import torch

from lora_backends.csgmv import launch, tuning
from lora_backends.csgmv.config import segment_and_group
from lora_backends.gpu.choice import tile_choice

QKV, DOWN, ODD = ((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)
DECODE, PREFILL = (1, 1, 16), (2048, 8, 16)  # tokens, active slots, segment_size
CASES = {
    "bf16": [
        (DECODE, QKV),
        (DECODE, ODD),
        (PREFILL, DOWN),
        ((64, 64, "auto"), QKV),
        ((2048, 8, 128), DOWN),
        ((8192, 8, 16), DOWN),  # boxes of B
    ],
    "fp16": [(PREFILL, QKV), ((8192, 8, 16), DOWN)],
    "fp32": [(PREFILL, DOWN)],
}


def variants(dtype, programmatic):
    """Yield (kernel, constants by name, options)."""
    rules = tile_choice(tuning, "csgmv", torch.device("cpu"), "rules")
    options = launch.Options("ieee", programmatic, False, rules, boxes=programmatic)
    for (tokens, active, size), (slices, inputs, rank) in CASES[dtype]:
        row = segment_and_group(size, tokens, active)
        layer = (slices, rank, inputs, 4 if dtype == "fp32" else 2)
        batch = (tokens, active, row, options)
        kernels = launch._kernels(*layer, False, *batch, "linear", programmatic)
        yield _parts(kernels.shrink)
        yield _parts(kernels.expand)
    by_token = launch._kernels(*layer, True, *batch, "separate", programmatic)
    yield _parts(by_token.shrink)
    yield _parts(by_token.expand)
    yield _parts(launch._gather(len(slices), rank, *row))


def _parts(kernel):
    variant = kernel.variant
    names = [name for name in variant._kernel.arg_names if name.isupper()]
    return variant._kernel, dict(zip(names, variant._constants, strict=True)), variant._options
