"""From tensors to addresses, and from the size of a batch to a number of threads."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from numba import config

from lora_backends.numba_cpu import kernels, kernels_eight_bit, kernels_experts
from lora_backends.numba_cpu.config import SEGMENTS_PER_THREAD, SERIAL_BYTES
from lora_backends.numba_cpu.layer import BIAS_DTYPES, Located
from lora_backends.numba_cpu.needs import EXPAND
from lora_backends.numba_cpu.openmp import OpenMP, torch_openmp
from lora_backends.numba_cpu.plan import NO_SCALES, Job, NumbaPlan
from lora_backends.numba_cpu.routines import MARKERS, Table, eight_bit_table, table_of

NO_FUNCTIONS = (0, 0, 0)
_CPU = torch.device("cpu")
_PACK_START = struct.Struct("9q").pack  # the fields of a `kernels.Call` before those of a `Work`
_PACK_TENSORS = struct.Struct("9q").pack  # and behind them
_PACK_REDUCTION = struct.Struct(f"{len(kernels_experts.Reduction._fields)}q").pack


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: both ways to call it with the bytes of its fields."""

    run: Callable[[bytes], None]
    address: int  # for OpenMP
    compiled: Any  # keeps the machine code alive
    table: Table | None = None  # keeps its routines alive: another thread may replace a cached one
    routines: int = 0  # address of its entries


def _kernel(compiled: Any, table: Table | None = None) -> Kernel:
    routines = 0 if table is None else table.address
    if config.DISABLE_JIT:
        return Kernel(lambda call: compiled(_address_of(call)), 0, compiled, table, routines)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)  # lets other threads run
    return Kernel(run, compiled.address, compiled, table, routines)


@cache
def kernel_for(dtype: torch.dtype, dtype_y: torch.dtype, needs: int) -> Kernel:
    """Compile the kernel and the routines that these calls need, or load them from the disk."""
    return _kernel(_dense_kernel(), table_of(dtype, dtype_y, needs))


@cache
def _dense_kernel() -> Any:
    return kernels.entry()


@cache
def eight_bit_kernel(dtype_x: torch.dtype, dtype_y: torch.dtype, needs: int) -> Kernel:
    """Do what `kernel_for` does for 8-bit stacks of any dtype."""
    return _kernel(_eight_bit_kernel(), eight_bit_table(dtype_x, dtype_y, needs))


@cache
def _eight_bit_kernel() -> Any:
    return kernels_eight_bit.entry()


@cache
def reduction_kernel(dtype_y: torch.dtype) -> Kernel:
    """Compile the kernel that sums over pairs, or load it."""
    return _kernel(kernels_experts.reduction_entry(MARKERS[dtype_y]))


@cache
def grouping_kernel() -> Kernel:
    """Compile the kernel that groups pairs, or load it."""
    return _kernel(kernels_experts.grouping_entry())


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def run(
    first: int,
    located: Located,
    job: NumbaPlan | Job,
    *,
    x: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
) -> None:
    """Write h from x (`SHRINK`) or token ids (`GATHER`), if asked, and add its expansion to y.

    x and y have two axes, or more where they are contiguous; rows lie along the last. Ids are
    int64. An h that is not given lives for this call.
    """
    if not job.num_segments:
        return
    threads = num_threads(located, job)
    needs = first | located.needs | job.needs | (0 if y is None else EXPAND)
    if located.eight_bit:
        dtype_x = torch.float32 if x is None else x.dtype
        kernel = eight_bit_kernel(dtype_x, torch.float32 if y is None else y.dtype, needs)
    else:
        kernel = kernel_for(located.dtype, located.dtype if y is None else y.dtype, needs)
    if h is None:
        h_row = 4 * located.max_rank
        h_slice = h_row * job.h_rows
        h = torch.empty(h_slice * located.num_slices // 4, device=_CPU)
    else:
        h_slice, h_row = 4 * h.stride(0), 4 * h.stride(1)
    x_at, x_row, x_dtype = _rows_of(x)
    y_at, y_row, y_dtype = _rows_of(y)
    whole = job.halves_match and job.num_segments >= SEGMENTS_PER_THREAD * threads
    openmp = torch_openmp() if threads > 1 else None
    functions = NO_FUNCTIONS if openmp is None else openmp.functions
    start = (first, kernel.routines, y is not None, whole, threads, *functions, located.address)
    tensors = (x_at, x_row, h.data_ptr(), h_slice, h_row, y_at, y_row, x_dtype, y_dtype)
    call = _PACK_START(*start) + job.packed_work + _PACK_TENSORS(*tensors)
    _start(kernel, call, threads, openmp)


def _start(kernel: Kernel, call: bytes, threads: int, openmp: OpenMP | None) -> None:
    if openmp is None:
        kernel.run(call)
    else:
        openmp.parallel(kernel.address, call, threads, 0)


def reduce(y: torch.Tensor, delta: torch.Tensor, located: Located, routing: Any) -> None:
    """Add to each row of y the deltas of its token's pairs, in order of the pairs.

    Args:
        y: [num_tokens, out_features].
        delta: [num_tokens * top_k, out_features] float32, contiguous.
        located: where the experts lie; where a pair's rank is 0, y keeps its bits.
        routing: a `NumbaRouting`.
    """
    work = routing.plan.work
    if not work.b_count:
        return
    threads = torch.get_num_threads() if delta.nbytes > SERIAL_BYTES else 1
    openmp = torch_openmp() if threads > 1 and not config.DISABLE_JIT else None
    call = _PACK_REDUCTION(
        1 if openmp is None else threads,
        *(NO_FUNCTIONS if openmp is None else openmp.functions)[:2],
        located.address,
        routing.topk_ids.data_ptr(),
        routing.top_k,
        work.b_count,
        work.b_segments,
        work.y_order,
        delta.data_ptr(),
        delta.shape[1],
        NO_SCALES[0],
        *_rows_of(y)[:2],
    )
    _start(reduction_kernel(y.dtype), call, threads, openmp)


def _rows_of(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """Return where rows lie, the bytes from one to the next, and the dtype as kernels name it."""
    if tensor is None:
        return 0, 0, 0
    # a contiguous tensor may have any stride along an axis of 1
    row = tensor.shape[-1] if tensor.is_contiguous() else tensor.stride(0)
    return tensor.data_ptr(), row * tensor.itemsize, BIAS_DTYPES.get(tensor.dtype, 0)


def num_threads(located: Located, job: NumbaPlan | Job) -> int:
    """Return how many threads a call starts: torch's number, or 1 where it is not worth it."""
    work = located.bytes_read * (job.num_segments + job.num_positions // 8)
    if work < SERIAL_BYTES or config.DISABLE_JIT or torch_openmp() is None:
        return 1
    return torch.get_num_threads()
