"""Per-layer data: where the weights lie, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.dispatch.ordinary import addresses_of
from lora_backends.experts import ExpertWeights
from lora_backends.weights import LoRAWeights

Weights: TypeAlias = LoRAWeights | ExpertWeights
Ints = npt.NDArray[np.int64]
BIAS_FLOAT32, BIAS_BFLOAT16, BIAS_FLOAT16, BIAS_FLOAT64 = range(4)
BIAS_DTYPES = {
    torch.float32: BIAS_FLOAT32,
    torch.bfloat16: BIAS_BFLOAT16,
    torch.float16: BIAS_FLOAT16,
    torch.float64: BIAS_FLOAT64,
}


class Slice(NamedTuple):
    """Where A and B of one slice lie: addresses, and strides in bytes; zeros for a missing half."""

    a: int  # [num_slots, max_rank, in_features]
    a_slot: int
    a_expert: int  # 0 in a dense layer
    a_row: int
    b: int  # [num_slots, width of the slice, max_rank]
    b_slot: int
    b_expert: int
    b_row: int
    first: int  # output columns from here
    last: int  # to here, not included


class Layer(NamedTuple):
    """Where the tensors of a layer lie, for kernels: addresses, and strides in bytes."""

    slices: int  # the fields of a `Slice`, [num_slices, 10] int64
    ranks: int  # [num_slots, num_slices] int32
    ranks_slot: int
    ranks_expert: int
    ranks_slice: int
    scalings: int  # [num_slots, num_slices] float32
    scalings_slot: int
    scalings_expert: int
    scalings_slice: int
    bias: int  # [num_slots, out_features], or 0
    bias_slot: int
    bias_size: int  # bytes of an element
    bias_dtype: int  # BIAS_FLOAT32, ...
    output_scales: int  # [num_slots, out_features] float32, or 0
    output_scales_slot: int
    in_features: int
    num_slices: int
    max_rank: int


@dataclass(eq=False)
class Located:
    """Where a layer lies, and what its size is."""

    addresses: tuple[int, ...]  # of the tensors, to notice that one has moved
    dtype: torch.dtype  # of A and B
    num_slices: int  # of h
    layer: Ints  # the fields of a `Layer`
    slices: Ints  # what its first field points to
    address: int  # of `layer`
    bytes_read: int  # of A and B, per active slot, if every rank were max_rank


class Layers:
    """The `Located` of all weights in use.

    Kept by the weights object itself, for as long as it lives, and made anew when one of its
    tensors has moved. Shapes and strides are those of the same tensors, ranks and scalings are
    read by the kernels, so a slot that is rewritten in place needs nothing.
    """

    def __init__(self) -> None:
        self._located: WeakKeyDictionary[Weights, Located] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()  # addresses mean nothing to a copy

    def locate(self, weights: Weights) -> Located:
        """Return where the weights lie now."""
        if isinstance(weights, LoRAWeights):
            addresses = addresses_of(weights)
        else:
            addresses = _expert_addresses(weights)
        found = self._located.get(weights)
        if found is None or found.addresses != addresses:
            if isinstance(weights, LoRAWeights):
                found = _locate(weights, addresses)
            else:
                found = _locate_experts(weights, addresses)
            self._located[weights] = found
        return found


def _locate(weights: LoRAWeights, addresses: tuple[int, ...]) -> Located:
    slices = [_slice_of(weights, s) for s in range(weights.num_slices)]
    bias, scales = weights.bias, weights.output_scales
    fields = {
        "bias": 0 if bias is None else bias.data_ptr(),
        "bias_slot": 0 if bias is None else bias.stride(0) * bias.element_size(),
        "bias_size": 0 if bias is None else bias.element_size(),
        "bias_dtype": BIAS_FLOAT32 if bias is None else BIAS_DTYPES[bias.dtype],
        "output_scales": 0 if scales is None else scales.data_ptr(),
        "output_scales_slot": 0 if scales is None else 4 * scales.stride(0),
    }
    for name in ("ranks", "scalings"):
        slot, column = getattr(weights, name).stride()
        fields |= _table(name, getattr(weights, name), (slot, 0, column))
    return _located(weights, addresses, slices, fields)


def _table(name: str, table: torch.Tensor, strides: tuple[int, ...]) -> dict[str, int]:
    """Return the fields of ranks or scalings: strides from slot to slot, expert and slice."""
    slot, expert, column = (4 * stride for stride in strides)
    steps = {f"{name}_slot": slot, f"{name}_expert": expert, f"{name}_slice": column}
    return {name: table.data_ptr(), **steps}


def _located(
    weights: Weights, addresses: tuple[int, ...], slices: list[Slice], fields: dict[str, int]
) -> Located:
    table = np.array(slices, dtype=np.int64)
    in_features, max_rank = weights.in_features, weights.max_rank
    sizes = {"in_features": in_features, "num_slices": len(slices), "max_rank": max_rank}
    layer = np.array(Layer(slices=table.ctypes.data, **fields, **sizes), dtype=np.int64)
    bytes_read = (len(slices) * in_features + weights.out_features) * max_rank
    bytes_read *= weights.dtype.itemsize
    address = layer.ctypes.data
    return Located(addresses, weights.dtype, len(slices), layer, table, address, bytes_read)


def _expert_addresses(weights: ExpertWeights) -> tuple[int, ...]:
    tensors = (weights.lora_a, weights.lora_b, weights.ranks, weights.scalings)
    return tuple([tensor.data_ptr() for tensor in tensors])


def _locate_experts(weights: ExpertWeights, addresses: tuple[int, ...]) -> Located:
    """Return where experts lie: a slice per A, and interleaved slices as blocks of columns."""
    fields = dict.fromkeys(("bias", "bias_slot", "bias_size", "bias_dtype"), 0)
    fields |= dict.fromkeys(("output_scales", "output_scales_slot"), 0)
    for name in ("ranks", "scalings"):
        fields |= _table(name, getattr(weights, name), _expert_strides(getattr(weights, name)))
    ends = (0, *accumulate(weights.output_slices))
    if weights.num_a == 1:  # one A, rank and scaling for all columns
        ends = (0, weights.out_features)
    slices = []
    for s in range(weights.num_a):
        a, columns = weights.lora_a[:, :, s], weights.columns(s)
        b = weights.lora_b[:, :, columns] if weights.num_a > 1 else weights.lora_b
        places = [
            (part.data_ptr(), *(part.element_size() * n for n in _expert_strides(part)))
            for part in (a, b)
        ]
        slices.append(Slice(*places[0], *places[1], *ends[s : s + 2]))
    return _located(weights, addresses, slices, fields)


def _expert_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of the first three axes; 0 for an expert axis of 1."""
    slot, expert, row = tensor.stride()[:3]
    return slot, expert if tensor.shape[1] > 1 else 0, row


def _slice_of(weights: LoRAWeights, s: int) -> Slice:
    places: list[int] = []
    for part in (
        None if weights.lora_a is None else weights.a_of(s),
        None if weights.lora_b is None else weights.b_of(s),
    ):
        if part is None:
            places += (0, 0, 0, 0)
        else:
            slot, row, _ = (part.element_size() * stride for stride in part.stride())
            places += (part.data_ptr(), slot, 0, row)
    return Slice(*places, *weights.slice_offsets[s : s + 2])
