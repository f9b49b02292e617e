"""The stacked LoRA weights of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from lora_backends.eight_bit import (
    COMPUTE_DTYPES,
    LARGEST,
    ScaleBlock,
    b_row_groups,
    checked_block,
    groups_of,
    quantized,
    spread,
)
from lora_backends.errors import InvalidInputError, shown
from lora_backends.layer_weights import (
    DTYPES,
    LayerWeights,
    check_last_axis,
    check_stacks,
    check_usable,
)

Stack: TypeAlias = Any
"""A or B of every slot: one tensor for all slices, a tuple of one for each, or None. Most code
meets one tensor, so types do not tell the three apart; `a_of` and `b_of` read either form."""


@dataclass(frozen=True, eq=False)
class LoRAWeights(LayerWeights):
    """The A and B matrices of every slot for one layer, with rank and scaling per slice.

    A fused qkv layer of widths (8, 2, 2) over 16 inputs, 4 slots of rank at most 2:

        LoRAWeights(
            lora_a,    # [4, 3, 2, 16]
            lora_b,    # [4, 12, 2]
            ranks,     # [4, 3] int32, e.g. [[2, 0, 2], ...]: slot 0 has no adapter on k
            scalings,  # [4, 3] float32
            output_slices=(8, 2, 2),
        )

    Either stack may be a tuple of one tensor per slice, here [4, 2, 16] for A, and [4, 8, 2],
    [4, 2, 2] and [4, 2, 2] for B. Either may be None where only the other half runs, in
    `run_lora_a` or `run_lora_b`.

    Stacks of int8, float8_e4m3fn or float8_e5m2 have scales, see `lora_backends.eight_bit`; the
    value of an element is its stored value times the scale of its group. x and base_output are
    then float16, bfloat16 or float32. Scales beyond a slot's rank may be anything.

    Tensors are kept, not copied, so a pool may rewrite a slot in place, its rank and scaling
    included; `ranks`, `scalings` and `output_scales` are copied where their dtype or device has to
    change. Values beyond a slot's own rank may be anything, NaN included.

    Raises:
        InvalidInputError: shapes, dtypes or devices contradict each other, or a rank is not in
            0..max_rank. Reading the ranks waits for the device once, here.
    """

    lora_a: Stack  # [num_slots, num_slices, max_rank, in_features], or one
    # [num_slots, max_rank, in_features] per slice
    lora_b: Stack  # [num_slots, out_features, max_rank], or one [num_slots, width of the
    # slice, max_rank] per slice
    ranks: torch.Tensor  # [num_slots, num_slices] int32, 0..max_rank; 0: slice not adapted
    scalings: torch.Tensor  # [num_slots, num_slices] float32
    output_slices: tuple[int, ...]  # one width > 0 per slice, sum == out_features
    bias: torch.Tensor | None = None  # [num_slots, out_features], added as it is
    output_scales: torch.Tensor | None = None  # [num_slots, out_features] float32: multiplies
    # base_output plus delta, not the bias (DoRA)
    a_scales: torch.Tensor | None = None  # [num_slots, num_slices, groups of max_rank, groups of
    # in_features] float32, of an 8-bit lora_a
    b_scales: torch.Tensor | None = None  # [num_slots, groups of rows summed over slices, groups of
    # max_rank] float32, of an 8-bit lora_b; a group of rows lies within a slice
    scale_block: ScaleBlock = (1, None)  # rows and columns that share a scale; None: all
    compute_dtype: torch.dtype | None = None  # of a result without base_output: of 8-bit stacks as
    # given, or bfloat16; of all others their own dtype

    slice_offsets: tuple[int, ...] = field(init=False)
    # first output column of every slice, then out_features: num_slices + 1 ints

    def __post_init__(self) -> None:
        for name in ("lora_a", "lora_b"):
            if isinstance(getattr(self, name), list):
                self._keep(**{name: tuple(getattr(self, name))})
        stacks = _stacks(self)
        check_stacks(stacks)
        first = next(iter(stacks.values()))
        self._keep(dtype=first.dtype, device=first.device)
        _check_bias(self.bias, first)
        for name in ("scalings", "a_scales", "b_scales"):
            if getattr(getattr(self, name), "requires_grad", False):
                raise InvalidInputError(
                    f"{name} requires a gradient, which no backend computes\n"
                    f"  to do: pass {name}.detach()"
                )
        self._keep_numbers()
        _, max_rank, inputs = _common_sizes(self)
        offsets = tuple(accumulate(self.output_slices, initial=0))
        self._keep(slice_offsets=offsets)
        _check_shapes(self, stacks)
        self._keep_sizes(stacks, max_rank=max_rank, in_features=inputs)

    def a_of(self, s: int) -> torch.Tensor:
        """Return A of slice s, [num_slots, max_rank, in_features], a view."""
        a = self.lora_a
        part: torch.Tensor = a[s] if isinstance(a, tuple) else a[:, s]
        return part

    def b_of(self, s: int) -> torch.Tensor:
        """Return B of slice s, [num_slots, width of the slice, max_rank], a view."""
        b, first, end = self.lora_b, *self.slice_offsets[s : s + 2]
        part: torch.Tensor = b[s] if isinstance(b, tuple) else b[:, first:end]
        return part

    def a_values(self, slot: int, s: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return A of a slot and slice, [rank, in_features], scales applied in `dtype`."""
        values = self.a_of(s)[slot, :rank].to(dtype)
        if self.a_scales is None:
            return values
        return values * spread(self.a_scales[slot, s], rank, self.in_features, self.scale_block)

    def b_values(self, slot: int, s: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """Return B of a slot and slice, [width of the slice, rank], scales applied in `dtype`."""
        values = self.b_of(s)[slot, :, :rank].to(dtype)
        if self.b_scales is None:
            return values
        groups = b_row_groups(self.output_slices, self.scale_block)
        first = sum(groups[:s])
        scales = self.b_scales[slot, first : first + groups[s]]
        return values * spread(scales, values.shape[0], rank, self.scale_block)

    def _quantized(self, dtype: torch.dtype, block: ScaleBlock) -> dict[str, Any]:
        """Return the fields that `quantize_weights` replaces, each slice on its own."""
        changes: dict[str, Any] = {"scale_block": block}
        within = torch.arange(self.max_rank, device=self.device) < self.ranks[..., None]
        for name, of, axis in (("lora_a", self.a_of, -1), ("lora_b", self.b_of, -2)):
            stack = getattr(self, name)
            if stack is None:
                continue
            parts = [
                quantized(of(s), within[:, s].unsqueeze(axis), dtype, block)
                for s in range(self.num_slices)
            ]
            stored, scales = zip(*parts, strict=True)
            if isinstance(stack, tuple):
                changes[name] = stored
            elif name == "lora_a":
                changes[name] = torch.stack(stored, 1)
            else:
                changes[name] = torch.cat([part.view(torch.int8) for part in stored], 1).view(dtype)
            joined = torch.stack(scales, 1) if name == "lora_a" else torch.cat(scales, 1)
            changes[f"{name[-1]}_scales"] = joined
        return changes

    def __repr__(self) -> str:
        return (
            f"LoRAWeights(num_slots={self.num_slots}, max_rank={self.max_rank}, "
            f"in_features={self.in_features}, output_slices={self.output_slices}, "
            f"dtype={self.dtype}, device={self.device}, bias={self.bias is not None}, "
            f"output_scales={self.output_scales is not None})"
        )


def _stacks(weights: LoRAWeights) -> dict[str, Any]:
    """Return the stacks by name, those of a tuple one by one."""
    if weights.lora_a is None and weights.lora_b is None:
        raise InvalidInputError(
            "lora_a and lora_b are both None\n  allowed: one of them, for a layer of which only "
            "the other half runs"
        )
    stacks: dict[str, Any] = {}
    for name, stack in (("lora_a", weights.lora_a), ("lora_b", weights.lora_b)):
        if isinstance(stack, tuple):
            stacks |= {f"{name}[{s}]": part for s, part in enumerate(stack)}
            if not stack:
                raise InvalidInputError(
                    f"{name} is an empty tuple\n  allowed: one tensor per slice"
                )
        elif stack is not None:
            stacks[name] = stack
    return stacks


def _check_bias(bias: Any, first: torch.Tensor) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.dtype not in DTYPES:
        kind = bias.dtype if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise InvalidInputError(
            f"bias is not a floating-point tensor\n  given: {kind}\n"
            f"  allowed: float16, bfloat16, float32 or float64"
        )
    check_usable("bias", bias)
    if bias.device != first.device:
        raise InvalidInputError(
            f"bias is on another device\n  given: {bias.device}, the weights are on "
            f"{first.device}\n  allowed: one device for all tensors of a layer"
        )


def _check_shapes(weights: LoRAWeights, stacks: Mapping[str, torch.Tensor]) -> None:
    """Check that the shapes fit together."""
    widths = weights.output_slices
    slots, rank, inputs = _common_sizes(weights)
    num_slices, out = len(widths), sum(widths)
    expected: dict[str, list[int]] = {
        "ranks": [slots, num_slices],
        "scalings": [slots, num_slices],
        "bias": [slots, out],
        "output_scales": [slots, out],
        "a_scales": [
            slots,
            num_slices,
            groups_of(rank, weights.scale_block[0]),
            groups_of(inputs, weights.scale_block[1]),
        ],
        "b_scales": [
            slots,
            sum(b_row_groups(widths, weights.scale_block)),
            groups_of(rank, weights.scale_block[1]),
        ],
    }
    a, b = weights.lora_a, weights.lora_b
    for name, stack in (("lora_a", a), ("lora_b", b)):
        if isinstance(stack, tuple) and len(stack) != num_slices:
            raise InvalidInputError(
                f"output_slices does not match {name}\n"
                f"  given: {num_slices} widths {widths}, {len(stack)} tensors in {name}\n"
                f"  allowed: one width and one tensor per slice"
            )
    if isinstance(a, tuple):
        expected |= {f"lora_a[{s}]": [slots, rank, inputs] for s in range(num_slices)}
    elif a is not None and a.shape[1] != num_slices:
        raise InvalidInputError(
            f"output_slices does not match lora_a\n"
            f"  given: {num_slices} widths {widths}, lora_a {list(a.shape)}\n"
            f"  allowed: one width per slice, {a.shape[1]} here"
        )
    if isinstance(b, tuple):
        expected |= {f"lora_b[{s}]": [slots, width, rank] for s, width in enumerate(widths)}
    elif b is not None:
        expected["lora_b"] = [slots, out, rank]
    tables = ("ranks", "scalings", "bias", "output_scales", "a_scales", "b_scales")
    tensors = {**stacks, **{name: getattr(weights, name) for name in tables}}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if name in expected and list(tensor.shape) != expected[name]:
            raise InvalidInputError(
                f"{name} has the wrong shape\n  given: {list(tensor.shape)}\n"
                f"  allowed: {expected[name]}, from {_described(weights)} and "
                f"output_slices {widths}"
            )
        if name not in ("ranks", "scalings"):
            check_last_axis(name, tensor)


def _common_sizes(weights: LoRAWeights) -> tuple[int, int, int]:
    """Return num_slots, max_rank and in_features (0 without A) from the first stack given."""
    a, b = weights.lora_a, weights.lora_b
    if a is not None:
        axes, shape = (3, a[0].shape) if isinstance(a, tuple) else (4, a.shape)
        allowed = "[num_slots, max_rank, in_features]"
        if not isinstance(a, tuple):
            allowed = "[num_slots, num_slices, max_rank, in_features]"
        if len(shape) != axes:
            raise InvalidInputError(
                f"lora_a has the wrong number of axes\n  given: {list(shape)}\n  allowed: {allowed}"
            )
        return shape[0], shape[-2], shape[-1]
    shape = b[0].shape if isinstance(b, tuple) else b.shape
    if len(shape) != 3:
        raise InvalidInputError(
            f"lora_b has the wrong number of axes\n  given: {list(shape)}\n"
            f"  allowed: [num_slots, out_features, max_rank]"
        )
    return shape[0], shape[-1], 0


def _described(weights: LoRAWeights) -> str:
    """Return the stack that sizes are taken from, for an error message."""
    name, stack = ("lora_a", weights.lora_a)
    if stack is None:
        name, stack = ("lora_b", weights.lora_b)
    if isinstance(stack, tuple):
        return f"{name}[0] {list(stack[0].shape)}"
    return f"{name} {list(stack.shape)}"


def quantize_weights(weights: Any, dtype: torch.dtype, scale_block: ScaleBlock = (1, None)) -> Any:
    """Return a layer with 8-bit stacks in place of 16- or 32-bit ones; all else is shared.

    The scale of a group is its largest magnitude over the largest value of `dtype` (127, 448 or
    57344), and 1 for zeros; stored = value / scale, int8 rounded to nearest, half to even. Values
    beyond a rank may be anything, and become zero.

    Args:
        weights: a `LoRAWeights` or `ExpertWeights` of float16, bfloat16 or float32.
        dtype: int8, float8_e4m3fn or float8_e5m2. int8 with a scale per row is the most exact.
        scale_block: (rows, columns) of a matrix that share a scale; None: all.

    Returns:
        A layer of the same class, whose compute_dtype is the dtype of `weights`.

    Raises:
        InvalidInputError: no layer, another dtype, a layer that is quantised, or one that holds
            NaN or infinity within a rank.
    """
    if not hasattr(weights, "_quantized"):
        raise InvalidInputError(
            f"quantize_weights takes the weights of a layer\n  given: {shown(weights)}\n"
            f"  allowed: LoRAWeights or ExpertWeights"
        )
    fits = isinstance(dtype, torch.dtype) and dtype in LARGEST
    if not fits or weights.dtype not in COMPUTE_DTYPES:
        raise InvalidInputError(
            f"quantize_weights makes 8-bit stacks of wider ones\n"
            f"  given: {weights.dtype} to {shown(dtype)}\n"
            f"  allowed: float16, bfloat16 or float32 to int8, float8_e4m3fn or float8_e5m2"
        )
    changes = weights._quantized(dtype, checked_block(scale_block))
    return replace(weights, **changes, compute_dtype=weights.dtype)
