"""Per-layer data: where the weights lie, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lora_backends.weights import LoRAWeights

Ints = npt.NDArray[np.int64]


class Layer(NamedTuple):
    """Where the weights of a layer lie, for kernels: addresses, and strides in bytes."""

    a: int  # [num_slots, num_slices, max_rank, in_features]
    a_slot: int
    a_slice: int
    a_row: int
    b: int  # [num_slots, out_features, max_rank]
    b_slot: int
    b_row: int
    ranks: int  # [num_slots, num_slices] int32
    ranks_slot: int
    ranks_slice: int
    scalings: int  # [num_slots, num_slices] float32
    scalings_slot: int
    scalings_slice: int
    bias: int  # [num_slots, out_features], or 0
    bias_slot: int
    in_features: int
    num_slices: int
    max_rank: int


@dataclass(eq=False)
class Located:
    """Where a layer lies, and what its size is."""

    addresses: tuple[int, ...]  # of the tensors, to notice that one has moved
    layer: Ints  # the fields of a `Layer`
    offsets: Ints  # [num_slices + 1] first column of every slice, then out_features
    bytes_read: int  # of A and B, per active slot, if every rank were max_rank


class Layers:
    """The `Located` of every `LoRAWeights` in use.

    Kept by the weights object itself, for as long as it lives, and made anew when one of its
    tensors has moved. Shapes and strides are those of the same tensors, ranks and scalings are
    read by the kernels, so a slot that is rewritten in place needs nothing.
    """

    def __init__(self) -> None:
        self._located: WeakKeyDictionary[LoRAWeights, Located] = WeakKeyDictionary()

    def locate(self, weights: LoRAWeights) -> Located:
        """Return where the weights lie now."""
        addresses = (
            weights.lora_a.data_ptr(),
            weights.lora_b.data_ptr(),
            weights.ranks.data_ptr(),
            weights.scalings.data_ptr(),
            0 if weights.bias is None else weights.bias.data_ptr(),
        )
        found = self._located.get(weights)
        if found is None or found.addresses != addresses:
            found = self._located[weights] = _locate(weights, addresses)
        return found


def _locate(weights: LoRAWeights, addresses: tuple[int, int, int, int, int]) -> Located:
    a, b, ranks, scalings, bias = addresses
    size = weights.lora_a.element_size()
    bias_slot = 0
    if weights.bias is not None:
        bias_slot = weights.bias.stride(0) * weights.bias.element_size()
    a_slot, a_slice, a_row, _ = (size * stride for stride in weights.lora_a.stride())
    b_slot, b_row, _ = (size * stride for stride in weights.lora_b.stride())
    layer = Layer(
        a=a,
        a_slot=a_slot,
        a_slice=a_slice,
        a_row=a_row,
        b=b,
        b_slot=b_slot,
        b_row=b_row,
        ranks=ranks,
        ranks_slot=4 * weights.ranks.stride(0),
        ranks_slice=4 * weights.ranks.stride(1),
        scalings=scalings,
        scalings_slot=4 * weights.scalings.stride(0),
        scalings_slice=4 * weights.scalings.stride(1),
        bias=bias,
        bias_slot=bias_slot,
        in_features=weights.in_features,
        num_slices=weights.num_slices,
        max_rank=weights.max_rank,
    )
    width = weights.num_slices * weights.in_features + weights.out_features
    offsets = np.array(weights.slice_offsets, dtype=np.int64)
    return Located(
        addresses, np.array(layer, dtype=np.int64), offsets, width * weights.max_rank * size
    )
