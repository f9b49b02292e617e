"""From tensors to addresses, and from the size of a batch to a number of threads."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import config

from lora_backends.numba_cpu.config import SCRATCH_BYTES, SEGMENTS_PER_THREAD, SERIAL_BYTES
from lora_backends.numba_cpu.kernels import dense, eight_bit, experts
from lora_backends.numba_cpu.layer import DTYPE_CODES, LocatedLayer
from lora_backends.numba_cpu.machine.openmp import torch_openmp
from lora_backends.numba_cpu.needs import EXPAND
from lora_backends.numba_cpu.plan import NO_SCALES, Job, NumbaPlan, Work
from lora_backends.numba_cpu.routines import MARKERS, Table, eight_bit_table, table_of

NO_FUNCTIONS = (0, 0, 0)
_CPU = torch.device("cpu")
_LINE = 64  # bytes of a cache line
_BOUND = struct.Struct("12q")  # the fields of a `KernelCall` before those of a `Work`
_WORK_BYTES = 8 * len(Work._fields)
_PACK_CALL = struct.Struct(f"{_BOUND.size}s{_WORK_BYTES}s6q").pack  # those, a `Work`, and the rest
_PACK_REDUCTION = struct.Struct(f"{len(experts.Reduction._fields)}q").pack


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: both ways to call it with the bytes of its fields."""

    run: Callable[[bytes], None]
    address: int  # for OpenMP
    compiled: Any  # keeps the machine code alive
    table: Table | None = None  # keeps its routines alive: another thread may replace a cached one
    routines: int = 0  # address of its entries


def kernel_of(compiled: Any, table: Table | None = None) -> Kernel:
    """Return both ways to call a compiled function."""
    routines = 0 if table is None else table.address
    if config.DISABLE_JIT:
        return Kernel(lambda call: compiled(_address_of(call)), 0, compiled, table, routines)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)  # lets other threads run
    return Kernel(run, compiled.address, compiled, table, routines)


@cache
def kernel_for(dtype: torch.dtype, dtype_y: torch.dtype, needs: int) -> Kernel:
    """Compile the kernel and the routines that these calls need, or load them from the disk."""
    return kernel_of(_dense_kernel(), table_of(dtype, dtype_y, needs))


@cache
def _dense_kernel() -> Any:
    return dense.entry()


@cache
def eight_bit_kernel(dtype_x: torch.dtype, dtype_y: torch.dtype, needs: int) -> Kernel:
    """Do what `kernel_for` does for 8-bit stacks of any dtype."""
    return kernel_of(_eight_bit_kernel(), eight_bit_table(dtype_x, dtype_y, needs))


@cache
def _eight_bit_kernel() -> Any:
    return eight_bit.entry()


@cache
def reduction_kernel(dtype_y: torch.dtype) -> Kernel:
    """Compile the kernel that sums over pairs, or load it."""
    return kernel_of(experts.reduction_entry(MARKERS[dtype_y]))


@cache
def grouping_kernel() -> Kernel:
    """Compile the kernel that groups pairs, or load it."""
    return kernel_of(experts.grouping_entry())


class _Scratch(threading.local):
    """Memory for h: a buffer per thread, which its calls use one after the other.

    NumPy allocates it, because a mode of torch may return a tensor without memory.
    """

    def __init__(self) -> None:
        self.memory = np.empty(SCRATCH_BYTES + _LINE, np.uint8)
        address = self.memory.ctypes.data
        self.address = address + -address % _LINE


_SCRATCH = _Scratch()


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


@dataclass(eq=False, slots=True)
class Bound:
    """A kernel with all of its arguments but the batch's and the addresses of x, h and y.

    A call reads no other object of its layer: each would come from memory, since the weights of
    the layers before it have filled the caches.
    """

    kernel: Kernel
    fields: bytes  # the fields of a `KernelCall` before those of a `Work`
    h_row: int  # bytes of a row of an h that lives for one call
    num_slices: int
    bytes_read: int
    located: LocatedLayer  # keeps alive what the fields point into


def run(
    first: int,  # `SHRINK` or `GATHER`
    located: LocatedLayer,
    job: NumbaPlan | Job,
    *,
    x: torch.Tensor | None = None,
    h: torch.Tensor | None = None,  # None: its memory lives for this call
    y: torch.Tensor | None = None,
) -> None:
    """Write h from x or token ids, if asked, and add its expansion to y.

    x and y have two axes, or more where they are contiguous; rows lie along the last. Ids are
    int64.
    """
    if not job.num_segments:
        return
    bound = bind(first, located, job.needs, x, h, y)
    x_at, y_at = (0 if tensor is None else tensor.data_ptr() for tensor in (x, y))
    if h is None:
        start(bound, job, x_at, y_at)
    else:
        _start(bound, job, x_at, h.data_ptr(), 4 * h.stride(0), y_at)


def bind(
    first: int,
    located: LocatedLayer,
    needs: int,
    x: torch.Tensor | None,
    h: torch.Tensor | None,
    y: torch.Tensor | None,
) -> Bound:
    """Return the kernel for such calls of `run`; `needs` are the batch's."""
    needs |= first | located.needs | (0 if y is None else EXPAND)
    if located.eight_bit:
        dtype_x = torch.float32 if x is None else x.dtype
        kernel = eight_bit_kernel(dtype_x, torch.float32 if y is None else y.dtype, needs)
    else:
        kernel = kernel_for(located.dtype, located.dtype if y is None else y.dtype, needs)
    openmp = torch_openmp()
    functions = NO_FUNCTIONS if openmp is None else openmp.functions
    own_row = 4 * located.max_rank
    rows = row_of(x), own_row if h is None else 4 * h.stride(1), row_of(y)
    start = (first, kernel.routines, y is not None, *functions, located.address)
    fields = _BOUND.pack(*start, *rows, _dtype_of(x), _dtype_of(y))
    return Bound(kernel, fields, own_row, located.num_slices, located.bytes_read, located)


def start(bound: Bound, job: NumbaPlan | Job, x: int, y: int) -> None:
    """Run a kernel whose h lives for this call; x and y are addresses."""
    h_slice = bound.h_row * job.h_rows
    size = h_slice * bound.num_slices
    if size <= SCRATCH_BYTES:
        _start(bound, job, x, _SCRATCH.address, h_slice, y)
    else:
        h = torch.empty(size // 4, device=_CPU)
        _start(bound, job, x, h.data_ptr(), h_slice, y)


def _start(bound: Bound, job: NumbaPlan | Job, x: int, h: int, h_slice: int, y: int) -> None:
    threads, fields, work = num_threads(bound.bytes_read, job), bound.fields, job.packed_work
    if threads == 1:
        bound.kernel.run(_PACK_CALL(fields, work, 0, 1, x, h, h_slice, y))
        return
    whole = job.halves_match and job.num_segments >= SEGMENTS_PER_THREAD * threads
    start_threads(bound.kernel, _PACK_CALL(fields, work, whole, threads, x, h, h_slice, y), threads)


def expand_fields(kernel: Kernel, located: LocatedLayer) -> bytes:
    """Return the fields of a blend's expand `KernelCall` that precede those of a `Work`."""
    openmp = torch_openmp()
    functions = NO_FUNCTIONS if openmp is None else openmp.functions
    rows = 0, 4 * located.max_rank, 0
    return _BOUND.pack(0, kernel.routines, 1, *functions, located.address, *rows, 0, 0)


def shrink_and_add(
    bound: Bound, kernel: Kernel, blend: Any, x: int, expand: tuple[bytes, bytes, bytes]
) -> None:
    """Run the shrink of a blend, then its expand.

    x is an address; `expand` has `expand_fields`, a `Work`, and `Blocks`.
    """
    h_slice = bound.h_row * blend.h_rows
    size, h = h_slice * bound.num_slices, _SCRATCH.address
    if size > SCRATCH_BYTES:
        memory = torch.empty(size // 4, device=_CPU)
        h = memory.data_ptr()
    _start(bound, blend, x, h, h_slice, 0)
    threads, (fields, work, blocks) = num_threads(bound.bytes_read, blend), expand
    start_threads(kernel, _PACK_CALL(fields, work, 0, threads, 0, h, h_slice, 0) + blocks, threads)


def start_threads(kernel: Kernel, call: bytes, threads: int) -> None:
    """Run a kernel on as many threads of torch."""
    openmp = torch_openmp() if threads > 1 else None
    if openmp is None:
        kernel.run(call)
    else:
        openmp.parallel(kernel.address, call, threads, 0)


def reduce(y: torch.Tensor, delta: torch.Tensor, located: LocatedLayer, routing: Any) -> None:
    """Add to each row of y the deltas of its token's pairs, in order of the pairs.

    y is [num_tokens, out_features], delta [num_tokens * top_k, out_features] float32, contiguous.
    Where a pair's rank is 0, y keeps its bits.
    """
    work = routing.plan.work
    if not work.b_count:
        return
    openmp = None if config.DISABLE_JIT or delta.nbytes <= SERIAL_BYTES else torch_openmp()
    threads = 1 if openmp is None else torch.get_num_threads()
    call = _PACK_REDUCTION(
        threads,
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
        y.data_ptr(),
        row_of(y),
    )
    start_threads(reduction_kernel(y.dtype), call, threads)


def row_of(tensor: torch.Tensor | None) -> int:
    """Return the bytes from one row to the next."""
    if tensor is None:
        return 0
    # a contiguous tensor may have any stride along an axis of 1
    row: int = tensor.shape[-1] if tensor.is_contiguous() else tensor.stride(0)
    return row * tensor.itemsize


def _dtype_of(tensor: torch.Tensor | None) -> int:
    """Return the dtype as kernels name it."""
    return 0 if tensor is None else DTYPE_CODES.get(tensor.dtype, 0)


def num_threads(bytes_read: int, job: NumbaPlan | Job) -> int:
    """Return how many threads a call starts: torch's number, or 1 where it is not worth it."""
    work = bytes_read * (job.num_segments + job.num_positions // 8)
    if work < SERIAL_BYTES or config.DISABLE_JIT or torch_openmp() is None:
        return 1
    return torch.get_num_threads()
