"""The experts' kernels that `ahead_of_time` compiles.

The kernels, their constants and options are those that `sgmv.experts` launches.
"""

from helpers.compiling.ahead_of_time import Variant, gpu_of, is_programmatic

TABLES = {
    "ids_ptr": "*i64",
    "weights_ptr": "*fp32",
    "map_ptr": "*i32",
    "slots_ptr": "*i32",
    "experts_ptr": "*i64",
    "factors_ptr": "*fp32",
    "order_ptr": "*i32",
    "tiles_ptr": "*i32",
    "singles_ptr": "*i32",
    "count_ptr": "*i32",
    "state_ptr": "*i64",
    "keys_ptr": "*i32",
    "nths_ptr": "*i32",
    "counts_ptr": "*i32",
    "turn_ptr": "*i32",
    "deltas_ptr": "*fp32",
    "u_ptr": "*fp32",
    "left_ptr": "*fp32",
    "pairs_ptr": "*fp32",
    "w_scales_ptr": "*fp32",
    "starts_ptr": "*i32",
}
GATE_UP, GPT = (2, 16, 2048, (768, 768), False), (2, 16, 2880, (2880, 2880), True)
DOWN, DOWN_64 = [(1, rank, 768, (2048,), False) for rank in (16, 64)]
ODD = 3, 130, 77, (33, 7, 1), False
CASES = {  # (pairs, keys, tile), (num_a, rank, inputs, slices, interleaved), top_k, fresh
    "bf16": [
        ((8, 8, 16), GATE_UP, 8, False),
        ((128, 82, 16), GATE_UP, 8, False),  # pair by pair, A after the rank; 2 warps
        ((8, 8, 16), (1, 32, 14336, (4096,), False), 8, False),  # 8 warps
        ((512, 413, 16), DOWN, 8, False),  # groups of warps share a step; two blocks a program
        ((128, 120, 16), DOWN_64, 8, False),  # groups of warps; two blocks of a pair
        ((256, 200, 16), DOWN_64, 8, False),  # blocks of 32 rows of A; TMA in tiles of 16
        ((512, 300, 16), (2, 64, 2048, (768, 768), False), 8, False),
        ((32768, 1024, 64), DOWN, 8, False),
        ((1024, 128, 16), GPT, 4, False),
        ((37, 9, 128), ODD, 1, True),
    ],
    "fp32": [((512, 420, 16), (2, 64, 2048, (768, 768), False), 8, False)],
    "i8": [
        ((512, 512, 16), GATE_UP, 8, False, "int8", (1, None)),
        ((512, 252, 16), (1, 16, 2048, (1024,), False), 4, False, "int8", (1, None)),  # groups
        ((32768, 1024, 64), (1, 16, 768, (1024,), False), 8, False, "int8", (None, None)),
        ((512, 512, 16), GATE_UP, 8, False, "float8_e4m3fn", (1, None)),
        ((37, 37, 16), (2, 20, 77, (33, 33), True), 1, True, "float8_e5m2", (4, 16)),
        ((37, 9, 128), ODD, 1, True, "int8", (4, 16)),
    ],
}


def routing_kernels(programmatic):
    from lora_backends.sgmv.experts import routing

    yield routing._alone(8, 128, True, programmatic)
    yield routing._compare(8, 8, 128, False, (16, True), programmatic)
    yield routing._compare(16, 8, 128, True, (16, True), programmatic)  # several, of one warp each
    yield routing._compare(512, 8, 128, True, (16, False), programmatic)
    yield routing._count(8, 128, True, programmatic)
    yield routing._scatter(128, (64, False), 8192, 32768, programmatic)
    yield routing._scatter(128, (16, True), 8192, 2048, programmatic)


def site_kernels(dtype, programmatic, gpu):
    import torch

    from lora_backends.sgmv.experts import launch
    from lora_backends.sgmv.experts.rules import PairShape, SiteShape
    from lora_backends.sgmv.launch import Options
    from lora_backends.sgmv.storage import Storage, storage_kind
    from lora_backends.sgmv.tiles.source import rules_for

    options = Options("ieee", programmatic, False, rules_for(gpu), programmatic, gpu)
    for pairs, layer, top_k, fresh, *stored in CASES[dtype]:
        num_a, rank, inputs, slices, interleaved = layer
        widths = (sum(slices),) if interleaved or num_a == 1 else slices
        item_bytes = 4 if dtype == "fp32" else 2
        shape = SiteShape(num_a, rank, inputs, sum(slices), max(widths), item_bytes, interleaved)
        by_token = interleaved  # one case of each
        site = launch.Site(shape, widths, num_a, interleaved, top_k, num_a == 1, by_token, fresh)
        if stored:
            kind = storage_kind(getattr(torch, stored[0]), programmatic)
            storage = Storage(kind, stored[1], torch.bfloat16)
            site = launch.with_scales(site, storage, slices, interleaved)
        sizes = PairShape(*pairs)
        tma = programmatic and not stored and not fresh
        settled = programmatic and num_a == 1  # as for the second of two sites
        found = launch.kernels_of(sizes, sizes, site, fresh, tma, options, settled)
        h = "*fp32" if found.split_k > 1 else f"*{'bf16' if stored else dtype}"
        yield found.shrink, {"h_ptr": h}
        yield found.expand, {"h_ptr": h} | ({"y_ptr": "*fp32"} if fresh else {})
        if fresh:
            yield launch._sum_kernel(site, programmatic), {}


BACKWARDS = {  # num_a, rank, slices, interleaved, experts' tile; dtypes of grad and of the stacks
    "bf16": [((2, 16, (2880, 2880), True, 16), "bf16")],
    "fp32": [((2, 16, (768, 768), False, 64), "fp32")],
    "i8": [((1, 20, (33, 33), True, 16), "bf16")],
}


def backward_kernels(dtype, programmatic):
    import torch

    from lora_backends.sgmv.experts import backward
    from lora_backends.sgmv.experts import backward_kernels as kernels
    from lora_backends.sgmv.storage import storage_kind

    stored = torch.float8_e5m2 if dtype == "i8" else torch.float32
    kind, sizes = storage_kind(stored, programmatic), {"bf16": 2, "fp32": 4}
    for (num_a, rank, widths, interleaved, tile), grad in BACKWARDS[dtype]:
        site = backward.BackwardSite(num_a, rank, 8, 128, kind, (4, 16), tile)
        starts = tuple(range(num_a)) if interleaved else backward.starts_of(widths)
        columns = backward.SiteColumns(starts, widths, num_a if interleaved else 1, starts)
        if num_a == 1 and not kind:
            columns = backward.SiteColumns((0,), (sum(widths),))
        inputs = backward.SiteColumns((0,), (2048,), 1, (0,))
        own = "bf16" if dtype == "i8" else dtype
        rows = {"rows_ptr": f"*{grad}", "w_ptr": f"*{dtype}", "out_ptr": "*fp32"}
        find = backward.kernel_of

        def made(kernel, columns, dtype, mixed=False, find=find, site=site, **constants):
            return find(kernel, site, columns, sizes[dtype], mixed, "ieee", **constants)

        yield made(kernels.product_kernel, columns, grad, grad != dtype, scaled=True), rows
        yield made(kernels.product_kernel, inputs, own), rows | {"rows_ptr": f"*{own}"}
        to = {"dx_ptr": "*fp32"}
        yield made(kernels.dx_kernel, inputs, own, has_factors=True), to
        yield made(kernels.sum_pairs_kernel, inputs, own), {}
        if dtype == "i8":
            continue
        for of_b in (False, True):
            right = grad if of_b else own
            pointers = {"right_ptr": f"*{right}", "out_ptr": f"*{own}", "order_ptr": "*i64"}
            given = (columns if of_b else inputs), right, right != own
            constants = {"scaled": of_b, "has_factors": of_b, "every": of_b}
            yield made(kernels.outer_kernel, *given, **constants, shared=of_b), pointers


def variants(target):
    """Yield the kernels of experts, forward and backward."""
    programmatic, gpu = is_programmatic(target), gpu_of(target)
    for dtype in CASES:
        found = list(site_kernels(dtype, programmatic, gpu))
        found += backward_kernels(dtype, programmatic)
        if dtype == "bf16":
            found += [(kernel, {}) for kernel in routing_kernels(programmatic)]
        for kernel, pointers in found:
            yield Variant(f"experts {dtype}", kernel, dtype, TABLES | pointers)
