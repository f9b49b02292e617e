"""Per-layer data: where the weights lie, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from lora_backends.common.tensors import operators_have_memory
from lora_backends.dispatch.cached import CallCache
from lora_backends.eight_bit import b_row_groups, is_eight_bit
from lora_backends.errors import InvalidInputError
from lora_backends.experts import ExpertWeights
from lora_backends.numba_cpu.machine.vectors import LANES
from lora_backends.numba_cpu.needs import BIAS, IN_REGISTERS, MULTIPLIED, RAGGED
from lora_backends.weights import LoRAWeights

Weights: TypeAlias = LoRAWeights | ExpertWeights
Ints = npt.NDArray[np.int64]
CODE_FLOAT32, CODE_BFLOAT16, CODE_FLOAT16, CODE_FLOAT64 = range(4)
DTYPE_CODES = {
    torch.float32: CODE_FLOAT32,
    torch.bfloat16: CODE_BFLOAT16,
    torch.float16: CODE_FLOAT16,
    torch.float64: CODE_FLOAT64,
}
INT8, E4M3, E5M2 = 1, 2, 3
STORED = {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


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
    a_scales: int  # of 8-bit stacks: [num_slots, groups of max_rank, groups of in_features]
    a_scales_slot: int
    a_scales_expert: int
    a_scales_row: int
    a_scales_column: int
    b_scales: int  # [num_slots, groups of rows of the slice, groups of max_rank]
    b_scales_slot: int
    b_scales_expert: int
    b_scales_row: int
    b_scales_column: int
    first: int  # output columns from here
    last: int  # to here, not included


class LayerPointers(NamedTuple):
    """Where the tensors of a layer lie, for kernels: addresses, and strides in bytes."""

    slices: int  # the fields of a `Slice`, [num_slices, 20] int64
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
    bias_dtype: int  # CODE_FLOAT32, ...
    output_scales: int  # [num_slots, out_features] float32, or 0
    output_scales_slot: int
    in_features: int
    num_slices: int
    max_rank: int
    stored: int  # INT8, E4M3 or E5M2 of 8-bit stacks, 0 of others
    block_rows: int  # that share a scale; 0: all
    block_columns: int


@dataclass(eq=False, slots=True)
class LocatedLayer:
    """Where a layer lies, and what its size is."""

    addresses: tuple[int, ...]  # of the tensors, to notice that one has moved
    dtype: torch.dtype  # of A and B
    eight_bit: bool
    num_slices: int  # of h
    max_rank: int
    layer: Ints  # the fields of a `LayerPointers`
    slices: Ints  # its first field points here
    address: int  # of `layer`
    needs: int  # the flags of `needs` that weights have
    bytes_read: int  # of A and B, per active slot, if every rank were max_rank
    shares_a: bool = False  # whether experts share A
    a_span: int = 1  # entries of ranks, one after the other, that a segment's A serves
    shares_b: bool = False  # whether experts share B, rank and scaling
    column_blocks: int = 1  # into which interleaved columns of y are sorted for kernels


class Layers:
    """The `LocatedLayer` of all weights in use, and the calls that were made of them.

    A `LocatedLayer` is kept for as long as the weights object lives, and made anew when one of its
    tensors has moved. Shapes and strides are those of the same tensors, ranks and scalings are
    read by the kernels, so a slot that is rewritten in place needs nothing.
    """

    def __init__(self) -> None:
        self._located: WeakKeyDictionary[Weights, LocatedLayer] = WeakKeyDictionary()
        self.calls = CallCache()  # of all plans: some models make a plan per pass

    def __reduce__(self) -> tuple[type[Layers], tuple[()]]:
        return Layers, ()  # addresses mean nothing to a copy

    def locate(self, weights: Weights) -> LocatedLayer:
        """Return where the weights lie now."""
        if torch._C._len_torch_dispatch_stack():  # inlined: every call of a layer runs this
            require_memory()
        addresses = weights.footprint.addresses
        located = self._located.get(weights)
        if located is None or located.addresses != addresses:
            if isinstance(weights, LoRAWeights):
                located = _locate(weights, addresses)
            else:
                located = _locate_experts(weights, addresses)
            self._located[weights] = located
        return located


def require_memory() -> None:
    """Raise InvalidInputError where the tensors that a call makes would have no address."""
    if not operators_have_memory():
        raise InvalidInputError(
            "backend 'numba_cpu' cannot run under this mode of torch:\n"
            "  - new tensors have no memory to write to, as under FakeTensorMode; call the backend "
            "outside of the mode, or use torch_ref"
        )


def _locate(weights: LoRAWeights, addresses: tuple[int, ...]) -> LocatedLayer:
    slices = [_slice_of(weights, s) for s in range(weights.num_slices)]
    bias, scales = weights.bias, weights.output_scales
    fields = {
        "bias": 0 if bias is None else bias.data_ptr(),
        "bias_slot": 0 if bias is None else bias.stride(0) * bias.element_size(),
        "bias_size": 0 if bias is None else bias.element_size(),
        "bias_dtype": CODE_FLOAT32 if bias is None else DTYPE_CODES[bias.dtype],
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
) -> LocatedLayer:
    table = np.array(slices, dtype=np.int64)
    in_features, max_rank = weights.in_features, weights.max_rank
    sizes = {"in_features": in_features, "num_slices": len(slices), "max_rank": max_rank}
    rows, columns = weights.scale_block
    sizes |= {"block_rows": rows or 0, "block_columns": columns or 0}
    sizes["stored"] = STORED.get(weights.dtype, 0)
    layer = np.array(LayerPointers(slices=table.ctypes.data, **fields, **sizes), dtype=np.int64)
    bytes_read = (len(slices) * in_features + weights.out_features) * max_rank
    bytes_read *= weights.dtype.itemsize
    return LocatedLayer(
        addresses,
        weights.dtype,
        is_eight_bit(weights.dtype),
        len(slices),
        max_rank,
        layer,
        table,
        layer.ctypes.data,
        _needs(slices, fields, weights.dtype is torch.int8 and columns is None),
        bytes_read,
    )


def _needs(slices: list[Slice], fields: dict[str, int], in_registers: bool) -> int:
    needs = IN_REGISTERS if in_registers else 0
    needs |= MULTIPLIED if fields["output_scales"] else 0
    needs |= BIAS if fields["bias"] else 0
    ragged = any((item.last - item.first) % LANES for item in slices)
    return needs | (RAGGED if ragged else 0)


def _locate_experts(weights: ExpertWeights, addresses: tuple[int, ...]) -> LocatedLayer:
    """Return where experts lie: a slice per A, and interleaved slices as blocks of columns."""
    fields = dict.fromkeys(("bias", "bias_slot", "bias_size", "bias_dtype"), 0)
    fields |= dict.fromkeys(("output_scales", "output_scales_slot"), 0)
    for name in ("ranks", "scalings"):
        slot, expert, column = _expert_strides(getattr(weights, name))
        column = column if weights.num_a > 1 else 0
        fields |= _table(name, getattr(weights, name), (slot, expert, column))
    ends = (0, *accumulate(weights.output_slices))
    split = _slices_apart(weights)
    if not split:  # one A, rank and scaling for all columns
        ends = (0, weights.out_features)
    slices = []
    for s in range(weights.num_slices if split else 1):
        nth = s if weights.num_a > 1 else 0
        a = weights.lora_a[:, :, nth]
        b = weights.lora_b[:, :, weights.columns(s)] if split else weights.lora_b
        places = [
            (part.data_ptr(), *(part.element_size() * n for n in _expert_strides(part)))
            for part in (a, b)
        ]
        a_scales = None if weights.a_scales is None else weights.a_scales[:, :, nth]
        scales = (*_scale_places(a_scales, 1), *_scale_places(_own_groups(weights, s, 2), 1))
        slices.append(Slice(*places[0], *places[1], *scales, *ends[s : s + 2]))
    located = _located(weights, addresses, slices, fields)
    located.shares_a = _experts_of(weights.lora_a, weights.a_scales) == 1
    located.a_span = weights.ranks.shape[1] if located.shares_a else 1
    of_b = (weights.lora_b, weights.ranks, weights.scalings, weights.b_scales)
    located.shares_b = _experts_of(*of_b) == 1
    located.column_blocks = weights.num_slices if weights.interleaved and split else 1
    return located


def _experts_of(*tensors: torch.Tensor | None) -> int:
    """Return how many experts tensors hold; 1 means all share them."""
    return max(tensor.shape[1] for tensor in tensors if tensor is not None)


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
    a_scales = None if weights.a_scales is None else weights.a_scales[:, s]
    places += (*_scale_places(a_scales, 0), *_scale_places(_own_groups(weights, s, 1), 0))
    return Slice(*places, *weights.slice_offsets[s : s + 2])


def _own_groups(weights: Weights, s: int, axis: int) -> torch.Tensor | None:
    """Return the part of b_scales that is of a slice; `axis` has the groups of rows."""
    if weights.b_scales is None:
        return None
    groups = b_row_groups(weights.output_slices, weights.scale_block)
    return weights.b_scales.narrow(axis, sum(groups[:s]), groups[s])


def _scale_places(scales: torch.Tensor | None, experts: int) -> tuple[int, ...]:
    """Return the address of scales and the strides of slots, experts, groups of rows, groups."""
    if scales is None:
        return (0,) * 5
    slot, *rest, row, column = (4 * stride for stride in scales.stride())
    # `experts`: axes of experts, 1 or, in a dense layer, 0
    expert = rest[0] if experts and scales.shape[1] > 1 else 0
    return scales.data_ptr(), slot, expert, row, column


def _slices_apart(weights: ExpertWeights) -> bool:
    """Return whether kernels see a slice of columns at a time, not all columns as one slice."""
    # groups of scales never cross slices, even if one A feeds all
    return weights.num_a > 1 or weights.b_scales is not None
