"""Stacks of one tensor per slice: where each lies, as kernels take it.

Kernels take one base address. Where the tensors of a tuple lie at equal distances, as those of A
often do, that distance is the stride of slices, and the tuple is a stack. Else kernels read a table
on the device, int64 [num_slices, 3]: the distance of a slice's tensor from the base, and its own
strides of slots and rows, all in units of their `alignment`.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.errors import InvalidInputError
from lora_backends.weights import LoRAWeights, Stack

MOST_ALIGNMENT = 16
"""Elements; loads are no wider than 16 bytes."""


class Located(NamedTuple):
    """Where a stack lies."""

    base: torch.Tensor  # the stack; of a tuple, the tensor that distances start from
    strides: tuple[int, ...]  # in elements: slots, slices (A only), rows
    table: torch.Tensor  # [num_slices, 3] int64; the base where no table is read
    alignment: int = 0  # the unit of the table's entries, a power of two; 0: no table is read
    rows: int = 0  # with a table: rows of B's width from the base to the end; 0: not a whole number


def stride_unit(max_rank: int, item_bytes: int) -> int:
    """Return what strides of B are multiplied by for kernels: the bytes of an element, or 1.

    Triton specializes on arguments that are multiples of 16 and on 1. A stride of 8 ranks in 16
    bits is 8 elements, so each element would be loaded alone; in bytes it is 16, so a load takes 16
    bytes. With one rank the columns of B are contiguous: their stride must stay 1.

    >>> stride_unit(8, 2), stride_unit(1, 2)
    (2, 1)
    """
    return item_bytes if max_rank % 8 == 0 else 1


def located_a(weights: LoRAWeights) -> Located:
    """Return where A lies."""
    a: Stack = weights.lora_a
    if isinstance(a, tuple):
        return _located(weights, "lora_a", a)
    return Located(a, a.stride()[:3], a)


def located_b(weights: LoRAWeights) -> Located:
    """Return where B lies."""
    b: Stack = weights.lora_b
    if isinstance(b, tuple):
        return _located(weights, "lora_b", b)
    return Located(b, b.stride()[:2], b)


def _located(weights: LoRAWeights, name: str, tensors: tuple[torch.Tensor, ...]) -> Located:
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    stack = _as_stack(name, tensors, addresses)
    return stack or _with_table(weights, name, tensors, addresses)


def _as_stack(
    name: str, tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...]
) -> Located | None:
    """Return tensors at equal distances as a stack; None where they are not."""
    first, size = tensors[0], tensors[0].element_size()
    slot_stride, row_stride, _ = first.stride()
    # in a stack the slices of B follow each other as columns
    if name == "lora_b":
        return Located(first, (slot_stride, row_stride), first) if len(tensors) == 1 else None
    step = addresses[1] - addresses[0] if len(tensors) > 1 else 0
    expected = tuple(addresses[0] + s * step for s in range(len(tensors)))
    if addresses != expected or any(tensor.stride() != first.stride() for tensor in tensors):
        return None
    return Located(first, (slot_stride, step // size, row_stride), first)


def _with_table(
    weights: LoRAWeights, name: str, tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...]
) -> Located:
    base = tensors[addresses.index(min(addresses))]
    device, size = base.device, base.element_size()
    if is_capturing(device):
        raise InvalidInputError(
            "a layer of one tensor per slice meets a CUDA graph capture in its first call, which "
            "sends a table to the device\n  to do: call it once before the capture"
        )
    entries, ends = [], []
    for s, (tensor, address) in enumerate(zip(tensors, addresses, strict=True)):
        slot_stride, row_stride, _ = tensor.stride()
        distance = (address - min(addresses)) // size
        ends.append(distance + (tensor.shape[0] - 1) * slot_stride + tensor.shape[1] * row_stride)
        # columns of y count over all slices: column c of B lies at c less the slice's first one
        first_row = weights.slice_offsets[s] if name == "lora_b" else 0
        entries.append((distance - first_row * row_stride, slot_stride, row_stride))
    numbers = [number for entry in entries for number in entry]
    row_stride = entries[0][2]
    is_whole = row_stride > 0 and not any(number % row_stride for number in numbers)
    is_whole = is_whole and all(entry[2] == row_stride for entry in entries)
    alignment = gcd(MOST_ALIGNMENT, base.data_ptr() // size, *numbers)
    units = [[number // alignment for number in entry] for entry in entries]
    return Located(
        base,
        tuple([0] * (3 if name == "lora_a" else 2)),
        torch.tensor(units, dtype=torch.int64, device=device),
        alignment,
        max(ends) // row_stride if is_whole else 0,
    )
