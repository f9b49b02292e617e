"""The layers of a cell, and what every contender's result is checked against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.bench.cells import Cell, num_layers
from lora_backends.errors import LoRABackendError
from lora_backends.weights import LoRAWeights

ROTATED_BYTES = {"cuda": 240e6, "cpu": 192 * 2**20}
"""Weights that a timing passes through, so that they do not stay in a cache."""
MOST_LAYERS = {"cuda": 32, "cpu": 64}
TOLERANCES = {
    torch.float16: 2.5e-3,
    torch.bfloat16: 1e-2,  # h and y are each rounded to 8 bits
    torch.float32: 5e-3,  # tf32 is an option of some backends
    torch.float64: 1e-9,
}
"""Largest error of a row, over the root mean square norm of the rows of the delta."""


class WrongResultError(LoRABackendError):
    """A contender does not compute what it is timed for."""


@dataclass(frozen=True, eq=False)
class Workload:
    """One cell on a device: what a contender binds to."""

    layers: list[LoRAWeights]  # equal shapes, different values
    batch: LoRABatch
    x: torch.Tensor  # [tokens, in_features], shared by the layers
    y: torch.Tensor  # [tokens, out_features], added to by every call


def make_layers(
    cell: Cell, device: torch.device | str, dtype: torch.dtype, max_rank: int = 0
) -> list[LoRAWeights]:
    """Return the layers that a timing rotates over.

    Args:
        cell: the shape.
        device: where they live.
        dtype: of A and B.
        max_rank: width of the stack; 0: the cell's rank.

    Returns:
        4 layers or more; A and B are scaled so that h and the delta are of order 1.
    """
    device, max_rank = torch.device(device), max_rank or cell.rank
    count = num_layers(cell, dtype.itemsize, ROTATED_BYTES[device.type], MOST_LAYERS[device.type])
    slots, slices = cell.num_slots, len(cell.output_slices)
    like: dict[str, Any] = {"device": device, "dtype": dtype}
    return [
        LoRAWeights(
            lora_a=torch.randn(slots, slices, max_rank, cell.in_features, **like).mul_(
                1 / math.sqrt(cell.in_features)
            ),
            lora_b=torch.randn(slots, cell.out_features, max_rank, **like).mul_(
                1 / math.sqrt(cell.rank)
            ),
            ranks=torch.full((slots, slices), cell.rank, dtype=torch.int32, device="cpu"),
            scalings=torch.full((slots, slices), 0.5, device="cpu"),
            output_slices=cell.output_slices,
        )
        for _ in range(count)
    ]


def make_workload(cell: Cell, layers: list[LoRAWeights]) -> Workload:
    """Return layers with a batch, an x and a y."""
    device, dtype = layers[0].device, layers[0].dtype
    return Workload(
        layers=layers,
        batch=LoRABatch(cell.token_slots, layers[0].num_slots),
        x=torch.randn(cell.tokens, cell.in_features, device=device, dtype=dtype),
        y=torch.zeros(cell.tokens, cell.out_features, device=device, dtype=dtype),
    )


def reference(x: torch.Tensor, weights: LoRAWeights, batch: LoRABatch) -> torch.Tensor:
    """Return the LoRA of every token by plain products, adapter by adapter.

    Args:
        x: [num_tokens, in_features].
        weights: the layer; it has no bias.
        batch: the slots.

    Returns:
        [num_tokens, out_features], float32 for 16-bit inputs and float64 for wider ones.
    """
    wide = torch.float32 if x.dtype.itemsize == 2 else torch.float64
    delta = torch.zeros(x.shape[0], weights.out_features, device=x.device, dtype=wide)
    offsets, ranks = weights.slice_offsets, weights.ranks.tolist()
    scalings = weights.scalings.tolist()
    for slot in sorted(set(batch.token_slots.tolist()) - {NO_ADAPTER}):
        rows = (batch.token_slots == slot).nonzero().flatten().to(x.device)
        rows_of_x = x[rows].to(wide)
        for s, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            rank = ranks[slot][s]
            h = rows_of_x @ weights.lora_a[slot, s, :rank].to(wide).T
            b = weights.lora_b[slot, start:end, :rank].to(wide)
            delta[rows, start:end] = scalings[slot][s] * (h @ b.T)
    return delta


def check(call: Callable[[int], object], work: Workload, expected: torch.Tensor) -> None:
    """Run a contender on the first layer and compare what it added to y.

    Args:
        call: adds the LoRA of a layer, by its index, to ``work.y``.
        work: the cell; y is left at zero.
        expected: from `reference`.

    Raises:
        WrongResultError: a row is off by more than `TOLERANCES` allows.
    """
    work.y.fill_(1)
    call(0)
    error = (work.y.to(expected.dtype) - 1 - expected).norm(dim=1).max()
    scale = expected.square().sum(1).mean().sqrt()
    work.y.zero_()
    relative, allowed = float(error / scale), TOLERANCES[work.x.dtype]
    if not relative <= allowed:
        raise WrongResultError(f"wrong result: a row is off by {relative:.1e}, allowed {allowed:g}")
