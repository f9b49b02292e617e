"""The figures of a GPU that tile sizes depend on."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """The figures that the rules read."""

    multiprocessors: int
    shared_bytes: int  # of shared memory that one program may take

    def as_on_h200(self, rows: int) -> int:
        """Return the rows of a grid that keep an H200 as busy as `rows` keep this GPU.

        The rules are fitted to an H200, so they count rows as it would. A lone row stays alone,
        since it waits for loads that follow each other on any GPU.

        >>> Gpu(66, 0).as_on_h200(16), Gpu(264, 0).as_on_h200(16), Gpu(66, 0).as_on_h200(1)
        (32, 8, 1)
        """
        return rows if rows == 1 else max(2, rows * H200.multiprocessors // self.multiprocessors)


H200 = Gpu(multiprocessors=132, shared_bytes=227 * 1024)
"""The GPU that the rules are fitted to; an H100 has the same figures."""


def gpu_of(device: torch.device | str) -> Gpu:
    """Return the figures of a device; the CPU interprets kernels with the sizes for an H200."""
    device = torch.device(device)
    if device.type != "cuda":
        return H200
    card = torch.cuda.get_device_properties(device)
    # on CUDA a kernel may ask for more than the default; ROCm has no such limit beside it
    shared = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)
    return Gpu(card.multi_processor_count, shared)
