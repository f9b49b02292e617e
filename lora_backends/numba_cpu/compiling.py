"""How functions are compiled: the decorators of kernels, and what is kept on disk."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba import cfunc, config, njit, types

_OPTIONS = {"nogil": True, "error_model": "numpy"}  # no divisor is 0, so none is checked

function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
"""A function that kernels call. LLVM optimises it once by itself and again in each caller, and
each caller in its own callers: deep chains of functions compile for long. numba compiles it once
more for a literal among its arguments, such as 0; `np.int64(0)` is none."""

inlined = njit(inline="always", **_OPTIONS)
"""A function that numba copies into its caller before it infers types, so that LLVM optimises it
there alone. Every copy takes time, so it suits functions with few callers."""


def digest_of(folder: Path) -> int:
    """Return a number that differs where any source of kernels does."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.name.encode() + path.read_bytes())
    return int.from_bytes(found.digest()[:7], "big")


SOURCES = digest_of(Path(__file__).parent)
"""Each function that is kept on disk has this number in its closure. numba's key consists of the
closure and the function's own file; without the number it would load code with older callees."""


def compiled(run: Any) -> Any:
    """Return a C function of int64s without a result, kept on disk where a folder can be written.

    `run` must have `SOURCES` in its closure.
    """
    if config.DISABLE_JIT:
        return run
    signature = types.void(*[types.int64] * run.__code__.co_argcount)
    with _without_garbage_collection():
        try:
            return cfunc(signature, cache=True, error_model="numpy")(run)
        except RuntimeError:  # neither this folder, nor NUMBA_CACHE_DIR, nor the user's
            return cfunc(signature, error_model="numpy")(run)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector in the block: it took a third of numba's time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
