"""Per-layer data: where the weights lie, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.weights import LoRAWeights

Ints = npt.NDArray[np.int64]
BIAS_FLOAT32, BIAS_BFLOAT16, BIAS_FLOAT16, BIAS_FLOAT64 = range(4)
BIAS_DTYPES = {
    torch.float32: BIAS_FLOAT32,
    torch.bfloat16: BIAS_BFLOAT16,
    torch.float16: BIAS_FLOAT16,
    torch.float64: BIAS_FLOAT64,
}


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
    bias_size: int  # bytes of an element
    bias_dtype: int  # BIAS_FLOAT32, ...
    in_features: int
    num_slices: int
    max_rank: int
    offsets: int  # [num_slices + 1] int64: first column of every slice, then out_features


@dataclass(eq=False)
class Located:
    """Where a layer lies, and what its size is."""

    addresses: tuple[int, ...]  # of the tensors, to notice that one has moved
    layer: Ints  # the fields of a `Layer`
    offsets: Ints  # what its last field points to
    address: int  # of `layer`
    bytes_read: int  # of A and B, per active slot, if every rank were max_rank


class Layers:
    """The `Located` of every `LoRAWeights` in use.

    Kept by the weights object itself, for as long as it lives, and made anew when one of its
    tensors has moved. Shapes and strides are those of the same tensors, ranks and scalings are
    read by the kernels, so a slot that is rewritten in place needs nothing.
    """

    def __init__(self) -> None:
        self._located: WeakKeyDictionary[LoRAWeights, Located] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()  # addresses mean nothing to a copy

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
    bias_slot, bias_size, bias_dtype = 0, 0, BIAS_FLOAT32
    if weights.bias is not None:
        bias_size = weights.bias.element_size()
        bias_slot, bias_dtype = weights.bias.stride(0) * bias_size, BIAS_DTYPES[weights.bias.dtype]
    a_slot, a_slice, a_row, _ = (size * stride for stride in weights.lora_a.stride())
    b_slot, b_row, _ = (size * stride for stride in weights.lora_b.stride())
    offsets = np.array(weights.slice_offsets, dtype=np.int64)
    fields = Layer(
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
        bias_size=bias_size,
        bias_dtype=bias_dtype,
        in_features=weights.in_features,
        num_slices=weights.num_slices,
        max_rank=weights.max_rank,
        offsets=offsets.ctypes.data,
    )
    layer = np.array(fields, dtype=np.int64)
    width = weights.num_slices * weights.in_features + weights.out_features
    return Located(addresses, layer, offsets, layer.ctypes.data, width * weights.max_rank * size)
