"""The OpenMP that torch runs on: kernels run on the same threads as torch's own.

A second set of threads would spin on the cores that torch needs, or sleep, whenever the other set
works. GCC's OpenMP and LLVM's (also Intel's) have the entry points that are used here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class OpenMP:
    """Starts threads."""

    parallel: Callable[[int, bytes, int, int], None]  # function, its argument, threads, flags: 0
    functions: tuple[int, int, int]  # addresses: a thread's number, how many they are, a barrier


@cache
def torch_openmp() -> OpenMP | None:
    """Return the OpenMP in this process, or None where it has no such entry points."""
    names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
    for library in (None, torch._C.__file__):  # global symbols come first, as they do for torch
        try:
            loaded = ctypes.CDLL(library)
            parallel: Any = loaded.GOMP_parallel
            functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names]
        except (AttributeError, OSError, TypeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        thread_num, num_threads, barrier = (function.value or 0 for function in functions)
        return OpenMP(parallel, (thread_num, num_threads, barrier))
    return None
