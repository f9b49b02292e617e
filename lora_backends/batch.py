"""Which adapter every token of a batch uses."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lora_backends.errors import InvalidInputError, shown
from lora_backends.tensors import unusable

NO_ADAPTER = -1
"""The slot of a token that uses no adapter."""

MOST = torch.iinfo(torch.int32).max
"""Slots at most, and tokens at most: plans hold both in int32."""


@dataclass(frozen=True, eq=False)
class LoRABatch:
    """One slot per token: the composition of a batch, independent of any layer.

    Four tokens, of which the second has no adapter, in a pool of three slots:

        LoRABatch([0, -1, 2, 2], num_slots=3)

    Args:
        token_slots: [num_tokens] integers (CPU tensor, list or array), each ``NO_ADAPTER`` or
            ``0 <= slot < num_slots``. The values are copied.
        num_slots: number of slots of the weights that the batch will meet, at least 1.

    Raises:
        InvalidInputError: wrong type, shape, device or range.
    """

    token_slots: torch.Tensor  # [num_tokens] int64, CPU, contiguous, -1 or 0 <= slot < num_slots
    num_slots: int  # >= 1

    def __init__(self, token_slots: torch.Tensor | Sequence[int] | Any, num_slots: int) -> None:
        num_slots = _as_num_slots(num_slots)
        slots = _as_int64(token_slots, "token_slots")
        _check_num_tokens(slots.numel())
        _check_range(slots, num_slots)
        object.__setattr__(self, "token_slots", slots)
        object.__setattr__(self, "num_slots", num_slots)

    @classmethod
    def from_sequences(
        cls,
        slots: torch.Tensor | Sequence[int] | Any,
        lengths: torch.Tensor | Sequence[int] | Any,
        num_slots: int,
    ) -> LoRABatch:
        """Make a batch of whole sequences: ``slots[i]`` repeated ``lengths[i]`` times, in order.

        Args:
            slots: [num_sequences] integers, as ``token_slots``.
            lengths: [num_sequences] integers >= 0, tokens per sequence.
            num_slots: as in the constructor.

        Returns:
            A batch of ``sum(lengths)`` tokens.

        Raises:
            InvalidInputError: as the constructor, or unequal lengths, or a negative one.
        """
        slot_per_sequence = _as_int64(slots, "slots")
        length_per_sequence = _as_int64(lengths, "lengths")
        if slot_per_sequence.shape != length_per_sequence.shape:
            raise InvalidInputError(
                f"slots and lengths differ in length\n"
                f"  given: {slot_per_sequence.numel()} slots, {length_per_sequence.numel()} lengths"
                f"\n  allowed: one slot and one token count per sequence"
            )
        if bool((length_per_sequence < 0).any()):
            raise InvalidInputError(
                f"a sequence has a negative length\n"
                f"  given: lengths {length_per_sequence.tolist()}\n  allowed: 0 or more"
            )
        _check_num_tokens(sum(length_per_sequence.tolist()))  # an int64 sum may wrap around
        _check_range(slot_per_sequence, _as_num_slots(num_slots))
        try:
            slots = slot_per_sequence.repeat_interleave(length_per_sequence)
        except RuntimeError as error:
            raise InvalidInputError(
                f"the sequences do not fit into memory\n  given: {length_per_sequence.sum()} tokens"
            ) from error
        return cls(slots, num_slots)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those without an adapter included."""
        return self.token_slots.shape[0]

    def __repr__(self) -> str:
        return f"LoRABatch({self.token_slots.tolist()}, num_slots={self.num_slots})"


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


def _check_range(slots: torch.Tensor, num_slots: int) -> None:
    wrong = (slots < NO_ADAPTER) | (slots >= num_slots)
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0, 0])
        raise InvalidInputError(
            f"token_slots names a slot that does not exist\n"
            f"  given: {int(slots[index])} at index {index}\n"
            f"  allowed: {NO_ADAPTER} (no adapter) or 0 to {num_slots - 1} (num_slots={num_slots})"
        )


def _as_int64(values: torch.Tensor | Sequence[int] | Any, name: str) -> torch.Tensor:
    """Return a fresh [n] int64 CPU tensor, or raise what is wrong with `values`."""
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise InvalidInputError(
            f"{name} is on a device\n  given: a tensor on {values.device}\n"
            f"  allowed: a CPU tensor, list or array, since plans are made on the CPU\n"
            f"  to do: keep the slots of a batch on the host; {name}.cpu() waits for the device"
        )
    try:
        tensor = _as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{name} cannot be read as integers\n  given: {type(values).__name__} ({error})\n"
            f"  allowed: a one-dimensional CPU tensor, list or array of ints"
        ) from error
    if tensor.ndim == 1 and tensor.numel() == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    integral = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.ndim != 1 or not integral:
        raise InvalidInputError(
            f"{name} is not a list of integers\n"
            f"  given: shape {list(tensor.shape)}, dtype {tensor.dtype}\n"
            f"  allowed: one dimension, an integer dtype"
        )
    result = tensor.to(torch.int64, copy=True).contiguous()
    if not tensor.dtype.is_signed and bool((result < 0).any()):
        raise InvalidInputError(f"{name} holds values beyond int64\n  given: dtype {tensor.dtype}")
    return result


def _as_tensor(values: Any) -> torch.Tensor:
    """Return `values` as a plain tensor on the CPU, whatever torch's default device.

    Raises:
        TypeError, ValueError, RuntimeError: they cannot be read.
    """
    if isinstance(values, torch.Tensor):
        values = values.resolve_neg()
        reason = unusable(values)
        if reason:
            raise ValueError(f"it {reason}")
    elif isinstance(values, np.ndarray):
        if np.ma.is_masked(values):
            raise ValueError("it has masked values; pass .filled(...)")
        values = np.ascontiguousarray(values)  # torch takes no negative strides
    return torch.as_tensor(values, device="cpu")
