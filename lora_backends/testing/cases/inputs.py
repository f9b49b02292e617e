"""The arguments of one call of a backend, laid out so that a wrong access shows.

Every tensor is a view inside a larger buffer: a read past it meets NaN, a write past it changes
a sentinel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lora_backends.batch import NO_ADAPTER, LoRABatch
from lora_backends.eight_bit import b_row_groups, spread
from lora_backends.weights import LoRAWeights

SENTINEL = 77.0
"""The value around a y; adding anything to it shows, at every dtype."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bit patterns of `tensor` as integers, so that NaN and -0.0 count.

    They are on the CPU: a contiguous tensor there shares its memory with the result.
    """
    values = tensor.detach().cpu().contiguous()
    return values.view(_BITS[values.element_size()]) if values.is_floating_point() else values


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bit patterns."""
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def guarded(values: torch.Tensor, pad: int, fill: float) -> torch.Tensor:
    """Return a copy of `values`, [..., n], as a view with `pad` columns of `fill` on either side.

    The last axis stays contiguous; the row stride is ``n + 2 * pad``. Where there are three axes or
    more, `pad` rows of `fill` follow those of each matrix.
    """
    if pad == 0:
        return values.clone(memory_format=torch.contiguous_format)
    *outer, rows, columns = values.shape
    below = pad if outer else 0
    # strides of a slice of a larger stack, as pools and vLLM pass them
    buffer = values.new_full((*outer, rows + below, columns + 2 * pad), fill)
    return buffer[..., :rows, pad : pad + columns].copy_(values)


def stack_of_a(weights: LoRAWeights) -> torch.Tensor:
    """Return A of all slices on the CPU, [num_slots, num_slices, max_rank, in_features].

    Values of 8 bits times their scales are float64, which holds the products exactly.
    """
    parts = [weights.a_of(s).detach().cpu() for s in range(weights.num_slices)]
    if weights.a_scales is not None:
        scales = weights.a_scales.cpu().double()
        parts = [
            part.double() * spread(scales[:, s], part.shape[1], part.shape[2], weights.scale_block)
            for s, part in enumerate(parts)
        ]
    return torch.stack(parts, 1)


def stack_of_b(weights: LoRAWeights) -> torch.Tensor:
    """Return B of all slices on the CPU, [num_slots, out_features, max_rank], as `stack_of_a`."""
    parts = [weights.b_of(s).detach().cpu() for s in range(weights.num_slices)]
    if weights.b_scales is not None:
        groups = b_row_groups(weights.output_slices, weights.scale_block)
        of_slices = torch.split_with_sizes(weights.b_scales.cpu().double(), groups, 1)
        parts = [
            part.double() * spread(scales, part.shape[1], part.shape[2], weights.scale_block)
            for part, scales in zip(parts, of_slices, strict=True)
        ]
    return torch.cat(parts, 1)


def on_each(stack: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a stack whose tensor, or whose tensors of every slice, are changed."""
    return tuple(map(change, stack)) if isinstance(stack, tuple) else change(stack)


class GuardedOutput:
    """A base_output inside a buffer of sentinels: guard rows and columns on all four sides.

    Args:
        values: [num_tokens, out_features], the first values.
        pad: guard columns on either side; the row stride is ``out_features + 2 * pad``.
    """

    def __init__(self, values: torch.Tensor, pad: int) -> None:
        tokens, width = values.shape
        self._buffer = values.new_full((tokens + 2, width + 2 * pad), SENTINEL)
        self._pad = pad
        self.view = self._buffer[1 : tokens + 1, pad : pad + width]
        self.view.copy_(values)

    def assert_untouched(self) -> None:
        """Raise AssertionError if a sentinel has changed."""
        changed = self._buffer.detach().cpu() != SENTINEL
        tokens, width = self.view.shape
        changed[1 : tokens + 1, self._pad : self._pad + width] = False
        if bool(changed.any()):
            row, column = (int(i) for i in changed.nonzero()[0])
            raise AssertionError(
                f"base_output is a view of [{tokens}, {width}] with row stride "
                f"{self.view.stride(0)}; the element at row {row - 1}, column "
                f"{column - self._pad}, outside of it, was written: "
                f"{self._buffer[row, column].item()} instead of {SENTINEL}"
            )


@dataclass(frozen=True, eq=False)
class LoRAInputs:
    """The arguments of one call, on one device; every property varies them by `replace`."""

    x: torch.Tensor  # [num_tokens, in_features]; rows without an adapter are NaN
    token_ids: torch.Tensor  # [num_tokens] int64, 0 <= id < in_features
    weights: LoRAWeights
    batch: LoRABatch
    base: torch.Tensor | None  # [num_tokens, out_features], the values of base_output
    x_pad: int  # guard columns beside x
    base_pad: int  # guard columns beside base_output

    @property
    def slots(self) -> list[Any]:
        """Slot per token, or a list of slots where the batch has several adapters per token."""
        values: list[Any] = self.batch.token_slots.tolist()
        return values

    def new_base(self) -> GuardedOutput | None:
        """Return a fresh guarded base_output; None if the case has none."""
        return None if self.base is None else GuardedOutput(self.base, self.base_pad)

    def new_view(self) -> torch.Tensor | None:
        """Return the view of a fresh guarded base_output; None if the case has none."""
        base = self.new_base()
        return None if base is None else base.view

    def replace(
        self,
        *,
        x: torch.Tensor | None = None,
        weights: LoRAWeights | None = None,
        slots: Sequence[int] | None = None,
    ) -> LoRAInputs:
        """Return these inputs with another x (copied into guards), weights or slots per token.

        Every token keeps its scale.
        """
        used = weights or self.weights
        token_slots = self.slots if slots is None else list(slots)
        return replace(
            self,
            x=self.x if x is None else guarded(x, self.x_pad, float("nan")),
            weights=used,
            # other weights may have another number of slots
            batch=LoRABatch(token_slots, used.num_slots, self.batch.token_scales),
        )

    def scaled(self, token_scales: torch.Tensor | None) -> LoRAInputs:
        """Return these inputs with other scales of the tokens, or without any."""
        batch = LoRABatch(self.batch.token_slots, self.batch.num_slots, token_scales)
        return replace(self, batch=batch)

    def select(self, rows: Sequence[int]) -> LoRAInputs:
        """Return the inputs of some tokens, in the given order."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.x.device)
        slots, scales = self.batch.token_slots[list(rows)], self.batch.token_scales
        return replace(
            self,
            x=guarded(self.x[index], self.x_pad, float("nan")),
            token_ids=self.token_ids[index],
            batch=LoRABatch(
                slots, self.weights.num_slots, None if scales is None else scales[list(rows)]
            ),
            base=None if self.base is None else self.base[index],
        )

    def without_base_and_bias(self) -> LoRAInputs:
        """Return the inputs whose result is the delta alone, times output_scales if there are."""
        return replace(self, base=None, weights=replace(self.weights, bias=None))

    def location(self, token: int, slice_index: int) -> str:
        """Describe whose value (token, slice) is: ``slot 2, slice 0 of rank 5, scaling 2.0``."""
        slot = self.slots[token]
        if isinstance(slot, list):
            return f"token {token}, slots {slot}, slice {slice_index}"
        if slot == NO_ADAPTER:
            return f"token {token} without adapter, slice {slice_index}"
        rank = int(self.weights.ranks[slot, slice_index])
        scaling = float(self.weights.scalings[slot, slice_index])
        scales = self.batch.token_scales
        factor = "" if scales is None else f", token scale {scales[token].item():g}"
        return (
            f"token {token}, slot {slot}, slice {slice_index}, rank {rank}, "
            f"scaling {scaling:g}{factor}"
        )

    def slice_of(self, column: int) -> int:
        """Return the slice that an output column belongs to."""
        offsets = self.weights.slice_offsets
        return next(s for s in range(self.weights.num_slices) if column < offsets[s + 1])
