"""The layers of a cell, and the reference that every result is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.bench.cells import Cell, num_layers
from lora_backends.errors import LoRABackendError
from lora_backends.operations import Input, Operation, find_operation
from lora_backends.weights import LoRAWeights

ROTATED_BYTES = {"cuda": 240e6, "cpu": 192 * 2**20}
"""Bytes of weights that a timing rotates over, so that they do not stay in a cache."""
MOST_LAYERS = {"cuda": 32, "cpu": 64}
TOLERANCES = {
    torch.float16: 2.5e-3,
    torch.bfloat16: 1e-2,  # h and y are each rounded to 8 bits
    torch.float32: 5e-3,  # tf32 is an option of some backends
    torch.float64: 1e-9,
}
"""Largest error of a row, over the root mean square norm of the expected rows."""


class WrongResultError(LoRABackendError):
    """A contender computes something else than the reference."""


@dataclass(frozen=True, eq=False)
class Workload:
    """One cell on a device: the arguments of a contender's calls."""

    operation: Operation
    layers: list[LoRAWeights]  # equal shapes, different values
    batch: LoRABatch
    x: torch.Tensor  # the operation's input, shared by the layers: rows, token ids, or h
    y: torch.Tensor  # [tokens, out_features], added to by every call; an h is returned instead


def make_layers(
    cell: Cell, device: torch.device | str, dtype: torch.dtype, max_rank: int = 0
) -> list[LoRAWeights]:
    """Return the layers that a timing rotates over, 4 or more."""
    device, max_rank = torch.device(device), max_rank or cell.rank
    count = num_layers(cell, dtype.itemsize, ROTATED_BYTES[device.type], MOST_LAYERS[device.type])
    slots, slices = cell.num_slots, len(cell.output_slices)
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    return [
        LoRAWeights(
            # A and B are scaled so that h and the delta are of order 1
            lora_a=torch.randn(slots, slices, max_rank, cell.in_features, **like).mul_(
                1 / math.sqrt(cell.in_features)
            ),
            lora_b=torch.randn(slots, cell.out_features, max_rank, **like).mul_(
                1 / math.sqrt(cell.rank)
            ),
            ranks=torch.full((slots, slices), cell.rank, dtype=torch.int32, device="cpu"),
            # 0.5 and not 1, so that a dropped scaling shows
            scalings=torch.full((slots, slices), 0.5, device="cpu"),
            output_slices=cell.output_slices,
        )
        for _ in range(count)
    ]


def make_workload(cell: Cell, layers: list[LoRAWeights]) -> Workload:
    """Return layers with a batch, the operation's input, and a y of zeros."""
    operation, first = find_operation(cell.operation), layers[0]
    like: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
    if operation.input is Input.ROWS:
        x = torch.randn(cell.tokens, cell.in_features, **like)
    elif operation.input is Input.TOKEN_IDS:
        x = torch.randint(cell.in_features, (cell.tokens,), device=first.device)
    else:
        shape = (first.num_slices, cell.tokens, first.max_rank)
        x = torch.randn(shape, device=first.device, dtype=torch.float32)
        # as in an h of a shrink: zero beyond the rank
        x[..., cell.rank :] = 0
    batch = LoRABatch(cell.token_slots, first.num_slots)
    y = torch.zeros(cell.tokens, cell.out_features, **like)
    return Workload(operation, layers, batch, x, y)


def reference(work: Workload) -> torch.Tensor:
    """Return the right result for the first layer, by plain products: the delta, or h.

    It is float32 for 16-bit weights and float64 for wider ones.
    """
    weights, batch, x = work.layers[0], work.batch, work.x
    wide = torch.float32 if weights.dtype.itemsize == 2 else torch.float64
    like: dict[str, Any] = {"device": x.device, "dtype": wide}
    h = torch.zeros(weights.num_slices, batch.num_tokens, weights.max_rank, **like)
    delta = torch.zeros(batch.num_tokens, weights.out_features, **like)
    offsets, ranks = weights.slice_offsets, weights.ranks.tolist()
    scalings = weights.scalings.tolist()
    for slot in sorted(set(batch.token_slots.tolist()) - {NO_ADAPTER}):
        rows = (batch.token_slots == slot).nonzero().flatten().to(x.device)
        for s, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            rank = ranks[slot][s]
            a = weights.lora_a[slot, s, :rank].to(wide)
            if work.operation.input is Input.ROWS:
                h_rows = x[rows].to(wide) @ a.T
            elif work.operation.input is Input.TOKEN_IDS:
                h_rows = a.T[x[rows]]
            else:
                h_rows = x[s, rows, :rank].to(wide)
            h[s, rows, :rank] = h_rows
            b = weights.lora_b[slot, start:end, :rank].to(wide)
            delta[rows, start:end] = scalings[slot][s] * (h_rows @ b.T)
    return h if work.operation.result == "h" else delta


def check(call: Callable[[int], object], work: Workload, expected: torch.Tensor) -> None:
    """Run a contender on the first layer and compare its result with that of `reference`.

    `call` runs the layer of an index: it returns h, or adds to ``work.y``, which is left at zero.

    Raises:
        WrongResultError: a row is off by more than `TOLERANCES` allows.
    """
    # not zeros: an engine that overwrites y instead of adding would pass
    work.y.fill_(1)
    result = call(0)
    if work.operation.result == "y":
        result = work.y.to(expected.dtype) - 1
    assert isinstance(result, torch.Tensor)
    error = (result.to(expected.dtype) - expected).norm(dim=-1).max()
    scale = expected.square().sum(-1).mean().sqrt()
    work.y.zero_()
    relative, allowed = float(error / scale), TOLERANCES[work.layers[0].dtype]
    # written so that NaN fails
    if not relative <= allowed:
        raise WrongResultError(f"wrong result: a row is off by {relative:.1e}, allowed {allowed:g}")
