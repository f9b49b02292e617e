"""Per-batch data: the tokens of each active slot, in pieces that threads share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_backends.backend import LoRAPlan
from lora_backends.batch import LoRABatch
from lora_backends.numba_cpu.config import MAX_SEGMENT

Ints = npt.NDArray[np.int64]


@dataclass(eq=False)
class NumbaPlan(LoRAPlan):
    """The tokens in order of their slots, cut into segments of one slot each.

    Slots ``[2, -1, 0, 2]`` make the order ``[2, 0, 3]`` and the segments
    ``[[0, 0, 1], [2, 1, 3]]``.
    """

    order: Ints  # [num_active_tokens] tokens with an adapter, by slot, then by position
    segments: Ints  # [num_segments, 3] slot, first and last + 1 in `order`; at most MAX_SEGMENT

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refill(self.order, self.segments)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.refill(self.order, self.segments)  # where a copy's arrays lie

    def refill(self, order: Ints, segments: Ints) -> None:
        """Take another batch's arrays."""
        self.order, self.segments = order, segments
        self.num_segments = len(segments)
        self.addresses = len(segments), segments.ctypes.data, order.ctypes.data


def order_and_segments(batch: LoRABatch) -> tuple[Ints, Ints]:
    """Return the two arrays of a `NumbaPlan`."""
    slots = batch.token_slots.numpy()
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    segments = []
    start = 0
    bounds = np.flatnonzero(np.diff(slots[order], append=-1)) + 1  # ends of runs
    for end in bounds.tolist():
        for first in range(start, end, MAX_SEGMENT):
            segments.append((slots[order[start]], first, min(first + MAX_SEGMENT, end)))
        start = end
    return np.ascontiguousarray(order), np.array(segments, dtype=np.int64).reshape(-1, 3)
