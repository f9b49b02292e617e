"""From tensors to addresses, and from the size of a batch to a number of threads."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numba
import numpy as np
import torch

from lora_backends.numba_cpu import kernels
from lora_backends.numba_cpu.config import SEGMENTS_PER_THREAD, SERIAL_BYTES
from lora_backends.numba_cpu.layer import Layers, Located
from lora_backends.numba_cpu.plan import NumbaPlan
from lora_backends.numba_cpu.vectors import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from lora_backends.weights import LoRAWeights

MARKERS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
BIAS_MARKERS = {**MARKERS, torch.float64: FLOAT64}

_ONE_AT_A_TIME = threading.Lock()


def shrink(x: torch.Tensor, weights: LoRAWeights, layers: Layers, plan: NumbaPlan) -> torch.Tensor:
    """Return h, [num_slices, num_tokens, max_rank] float32."""
    h = torch.zeros(weights.num_slices, plan.num_tokens, weights.max_rank)
    _run(kernels.SHRINK, False, x, h, None, weights, layers, plan)
    return h


def expand(
    h: torch.Tensor, weights: LoRAWeights, layers: Layers, plan: NumbaPlan, y: torch.Tensor
) -> None:
    """Add the expansion of h, scaled, and the bias to y."""
    _run(kernels.NOTHING, True, None, h, y, weights, layers, plan)


def shrink_and_expand(
    x: torch.Tensor, weights: LoRAWeights, layers: Layers, plan: NumbaPlan, y: torch.Tensor
) -> None:
    """Add the LoRA of x to y; h lives for this call."""
    h = torch.empty(weights.num_slices, plan.num_tokens, weights.max_rank)
    _run(kernels.SHRINK, True, x, h, y, weights, layers, plan)


def gather_and_expand(
    token_ids: torch.Tensor, weights: LoRAWeights, layers: Layers, plan: NumbaPlan, y: torch.Tensor
) -> None:
    """Add the LoRA of an embedding to y."""
    h = torch.empty(weights.num_slices, plan.num_tokens, weights.max_rank)
    ids = token_ids.to(torch.int64).reshape(-1, 1)
    _run(kernels.GATHER, True, ids, h, y, weights, layers, plan)


def _run(
    first: int,
    expand: bool,
    x: torch.Tensor | None,
    h: torch.Tensor,
    y: torch.Tensor | None,
    weights: LoRAWeights,
    layers: Layers,
    plan: NumbaPlan,
) -> None:
    if not len(plan.segments):
        return
    located = layers.locate(weights)
    arguments = _arguments(first, expand, x, h, y, weights, located, plan)
    threads = num_threads(located, plan)
    whole = len(plan.segments) >= SEGMENTS_PER_THREAD * threads
    if threads == 1:
        kernels.run(1, whole, *arguments)
    else:
        _run_threads(threads, whole, arguments)


def _arguments(
    first: int,
    expand: bool,
    x: torch.Tensor | None,
    h: torch.Tensor,
    y: torch.Tensor | None,
    weights: LoRAWeights,
    located: Located,
    plan: NumbaPlan,
) -> tuple[Any, ...]:
    """Return the arguments of `kernels.run`."""
    kind = MARKERS[weights.dtype]
    kind_y = kind if y is None else MARKERS[y.dtype]
    kind_bias = FLOAT32 if weights.bias is None else BIAS_MARKERS[weights.bias.dtype]
    return (
        first,
        expand,
        (kind, kind_y, kind_bias),
        located.layer,
        located.offsets,
        plan.segments,
        plan.order,
        _address_and_row(x),
        (h.data_ptr(), 4 * h.stride(0), 4 * h.stride(1)),
        _address_and_row(y),
    )


def _run_threads(threads: int, whole: bool, arguments: tuple[Any, ...]) -> None:
    before = numba.get_num_threads()  # of this Python thread
    try:
        if threads != before:
            numba.set_num_threads(threads)
        with _guard():
            kernels.run(threads, whole, *arguments)
    finally:
        if threads != before:
            numba.set_num_threads(before)


def _address_and_row(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return where a matrix lies and the bytes from row to row."""
    if tensor is None:
        return 0, 0
    return tensor.data_ptr(), tensor.stride(0) * tensor.element_size()


def compile_for(dtype: torch.dtype) -> None:
    """Compile the kernels for x, weights and base_output of one dtype."""
    weights = LoRAWeights(
        lora_a=torch.zeros(1, 1, 1, 1, dtype=dtype),
        lora_b=torch.zeros(1, 1, 1, dtype=dtype),
        ranks=torch.zeros(1, 1, dtype=torch.int32),
        scalings=torch.zeros(1, 1),
        output_slices=(1,),
    )
    plan = NumbaPlan(1, 1, np.zeros(1, np.int64), np.array([[0, 0, 1]]))
    located, y, h = Layers().locate(weights), torch.zeros(1, 1, dtype=dtype), torch.zeros(1, 1, 1)
    arguments = _arguments(kernels.SHRINK, True, y, h, y, weights, located, plan)
    kernels.run(1, True, *arguments)


def num_threads(located: Located, plan: NumbaPlan) -> int:
    """Return how many threads a call starts: torch's number, or 1 where it is not worth it."""
    work = located.bytes_read * (len(plan.segments) + len(plan.order) // 8)
    if work < SERIAL_BYTES:
        return 1
    threads: int = numba.config.NUMBA_NUM_THREADS
    return min(torch.get_num_threads(), threads)


def _guard() -> AbstractContextManager[Any]:
    """Return a lock where numba's threads do not stand two callers at once.

    OpenMP and TBB do; "workqueue", which numba falls back to, ends the process.
    """
    try:
        layer = numba.threading_layer()
    except ValueError:  # chosen by the first parallel call
        return _ONE_AT_A_TIME
    return _ONE_AT_A_TIME if layer == "workqueue" else nullcontext()
