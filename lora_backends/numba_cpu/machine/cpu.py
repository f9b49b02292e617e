"""The features of a CPU that the compiled kernels need, or use where they exist."""

from __future__ import annotations

import platform

from llvmlite import binding
from numba.core import config
from numba.core.codegen import get_host_cpu_features

_AVX = ("f16c", "avx", "sse4.2", "sse4.1", "ssse3", "sse3", "sse2", "sse")
_NEEDED = {
    "f16c": _AVX,
    "avx512bf16": ("avx512bf16", "avx512bw", "avx512f", "avx2", "fma", *_AVX),
}
"""The features that a feature needs, itself included."""


def missing_features() -> list[str]:
    """Return why the kernels cannot be compiled for this CPU, a sentence each; [] if they can."""
    # Without F16C LLVM calls a function of the C runtime for float16, does not find it, and ends
    # the process. Virtual machines may hide F16C from their guests.
    if config.DISABLE_JIT or not is_x86() or _has("f16c"):
        return []
    return ["numba_cpu converts float16 with F16C, which this CPU or NUMBA_CPU_FEATURES lacks."]


def has_bfloat16() -> bool:
    """Return whether instructions round float32 to bfloat16, and multiply pairs of bfloat16."""
    # LLVM 15, which numba 0.61 comes with, calls a function of the C runtime instead, does not find
    # it, and ends the process
    return is_x86() and _has("avx512bf16") and binding.llvm_version_info[0] > 15


def has_fast_pairs() -> bool:
    """Return whether products of pairs of bfloat16 take less time than those of float32.

    They do on AMD. On Intel's Sapphire Rapids, LLVM's model gives vdpbf16ps, 32 products, two
    cycles of both ports for vectors; vfmadd231ps, 16 products, takes one cycle of one port.
    """
    return has_bfloat16() and (config.CPU_NAME or binding.get_host_cpu_name()).startswith("znver")


def is_x86() -> bool:
    """Return whether this is an x86 CPU of 64 bits."""
    return platform.machine().lower() in ("x86_64", "amd64")


def _has(feature: str) -> bool:
    """Return whether LLVM may use a feature: a later "-avx" takes back "+f16c", which needs AVX."""
    usable = False
    for item in _features():
        if item == "+" + feature:
            usable = True
        elif item[:1] == "-" and item[1:] in _NEEDED[feature]:
            usable = False
    return usable


def _features() -> list[str]:
    features = config.CPU_FEATURES  # of NUMBA_CPU_FEATURES; none at all for the CPU "generic"
    if features is None:
        features = get_host_cpu_features()  # without those that NUMBA_ENABLE_AVX switches off
    names: list[str] = features.split(",")
    return names
