"""Stacks of one tensor per slice: a small table on the device says where each lies.

Kernels take one base address. For a tuple of tensors they add, per slice, the distance of its
tensor from the first one's, and use its own strides, read from a table of int64 [num_slices, 3].
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from lora_backends.errors import InvalidInputError
from lora_backends.sgmv.launching.kernel import is_capturing
from lora_backends.weights import LoRAWeights, Stack

MOST_ALIGNMENT = 16
"""Elements; loads are no wider than 16 bytes."""


class Located(NamedTuple):
    """Where a stack lies, as kernels take it."""

    first: torch.Tensor  # the stack, or the tensor of its first slice
    strides: tuple[int, ...]  # of a stack, in elements: slots, slices (A only), rows
    table: torch.Tensor  # of a tuple: [num_slices, 3] int64; of a stack the stack, not read


class _Table(NamedTuple):
    addresses: tuple[int, ...]  # of the tensors, to notice that one has moved
    rows: torch.Tensor  # [num_slices, 3] int64 on the device: distance, strides of slots and rows
    alignment: int  # a power of two that divides every entry, at most MOST_ALIGNMENT


_TABLES: WeakKeyDictionary[LoRAWeights, dict[str, _Table]] = WeakKeyDictionary()


def slice_alignments(weights: LoRAWeights) -> tuple[int, int]:
    """Return the alignment of the tables of A and B in elements; 0 for a stack, or for None."""
    if not (isinstance(weights.lora_a, tuple) or isinstance(weights.lora_b, tuple)):
        return 0, 0
    alignments = []
    for name in ("lora_a", "lora_b"):
        is_tuple = isinstance(getattr(weights, name), tuple)
        alignments.append(_table_of(weights, name).alignment if is_tuple else 0)
    return alignments[0], alignments[1]


def located_a(weights: LoRAWeights) -> Located:
    """Return where A lies."""
    a: Stack = weights.lora_a
    if isinstance(a, tuple):
        return Located(a[0], (0, 0, 0), _table_of(weights, "lora_a").rows)
    return Located(a, a.stride()[:3], a)


def located_b(weights: LoRAWeights) -> Located:
    """Return where B lies."""
    b: Stack = weights.lora_b
    if isinstance(b, tuple):
        return Located(b[0], (0, 0), _table_of(weights, "lora_b").rows)
    return Located(b, b.stride()[:2], b)


def _table_of(weights: LoRAWeights, name: str) -> _Table:
    tensors: tuple[torch.Tensor, ...] = getattr(weights, name)
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    tables = _TABLES.setdefault(weights, {})
    table = tables.get(name)
    if table is None or table.addresses != addresses:
        # columns of y count over all slices: row c of B lies at c, less the slice's first column
        first_rows = weights.slice_offsets if name == "lora_b" else (0,) * len(tensors)
        table = tables[name] = _new_table(tensors, addresses, first_rows)
    return table


def _new_table(
    tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...], first_rows: tuple[int, ...]
) -> _Table:
    device, size = tensors[0].device, tensors[0].element_size()
    if is_capturing(device):
        raise InvalidInputError(
            "a layer of one tensor per slice meets a CUDA graph capture in its first call, which "
            "sends a table to the device\n  to do: call it once before the capture"
        )
    rows = []
    for tensor, address, first_row in zip(tensors, addresses, first_rows, strict=False):
        slot_stride, row_stride, _ = tensor.stride()
        distance = (address - addresses[0]) // size - first_row * row_stride
        rows.append((distance, slot_stride, row_stride))
    divisor = gcd(MOST_ALIGNMENT, addresses[0] // size, *[n for row in rows for n in row])
    return _Table(addresses, torch.tensor(rows, dtype=torch.int64, device=device), divisor)
