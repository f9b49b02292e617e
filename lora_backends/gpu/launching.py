"""Launching compiled kernels with little host time.

Triton binds and specializes the arguments of every launch anew, which takes 20 us of host time
where the kernel takes 3. A `Variant` fixes the constants once and looks the compiled kernel up by
what is left: dtypes, alignments and widths of the arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from triton import knobs

from lora_backends.checks import as_device

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run on the CPU, in Triton's interpreter."""


class Variant:
    """A kernel with its constants and options, compiled once per kind of arguments.

    Args:
        kernel: a `triton.jit` function whose arguments are tensors, ints, constants, in that order.
        constants: the constants, by position.
        num_warps: warps of a program.
        num_stages: steps of a loop whose loads are in flight together.
        programmatic: launch before the kernel in front has ended (compute capability 9.0).
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options")

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        num_warps: int,
        num_stages: int,
        programmatic: bool = False,
    ) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if programmatic:
            self._options["launch_pdl"] = True
        self._compiled: dict[Any, Any] = {}

    def launch(
        self, grid: tuple[int, int], tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]
    ) -> None:
        """Launch over a grid, on the device of the first tensor and its current stream.

        Args:
            grid: programs along the first and second axis, at least 1 each.
            tensors: the kernel's pointers, by position.
            numbers: its ints, by position.
        """
        if INTERPRETED:
            self._kernel[grid](*tensors, *numbers, *self._constants)
            return
        device = tensors[0].device.index
        if _several_devices() and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(device, grid, tensors, numbers)
        else:
            self._launch(device, grid, tensors, numbers)

    def _launch(
        self,
        device: int,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
    ) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            *[tensor.dtype for tensor in tensors],
            *[pointer & 15 == 0 for pointer in pointers],
            *[n if n == 1 else (n & 15 == 0, n > 0x7FFFFFFF) for n in numbers],
        )
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = self._kernel[grid](
                *tensors, *numbers, *self._constants, **self._options
            )
            return
        stream = _stream_of()(device)
        arguments = (*pointers, *numbers, *self._constants)
        found.run(
            grid[0],
            grid[1],
            1,
            stream,
            found.function,
            found.packed_metadata,
            found.launch_metadata((*grid, 1), stream, *arguments),
            knobs.runtime.launch_enter_hook,
            knobs.runtime.launch_exit_hook,
            *arguments,
        )


def interpreter_reasons(device: torch.device | str) -> list[str]:
    """Return why an engine written in Triton cannot run on `device`, besides its class data."""
    if as_device(device).type == "cpu" and not INTERPRETED:
        return ["Triton runs on the CPU only where TRITON_INTERPRET=1 is set before the import."]
    return []


def has_programmatic_launch(device: torch.device) -> bool:
    """Return whether a kernel may start before the one in front of it has ended."""
    if device.type != "cuda" or torch.version.hip is not None or INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache(maxsize=1)
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


@lru_cache(maxsize=1)
def _stream_of() -> Any:
    """Return Triton's function from a device's index to its current stream's address."""
    return triton.runtime.driver.active.get_current_stream
