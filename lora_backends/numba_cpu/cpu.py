"""The features that the compiled kernels need of a CPU."""

from __future__ import annotations

import platform

import llvmlite.binding as llvm
from numba.core import config


def missing_features() -> list[str]:
    """Return why the kernels cannot be compiled for this CPU, a sentence each; [] if they can.

    Without F16C LLVM calls a function of the C runtime for float16, does not find it, and ends the
    process. Virtual machines may hide F16C from their guests.
    """
    if config.DISABLE_JIT or platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    features = config.CPU_FEATURES  # of NUMBA_CPU_FEATURES; none at all for the CPU "generic"
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    if "+f16c" in features.split(","):
        return []
    return ["numba_cpu converts float16 with F16C, which this CPU or NUMBA_CPU_FEATURES lacks."]
