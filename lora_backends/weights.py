"""The stacked LoRA weights of one layer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from lora_backends.dispatch.handles import Handled
from lora_backends.errors import InvalidInputError, shown
from lora_backends.tensors import unusable

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What weights may be made of; a backend supports some of them."""

MOST = torch.iinfo(torch.int32).max
"""Columns of y at most: kernels count them in int32."""


@dataclass(frozen=True, eq=False)
class LoRAWeights(Handled):
    """The A and B matrices of every slot for one layer, with rank and scaling per slice.

    A fused qkv layer of widths (8, 2, 2) over 16 inputs, 4 slots of rank at most 2:

        LoRAWeights(
            lora_a,    # [4, 3, 2, 16]
            lora_b,    # [4, 12, 2]
            ranks,     # [4, 3] int32, e.g. [[2, 0, 2], ...]: slot 0 has no adapter on k
            scalings,  # [4, 3] float32
            output_slices=(8, 2, 2),
        )

    Tensors are kept, not copied, so a pool may rewrite a slot in place; `ranks` and `scalings`
    are the exception where their dtype or device has to change. Values beyond a slot's own rank
    may be anything, NaN included.

    Raises:
        InvalidInputError: shapes, dtypes or devices contradict each other, or a rank is not in
            0..max_rank. Reading the ranks waits for the device once, here.
    """

    lora_a: torch.Tensor  # [num_slots, num_slices, max_rank, in_features]
    lora_b: torch.Tensor  # [num_slots, out_features, max_rank]
    ranks: torch.Tensor  # [num_slots, num_slices] int32, 0..max_rank; 0: slice not adapted
    scalings: torch.Tensor  # [num_slots, num_slices] float32
    output_slices: tuple[int, ...]  # one width > 0 per slice, sum == out_features
    bias: torch.Tensor | None = None  # [num_slots, out_features], added as it is

    num_slots: int = field(init=False)  # adapters that the stack has room for
    num_slices: int = field(init=False)  # projections fused in this layer
    max_rank: int = field(init=False)  # padded rank width of the stack
    in_features: int = field(init=False)  # width of x; the vocabulary of an embedding
    out_features: int = field(init=False)  # width of y, all slices together
    slice_offsets: tuple[int, ...] = field(init=False)
    # first output column of every slice, then out_features: num_slices + 1 ints
    extents: tuple[int, ...] = field(init=False, repr=False)
    # bytes from the first to behind the last element of lora_a, lora_b, ranks, scalings and bias

    def __post_init__(self) -> None:
        _check_tensors(self)
        object.__setattr__(self, "output_slices", _as_widths(self.output_slices))
        device = self.lora_a.device
        object.__setattr__(self, "ranks", _as_numbers(self.ranks, "ranks", "int32").to(device))
        scalings = _as_numbers(self.scalings, "scalings", "float32")
        if scalings.requires_grad:
            raise InvalidInputError(
                "scalings requires a gradient, which no backend computes\n"
                "  to do: pass scalings.detach()"
            )
        object.__setattr__(self, "scalings", scalings.to(device, torch.float32))
        _check_shapes(self)
        _check_ranks(self.ranks, self.lora_a.shape[2])
        object.__setattr__(self, "ranks", self.ranks.to(torch.int32))
        self._keep_sizes()

    def _keep_sizes(self) -> None:
        """Set the sizes; asking a tensor for them in every call takes longer than checking it."""
        sizes = ("num_slots", "num_slices", "max_rank", "in_features")
        for name, size in zip(sizes, self.lora_a.shape, strict=True):
            object.__setattr__(self, name, size)
        object.__setattr__(self, "out_features", self.lora_b.shape[1])
        object.__setattr__(self, "slice_offsets", tuple(accumulate(self.output_slices, initial=0)))
        tensors = (self.lora_a, self.lora_b, self.ranks, self.scalings, self.bias)
        object.__setattr__(self, "extents", tuple(map(extent_of, tensors)))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of lora_a and lora_b."""
        return self.lora_a.dtype

    @property
    def device(self) -> torch.device:
        """Device of every tensor."""
        return self.lora_a.device

    def __repr__(self) -> str:
        return (
            f"LoRAWeights(num_slots={self.num_slots}, max_rank={self.max_rank}, "
            f"in_features={self.in_features}, output_slices={self.output_slices}, "
            f"dtype={self.dtype}, device={self.device}, bias={self.bias is not None})"
        )


def extent_of(tensor: torch.Tensor | None) -> int:
    """Return the bytes from the first element of a tensor to behind its last one."""
    if tensor is None or not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _as_widths(output_slices: Sequence[int]) -> tuple[int, ...]:
    try:
        widths = tuple(0 if isinstance(w, bool) else operator.index(w) for w in output_slices)
    except TypeError:
        widths = ()
    if not widths or min(widths) < 1 or sum(widths) > MOST:
        raise InvalidInputError(
            f"output_slices is not a tuple of widths\n  given: {shown(output_slices)}\n"
            f"  allowed: at least one int from 1 to {MOST}, one per slice"
        )
    return widths


def _check_usable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that engines, which read weights by address, would read wrongly."""
    reason = unusable(tensor)
    if reason:
        raise InvalidInputError(f"weights cannot be read by address\n  given: {name} {reason}")


def _as_numbers(values: Any, name: str, wanted: str) -> torch.Tensor:
    """Return `values` as a tensor of the kind of numbers that is wanted, in its own dtype."""
    if isinstance(values, torch.Tensor):
        _check_usable(name, values)
    try:
        own = values.device if isinstance(values, torch.Tensor) else "cpu"
        tensor = torch.as_tensor(values, device=own)  # not on torch's default device
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name} cannot be read as a tensor\n  given: {type(values).__name__} ({error})\n"
            f"  allowed: [num_slots, num_slices] {wanted}"
        ) from error
    odd = tensor.is_complex() or tensor.dtype == torch.bool
    if odd or (wanted == "int32" and tensor.is_floating_point()):
        raise InvalidInputError(
            f"{name} has the wrong dtype\n  given: {tensor.dtype}\n  allowed: {wanted}"
        )
    return tensor


def _check_ranks(ranks: torch.Tensor, max_rank: int) -> None:
    wide = ranks.to(torch.int64)
    wrong = (wide < 0) | (wide > max_rank)
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        raise InvalidInputError(
            f"a rank is out of range\n"
            f"  given: ranks{index} = {int(wide[tuple(index)])}\n"
            f"  allowed: 0 to {max_rank} (max_rank, the last axis but one of lora_a)"
        )


def _check_tensors(weights: LoRAWeights) -> None:
    a, b, bias = weights.lora_a, weights.lora_b, weights.bias
    for name, tensor in (("lora_a", a), ("lora_b", b), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{name} is not a floating-point tensor\n  given: {kind}\n"
                f"  allowed: float16, bfloat16, float32 or float64"
            )
        if tensor.device != a.device:
            raise InvalidInputError(
                f"weights are on different devices\n"
                f"  given: lora_a on {a.device}, {name} on {tensor.device}\n  allowed: one device"
            )
        _check_usable(name, tensor)
    if a.dtype != b.dtype:
        raise InvalidInputError(
            f"lora_a and lora_b differ in dtype\n  given: {a.dtype} and {b.dtype}\n"
            f"  allowed: one dtype for both"
        )


def _check_shapes(weights: LoRAWeights) -> None:
    a, b = weights.lora_a, weights.lora_b
    if a.ndim != 4:
        raise InvalidInputError(
            f"lora_a has the wrong number of axes\n  given: {list(a.shape)}\n"
            f"  allowed: [num_slots, num_slices, max_rank, in_features]"
        )
    num_slots, num_slices, max_rank, _ = a.shape
    out_features = sum(weights.output_slices)
    expected = {
        "lora_b": (b, [num_slots, out_features, max_rank]),
        "ranks": (weights.ranks, [num_slots, num_slices]),
        "scalings": (weights.scalings, [num_slots, num_slices]),
        "bias": (weights.bias, [num_slots, out_features]),
    }
    if len(weights.output_slices) != num_slices:
        raise InvalidInputError(
            f"output_slices does not match lora_a\n"
            f"  given: {len(weights.output_slices)} widths {weights.output_slices}, "
            f"lora_a {list(a.shape)}\n  allowed: one width per slice, {num_slices} here"
        )
    for name, (tensor, shape) in expected.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise InvalidInputError(
                f"{name} has the wrong shape\n  given: {list(tensor.shape)}\n"
                f"  allowed: {shape}, from lora_a {list(a.shape)} and "
                f"output_slices {weights.output_slices}"
            )
    for name, tensor in (("lora_a", a), ("lora_b", b), ("bias", weights.bias)):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise InvalidInputError(
                f"the last axis of {name} is not contiguous\n"
                f"  given: strides {tuple(tensor.stride())}\n  to do: pass {name}.contiguous()"
            )
