"""The routines that kernels call: compiled when a call first needs them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import config

from lora_backends.numba_cpu.kernels import (
    dense,
    eight_bit,
    eight_bit_expand,
    eight_bit_shrink,
    long,
    short,
)
from lora_backends.numba_cpu.layer import Ints
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.cpu import has_bfloat16, has_fast_pairs
from lora_backends.numba_cpu.needs import (
    BIAS,
    EXPAND,
    GATHER,
    IN_REGISTERS,
    LONG,
    MULTIPLIED,
    RAGGED,
    SHRINK,
)

MARKERS = {
    torch.float32: v.FLOAT32,
    torch.bfloat16: v.BFLOAT16,
    torch.float16: v.FLOAT16,
    torch.int8: v.INT8,
}

_MAKING = threading.Lock()
"""Without it, two threads that need a routine at once would both compile it, and the cache would
keep one of the two while a table has the address of the other."""


@dataclass(frozen=True)
class Table:
    """Addresses of routines, for a kernel, which keeps them alive."""

    address: int  # of `entries`
    entries: Ints  # the fields of a `Routines`


@cache
def table_of(dtype: torch.dtype, dtype_y: torch.dtype, needs: int) -> Table:
    """Compile what calls with these needs run, or load it from the disk."""
    addresses = {}
    if needs & SHRINK:
        addresses["shrink_short"] = address_of(short.shrink_short, dtype, dtype)
        if needs & LONG:
            addresses["shrink_long"] = address_of(long.shrink_long, dtype)
            addresses["add_block"] = address_of(long.add_block, dtype)
    if needs & GATHER:
        addresses["gather"] = address_of(short.gather, dtype)
    if needs & EXPAND:
        name = "expand_multiplied" if needs & MULTIPLIED else "expand_short"
        addresses[name] = address_of(getattr(short, name), dtype, dtype_y)
        if needs & LONG:
            addresses["expand_long"] = address_of(long.expand_long, dtype)
            addresses["add_stored"] = address_of(long.add_stored, dtype_y)
        if needs & RAGGED:
            addresses["expand_column"] = address_of(short.expand_column, dtype, dtype_y)
    return _table(dense.Routines, addresses)


@cache
def eight_bit_table(dtype_x: torch.dtype, dtype_y: torch.dtype, needs: int) -> Table:
    """Compile what calls with these needs run for 8-bit stacks of any dtype, or load it."""
    addresses, wide = {}, torch.float32
    in_registers = needs & IN_REGISTERS
    if needs & SHRINK and in_registers and dtype_x is torch.bfloat16 and has_bfloat16():
        products = torch.bfloat16 if has_fast_pairs() else wide
        addresses["shrink_dots"] = address_of(eight_bit_shrink.shrink_dots, products)
    elif needs & SHRINK:
        if in_registers:
            addresses["copy_x"] = address_of(eight_bit_shrink.copy_x)
            addresses["shrink_short"] = address_of(short.shrink_short, torch.int8, wide)
        if needs & LONG or not in_registers:
            addresses["shrink_panel"] = address_of(eight_bit_shrink.shrink_panel)
            addresses["add_block"] = address_of(long.add_block, wide)
    if needs & GATHER:
        addresses["gather"] = address_of(eight_bit_shrink.gather)
    if needs & EXPAND:
        if in_registers and not needs & MULTIPLIED:
            addresses["expand_int8"] = address_of(eight_bit_expand.expand_int8, dtype_y)
        if needs & (MULTIPLIED | BIAS) or not in_registers:  # BIAS: a slot's rank may be 0
            addresses["expand_stored"] = address_of(eight_bit_expand.expand_stored)
            addresses["add_many"] = address_of(long.add_stored, wide)
            addresses["add_one"] = address_of(long.add_stored_one, wide)
        if needs & RAGGED:
            addresses["expand_ragged"] = address_of(eight_bit_expand.expand_ragged)
            addresses["expand_column"] = address_of(short.expand_column, wide, wide)
    return _table(eight_bit.EightBitRoutines, addresses)


def _table(kind: Any, addresses: dict[str, int]) -> Table:
    entries = np.array(kind(**dict.fromkeys(kind._fields, 0) | addresses), np.int64)
    return Table(entries.ctypes.data, entries)


def address_of(make: Callable[..., Any], *dtypes: torch.dtype) -> int:
    """Return the address of a routine for some dtypes."""
    with _MAKING:
        routine = _routine(make, *dtypes)
    if config.DISABLE_JIT:
        return ctypes.cast(routine, ctypes.c_void_p).value or 0
    address: int = routine.address
    return address


@cache  # keeps the machine code
def _routine(make: Callable[..., Any], *dtypes: torch.dtype) -> Any:
    made = make(*[MARKERS[dtype] for dtype in dtypes])
    if not config.DISABLE_JIT:
        return made
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(made)
