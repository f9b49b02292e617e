"""The backward's kernels that `ahead_of_time` compiles.

The kernels, their constants and options are those that `sgmv.backward` launches.
"""

from helpers.compiling import ahead_of_time
from helpers.compiling.ahead_of_time import (
    DOWN,
    ODD,
    QKV,
    SMALL,
    TINY,
    Variant,
    gpu_of,
    is_programmatic,
)

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
CASES = {  # layer, rows, tile, segment size of csgmv, outer products of A and of B, other dtypes
    ("triton", "bf16"): [
        (QKV, 8192, 64, None, (True,), {}),
        (UP, 32768, 64, None, (False,), {"out_ptr": "*fp32"}),
    ],
    ("triton", "fp32"): [(SMALL, 16, 16, None, (False, True), {})],
    ("triton", "i8"): [(TINY, 300, 16, None, (), {})],  # only x and y have gradients
    ("csgmv", "bf16"): [(QKV, 8192, 64, 16, (), {})],
}
ROOMY = {  # as CASES, for shared memory alone
    ("triton", "bf16"): [(QKV, 8192, 64, None, (False,), {})],
    ("triton", "fp32"): [(DOWN, 16, 16, None, (), {})],
    ("triton", "i8"): [(ODD, 300, 16, None, (), {})],
}
STORED = "float8_e5m2", (4, 16)  # of 8 bits, and the block of a scale


def kernels(cases, engine, dtype, programmatic, gpu):
    """Yield every kernel that the engine launches for cases, and its pointers' dtypes."""
    import torch

    from lora_backends.sgmv.backward import launch
    from lora_backends.sgmv.backward.kernels.operands import PieceSizes
    from lora_backends.sgmv.launch import Options
    from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind
    from lora_backends.sgmv.tiles.sizes import LayerShape
    from lora_backends.sgmv.tiles.source import rules_for

    options = Options("ieee", programmatic, False, rules_for(gpu), programmatic, gpu)
    of_names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    for layer, rows, tile, segment, outers, pointers in cases[engine, dtype]:
        slices, inputs, rank = layer
        constants, tile = ahead_of_time.row_constants(engine, segment, tile)
        own = of_names.get(dtype, torch.int8)
        grad = torch.float32 if "grad_ptr" in pointers else of_names.get(dtype, torch.bfloat16)
        shape = LayerShape(len(slices), rank, inputs, sum(slices), own.itemsize)
        storage = PLAIN
        if dtype == "i8":
            name, block = STORED
            storage = Storage(storage_kind(getattr(torch, name), programmatic), block, grad)
        row, aligns = constants(True), 16 if layer == UP else 0
        found = launch._dh_kernel(
            shape, slices, aligns, storage, grad, own, aligns > 0, 8 + rows // tile, tile, row,
            options,
        )  # fmt: skip
        yield found, pointers
        yield launch._dx_kernel(shape, aligns, storage, layer == QKV, row, options), {}
        size = segment or tile
        for of_b in outers:
            widths = slices if of_b else (inputs,)
            right = grad if of_b else own
            found = launch._outer_kernel(shape, widths, of_b, right, own, of_b, options)
            changed = pointers if of_b else {k: v for k, v in pointers.items() if k == "out_ptr"}
            runs = max(1, found.tiles.piece // size) if rows > found.tiles.piece else 0
            yield found.kernel(PieceSizes(size, runs, layer != UP, of_b)), changed
        if (layer, engine) == (QKV, "triton"):
            pieces = PieceSizes(size, 2048 // size, False, False)
            yield launch._sum_kernel(6144, pieces), {"values_ptr": "*fp32"}
            yield launch._pieces_kernel(16 * 4096, pieces), {}
            yield launch.planes_kernel(8, rank, True), {"out_ptr": "*fp32"}
            yield launch._ids_kernel(1, rank, False), {}


def variants(target):
    """Yield the kernels of dense layers, backward."""
    programmatic, gpu = is_programmatic(target), gpu_of(target)
    for cases, whole in ((CASES, True), (ROOMY, False)):
        for engine, dtype in cases:
            for kernel, pointers in kernels(cases, engine, dtype, programmatic, gpu):
                yield Variant(f"backward {dtype}", kernel, dtype, TABLES | pointers, whole)
