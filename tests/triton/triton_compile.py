"""Compiles every kernel for one target without a device: ``python -m triton_compile cuda:90``."""

import itertools
import sys
from dataclasses import replace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_backends.gpu.tiles import padded_rank
from lora_backends.triton import kernels
from lora_backends.triton.config import block_tokens, choose_tiles

POINTERS = {
    "ranks_ptr": "*i32",
    "scalings_ptr": "*fp32",
    "tile_slots_ptr": "*i32",
    "tile_tokens_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "h_ptr": "*fp32",
}
BATCHES = [(1, 1), (64, 64), (256, 8), (2048, 8)]  # tokens, active slots
LAYERS = [((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)]


def target_of(name):
    backend, arch = name.split(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64)


def variants(dtype, programmatic):
    """Yield (kernel, constants, options) for the tiles chosen over batches and layers."""
    batches = BATCHES if dtype == "bf16" else BATCHES[:1]
    for (tokens, active), (slices, inputs, rank) in itertools.product(batches, LAYERS):
        tile = block_tokens(tokens, active)
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
                "BLOCK_N": shrink.block_n,
                "BLOCK_K": shrink.block_k,
                "WARPS_K": shrink.warps_k,
                "STEPS": -(-inputs // step),
                "EVEN_K": inputs % step == 0,
            },
            {"num_warps": shrink.num_warps, "num_stages": shrink.num_stages},
        )
        narrow = replace(expand, block_r=min(expand.block_r, 32), block_c=64, chunks=1)
        for exact, sizes in ((False, expand), (True, narrow)):
            yield (
                kernels.expand_kernel,
                shared
                | {
                    "STARTS": starts,
                    "FIRST_PROGRAMS": programs,
                    "BLOCK_C": sizes.block_c,
                    "BLOCK_R": sizes.block_r,
                    "CHUNKS": sizes.chunks,
                    "EVEN_C": all(width % 1024 == 0 for width in slices),
                    "HAS_BIAS": exact,
                    "EXACT_H": exact,
                },
                {"num_warps": sizes.num_warps, "num_stages": 1},
            )
        yield (
            kernels.gather_kernel,
            {"NUM_SLICES": len(slices), "BLOCK_T": tile, "BLOCK_R": 16},
            {"num_warps": 4},
        )


def compile_kernel(kernel, dtype, constants, options, target):
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
        else:
            default = f"*{dtype}" if name.endswith("_ptr") else "i32"
            signature[name] = POINTERS.get(name, default)
            attributes[(place,)] = [["tt.divisibility", 16]]
    named = {name: constants[name] for name in kernel.arg_names if name.isupper()}
    source = ASTSource(kernel, signature, named, attributes)
    triton.compile(source, target=target, options=options)


def main():
    target = target_of(sys.argv[1])
    programmatic = target.backend == "cuda" and target.arch >= 90
    done = set()
    for dtype in ("bf16", "fp32"):
        for kernel, constants, options in variants(dtype, programmatic):
            if target.backend == "hip":
                options = options | {"num_stages": min(2, options.get("num_stages", 2))}
            key = (dtype, kernel.__name__, str(constants), str(options))
            if key not in done:
                done.add(key)
                compile_kernel(kernel, dtype, constants, options, target)
                print("compiled", *key[:2])


if __name__ == "__main__":
    main()
