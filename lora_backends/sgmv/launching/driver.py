"""Launches of compiled kernels by the CUDA driver.

Triton's launcher takes every constant of a kernel anew with each launch, and parses all arguments.
Here they lie in memory as the driver reads them, and a launch writes the few that have changed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_size_t, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_CONFIG = struct.Struct(
    "=7I4xQQI4x"
)  # CUlaunchConfig: grid, block, shared bytes, stream, attributes
_ATTRIBUTE = struct.Struct("=I4xI60x")  # CUlaunchAttribute: which, its value
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STREAM = 32 // 8  # place of the stream in a configuration, in words
_ARGUMENTS = (_CONFIG.size + _ATTRIBUTE.size) // 8  # words in front of the arguments
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SCRATCH = 2  # addresses that Triton adds to a kernel's parameters; ours use no such memory


class Driver(NamedTuple):
    """Functions of the CUDA driver."""

    launch: Any  # cuLaunchKernelEx
    parameter: Any  # cuFuncGetParamInfo


@lru_cache(maxsize=1)
def cuda_driver() -> Driver | None:
    """Return the driver; None on ROCm, and with one older than CUDA 12.4."""
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, parameter = library.cuLaunchKernelEx, library.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    launch.argtypes = [c_void_p] * 4
    parameter.argtypes = [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]
    return Driver(launch, parameter)


class _Frame(NamedTuple):
    """The memory of one launch: configuration, attribute, arguments, addresses of the arguments."""

    halves: memoryview  # of 4 bytes; the first three are the grid
    words: memoryview  # of 8 bytes
    config_at: int
    addresses_at: int


class DriverKernel:
    """A compiled kernel with all of its arguments but two addresses.

    Args:
        launch: cuLaunchKernelEx.
        function: address of the kernel (CUfunction).
        grid: of one row.
        axis: of the grid along which rows follow each other.
        threads: of a program.
        shared_bytes: of a program.
        programmatic: launch before the kernel in front has ended.
        arguments: of the kernel, without constants.
        second: place of the address that changes besides the first argument's.
    """

    __slots__ = (
        *("_arguments", "_axis", "_frames", "_function"),
        *("_launch", "_programs", "_second", "_sizes"),
    )

    def __init__(
        self,
        launch: Any,
        function: int,
        grid: tuple[int, int, int],
        axis: int,
        threads: int,
        shared_bytes: int,
        programmatic: bool,
        arguments: Sequence[int],
        second: int,
    ) -> None:
        self._launch, self._function = launch, function
        self._axis, self._programs, self._second = axis, grid[axis], _ARGUMENTS + second
        self._sizes = (*grid, threads, 1, 1, shared_bytes), int(programmatic)
        self._arguments = (*arguments, *[0] * _SCRATCH)
        self._frames: list[_Frame] = []  # that no launch uses

    def launch(self, rows: int, stream: int, first: int, second: int) -> bool:
        """Launch on a stream of the current device.

        Returns False, with nothing run, in a thread that has no CUDA context yet; Triton's launcher
        gives it one.

        Args:
            rows: rows of the grid, at least 1.
            stream: its address.
            first: the address of the first tensor.
            second: the address of the other tensor that changes.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        try:
            frame = self._frames.pop()  # one step: no other thread gets it, too
        except IndexError:
            frame = self._new_frame()
        halves, words, config_at, addresses_at = frame
        halves[self._axis] = self._programs * rows
        words[_STREAM], words[_ARGUMENTS], words[self._second] = stream, first, second
        status = self._launch(config_at, self._function, addresses_at, None)
        self._frames.append(frame)
        if status not in (0, _NO_CONTEXT):
            raise RuntimeError(f"the CUDA driver refuses a launch: error {status} (CUresult)")
        return not status

    def _new_frame(self) -> _Frame:
        sizes, attributes = self._sizes
        n = len(self._arguments)
        memory = bytearray(8 * (_ARGUMENTS + 2 * n))
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _CONFIG.pack_into(memory, 0, *sizes, 0, at + _CONFIG.size, attributes)
        _ATTRIBUTE.pack_into(memory, _CONFIG.size, _PROGRAMMATIC, 1)
        # of an argument of 4 bytes the driver reads the lower half
        arguments_at = at + 8 * _ARGUMENTS
        addresses = [arguments_at + 8 * i for i in range(n)]
        struct.pack_into(f"={n}q{n}Q", memory, 8 * _ARGUMENTS, *self._arguments, *addresses)
        view = memoryview(memory)
        return _Frame(view.cast("I"), view.cast("Q"), at, arguments_at + 8 * n)


def driver_kernel(
    compiled: Any,
    pointers: Sequence[int],
    numbers: Sequence[int],
    second: int,
    grid: tuple[int, int, int],
    axis: int,
) -> DriverKernel | None:
    """Return a kernel that Triton compiled for these arguments, or None if Triton must launch it.

    None: without `cuda_driver`, or if the kernel's parameters are other than expected: the
    addresses, each number in 4 bytes or, if it is wider, in 8, and two addresses of Triton's own
    memory, of which it uses none. Triton makes a number that is 1 a constant.
    """
    driver, metadata = cuda_driver(), compiled.metadata
    if driver is None or metadata.num_ctas != 1:
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    numbers = [number for number in numbers if number != 1]
    widths = [4 if -0x80000000 <= number <= 0x7FFFFFFF else 8 for number in numbers]
    if _widths(driver, compiled.function) != [8] * len(pointers) + widths + [8] * _SCRATCH:
        return None
    return DriverKernel(
        driver.launch,
        compiled.function,
        grid,
        axis,
        32 * metadata.num_warps,
        metadata.shared,
        metadata.launch_pdl,
        [*pointers, *numbers],
        second,
    )


def _widths(driver: Driver, function: int) -> list[int]:
    """Return the bytes of each parameter of a kernel."""
    found: list[int] = []
    offset, width = c_size_t(), c_size_t()
    while not driver.parameter(function, len(found), byref(offset), byref(width)):
        found.append(width.value)
    return found
