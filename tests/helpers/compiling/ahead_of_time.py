"""Compiles the engines' kernels without a device, see `compiled_by_a_process`.

The kernels, their constants and options are those that `sgmv.launch` launches for a spread of
layers and batches. Compiling takes longer the larger the code is. So each form of each kernel is
compiled fully in a small shape; shapes that take the most shared memory are compiled only until
Triton has allocated it.

One process compiles for several targets with almost the same code. For the first, kernels are
compiled as above. For each other target, one kernel of each name is compiled fully; those with
sizes that the first did not have, or that take more than half of the target's shared memory, are
compiled until the allocation.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from lora_backends.sgmv.kernels.operands import ExpandSizes, ShrinkSizes, WideSizes

TARGETS = [  # mma.sync; wgmma; tcgen05
    "cuda:80 cuda:89 cuda:120",
    "cuda:90",
    "cuda:100 cuda:103",
    "hip:gfx942",
]
GPUS = {  # multiprocessors, and shared memory of a program
    ("cuda", 80): (108, 163 << 10),
    ("cuda", 89): (58, 99 << 10),
    ("cuda", 90): (132, 227 << 10),
    ("cuda", 100): (148, 227 << 10),
    ("cuda", 103): (148, 227 << 10),
    ("cuda", 120): (170, 99 << 10),
    ("hip", "gfx942"): (304, 64 << 10),
}
SHARED_ALONE = [("cuda", 89)]
"""Targets for which no kernel is compiled fully."""
BARRIERS = 64  # bytes
POINTERS = {
    "ranks_ptr": "*i32",
    "scalings_ptr": "*fp32",
    "slot_table_ptr": "*i32",
    "token_table_ptr": "*i32",
    "num_tiles_ptr": "*i32",
    "starts_ptr": "*i32",
    "tokens_ptr": "*i32",
    "slots_ptr": "*i32",
    "ids_ptr": "*i32",
    "factors_ptr": "*fp32",
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
PLANES = {"planes_ptr": "*fp32", "token_slots_ptr": "*i32", "out_ptr": "*fp32"}
BLOCKS = {  # of TMA
    "b_tma": ("BLOCK_C", "BLOCK_R"),
    "x_tma": ("BLOCK_T", "BLOCK_K"),
    "w_tma": ("BLOCK_C", "BLOCK_K"),
}
REPLACED = "triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()"
"""SGLang does so in its processes: a kernel that called it would not compile there."""
KEEP_FREED_MEMORY = (
    "glibc.malloc.tcache_count=2000:glibc.malloc.trim_threshold=1073741824:"
    "glibc.malloc.top_pad=67108864"
)
"""MLIR and LLVM free and allocate all the time: this spares about a tenth of it."""
QKV, DOWN, ODD = ((4096, 1024, 1024), 4096, 16), ((4096,), 14336, 64), ((1001,), 77, 130)
NARROW, SMALL = ((1024,), 14336, 64), ((1024,), 14336, 16)  # programs of few steps
TINY = ((1001,), 77, 33)
PRIME = ((4096,), 11008, 64)  # 43 steps of 256 inputs: parts are unequal
ALL = ("linear", "separate", "embedding")
STORAGE = {  # the dtype, and the block of a scale
    "linear int8": ("int8", (1, None)),
    "factors e4m3": ("float8_e4m3fn", (1, None)),
    "linear blocks": ("float8_e5m2", (4, 16)),
}
FACTORS = {  # by form: bias, output_scales and token_scales; alignments of slices' tables
    "linear": ((False, False, False), (0, 0)),
    "beside": ((False, False, False), (16, 16)),
    "factors": ((True, True, True), (16, 16)),
    "separate": ((True, False, True), (16, 16)),
    "embedding": ((True, True, False), (0, 0)),
}
CASES = {  # layer, (tokens, active slots), segment size of csgmv, forms
    ("triton", "bf16"): [
        (QKV, (1, 1), None, ("linear", "beside")),  # row by row, without a matrix product
        (QKV[:2] + (8,), (64, 64), None, ("linear",)),  # the same, 8 ranks a row
        (ODD, (1, 1), None, ALL),
        (NARROW, (2048, 8), None, ("linear",)),
        (PRIME, (16, 8), None, ("beside",)),
        (PRIME, (16, 1), None, ("linear",)),  # four groups of warps in the shrink
    ],
    ("triton", "i8"): [
        (QKV, (64, 8), None, ("factors e4m3",)),
        (PRIME, (1, 1), None, ("linear int8",)),
        (QKV, (64, 64), None, ("linear int8",)),  # row by row, without a matrix product
        (DOWN, (64, 8), None, ("linear int8",)),  # blocks of 16 ranks and 128 columns, too
        (TINY, (64, 8), None, ("linear blocks",)),
        (NARROW, (2048, 8), None, ("linear int8",)),  # wgmma in the shrink
        (SMALL, (64, 8), None, ("linear blocks",)),
        (QKV, (8192, 8), None, ("linear int8",)),  # B through TMA
    ],
    # B through TMA, where the target has it
    ("triton", "fp16"): [(DOWN[:2] + (16,), (8192, 8), None, ("factors",))],
    ("triton", "fp32"): [(SMALL, (2048, 8), None, ("linear",))],
    # the engines differ in how an entry kernel finds its row: tests/sgmv/test_engines.py
    ("csgmv", "bf16"): [
        (ODD, (1, 1), 16, ("separate", "embedding")),
        (QKV, (64, 64), 128, ("linear",)),
        (SMALL, (2048, 8), 16, ("linear",)),  # groups of four segments
    ],
}
ROOMY = {  # as CASES, for shared memory alone
    ("triton", "bf16"): [(DOWN, tokens, None, ("linear",)) for tokens in ((2048, 8), (8192, 8))],
    ("triton", "i8"): [(DOWN, (512, 8), None, ("linear blocks",))],
}


BLENDS = {  # layer, (tokens, adapters), adapters per token, whether unlike, scales as in STORAGE
    "bf16": [
        (TINY, (16, 8), 2, True, None),  # one tile: all of B at once
        (QKV, (64, 8), 4, True, None),  # loads of B in flight
        (TINY[:2] + (72,), (16, 8), 2, True, None),  # a product loads h, a rank in steps
        (NARROW, (64, 8), 2, False, None),  # several entries in one product
        (NARROW, (64, 8), 4, False, None),  # a third kernel adds up the planes
        (ODD, (64, 8), 2, False, None),  # the same, in steps
        (SMALL, (1, 2), 2, False, None),  # one row
        (DOWN, (1, 4), 4, False, None),  # the same, of many ranks
        (SMALL, (100, 100), 2, False, None),  # row by row
        (QKV, (2048, 8), 4, False, None),  # B through TMA, where the target has it
    ],
    "fp16": [(SMALL, (64, 8), 2, False, None)],
    "i8": [(SMALL, (64, 8), 2, False, ("int8", (1, None)))],
}
ROOMY_BLENDS = {  # for shared memory alone
    "bf16": [(layer, (2048, 8), 4, False, None) for layer in (NARROW, DOWN)],
    "fp32": [(SMALL, (64, 8), 4, True, None), (NARROW, (2048, 8), 4, False, None)],
}
BASES = [  # rows, columns, and whether there is a bias
    (1, 4096, False),
    (64, 4096, True),  # the most shared memory
    (16, 14336, False),
    (64, 65536, True),
]
WIDE = [  # of widened products: columns of a slice, first columns of slices, whether they have a
    # table, adapters, and whether steps are whole
    ("bf16", (16, (0,), False, 4, True)),
    ("fp16", (8, (0,), False, 1, False)),
    ("bf16", (16, (0, 1280, 2560), True, 4, True)),
    ("bf16", (256, (0,), False, 1, True)),  # the most shared memory
]


def compiled_by_a_process(targets, cache):
    """Return the output of a process of its own: one that runs the interpreter cannot compile."""
    names = ("ahead_of_time", "experts_ahead_of_time", "backward_ahead_of_time")
    imports = f"import triton; from helpers.compiling import {', '.join(names)}"
    code = f"{imports}; {REPLACED}; ahead_of_time.main({', '.join(names)})"
    tests = Path(__file__).parents[2]
    # a default for fused multiply-adds would hide that a kernel does not ask for them
    unset = "TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DISABLE_LINE_INFO": "1",  # lines of the source in debug sections: the code stays
        "GLIBC_TUNABLES": KEEP_FREED_MEMORY,
    }
    paths = [str(tests.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-W", "error:TRITON", "-c", code, *targets.split()],
        cwd=tests,
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


def gpu_of(target):
    from lora_backends.sgmv.tiles.gpu import Gpu

    return Gpu(*GPUS[target.backend, target.arch])


class Variant(NamedTuple):
    """A kernel as it is launched."""

    label: str
    kernel: Any  # a `SpecializedKernel`
    dtype: str  # of the weights
    pointers: dict = {}  # dtypes of arguments, beside `POINTERS`
    whole: bool = True  # whether to compile fully, or only until shared memory is allocated

    @property
    def name(self):
        return f"{self.kernel.kernel.__module__}.{self.kernel.kernel.__name__}"

    @property
    def settings(self):
        """Everything that the code depends on."""
        own = str(self.kernel.constants), str(self.kernel.options), str(self.pointers)
        return self.name, self.dtype, *own

    @property
    def room(self):
        """The settings that decide shared memory, the same on targets with almost the same code."""
        parts = r"(PROGRAMMATIC|SPLIT_K|'PROGRAMS')[=:] ?\w+", r"FIRST_PROGRAMS=\([^)]*\)"
        free = "|".join((*parts, r", 'launch_pdl': \w+"))
        return re.sub(free, "", "".join(map(str, self.settings)))


def source_of(variant, target):
    """Return the source and options that Triton compiles; all strides are multiples of 16."""
    from triton.compiler import ASTSource

    from lora_backends.sgmv.launching.kernel import STAGES_ON_ROCM

    found, dtype = variant.kernel, variant.dtype
    kernel, sizes, options = found.kernel, found.sizes, dict(found.options)
    if target.backend == "hip":
        options["num_stages"] = min(options["num_stages"], STAGES_ON_ROCM)
    pointers = POINTERS | variant.pointers
    signature, attributes = {}, {}
    lacking = set()  # passed as None
    if "TILE" in getattr(found.constants.get("ROW"), "_fields", ()):
        lacking.add("group_starts_ptr")
    for place, name in enumerate(kernel.arg_names):
        how = found.constants.get("HOW", "tma")  # of a blend
        if name.endswith("_tma") and (sizes.STAGES <= 1 or how != "tma"):
            lacking.add(name)
        if name.isupper() or name in lacking:
            signature[name] = "constexpr"
        elif name.endswith("_tma"):
            block = [getattr(sizes, size) for size in BLOCKS[name]]
            signature[name] = f"tensordesc<{dtype}{block}>"
        else:
            own = "bf16" if dtype == "i8" and name not in ("a_ptr", "b_ptr") else dtype
            default = f"*{own}" if name.endswith("_ptr") else "i32"
            signature[name] = pointers.get(name, default)
            if not kernel.params[place].do_not_specialize:
                attributes[(place,)] = [["tt.divisibility", 16]]
    named = {
        name: found.constants.get(name) for name in signature if signature[name] == "constexpr"
    }
    return ASTSource(kernel, signature, named, attributes), options


def code_of_launch(found, given):
    """Return the code of every compiler stage, for sm_90, of a launch with bfloat16 weights."""
    import triton

    source, options = source_of(Variant("", found, "bf16"), target_of("cuda:90"))
    first = len(given.tensors) + len(given.descriptors)
    for place, number in enumerate(given.numbers, first):
        if number % 16:
            source.attrs.pop((place,), None)
        if number == 1:
            name = source.fn.arg_names[place]
            source.signature[name], source.constants[place,] = "constexpr", 1
    return triton.compile(source, target=target_of("cuda:90"), options=options).asm


def compiled_shared(variant, target):
    """Compile a kernel fully; return the bytes of shared memory that it takes."""
    import triton

    source, options = source_of(variant, target)
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "cuda":
        check_ptx(variant.kernel, variant.dtype, compiled.asm["ptx"])
    return compiled.metadata.shared


def allocated_shared(variant, target):
    """Compile a kernel until its shared memory is allocated, and return the bytes.

    This takes a third of the time of `compiled_shared`.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    source, options = source_of(variant, target)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    stages = {}
    backend.add_stages(stages, options, source.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, {"target": target, **vars(options)})
    manager = ir.pass_manager(context)
    try:
        add_allocation(manager, target, options)
    except (AttributeError, TypeError):  # other versions of Triton have other passes
        return compiled_shared(variant, target)
    manager.run(module, "allocate")
    return module.get_int_attr("ttg.shared")


def add_allocation(manager, target, options):
    """Add the first passes of Triton's `make_llir`, up to the one that allocates shared memory."""
    from triton._C.libtriton import amd, nvidia, passes

    if target.backend == "hip":
        amd.passes.ttgpuir.add_update_async_wait_count(manager, options.arch)
        amd.passes.ttgpuir.add_warp_pipeline_conversion(manager, options.arch)
        passes.convert.add_scf_to_cf(manager)
        passes.gluon.add_inliner(manager)
        passes.convert.add_index_to_llvmir(manager)
        amd.passes.ttgpuir.add_allocate_shared_memory(manager, options.arch)
        return
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, version)


def check_shared(variant, target, shared):
    """Check that a kernel's shared memory fits on the target and into what the rules expect."""
    assert shared <= gpu_of(target).shared_bytes, (variant, shared)
    if isinstance(variant.kernel.sizes, ShrinkSizes):
        assert shared <= BARRIERS + most_shared_bytes(variant.kernel, variant.dtype), variant


def check_ptx(found, dtype, ptx):
    """Check how a kernel reads memory, and where it waits."""
    name, sizes = found.kernel.__name__, found.sizes
    if isinstance(sizes, WideSizes):
        assert "st.global.v4.b32" in ptx, "a copy writes less than 16 bytes at a time"
    is_dense = found.kernel.__module__.startswith("lora_backends.sgmv.kernels")
    if isinstance(sizes, ExpandSizes) and is_dense:
        if is_wide(sizes):
            # a thread with one column reads single values of y: of the first token, and of later
            # ones
            has_one = not sizes.STAGES and sizes.BLOCK_C <= 32 * found.options["num_warps"]
            narrow = 2 * sizes.CHUNKS if has_one else 0
            assert ptx.count("ld.global.b16") <= narrow, "B or y is read 2 bytes at a time"
        if dtype == "i8":
            check_widening(ptx, sizes)
    if not getattr(sizes, "PROGRAMMATIC", False):  # a gather never starts early
        return
    if name == "add_planes_kernel":
        check_waits_first(ptx)
    elif isinstance(sizes, ShrinkSizes):
        check_waits_first(ptx)
        before, _, _ = ptx.partition("griddepcontrol")
        early = (is_dense or name == "blend_shrink_kernel") and sizes.WARPS_K > 0
        if "SITE" in found.constants:
            early = found.constants["SITE"].SETTLED
            assert ("ld.global" in before) == early, "only settled routings are read early"
        assert ("prefetch.global.L2" in before) == early, "A is prefetched late"
    elif name == "base_kernel" or getattr(sizes, "LATE_Y", False):
        check_waits(name, ptx)


def check_waits_first(ptx):
    """Check that each program waits before it can end or let the next kernel start.

    A base product beside a shrink relies on it: it reads x without a wait of its own. So does an
    expand: its wait covers the sum of planes in front of it, and so the shrink before that.
    """
    seen = re.findall(r"griddepcontrol\.\w+|st\.global|\bbra\b|\bret;", ptx)
    assert seen[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"], seen[:2]


def check_waits(name, ptx):
    """Check that a kernel that starts early writes after a wait, and also waits where it ends."""
    seen = re.findall(r"griddepcontrol\.\w+|st\.global", ptx)
    wait, launch = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert seen.index(wait) < seen.index("st.global"), f"{name} writes before it waits"
    is_base = name == "base_kernel"  # each of its programs has work
    assert is_base or seen.count(wait) > 1, f"{name} ends without a wait where it has no work"
    is_first = seen.index(launch) < seen.index(wait)
    assert is_first == is_base, "the base product alone lets the next kernel start before it waits"


def check_widening(ptx, sizes):
    """Check that widened values of B are stored many at a time, and before the wait for h."""
    if sizes.STAGES != 1 or sizes.GROUP_R:
        return  # a kernel that widens after the wait
    if sizes.BLOCK_R < sizes.RANK_PAD or sizes.EVEN_R != 16:
        return
    assert ptx.count("st.shared.b16") < 8, "widened values are stored one by one"
    seen = re.findall(r"griddepcontrol\.wait|sub\.rn\.bf16x2|cvt\.rn\.f16x2\.e4m3x2", ptx)
    if sizes.PROGRAMMATIC:
        assert seen[0] != "griddepcontrol.wait", "B is widened after the wait for the shrink"


def most_shared_bytes(found, dtype):
    """Return what the rules take for the shared memory of a shrink."""
    from lora_backends.sgmv.tiles.sizes import ShrinkTiles, shrink_bytes

    sizes = found.sizes
    names = ("BLOCK_N", "BLOCK_K", "SPLIT_K", "WARPS_K")
    shrink = ShrinkTiles(
        *(getattr(sizes, name) for name in names), num_stages=found.options["num_stages"]
    )
    item_bytes = {"i8": 1, "bf16": 2, "fp16": 2, "fp32": 4}[dtype]
    scaled = sizes.GROUP_K > 0
    return shrink_bytes(shrink, rows_of(found.constants), 2 if scaled else item_bytes, scaled)


def rows_of(constants):
    """Return the rows of a program's tile."""
    if "SITE" in constants:
        return constants["SITE"].ROWS
    if "TILE" in constants:
        return constants["TILE"]
    return math.prod(
        size
        for name, size in constants["ROW"]._asdict().items()
        if name not in ("BY_TOKEN", "WIDTH")
    )


def is_wide(sizes):
    """Return whether an expand of slices' tensors has nothing to read but in 16 bytes."""
    odd = sizes.HAS_BIAS or sizes.STORAGE or not sizes.EVEN_C
    return sizes.SLICE_ALIGN == 16 and sizes.EVEN_R and not odd


def kernels(cases, engine, dtype, programmatic, gpu):
    """Yield every kernel that the engine launches for layers and batches."""
    import torch

    from lora_backends.sgmv import launch
    from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind
    from lora_backends.sgmv.tiles import rules
    from lora_backends.sgmv.tiles.sizes import BatchShape, LayerShape
    from lora_backends.sgmv.tiles.source import rules_for

    options = launch.Options("ieee", programmatic, False, rules_for(gpu), programmatic, gpu)
    item_bytes = 4 if dtype == "fp32" else 2
    for (slices, inputs, rank), (tokens, active), segment_size, forms in cases[engine, dtype]:
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
            form = next((name for name in (*ALL, "beside") if form.startswith(name)), "linear")
            yield from launch._kernels(
                batch, layer, slices, launch.Epilogue(*epilogue), aligns, storage, row, options,
                form, programmatic and storage.block[1] is None,
            )[:2]  # fmt: skip
        if "embedding" in forms:
            yield launch.gather_kernel(len(slices), rank, 0, PLAIN, constants(False))


def blend_kernels(dtype, cases, programmatic, gpu):
    """Yield the kernels for several adapters per token of cases as in `BLENDS`."""
    import torch

    from lora_backends import LoRABatch, quantize_weights
    from lora_backends.sgmv import launch
    from lora_backends.sgmv.blends.launch import kernels_of
    from lora_backends.sgmv.blends.plan import fill_blend, new_blend
    from lora_backends.sgmv.tiles.source import rules_for

    options = launch.Options("ieee", programmatic, False, rules_for(gpu), programmatic, gpu)
    x_dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(dtype, torch.bfloat16)
    for layer, (tokens, slots), adapters, unlike, stored in cases:
        weights = blended_layer(layer, slots, x_dtype, unlike)
        if stored:
            weights = quantize_weights(weights, getattr(torch, stored[0]), stored[1])
        if unlike:
            drawn = torch.rand(tokens, slots, generator=torch.Generator().manual_seed(3))
            chosen = drawn.argsort(1)[:, :adapters]
        else:
            first = torch.arange(tokens) * slots // tokens
            chosen = torch.stack([(first + j) % slots for j in range(adapters)], 1)
        batch = LoRABatch(chosen, slots)
        blend = new_blend(batch, None, torch.device("cpu"))
        fill_blend(blend, batch, options.source.tile_tokens)
        stacks = launch.stacks_of(weights)
        found = kernels_of(weights, stacks, blend, tokens, x_dtype, options)
        yield from (found.shrink, found.expand)
        if found.sum is not None:
            yield found.sum


def blended_layer(layer, slots, dtype, is_stack):
    """Return a layer with a bias, or one of tensors per slice without."""
    import torch

    from lora_backends import LoRAWeights

    slices, inputs, rank = layer
    a = [torch.zeros(slots, rank, inputs, dtype=dtype) for _ in slices]
    b = [torch.zeros(slots, width, rank, dtype=dtype) for width in slices]
    return LoRAWeights(
        lora_a=torch.stack(a, 1) if is_stack else tuple(a),
        lora_b=torch.cat(b, 1) if is_stack else tuple(b),
        ranks=torch.full((slots, len(slices)), rank),
        scalings=torch.ones(slots, len(slices)),
        output_slices=slices,
        bias=torch.zeros(slots, sum(slices), dtype=dtype) if is_stack else None,
    )


def base_kernels(gpu):
    """Yield the kernels that multiply by base weights of several widths."""
    from lora_backends.sgmv.base.product import _block_t, _kernel, base_tiles

    for rows, out_features, has_bias in BASES:
        tiles = base_tiles(rows, out_features, gpu)
        programs = -(-out_features // tiles.block_c)
        yield _kernel(tiles, _block_t(rows), programs, has_bias, True)


def wide_kernels(each, starts, has_table, adapters, even_k):
    """Yield the kernels of the operands of a widened product."""
    from lora_backends.sgmv.wide.operands import left_kernel_of, right_kernel_of

    align = 16 * has_table
    yield left_kernel_of(each, len(starts), align, adapters, even_k)
    yield right_kernel_of(each, starts, align)


def row_constants(engine, segment_size, tile):
    """Return the constants by which an engine finds a row, and its tokens per tile."""
    from lora_backends.csgmv import segment_and_group
    from lora_backends.sgmv.layout import RowSizes

    if engine == "triton":
        return lambda by_token: RowSizes(tile, 1, True), tile
    segment, group = segment_and_group(segment_size, tile)
    return lambda by_token: RowSizes(segment, group, by_token), segment * group


def is_programmatic(target):
    return target.backend == "cuda" and target.arch >= 90


def variants(target):
    """Yield the kernels of dense layers, forward."""
    programmatic, gpu = is_programmatic(target), gpu_of(target)
    for cases, whole in ((CASES, True), (ROOMY, False)):
        for engine, dtype in cases:
            for found in kernels(cases, engine, dtype, programmatic, gpu):
                yield Variant(f"{engine} {dtype}", found, dtype, whole=whole)
    for blends, whole in ((BLENDS, True), (ROOMY_BLENDS, False)):
        for dtype, cases in blends.items():
            for found in blend_kernels(dtype, cases, programmatic, gpu):
                pointers = PLANES if "planes_ptr" in found.kernel.arg_names else {}
                yield Variant(f"blends {dtype}", found, dtype, pointers, whole=whole)
    for dtype, sizes in WIDE:
        for found in wide_kernels(*sizes):
            yield Variant(f"wide {dtype}", found, dtype, {"token_slots_ptr": "*i32"})
    for found in base_kernels(gpu) if programmatic else ():
        yield Variant("bf16", found, "bf16")


def main(*modules):
    first, *others = map(target_of, sys.argv[1:])
    done, taken = set(), {}  # shared memory
    for variant in each_variant(modules, first):
        if variant.settings not in done:
            shared = (compiled_shared if variant.whole else allocated_shared)(variant, first)
            check_shared(variant, first, shared)
            done.add(variant.settings)
            taken[variant.room] = max(shared, taken.get(variant.room, 0))
            step = "compiled" if variant.whole else "allocated"
            print(report(variant, first, step), shared, flush=True)
    for target in others:
        check_like(target, list(each_variant(modules, target)), taken)


def check_like(target, found, taken):
    """Check a target's kernels; `taken` has the shared memory on targets with almost the same code.

    It gains the shared memory of settings that were new.
    """
    own = {}  # shared memory on this target
    named = {}  # one variant of each kernel, with a matrix product if there is one
    for variant in found:
        shared = own.get(variant.room)
        if shared is None:
            shared = taken.get(variant.room)
            if shared is None or 2 * shared > gpu_of(target).shared_bytes:
                own[variant.room] = shared = allocated_shared(variant, target)
                print(report(variant, target, "allocated"), shared, flush=True)
        check_shared(variant, target, shared)
        if variant.whole and (variant.name not in named or not is_tiled(named[variant.name])):
            named[variant.name] = variant
    for variant in named.values() if (target.backend, target.arch) not in SHARED_ALONE else ():
        shared = compiled_shared(variant, target)
        check_shared(variant, target, shared)
        assert shared == own.get(variant.room, shared), variant
        print(report(variant, target, "compiled"), shared, flush=True)
    for room, shared in own.items():
        taken.setdefault(room, shared)


def each_variant(modules, target):
    for module in modules:
        yield from module.variants(target)


def report(variant, target, step):
    return f"{target.backend}:{target.arch} {step} {variant.label} {variant.name.split('.')[-1]}"


def is_tiled(variant):
    sizes = variant.kernel.sizes
    return bool(getattr(sizes, "WARPS_K", 1) and getattr(sizes, "STAGES", 1))
