"""Which adapter every token of a batch uses."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lora_backends.common.tensors import unusable
from lora_backends.errors import InvalidInputError, shown

NO_ADAPTER = -1
"""The slot of a token that uses no adapter."""

MOST = torch.iinfo(torch.int32).max
"""Slots at most, and tokens at most: plans hold both in int32."""


@dataclass(frozen=True, eq=False)
class LoRABatch:
    """The adapters of each token: the composition of a batch, independent of any layer.

    Four tokens, the second without an adapter, in a pool of three slots:

        LoRABatch([0, -1, 2, 2], num_slots=3)

    Two tokens; the first blends two adapters, the second has one:

        LoRABatch([[0, 2], [1, -1]], num_slots=3, token_scales=[[0.7, 0.3], [1.0, 0.0]])

    Args:
        token_slots: [num_tokens] integers (CPU tensor, list or array), each ``NO_ADAPTER`` or
            ``0 <= slot < num_slots``; or [num_tokens, n] for n adapters per token, whose deltas
            and biases are added. The values are copied.
        num_slots: number of slots of the weights that the batch will meet, at least 1.
        token_scales: finite numbers in the shape of token_slots, taken as float32, or None for 1:
            each multiplies the delta of its token and adapter, not the bias.

    Raises:
        InvalidInputError: wrong type, shape, device or range.
    """

    token_slots: Tensor  # [num_tokens] or [num_tokens, n >= 2] int64, CPU, contiguous
    num_slots: int  # >= 1
    token_scales: Tensor | None  # in the shape of token_slots, float32, CPU, contiguous
    num_tokens: int = field(init=False)  # tokens, those without an adapter included

    def __init__(
        self,
        token_slots: Tensor | Sequence[int] | Sequence[Sequence[int]] | Any,
        num_slots: int,
        token_scales: Tensor | Sequence[float] | Sequence[Sequence[float]] | Any | None = None,
    ) -> None:
        num_slots = _as_num_slots(num_slots)
        slots = _as_int64(token_slots, "token_slots", most_axes=2)
        _check_num_tokens(slots.shape[0])
        _check_range(slots, num_slots)
        scales = None if token_scales is None else _as_scales(token_scales, slots)
        if slots.ndim == 2 and slots.shape[1] == 1:
            slots, scales = slots[:, 0], None if scales is None else scales[:, 0]
        object.__setattr__(self, "token_slots", slots)
        object.__setattr__(self, "num_slots", num_slots)
        object.__setattr__(self, "token_scales", scales)
        object.__setattr__(self, "num_tokens", slots.shape[0])

    @classmethod
    def from_sequences(
        cls,
        slots: Tensor | Sequence[int] | Sequence[Sequence[int]] | Any,
        lengths: Tensor | Sequence[int] | Any,
        num_slots: int,
        scales: Tensor | Sequence[float] | Sequence[Sequence[float]] | Any | None = None,
    ) -> LoRABatch:
        """Make a batch of whole sequences: ``slots[i]`` repeated ``lengths[i]`` times, in order.

        Args:
            slots: [num_sequences] integers, or [num_sequences, n], as ``token_slots``.
            lengths: [num_sequences] integers >= 0, tokens per sequence.
            num_slots: as in the constructor.
            scales: in the shape of slots, as ``token_scales``, or None.

        Returns:
            A batch of ``sum(lengths)`` tokens.

        Raises:
            InvalidInputError: as the constructor, or unequal lengths, or a negative one.
        """
        slot_per_sequence = _as_int64(slots, "slots", most_axes=2)
        length_per_sequence = _as_int64(lengths, "lengths")
        if slot_per_sequence.shape[0] != length_per_sequence.shape[0]:
            raise InvalidInputError(
                f"slots and lengths differ in length\n"
                f"  given: {slot_per_sequence.shape[0]} slots, "
                f"{length_per_sequence.numel()} lengths\n"
                f"  allowed: one slot and one token count per sequence"
            )
        if bool((length_per_sequence < 0).any()):
            raise InvalidInputError(
                f"a sequence has a negative length\n"
                f"  given: lengths {length_per_sequence.tolist()}\n  allowed: 0 or more"
            )
        _check_num_tokens(sum(length_per_sequence.tolist()))  # an int64 sum may wrap around
        _check_range(slot_per_sequence, _as_num_slots(num_slots))
        per_sequence = None if scales is None else _as_scales(scales, slot_per_sequence)
        try:
            slots = slot_per_sequence.repeat_interleave(length_per_sequence, 0)
            if per_sequence is not None:
                per_sequence = per_sequence.repeat_interleave(length_per_sequence, 0)
        except RuntimeError as error:
            raise InvalidInputError(
                f"the sequences do not fit into memory\n  given: {length_per_sequence.sum()} tokens"
            ) from error
        return cls(slots, num_slots, per_sequence)

    @property
    def adapters_per_token(self) -> int:
        """Adapters that a token can have: 1, or n for token_slots of [num_tokens, n]."""
        return 1 if self.token_slots.ndim == 1 else self.token_slots.shape[1]

    def per_adapter(self, count: int) -> list[LoRABatch]:
        """Return `count` batches of one adapter per token, whose deltas add up to this batch's.

        Batch j has the j-th adapter of every token; those beyond `adapters_per_token` have none.
        """
        slots, scales = self.token_slots, self.token_scales
        if slots.ndim == 1:
            slots, scales = slots[:, None], None if scales is None else scales[:, None]
        empty = torch.full((self.num_tokens,), NO_ADAPTER, device="cpu")
        batches = []
        for j in range(count):
            has_column = j < slots.shape[1]
            column = slots[:, j] if has_column else empty
            scale = scales[:, j] if scales is not None and has_column else None
            if scales is not None and scale is None:
                scale = torch.ones(self.num_tokens, device="cpu")
            batches.append(LoRABatch(column, self.num_slots, scale))
        return batches

    def __repr__(self) -> str:
        scales = "" if self.token_scales is None else f", token_scales={self.token_scales.tolist()}"
        return f"LoRABatch({self.token_slots.tolist()}, num_slots={self.num_slots}{scales})"


def _as_num_slots(num_slots: Any) -> int:
    try:
        count = 0 if isinstance(num_slots, bool) else operator.index(num_slots)
    except TypeError:
        count = 0
    if not 1 <= count <= MOST:
        raise InvalidInputError(
            f"num_slots is not a number of slots\n  given: {shown(num_slots)}\n"
            f"  allowed: an int from 1 to {MOST}"
        )
    return count


def _check_num_tokens(num_tokens: int) -> None:
    if num_tokens > MOST:
        raise InvalidInputError(
            f"a batch has too many tokens\n  given: {num_tokens}\n  allowed: at most {MOST}"
        )


def _check_range(slots: Tensor, num_slots: int) -> None:
    if slots.numel() == 0:
        return
    values = slots.numpy()
    if values.min() < NO_ADAPTER or values.max() >= num_slots:
        wrong = (slots < NO_ADAPTER) | (slots >= num_slots)
        index = wrong.nonzero()[0].tolist()
        raise InvalidInputError(
            f"token_slots names a slot that does not exist\n"
            f"  given: {int(slots[tuple(index)])} at index {', '.join(map(str, index))}\n"
            f"  allowed: {NO_ADAPTER} (no adapter) or 0 to {num_slots - 1} (num_slots={num_slots})"
        )


def _as_int64(values: Any, name: str, most_axes: int = 1) -> Tensor:
    """Return a fresh [n] int64 CPU tensor, or [n, m >= 1] where `most_axes` is 2.

    Raises:
        InvalidInputError: what is wrong with `values`.
    """
    if type(values) is np.ndarray and values.dtype == np.int64 and values.ndim == 1:
        return torch.from_numpy(values.copy())  # as engines announce a batch, at every step
    shape = "one axis" if most_axes == 1 else "one axis, or [num_tokens, n] with n >= 1"
    tensor = _read(values, name, f"integers of {shape}")
    if tensor.ndim == 1 and tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    integral = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    has_shape = tensor.ndim == 1 or (tensor.ndim == most_axes == 2 and tensor.shape[1] > 0)
    if not has_shape or not integral:
        raise InvalidInputError(
            f"{name} is not a list of integers\n"
            f"  given: shape {list(tensor.shape)}, dtype {tensor.dtype}\n"
            f"  allowed: {shape}, an integer dtype"
        )
    result = tensor.to(torch.int64, copy=True).contiguous()
    if not tensor.dtype.is_signed and bool((result < 0).any()):
        raise InvalidInputError(f"{name} holds values beyond int64\n  given: dtype {tensor.dtype}")
    return result


def _as_scales(values: Any, slots: Tensor) -> Tensor:
    """Return token_scales as a fresh float32 CPU tensor in the shape of `slots`."""
    tensor = _read(values, "token_scales", f"numbers of shape {list(slots.shape)}")
    if tensor.is_complex() or tensor.dtype == torch.bool or tensor.shape != slots.shape:
        raise InvalidInputError(
            f"token_scales does not match token_slots\n"
            f"  given: shape {list(tensor.shape)}, dtype {tensor.dtype}\n"
            f"  allowed: {list(slots.shape)} numbers, one for each adapter of each token"
        )
    if tensor.requires_grad:
        raise InvalidInputError(
            f"token_scales requires a gradient, which no backend computes\n"
            f"  given: {list(tensor.shape)} {tensor.dtype}\n"
            f"  to do: pass token_scales.detach()"
        )
    scales = tensor.to(torch.float32, copy=True).contiguous()
    if not bool(scales.isfinite().all()):
        index = (~scales.isfinite()).nonzero()[0].tolist()
        raise InvalidInputError(
            f"token_scales holds a number that is not finite in float32\n"
            f"  given: {float(tensor[tuple(index)])} at index {', '.join(map(str, index))}\n"
            f"  allowed: finite numbers; a token without adapters has slot {NO_ADAPTER}"
        )
    return scales


def _read(values: Any, name: str, allowed: str) -> Tensor:
    """Return `values` as a CPU tensor in its own dtype."""
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise InvalidInputError(
            f"{name} is on a device\n  given: a tensor on {values.device}\n"
            f"  allowed: a CPU tensor, list or array, since plans are made on the CPU\n"
            f"  to do: keep the values of a batch on the host; {name}.cpu() waits for the device"
        )
    try:
        return _as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name} cannot be read\n  given: {type(values).__name__} ({error})\n"
            f"  allowed: a CPU tensor, list or array of {allowed}"
        ) from error


def _as_tensor(values: Any) -> Tensor:
    """Return `values` as a plain tensor on the CPU, whatever torch's default device.

    Raises:
        TypeError, ValueError, RuntimeError: they cannot be read.
    """
    if isinstance(values, Tensor):
        values = values.resolve_neg()
        reason = unusable(values)
        if reason:
            raise ValueError(f"it {reason}")
    elif isinstance(values, np.ndarray):
        if np.ma.is_masked(values):
            raise ValueError("it has masked values; pass .filled(...)")
        values = np.ascontiguousarray(values)  # torch takes no negative strides
    return torch.as_tensor(values, device="cpu")
