"""Reading a bias of any dtype: no kernel is compiled for each of them."""

from __future__ import annotations

from lora_backends.numba_cpu.layer import CODE_BFLOAT16, CODE_FLOAT16, CODE_FLOAT32
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.compiling import function


@function
def load_bias(dtype, address):
    """Return 16 elements of a bias."""
    if dtype == CODE_FLOAT32:
        return v.load(v.FLOAT32, address)
    if dtype == CODE_BFLOAT16:
        return v.load(v.BFLOAT16, address)
    if dtype == CODE_FLOAT16:
        return v.load(v.FLOAT16, address)
    return v.load(v.FLOAT64, address)


@function
def read_bias(dtype, address):
    """Return one element of a bias."""
    if dtype == CODE_FLOAT32:
        return v.read(v.FLOAT32, address)
    if dtype == CODE_BFLOAT16:
        return v.read(v.BFLOAT16, address)
    if dtype == CODE_FLOAT16:
        return v.read(v.FLOAT16, address)
    return v.read(v.FLOAT64, address)
