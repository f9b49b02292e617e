"""How the stacks of a pool are stored, and the parts that all of them have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StackFormat(NamedTuple):
    """How the stacks of a pool are stored."""

    num_slots: int  # of every stack
    dtype: torch.dtype  # the model's
    eight_bit: torch.dtype | None  # of the matrices; None: they have `dtype`
    device: torch.device

    @property
    def stored(self) -> torch.dtype:
        """The dtype of the matrices."""
        return self.eight_bit or self.dtype

    def matrices(self, shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> dict[str, Any]:
        """Return zero matrices as arguments of a stack, with their scales where they have 8 bits.

        The shapes are without the axis of slots.
        """
        shapes = {"a": (self.num_slots, *shape_a), "b": (self.num_slots, *shape_b)}
        like: dict[str, Any] = {"dtype": self.stored, "device": self.device}
        parts: dict[str, Any] = {f"lora_{x}": torch.zeros(s, **like) for x, s in shapes.items()}
        if self.eight_bit is not None:
            rows = {"a": (*shapes["a"][:-1], 1), "b": (*shapes["b"][:-1], 1)}  # a scale for each
            like["dtype"] = torch.float32
            parts |= {f"{x}_scales": torch.ones(s, **like) for x, s in rows.items()}
            parts["compute_dtype"] = self.dtype
        return parts


def bytes_of(*tensors: Tensor | None) -> int:
    """Return the bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def bytes_in(matrices: Any) -> int:
    """Return the bytes of the matrices and scales of a stack, or of a staged delta."""
    return bytes_of(matrices.lora_a, matrices.lora_b, matrices.a_scales, matrices.b_scales)


def tensors_in(stacks: Iterable[Any]) -> list[Tensor]:
    """Return the tensors of stacks, without tables of ranks."""
    parts = ("lora_a", "lora_b", "a_scales", "b_scales", "bias", "output_scales")
    tensors = (getattr(stack, part, None) for stack in stacks for part in parts)
    return [tensor for tensor in tensors if tensor is not None]


def write_matrices(stack: Any, slot: int, delta: Any) -> None:
    """Write the matrices of a staged delta and their scales into a slot of its stack."""
    # Rows and columns above the delta's rank keep old values: kernels read up to the rank.
    stack.lora_a[slot, ..., : delta.rank, :] = delta.lora_a
    stack.lora_b[slot, ..., : delta.rank] = delta.lora_b
    if stack.a_scales is not None and delta.a_scales is not None:
        stack.a_scales[slot, ..., : delta.rank, :] = delta.a_scales
        stack.b_scales[slot] = delta.b_scales
