"""The kernels that the launcher makes for a spread of layers and batches."""

from lora_backends.csgmv import launch
from lora_backends.csgmv.config import segment_and_group

BATCHES = [(1, 1, 16), (2048, 8, 16), (64, 64, "auto"), (2048, 8, 128)]  # tokens, active slots
LAYERS = [((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)]


def variants(dtype, programmatic):
    """Yield (kernel, constants by name, options): for bf16 all batches, else the first two."""
    options = launch.Options("ieee", programmatic, False, None)
    item_bytes = 4 if dtype == "fp32" else 2
    for place, (tokens, active, size) in enumerate(BATCHES if dtype == "bf16" else BATCHES[:2]):
        row = segment_and_group(size, tokens, active)
        for slices, inputs, rank in LAYERS if place < 2 and dtype == "bf16" else LAYERS[:2]:
            shape = (slices, rank, inputs, item_bytes, False, tokens, active, row, options)
            kernels = launch._kernels(*shape, "linear")
            yield _parts(kernels.shrink)
            yield _parts(kernels.expand)
        by_token = launch._kernels(*shape[:4], True, *shape[5:], "separate")
        yield _parts(by_token.shrink)
        yield _parts(by_token.expand)
        yield _parts(launch._gather(len(slices), rank, *row))


def _parts(kernel):
    variant = kernel.variant
    names = [name for name in variant._kernel.arg_names if name.isupper()]
    return variant._kernel, dict(zip(names, variant._constants, strict=True)), variant._options
