"""The kernels that the launcher makes for a spread of layers and batches."""

import itertools
from dataclasses import replace

from lora_backends.gpu.config import row_tokens
from lora_backends.gpu.tiles import padded_rank
from lora_backends.triton import kernels
from lora_backends.triton.tuning import choose_tiles

BATCHES = [(1, 1), (64, 64), (256, 8), (2048, 8), (8192, 8)]  # tokens, active slots
LAYERS = [((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)]


def variants(dtype, programmatic):
    """Yield (kernel, constants, options) for the tiles chosen over batches and layers."""
    batches = BATCHES if dtype == "bf16" else BATCHES[:1]
    for (tokens, active), (slices, inputs, rank) in itertools.product(batches, LAYERS):
        tile = row_tokens(tokens, active)
        item = 4 if dtype == "fp32" else 2
        tiles = choose_tiles(tokens, active, tile, len(slices), rank, inputs, sum(slices), item)
        shrink, expand = tiles.shrink, tiles.expand
        starts = tuple(sum(slices[:s]) for s in range(len(slices) + 1))
        programs = tuple(s * 4 for s in range(len(slices)))
        shared = {
            "NUM_SLICES": len(slices),
            "RANK_PAD": padded_rank(rank),
            "BLOCK_T": tile,
            "SPLIT_K": shrink.split_k,
            "EVEN_R": rank % 8 == 0,
            "PRECISION": "ieee",
            "INTERPRETED": False,
            "PROGRAMMATIC": programmatic,
        }
        step = shrink.block_k * shrink.split_k
        yield (
            kernels.shrink_kernel,
            shared
            | {
                "PROGRAMS": 3 * shrink.split_k,
                "BLOCK_N": shrink.block_n,
                "BLOCK_K": shrink.block_k,
                "WARPS_K": shrink.warps_k,
                "STEPS": -(-inputs // step),
                "EVEN_K": inputs % step == 0,
            },
            {"num_warps": shrink.num_warps, "num_stages": shrink.num_stages},
        )
        small = {"block_c": 64, "chunks": 1, "num_stages": 1}
        narrow = replace(expand, block_r=min(expand.block_r, 32), **small)
        for exact, sizes in ((False, expand), (True, narrow)):
            yield (
                kernels.expand_kernel,
                shared
                | {
                    "STARTS": starts,
                    "FIRST_PROGRAMS": programs,
                    "PROGRAMS": 4 * len(slices) if sizes.num_stages == 1 else 0,
                    "BLOCK_C": sizes.block_c,
                    "BLOCK_R": sizes.block_r,
                    "CHUNKS": sizes.chunks,
                    "STAGES": sizes.num_stages if programmatic else 1,
                    "EVEN_C": all(width % 1024 == 0 for width in slices),
                    "HAS_BIAS": exact,
                    "EXACT_H": exact,
                },
                {"num_warps": sizes.num_warps, "num_stages": 1},
            )
        yield (
            kernels.gather_kernel,
            {"PROGRAMS": 4, "NUM_SLICES": len(slices), "BLOCK_T": tile, "BLOCK_R": 16},
            {"num_warps": 4},
        )
