"""The copy of a plan to the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 32
"""int32 values that every table of a plan starts at a multiple of: 128 bytes."""


def aligned(count: int) -> int:
    """Return the least multiple of `ALIGNMENT` that is at least `count`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def sort_key(
    token_slots: npt.NDArray[np.int64], num_slots: int
) -> npt.NDArray[np.int64] | npt.NDArray[np.int16]:
    """Return the slots in a type that sorts fast: numpy sorts 16-bit integers by radix."""
    return token_slots.astype(np.int16) if num_slots < 1 << 15 else token_slots


def staging_buffer(size: int, device: torch.device) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
    """Return memory on the host for a copy to `device`, as a tensor and as an array.

    It is pinned, and new each time: torch's allocator reuses it only after the copies from it.

    Args:
        size: int32 values.
        device: where the plan lives.

    Returns:
        The memory, twice: ``tensor.to(device, non_blocking=True)`` sends it.
    """
    staged = torch.empty(size, dtype=torch.int32, pin_memory=device.type != "cpu")
    return staged, staged.numpy()
