"""How functions are compiled: the decorators of kernels, and what is kept on disk."""

# mypy: disable-error-code="no-untyped-call, misc"

from __future__ import annotations

import gc
import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, config, njit, types
from numba.core import typed_passes, untyped_passes
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.registry import cpu_target

_NEEDLESS = (
    untyped_passes.InlineClosureLikes,
    untyped_passes.ReconstructSSA,
    typed_passes.PreLowerStripPhis,
    typed_passes.NopythonRewrites,
)


class _Compiler(CompilerBase):
    """numba's compiler without passes that kernels do not need: they took 1/7 of the compile time.

    Without ReconstructSSA each variable of a function must have one type.
    """

    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [item for item in pipeline.passes if item[0] not in _NEEDLESS]
        pipeline.finalize()
        return [pipeline]


class _FunctionCompiler(_Compiler):
    def define_pipelines(self) -> list[Any]:
        codegen = self.state.targetctx.codegen()
        self.state.library = _LinkedLibrary(codegen, self.state.func_id.func_qualname)
        return super().define_pipelines()


class _LinkedLibrary(JITCodeLibrary):
    """The LLVM module of a function, neither optimised nor compiled by itself.

    A caller links it into its module, which LLVM optimises and compiles.
    """

    @property
    def codegen(self) -> Any:
        """Return self, whose `set_env` replaces the code generator's."""
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: the variable has no address, and only code with Python objects reads it."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",  # no divisor is 0, so none is checked
    "pipeline_class": _Compiler,
}

_OF_FUNCTIONS = _OPTIONS | {
    "pipeline_class": _FunctionCompiler,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

function = njit(**_OF_FUNCTIONS)
"""A function that kernels call. LLVM optimises it in each of its callers. numba compiles it once
more for a literal among its arguments, such as 0; `np.int64(0)` is none."""

part = njit(forceinline=True, **_OF_FUNCTIONS)
"""A `function` that LLVM copies into each caller, however large: for those that pass records."""

inlined = njit(inline="always", **_OPTIONS)
"""A function that numba copies into its caller before it infers types, so that LLVM optimises it
there alone. Every copy takes time, so it suits functions with few callers."""


def digest_of(folder: Path) -> int:
    """Return a number that differs where any source of kernels does."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big")


SOURCES = digest_of(Path(__file__).parents[1])
"""Part of `kept_name`: numba alone would load code whose callees have changed in other files."""


def kept_name(run: Any) -> str:
    """Return the name of a function's files on disk, which no other code shares."""
    cells = [cell.cell_contents for cell in run.__closure__ or ()]
    cpu = cpu_target.target_context.codegen().magic_tuple()
    # numba keeps the variants of a function in numbered files, and writes their index first. Two
    # processes may give one number to two variants. A process that ends before it writes its file
    # leaves an index that names an older one. In both cases numba would load the wrong code.
    key = (SOURCES, cells, cpu, numba.__version__, llvmlite.__version__)
    return f"{run.__qualname__}.{hashlib.sha256(pickle.dumps(key)).hexdigest()[:16]}"


def compiled(run: Any) -> Any:
    """Return a C function of a record's address, kept on disk where that is possible."""
    if config.DISABLE_JIT:
        return run
    run.__qualname__ = kept_name(run)
    signature = types.void(types.int64)
    kept = cfunc(signature, cache=True, **_OPTIONS)
    with _without_garbage_collection():
        try:
            return kept(run)
        except (OSError, RuntimeError):  # no folder can be written, or the disk is full
            pass
        except Exception:  # pickle raises errors of any type for a damaged file
            with suppress(OSError, RuntimeError):
                FunctionCache(run).flush()
                return kept(run)
        return cfunc(signature, **_OPTIONS)(run)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in the block: it would take a third of the compile time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
