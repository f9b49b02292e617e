"""Launching compiled kernels with little host time.

Triton binds and specializes the arguments of every launch anew, which takes 20 us of host time
where the kernel takes 3. A `Variant` fixes the constants once and looks the compiled kernel up by
what is left: dtypes, alignments and widths of the arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs

from lora_backends.checks import as_device
from lora_backends.gpu.direct import DirectLaunch

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run on the CPU, in Triton's interpreter."""


STAGES_ON_ROCM = 2
"""Steps of a loop in flight at most there: a workgroup of an MI300 has 64 KB for them."""


class Arguments(NamedTuple):
    """What a kernel is called with besides its constants."""

    tensors: tuple[torch.Tensor, ...]  # its pointers, by position
    numbers: tuple[int, ...]  # its ints, by position
    boxes: tuple[Any, ...] = ()  # between both: from `boxes_of`, or None where it loads none


class Variant:
    """A kernel with its constants and options, compiled once per kind of arguments.

    Args:
        kernel: a `triton.jit` function whose arguments are tensors, boxes, ints, constants, in
            that order.
        constants: the constants, by position.
        programs: for a row of the grid.
        flat: whether rows and programs share the grid's first axis, as `row_and_program` says.
        num_warps: warps of a program.
        num_stages: steps of a loop whose loads are in flight together.
        programmatic: launch before the kernel in front has ended (compute capability 9.0).
    """

    __slots__ = ("_compiled", "_constants", "_flat", "_kernel", "_options", "_programs")

    def __init__(
        self,
        kernel: Any,
        constants: tuple[Any, ...],
        programs: int,
        flat: bool,
        num_warps: int,
        num_stages: int,
        programmatic: bool = False,
    ) -> None:
        self._kernel = kernel
        self._programs, self._flat = programs, flat
        self._constants = constants
        if torch.version.hip is not None:
            num_stages = min(num_stages, STAGES_ON_ROCM)
        self._options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
        if programmatic:
            self._options["launch_pdl"] = True
        self._compiled: dict[Any, Any] = {}

    def launch(self, rows: int, arguments: Arguments) -> None:
        """Launch over a grid, on the device of the first tensor and its current stream.

        Args:
            rows: of the grid, at least 1.
            arguments: all but the constants.
        """
        grid = grid_of(self._programs, rows, self._flat)
        if INTERPRETED:
            tensors, numbers, boxes = arguments
            self._kernel[grid](*tensors, *boxes, *numbers, *self._constants)
            return
        device = arguments.tensors[0].device
        if is_current(device):
            self._launch(device.index, grid, arguments)
        else:
            with torch.cuda.device(device):
                self._launch(device.index, grid, arguments)

    def ready(self, arguments: Arguments, second: int) -> ReadyLaunch:
        """Return the kernel that `launch` has compiled for these arguments, to launch again.

        Args:
            arguments: of the launch.
            second: position of the tensor that moves besides the first one: their addresses are
                given anew at each launch. Dtypes and alignment to 16 bytes have to stay.
        """
        tensors, numbers, boxes = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        found = self._compiled[_kind(tensors, pointers, numbers)]
        arguments_now = (*pointers, *boxes, *numbers, *self._constants)
        return ReadyLaunch(found, arguments_now, second, self._programs, self._flat)

    def _launch(self, device: int, grid: tuple[int, int], arguments: Arguments) -> None:
        tensors, numbers, boxes = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        kind = _kind(tensors, pointers, numbers)
        found = self._compiled.get(kind)
        if found is None:
            self._compiled[kind] = self._kernel[grid](
                *tensors, *boxes, *numbers, *self._constants, **self._options
            )
        else:
            found_arguments = [*pointers, *boxes, *numbers, *self._constants]
            _run(found, grid, current_stream(device), found_arguments)


class ReadyLaunch:
    """A compiled kernel with all of its arguments but two addresses."""

    __slots__ = ("_arguments", "_compiled", "_direct", "_flat", "_programs", "_second")

    def __init__(
        self, compiled: Any, arguments: tuple[Any, ...], second: int, programs: int, flat: bool
    ) -> None:
        self._compiled, self._arguments, self._second = compiled, arguments, second
        self._programs, self._flat = programs, flat
        self._direct = DirectLaunch.of(compiled, arguments, second)

    def launch(self, rows: int, stream: int, first: int, second: int, told: bool) -> None:
        """Launch on a stream of the current device, with the addresses that move.

        `told`: whether a profiler is told of launches, from `are_launches_told`.
        """
        grid = grid_of(self._programs, rows, self._flat)
        if self._direct is not None and not told:
            self._direct.launch(*grid, stream, first, second)
        else:
            arguments = list(self._arguments)
            arguments[0], arguments[self._second] = first, second
            _run(self._compiled, grid, stream, arguments)


def grid_of(programs: int, rows: int, flat: bool) -> tuple[int, int]:
    """Return the grid: programs of one row follow each other."""
    return (programs * rows, 1) if flat else (programs, rows)


def is_current(device: torch.device) -> bool:
    """Return whether kernels for `device` may be launched as they are: it is the current one."""
    return not _several_devices() or device.index == torch.cuda.current_device()


def current_stream(device: int) -> int:
    """Return the address of a device's current stream."""
    stream: int = _stream_of()(device)
    return stream


def _kind(
    tensors: tuple[torch.Tensor, ...], pointers: list[int], numbers: tuple[int, ...]
) -> tuple[Any, ...]:
    """Return all that Triton specializes a kernel on, besides its constants."""
    return (
        tensors[0].device.index,
        *[tensor.dtype for tensor in tensors],
        *[pointer & 15 == 0 for pointer in pointers],
        *[n if n == 1 else (n & 15 == 0, n > 0x7FFFFFFF) for n in numbers],
    )


def are_launches_told() -> bool:
    """Return whether a profiler has to be told of every launch."""
    hooks = knobs.runtime
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


def _run(compiled: Any, grid: tuple[int, int], stream: int, arguments: list[Any]) -> None:
    enter = leave = metadata = None  # calling hooks that do nothing costs more than the launch
    if are_launches_told():
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        metadata = compiled.launch_metadata((*grid, 1), stream, *arguments)
    compiled.run(
        grid[0],
        grid[1],
        1,
        stream,
        compiled.function,
        compiled.packed_metadata,
        metadata,
        enter,
        leave,
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
