"""The kernels that the launcher makes for a spread of layers and batches."""

from itertools import product

from lora_backends.csgmv import launch
from lora_backends.csgmv.config import segment_and_group

BATCHES = [(1, 1, 16), (64, 64, "auto"), (256, 8, 16), (2048, 8, 16), (2048, 8, 128)]
LAYERS = [((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)]


def variants(dtype, programmatic):
    """Yield (kernel, constants by name, options): all batches for bf16, two for other dtypes."""
    options = launch.Options("ieee", programmatic, False, None)
    item_bytes = 4 if dtype == "fp32" else 2
    batches = BATCHES if dtype == "bf16" else BATCHES[:1] + BATCHES[3:4]
    for (tokens, active, segment_size), (slices, inputs, rank) in product(batches, LAYERS):
        row = segment_and_group(segment_size, tokens, active)
        for form, has_bias in (("linear", False), ("separate", True)):
            shape = (slices, rank, inputs, item_bytes, has_bias)
            kernels = launch._kernels(*shape, tokens, active, row, options, form)
            yield _parts(kernels.shrink)
            yield _parts(kernels.expand)
        yield _parts(launch._gather(len(slices), rank, *row))


def _parts(kernel):
    variant = kernel.variant
    names = [name for name in variant._kernel.arg_names if name.isupper()]
    return variant._kernel, dict(zip(names, variant._constants, strict=True)), variant._options
