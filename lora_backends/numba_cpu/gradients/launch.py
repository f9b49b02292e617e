"""The backward of a layer: from tensors to the arguments of its kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import torch
from numba import config

from lora_backends.numba_cpu.gradients import kernels, products
from lora_backends.numba_cpu.launch import (
    NO_FUNCTIONS,
    Kernel,
    kernel_of,
    num_threads,
    row_of,
    start_threads,
)
from lora_backends.numba_cpu.layer import LocatedLayer
from lora_backends.numba_cpu.machine.openmp import torch_openmp
from lora_backends.numba_cpu.plan import NO_SCALES, NumbaPlan
from lora_backends.numba_cpu.routines import address_of
from lora_backends.weights import LoRAWeights

_PACK = struct.Struct(f"{len(kernels.BackwardCall._fields)}q").pack
F32 = torch.float32


@cache
def _b_kernel() -> Kernel:
    return kernel_of(kernels.b_entry())


@cache
def _a_kernel() -> Kernel:
    return kernel_of(kernels.a_entry())


@cache
def _with_weights(dtype_a: torch.dtype, dtype_b: torch.dtype) -> int:
    return address_of(products.with_weights, dtype_a, dtype_b)


@cache
def _over_rows(dtype_a: torch.dtype, dtype_b: torch.dtype) -> int:
    return address_of(products.over_rows, dtype_a, dtype_b)


def run_b(
    located: LocatedLayer,
    plan: NumbaPlan,
    weights: LoRAWeights,
    grad: torch.Tensor,
    h: torch.Tensor | None,
    *,
    needs_h: bool,
    lora_b: torch.Tensor | None,
    slots: Sequence[int] | None,
) -> torch.Tensor | None:
    """Return dh and write dB; arguments as in `LoRABackend.run_lora_b_backward`."""
    dh = None
    if needs_h:
        shape = weights.num_slices, grad.shape[0], weights.max_rank
        dh = torch.zeros(shape, dtype=F32, device=grad.device)
    if not plan.num_segments:
        if lora_b is not None:
            lora_b.zero_()
        return dh
    out = None if lora_b is None else _out(lora_b, plan, weights, slots)
    h_at, routine = (0, 0, 0), 0
    if out is not None:
        assert h is not None
        if h.stride(-1) != 1 and h.shape[-1] > 1:
            h = h.contiguous()
        h_at = h.data_ptr(), h.stride(0) * h.itemsize, h.stride(1) * h.itemsize
        routine = _over_rows(grad.dtype, h.dtype)
    routines = 0 if dh is None else _with_weights(grad.dtype, located.dtype), routine
    rows = grad.data_ptr(), row_of(grad), grad.itemsize, located.dtype.itemsize
    outs = (0,) * 4 if out is None else (*_place(out, 0), out.stride(-2) * 4)
    _launch(_b_kernel(), located, plan, slots, (*routines, *rows, *_dh(dh), *h_at, 0, 0, *outs))
    if lora_b is not None and out is not None and out is not lora_b:
        lora_b.copy_(out)
    return dh


def run_a(
    located: LocatedLayer,
    plan: NumbaPlan,
    weights: LoRAWeights,
    dh: torch.Tensor,
    x: torch.Tensor | None,
    *,
    dx: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    slots: Sequence[int] | None,
) -> None:
    """Add to dx and write dA; arguments as in `LoRABackend.run_lora_a_backward`."""
    if not plan.num_segments:
        if lora_a is not None:
            lora_a.zero_()
        return
    out = None if lora_a is None else _out(lora_a, plan, weights, slots)
    dh = dh.to(F32)
    dh = dh if dh.stride(-1) == 1 else dh.contiguous()
    total = dx
    if dx is not None and (dx.dtype is not F32 or dx.stride(-1) != 1):
        total = dx.to(F32).contiguous()  # `to` alone keeps strides where the dtype is the same
    into = (0, 0) if total is None else (total.data_ptr(), row_of(total))
    rows, routine = (0, 0, 0), 0
    if out is not None:
        assert x is not None
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        rows = x.data_ptr(), row_of(x), x.itemsize
        routine = _over_rows(F32, x.dtype)
    routines = 0 if dx is None else _with_weights(F32, located.dtype), routine
    sizes = (*rows, located.dtype.itemsize)
    outs = (0,) * 4 if out is None else (*_place(out, out.stride(1) * 4), out.stride(2) * 4)
    at = (*routines, *sizes, *_dh(dh), 0, 0, 0, *into, *outs)
    _launch(_a_kernel(), located, plan, slots, at)
    if lora_a is not None and out is not None and out is not lora_a:
        lora_a.copy_(out)
    if dx is not None and total is not None and total is not dx:
        for _, of_slot in plan.rows_by_slot():  # other rows keep their bits
            dx[of_slot] = total[of_slot].to(dx.dtype)


def _dh(dh: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if dh is None else (dh.data_ptr(), dh.stride(0) * 4, dh.stride(1) * 4)


def _place(out: torch.Tensor, of_slice: int) -> tuple[int, int, int]:
    return out.data_ptr(), out.stride(0) * 4, of_slice


def _out(
    out: torch.Tensor, plan: NumbaPlan, weights: LoRAWeights, slots: Sequence[int] | None
) -> torch.Tensor:
    """Return memory for float32 sums, zero wherever the kernel does not write."""
    if out.dtype is not F32 or out.stride(-1) != 1:
        return torch.zeros(out.shape, dtype=F32, device=out.device)
    wanted = range(weights.num_slots) if slots is None else slots
    ranks, full = weights.ranks.tolist(), [weights.max_rank] * weights.num_slices
    if not (plan.slots.issuperset(wanted) and all(ranks[slot] == full for slot in wanted)):
        out.zero_()
    return out


def _launch(
    kernel: Kernel,
    located: LocatedLayer,
    plan: NumbaPlan,
    slots: Sequence[int] | None,
    rest: tuple[int, ...],
) -> None:
    threads, openmp = num_threads(located.bytes_read, plan), torch_openmp()
    functions = NO_FUNCTIONS if openmp is None else openmp.functions
    scales = plan.token_scales
    places = plan.places_of(slots)  # alive until the kernel ends
    call = _PACK(
        *functions[:2],
        threads,
        located.address,
        plan.num_segments,
        plan.segments.ctypes.data,
        plan.order.ctypes.data,
        places.ctypes.data,
        *(NO_SCALES if scales is None else (scales.data_ptr(), 4)),
        NO_SCALES[0],
        *rest,
    )
    start_threads(kernel, call, threads)


def runs(*tensors: torch.Tensor | None) -> bool:
    """Return whether the kernels take these tensors; torch computes with all others."""
    return not config.DISABLE_JIT and all(
        tensor is None or tensor.dtype in (F32, torch.bfloat16, torch.float16) for tensor in tensors
    )
