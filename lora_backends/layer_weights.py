"""`LayerWeights`: the common part of weights of dense layers and of experts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

import torch

from lora_backends import features
from lora_backends.common.tensors import extent_of, unusable
from lora_backends.dispatch.handles import Handled
from lora_backends.eight_bit import COMPUTE_DTYPES, LARGEST, ScaleBlock, checked_block, is_eight_bit
from lora_backends.errors import InvalidInputError, shown

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of weights; a backend supports some of them."""

MOST = torch.iinfo(torch.int32).max
"""Columns of y at most: kernels count them in int32."""

_TABLES = ("ranks", "scalings", "bias", "output_scales", "a_scales", "b_scales")
_Derived = TypeVar("_Derived")
_data_ptr = torch.Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")


class Footprint:
    """Where the tensors of a layer lie. It holds none of them: stored calls keep it."""

    __slots__ = ("accepted", "addresses", "spans")

    def __init__(self, tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...]) -> None:
        self.addresses = addresses
        # the first byte of each tensor and the byte after its last element; [] if it has none
        sizes = map(extent_of, tensors)
        self.spans = [(at, at + size) for at, size in zip(addresses, sizes, strict=True) if size]
        self.accepted: dict[Any, list[Any]] = {}  # kinds of calls that passed the guards

    def meets(self, first: int, end: int) -> bool:
        """Return whether the bytes from `first` to `end` are memory of the layer."""
        for start, stop in self.spans:
            if start < end and first < stop:
                return True
        return False


class _LayerArguments:
    """The arguments that layers of all kinds have; each class documents its own."""

    lora_a: Any
    lora_b: Any
    ranks: torch.Tensor
    scalings: torch.Tensor
    output_slices: tuple[int, ...]
    a_scales: torch.Tensor | None
    b_scales: torch.Tensor | None
    scale_block: ScaleBlock
    compute_dtype: torch.dtype | None


@dataclass(frozen=True, eq=False)
class LayerWeights(_LayerArguments, Handled):
    """Stacks of A and B with their ranks and scalings, and all that is computed once from them.

    Values may change in place at any time. Shapes, dtypes and devices must stay; `changed` finds
    tensors whose memory was exchanged for another kind.
    """

    _transient: ClassVar[tuple[str, ...]] = ("handle", "_footprint", "_derived")

    dtype: torch.dtype = field(init=False)  # of lora_a and lora_b
    device: torch.device = field(init=False)  # of every tensor
    num_slots: int = field(init=False)  # adapters that the stack has room for
    num_slices: int = field(init=False)  # projections fused in this layer
    max_rank: int = field(init=False)  # padded rank width of the stack
    in_features: int = field(init=False)  # width of x; the vocabulary of an embedding; 0 without A
    out_features: int = field(init=False)  # width of y, all slices together
    tensors: Mapping[str, torch.Tensor] = field(init=False, repr=False)
    # every tensor by name: lora_a, or lora_a[0], lora_a[1] ... of a tuple, and so on
    input_dtypes: tuple[torch.dtype, ...] = field(init=False, repr=False)
    # that x may have: the stacks' own, or for 8-bit stacks `COMPUTE_DTYPES`
    needs: frozenset[str] = field(init=False, repr=False)
    # features, see `lora_backends.features`, that a backend must have to run the layer
    _footprint: Footprint | None = field(init=False, repr=False)
    _derived: dict[Any, Any] = field(init=False, repr=False)  # by the function that made it
    _kinds: tuple[Any, ...] = field(init=False, repr=False)  # shape, dtype, device of each tensor

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Give each object, copies included, a footprint of its own."""
        self = super().__new__(cls)
        self.__dict__["_footprint"] = None
        return self

    @property
    def footprint(self) -> Footprint:
        """Where the tensors lie now: the same object for as long as none of them moves."""
        addresses, footprint = tuple(map(_data_ptr, self.tensors.values())), self._footprint
        if footprint is None or footprint.addresses != addresses:
            footprint = Footprint(tuple(self.tensors.values()), addresses)
            self._keep(_derived={}, _footprint=footprint)  # in this order: threads read both
        return footprint

    def derived(self, make: Callable[[Self], _Derived]) -> _Derived:
        """Return ``make(self)``, computed again only after a tensor has moved.

        `make` depends on shapes, strides, dtypes and addresses, never on values.
        """
        footprint = self._footprint
        if footprint is None or footprint.addresses != tuple(map(_data_ptr, self.tensors.values())):
            _ = self.footprint  # clears the derived values after a move
        # its key is the function: `make` is defined at the top level of a module
        made: _Derived | None = self._derived.get(make)
        if made is None:
            made = self._derived[make] = make(self)
        return made

    def requires_gradient(self, *others: torch.Tensor) -> bool:
        """Return whether a tensor of the layer, or another, requires a gradient."""
        return any(map(_requires_grad, (*others, *self.tensors.values())))

    def changed(self) -> list[str]:
        """Return the names of tensors that have another shape, dtype or device than they had."""
        kinds = zip(self.tensors.items(), self._kinds, strict=True)
        return [name for (name, tensor), kind in kinds if _kind_of(tensor) != kind]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        tensors = tuple(self.tensors.values())  # a loaded copy may be on another device
        self._keep(device=tensors[0].device, _kinds=tuple(map(_kind_of, tensors)))

    def _keep(self, **fields: Any) -> None:
        """Set fields of the frozen dataclass."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _keep_numbers(self) -> None:
        """Check scales and sizes that a caller may pass as lists, and keep them as tensors."""
        self._keep(
            output_slices=_as_widths(self.output_slices),
            scale_block=checked_block(self.scale_block),
        )
        _keep_compute_dtype(self)
        for name in ("scalings", "output_scales", "a_scales", "b_scales"):
            if name == "scalings" or getattr(self, name, None) is not None:
                numbers = _as_numbers(getattr(self, name), name, "float32")
                self._keep(**{name: numbers.to(self.device, torch.float32)})
        self._keep(ranks=_as_numbers(self.ranks, "ranks", "int32").to(self.device))

    def _keep_sizes(self, stacks: Mapping[str, torch.Tensor], **sizes: Any) -> None:
        """Check the ranks, and set the sizes: reading them off tensors takes longer."""
        _check_ranks(self.ranks, sizes["max_rank"])
        self._keep(ranks=self.ranks.to(torch.int32))
        named = {name: getattr(self, name, None) for name in _TABLES}
        tensors = {**stacks, **{name: each for name, each in named.items() if each is not None}}
        needs = set()
        if isinstance(self.lora_a, tuple) or isinstance(self.lora_b, tuple):
            needs.add(features.SLICE_TENSORS)
        if named["output_scales"] is not None:
            needs.add(features.OUTPUT_SCALES)
        if is_eight_bit(self.dtype):
            needs.add(features.EIGHT_BIT)
        self._keep(
            num_slots=self.ranks.shape[0],
            num_slices=len(self.output_slices),
            out_features=sum(self.output_slices),
            tensors=tensors,
            needs=frozenset(needs),
            _kinds=tuple(map(_kind_of, tensors.values())),
            **sizes,
        )


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _keep_compute_dtype(weights: LayerWeights) -> None:
    """Set compute_dtype and input_dtypes; refuse scales that are missing or superfluous."""
    has_scales = is_eight_bit(weights.dtype)
    for stack, scales in (("lora_a", "a_scales"), ("lora_b", "b_scales")):
        wanted = has_scales and getattr(weights, stack) is not None
        if wanted != (getattr(weights, scales) is not None):
            raise InvalidInputError(
                f"{scales} {'is missing' if wanted else 'is superfluous'}\n"
                f"  given: {stack} of {weights.dtype}\n"
                f"  allowed: scales with stacks of int8, float8_e4m3fn or float8_e5m2 alone"
            )
    dtype = (weights.compute_dtype or torch.bfloat16) if has_scales else weights.dtype
    if has_scales and dtype not in COMPUTE_DTYPES:
        raise InvalidInputError(
            f"compute_dtype cannot be used with 8-bit stacks\n  given: {shown(dtype)}\n"
            f"  allowed: float16, bfloat16 or float32"
        )
    object.__setattr__(weights, "compute_dtype", dtype)
    object.__setattr__(weights, "input_dtypes", COMPUTE_DTYPES if has_scales else (dtype,))


def check_stacks(stacks: Mapping[str, Any]) -> None:
    """Check that stacks are tensors of one dtype on one device that engines can read."""
    first_name, first = next(iter(stacks.items()))
    for name, tensor in stacks.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (*DTYPES, *LARGEST):
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise InvalidInputError(
                f"{name} is not a floating-point tensor\n  given: {kind}\n"
                f"  allowed: float16, bfloat16, float32 or float64, or with scales int8, "
                f"float8_e4m3fn or float8_e5m2"
            )
        check_usable(name, tensor)
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise InvalidInputError(
                f"{first_name} and {name} differ in dtype or device\n"
                f"  given: {first.dtype} on {first.device} and {tensor.dtype} on {tensor.device}\n"
                f"  allowed: one dtype and one device for all"
            )


def check_last_axis(name: str, tensor: torch.Tensor) -> None:
    """Check that neighbours along the last axis are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidInputError(
            f"the last axis of {name} is not contiguous\n"
            f"  given: strides {tuple(tensor.stride())}\n  to do: pass {name}.contiguous()"
        )


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


def check_usable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that engines, which read weights by address, would read wrongly."""
    reason = unusable(tensor)
    if reason:
        raise InvalidInputError(f"weights cannot be read by address\n  given: {name} {reason}")


def _as_numbers(values: Any, name: str, wanted: str) -> torch.Tensor:
    """Return `values` as a tensor of the kind of numbers that is wanted, in its own dtype."""
    if isinstance(values, torch.Tensor):
        check_usable(name, values)
    try:
        device = values.device if isinstance(values, torch.Tensor) else "cpu"
        tensor = torch.as_tensor(values, device=device)  # not on torch's default device
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
