"""What the current stream does; the CPU has none."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
