"""Compiles kernels without a device: ``python -m ahead_of_time FILE cuda:90``.

FILE has `variants(dtype, programmatic)`, which yields (kernel, constants by name, options).
"""

import importlib.util
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
    "tile_slots_ptr": "*i32",
    "tile_tokens_ptr": "*i32",
    "segment_slots_ptr": "*i32",
    "segment_tokens_ptr": "*i32",
    "group_starts_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "h_ptr": "*fp32",
}


def compiled_by_a_process(file, target, cache):
    """Return what a process of its own printed: one that runs the interpreter has no compiler."""
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    paths = [str(here.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ahead_of_time", str(file), target],
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


def compile_kernel(kernel, dtype, constants, options, target):
    import triton
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name.isupper() or (name.endswith("_boxes") and constants["STAGES"] == 1):
            signature[name] = "constexpr"
        elif name.endswith("_boxes"):
            signature[name] = f"tensordesc<{dtype}[{constants['BLOCK_C']}, {constants['BLOCK_R']}]>"
        else:
            default = f"*{dtype}" if name.endswith("_ptr") else "i32"
            signature[name] = POINTERS.get(name, default)
            attributes[(place,)] = [["tt.divisibility", 16]]
    named = {name: constants.get(name) for name in signature if signature[name] == "constexpr"}
    source = ASTSource(kernel, signature, named, attributes)
    compiled = triton.compile(source, target=target, options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[target.backend, target.arch]


def main():
    from lora_backends.gpu.launching import STAGES_ON_ROCM

    spec = importlib.util.spec_from_file_location("compiled", sys.argv[1])
    module, target = importlib.util.module_from_spec(spec), target_of(sys.argv[2])
    spec.loader.exec_module(module)
    programmatic = target.backend == "cuda" and target.arch >= 90
    done = set()
    for dtype in ("bf16", "fp16", "fp32"):
        for kernel, constants, options in module.variants(dtype, programmatic):
            if target.backend == "hip":
                stages = options.get("num_stages", STAGES_ON_ROCM)
                options = options | {"num_stages": min(stages, STAGES_ON_ROCM)}
            key = (dtype, kernel.__name__, str(constants), str(options))
            if key not in done:
                done.add(key)
                compile_kernel(kernel, dtype, constants, options, target)
                print("compiled", *key[:2])


if __name__ == "__main__":
    main()
