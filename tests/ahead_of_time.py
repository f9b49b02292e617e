"""Compiles the engines' kernels without a device: ``python -m ahead_of_time cuda:90``.

The kernels, their constants and options are those that `sgmv.launch` launches for a spread of
layers and batches.
"""

import os
import subprocess
import sys
from pathlib import Path

TARGETS = ["cuda:80", "cuda:90", "cuda:100", "hip:gfx942"]
SHARED_BYTES = {("cuda", 80): 163 << 10, ("cuda", 90): 227 << 10, ("cuda", 100): 227 << 10}
SHARED_BYTES["hip", "gfx942"] = 64 << 10  # for a program
POINTERS = {
    "ranks_ptr": "*i32",
    "scalings_ptr": "*fp32",
    "slot_table_ptr": "*i32",
    "token_table_ptr": "*i32",
    "group_starts_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "h_ptr": "*fp32",
    "output_scales_ptr": "*fp32",
    "token_scales_ptr": "*fp32",
    "a_slices_ptr": "*i64",
    "b_slices_ptr": "*i64",
    "a_scales_ptr": "*fp32",
    "b_scales_ptr": "*fp32",
}
QKV, DOWN, ODD = ((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)
ALL = ("linear", "separate", "embedding")
STORAGE = {  # the dtype, and the block of a scale
    "linear int8": ("int8", (1, None)),
    "factors e4m3": ("float8_e4m3fn", (1, None)),
    "linear blocks": ("float8_e5m2", (4, 16)),
}
FACTORS = {  # by form: bias, output_scales and token_scales; alignments of slices' tables
    "linear": ((False, False, False), (0, 0)),
    "factors": ((True, True, True), (16, 16)),
    "separate": ((True, False, True), (16, 16)),
    "embedding": ((True, True, False), (0, 0)),
}
CASES = {  # layer, (tokens, active slots), segment size of csgmv, forms
    ("triton", "bf16"): [
        (QKV, (1, 1), None, ("linear",)),
        (ODD, (1, 1), None, ALL),
        (DOWN, (2048, 8), None, ("linear", "separate")),
        (DOWN, (8192, 8), None, ("linear",)),  # B through TMA, where there is any
    ],
    ("triton", "i8"): [
        (QKV, (64, 8), None, ("linear int8", "factors e4m3")),
        (ODD, (64, 8), None, ("linear blocks",)),
        (DOWN, (2048, 8), None, ("linear int8",)),  # wgmma in the shrink
        (QKV, (8192, 8), None, ("linear int8",)),  # B through TMA
    ],
    ("triton", "fp16"): [(DOWN, (8192, 8), None, ("factors",))],
    ("triton", "fp32"): [(DOWN, (2048, 8), None, ("linear",))],
    # the engines differ in how an entry kernel finds its row: tests/sgmv/test_engines.py
    ("csgmv", "bf16"): [
        (ODD, (1, 1), 16, ALL),
        (QKV, (64, 64), 128, ("linear",)),
        (DOWN, (8192, 8), 16, ("linear",)),  # groups of four segments
    ],
}


def compiled_by_a_process(target, cache):
    """Return the output of a process of its own: one that runs the interpreter cannot compile."""
    code = "import ahead_of_time, experts_ahead_of_time as e; ahead_of_time.main(); e.main()"
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    paths = [str(here.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, target],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def target_of(name):
    from triton.backends.compiler import GPUTarget

    backend, arch = name.split(":")
    if backend == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64)


def compile_kernel(found, dtype, target):
    """Compile a `SpecializedKernel` for weights of a dtype, all strides multiples of 16."""
    import triton
    from triton.compiler import ASTSource

    from lora_backends.sgmv.launching.kernel import STAGES_ON_ROCM

    kernel, constants, options = found.kernel, found.constants, dict(found.options)
    if target.backend == "hip":
        options["num_stages"] = min(options["num_stages"], STAGES_ON_ROCM)
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.isupper() or (name.endswith("_tma") and constants["STAGES"] <= 1):
            signature[name] = "constexpr"
        elif name.endswith("_tma"):
            signature[name] = f"tensordesc<{dtype}[{constants['BLOCK_C']}, {constants['BLOCK_R']}]>"
        else:
            own = "bf16" if dtype == "i8" and name not in ("a_ptr", "b_ptr") else dtype
            default = f"*{own}" if name.endswith("_ptr") else "i32"
            signature[name] = POINTERS.get(name, default)
            if not kernel.params[place].do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    named = {name: constants.get(name) for name in signature if signature[name] == "constexpr"}
    source = ASTSource(kernel, signature, named, attributes)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[target.backend, target.arch]
    return compiled


def kernels(engine, dtype, programmatic):
    """Yield every kernel that the engine launches for the layers and batches above."""
    import torch

    from lora_backends.registry import backend_class
    from lora_backends.sgmv import launch
    from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind
    from lora_backends.sgmv.tiles import rules
    from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape
    from lora_backends.sgmv.tiles.source import RULES

    cls = backend_class(engine)
    options = launch.Options(cls, "ieee", programmatic, False, RULES, programmatic)
    item_bytes = 4 if dtype == "fp32" else 2
    for (slices, inputs, rank), (tokens, active), segment_size, forms in CASES[engine, dtype]:
        layer = LayerShape(len(slices), rank, inputs, sum(slices), item_bytes)
        constants, tile = row_constants(engine, segment_size, rules.tile_tokens(tokens, active))
        batch = BatchShape(tokens, active, tile)
        for form in forms:
            row, (epilogue, aligns) = constants(form == "separate"), FACTORS[form.split()[0]]
            storage = PLAIN
            if form in STORAGE:
                stored, block = STORAGE[form]
                kind = storage_kind(getattr(torch, stored), programmatic)
                storage = Storage(kind, block, torch.bfloat16)
            form = form if form in ALL else "linear"
            yield from launch._kernels(
                batch, layer, slices, launch.Epilogue(*epilogue), aligns, storage, row, options,
                form, programmatic and storage.block[1] is None,
            )[:2]  # fmt: skip
        if "embedding" in forms:
            yield launch.gather_kernel(cls, len(slices), rank, 0, PLAIN, constants(False))


def row_constants(engine, segment_size, tile):
    """Return the constants that a plan gives its entry kernels, and its tokens per tile."""
    if engine == "triton":
        return lambda by_token: (("TILE", tile),), tile
    from lora_backends.csgmv import segment_and_group

    segment, group = segment_and_group(segment_size, tile)
    pairs = (("SEGMENT", segment), ("GROUP", group))
    return lambda by_token: (*pairs, ("BY_TOKEN", by_token)), segment * group


def main():
    target, done = target_of(sys.argv[1]), set()
    programmatic = target.backend == "cuda" and target.arch >= 90
    for engine, dtype in CASES:
        for found in kernels(engine, dtype, programmatic):
            name = found.kernel.__name__
            key = (engine, dtype, name, str(found.constants), str(found.options))
            if key not in done:
                done.add(key)
                compile_kernel(found, dtype, target)
                print("compiled", engine, dtype, name, flush=True)


if __name__ == "__main__":
    main()
