"""Devices: from text to `torch.device`, whether this machine has them, and graph captures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_backends.errors import InvalidInputError, shown


def as_device(device: torch.device | str) -> torch.device:
    """Return the device as its tensors name it: "cuda" gets its number, "cpu:0" loses it."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"no such device\n  given: {shown(device)}\n"
            f"  allowed: cpu, cuda, cuda:N, ...\n  {error}"
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")  # tensors on "cpu:0" say "cpu"
    # by number: the current device may change later, and a backend must not follow it
    if parsed.type == "cuda" and parsed.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return parsed


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph captures the current stream of the device; none does on a CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_reasons(name: str, device_types: Sequence[str], device: torch.device | str) -> list[str]:
    """Return why a backend for `device_types` cannot run on `device`; [] if it can."""
    parsed = as_device(device)
    reasons = []
    if parsed.type not in device_types:
        reasons.append(f"{name} runs on {', '.join(device_types)}, not on {parsed.type}.")
    if parsed.type == "cuda" and not torch.cuda.is_available():
        reasons.append("torch finds no CUDA or ROCm device here.")
    elif parsed.type == "cuda" and parsed.index >= torch.cuda.device_count():
        reasons.append(f"there is no {parsed}; torch finds {torch.cuda.device_count()} device(s).")
    return reasons
