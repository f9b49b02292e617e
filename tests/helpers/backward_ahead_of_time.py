"""Compiles the backward's kernels without a device: ``python -m backward_ahead_of_time cuda:90``.

The kernels, their constants and options are those that `sgmv.backward` launches.
"""

import sys

from helpers import ahead_of_time
from helpers.ahead_of_time import DOWN, ODD, QKV

TABLES = {
    "dh_ptr": "*fp32",
    "slots_ptr": "*i32",
    "token_slots_ptr": "*i32",
    "parts_ptr": "*fp32",
    "planes_ptr": "*fp32",
    "keys_ptr": "*i64",
    "order_ptr": "*i64",
}
UP = ((14336, 14336), 4096, 16)
CASES = {  # layer, rows, tile, segment size of csgmv, dtypes that differ from the stacks'
    ("triton", "bf16"): [
        (QKV, 8192, 64, None, {}),
        (UP, 32768, 64, None, {"out_ptr": "*fp32"}),
    ],
    ("triton", "fp32"): [(DOWN, 16, 16, None, {})],
    ("triton", "i8"): [(ODD, 300, 16, None, {})],
    ("csgmv", "bf16"): [(QKV, 8192, 64, 16, {})],
}
STORED = {  # of 8 bits, and the block of a scale
    ODD: ("float8_e5m2", (4, 16)),
}


def kernels(engine, dtype, programmatic, gpu, precision):
    """Yield every kernel that the engine launches for the cases, and its pointers' dtypes."""
    import torch

    from lora_backends.selection.registry import backend_class
    from lora_backends.sgmv.backward import launch
    from lora_backends.sgmv.backward.kernels.operands import PieceSizes
    from lora_backends.sgmv.launch import Options
    from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind
    from lora_backends.sgmv.tiles.sizes import LayerShape
    from lora_backends.sgmv.tiles.source import rules_for

    options = Options(
        backend_class(engine), precision, programmatic, False, rules_for(gpu), programmatic, gpu
    )
    of_names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for layer, rows, tile, segment, pointers in CASES[engine, dtype]:
        slices, inputs, rank = layer
        constants, tile = ahead_of_time.row_constants(engine, segment, tile)
        own = of_names.get(dtype, torch.int8)
        grad = torch.float32 if "grad_ptr" in pointers else of_names.get(dtype, torch.bfloat16)
        shape = LayerShape(len(slices), rank, inputs, sum(slices), own.itemsize)
        storage = PLAIN
        if dtype == "i8":
            name, block = STORED[layer]
            storage = Storage(storage_kind(getattr(torch, name), programmatic), block, grad)
        row, aligns = constants(True), 16 if layer == UP else 0
        found = launch._dh_kernel(
            shape, slices, aligns, storage, grad, own, aligns > 0, 8 + rows // tile, tile, row,
            options,
        )  # fmt: skip
        yield found, pointers
        for adds in {False, layer == QKV}:
            yield launch._dx_kernel(shape, aligns, storage, adds, row, options), {}
        if dtype == "i8":
            continue  # only x and y have gradients
        size = segment or tile
        for widths, of_b in (((inputs,), False), (slices, True)):
            right = grad if of_b else own
            found = launch._outer_kernel(shape, widths, of_b, right, own, of_b, options)
            changed = pointers if of_b else {k: v for k, v in pointers.items() if k == "out_ptr"}
            runs = max(1, found.tiles.piece // size) if rows > found.tiles.piece else 0
            yield found.kernel(PieceSizes(size, runs, layer != UP, of_b)), changed
        if (layer, dtype) == (QKV, "bf16"):
            pieces = PieceSizes(size, 2048 // size, False, False)
            yield launch._sum_kernel(6144, pieces), {"values_ptr": "*fp32"}
            yield launch._pieces_kernel(16 * 4096, pieces), {}
            yield launch._planes_kernel(8, rank, True), {"out_ptr": "*fp32"}
            yield launch._ids_kernel(1, rank, False), {}


def main():
    target, done = ahead_of_time.target_of(sys.argv[1]), set()
    programmatic = target.backend == "cuda" and target.arch >= 90
    common, gpu = dict(ahead_of_time.POINTERS), ahead_of_time.gpu_of(target)
    for engine, dtype in CASES:
        for kernel, pointers in kernels(engine, dtype, programmatic, gpu, "ieee"):
            key = (dtype, str(kernel.constants), str(kernel.options), str(pointers))
            if (kernel.kernel, key) in done:
                continue
            done.add((kernel.kernel, key))
            ahead_of_time.POINTERS = common | TABLES | pointers
            compiled = ahead_of_time.compile_kernel(kernel, dtype, target)
            name = kernel.kernel.__name__
            print("compiled backward", dtype, name, compiled.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
