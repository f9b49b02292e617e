"""Captures, and a second stream beside the current one; the CPU has neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of the device, None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launch on another stream, behind all that the current one has been given so far."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def join(stream: torch.cuda.Stream | None) -> None:
    """Let the current stream wait for another one."""
    if stream is not None:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
