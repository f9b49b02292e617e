"""Launches of compiled kernels by the CUDA driver.

Triton's launcher parses all arguments of a kernel, constants included, at every launch. Here they
stay in memory in the form that the driver reads, and a launch overwrites the few that have changed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import torch

# CUlaunchConfig: grid, block, bytes of shared memory, stream, address and number of attributes
_CONFIG = struct.Struct("=7I4xQQI4x")
# CUlaunchAttribute: id, value
_ATTRIBUTE = struct.Struct("=I4xI60x")
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_STREAM = 32 // 8  # place of the stream in a configuration, in words
_ARGUMENTS = (_CONFIG.size + _ATTRIBUTE.size) // 8  # words in front of the arguments
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SCRATCH = 2  # addresses of scratch memory that Triton adds to a kernel's parameters
_MOST_SHARED = 228 << 10  # bytes; Triton 3.9 sets a further attribute for more


class Driver(NamedTuple):
    """Functions of the CUDA driver."""

    launch: Any  # cuLaunchKernelEx
    parameter: Any  # cuFuncGetParamInfo
    text: Any  # cuGetErrorString


@lru_cache(maxsize=1)
def cuda_driver() -> Driver | None:
    """Return the driver; None on ROCm, and with one older than CUDA 12.4."""
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, parameter = library.cuLaunchKernelEx, library.cuFuncGetParamInfo
        text = library.cuGetErrorString
    except (OSError, AttributeError):
        return None
    launch.argtypes = [c_void_p] * 4
    parameter.argtypes = [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]
    text.argtypes = [c_int, POINTER(c_char_p)]
    return Driver(launch, parameter, text)


class _Frame(NamedTuple):
    """The memory of one launch: configuration, attribute, arguments, addresses of the arguments."""

    halves: memoryview  # of 4 bytes; the first three are the grid
    words: memoryview  # of 8 bytes
    config_at: int
    addresses_at: int


class DriverKernel:
    """A compiled kernel with all of its arguments but two addresses."""

    __slots__ = (
        *("_arguments", "_axis", "_frames", "_function"),
        *("_launch", "_programs", "_second", "_sizes"),
    )

    def __init__(
        self,
        launch: Any,  # cuLaunchKernelEx
        function: int,  # address of the kernel (CUfunction)
        grid: tuple[int, int, int],  # of one row
        axis: int,  # of the grid along which rows follow each other
        threads: int,  # of a program
        shared_bytes: int,  # of a program
        programmatic: bool,  # launch before the kernel in front has ended
        arguments: Sequence[int],  # without constants; their tensors and code must stay alive
        second: int,  # place of the address that changes besides the first
    ) -> None:
        self._launch, self._function = launch, function
        self._axis, self._programs, self._second = axis, grid[axis], _ARGUMENTS + second
        self._sizes = (*grid, threads, 1, 1, shared_bytes), int(programmatic)
        self._arguments = (*arguments, *[0] * _SCRATCH)
        self._frames: list[_Frame] = []  # not in use by any launch

    def launch(self, rows: int, stream: int, first: int, second: int) -> bool:
        """Launch on a stream of the current device, with the addresses that change.

        Returns False, with nothing run, in a thread that has no CUDA context yet; Triton's launcher
        gives it one.

        Raises:
            RuntimeError: the driver refuses the launch, or an earlier kernel has failed.
        """
        try:
            frame = self._frames.pop()  # atomic: no other thread can get the same frame
        except IndexError:
            frame = self._new_frame()
        halves, words, config_at, addresses_at = frame
        halves[self._axis] = self._programs * rows
        words[_STREAM], words[_ARGUMENTS], words[self._second] = stream, first, second
        status = self._launch(config_at, self._function, addresses_at, None)
        self._frames.append(frame)
        if status not in (0, _NO_CONTEXT):
            raise RuntimeError(_refusal(status))
        return not status

    def _new_frame(self) -> _Frame:
        sizes, attributes = self._sizes
        n = len(self._arguments)
        memory = bytearray(8 * (_ARGUMENTS + 2 * n))
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _CONFIG.pack_into(memory, 0, *sizes, 0, at + _CONFIG.size, attributes)
        _ATTRIBUTE.pack_into(memory, _CONFIG.size, _PROGRAMMATIC, 1)
        # the driver reads the lower half of a word for an argument of 4 bytes
        arguments_at = at + 8 * _ARGUMENTS
        addresses = [arguments_at + 8 * i for i in range(n)]
        struct.pack_into(f"={n}q{n}Q", memory, 8 * _ARGUMENTS, *self._arguments, *addresses)
        view = memoryview(memory)
        return _Frame(view.cast("I"), view.cast("Q"), at, arguments_at + 8 * n)


def driver_kernel(
    compiled: Any,
    pointers: Sequence[int],
    numbers: Sequence[int],  # that Triton did not compile in as constants
    second: int,  # place of the address that changes besides the first
    grid: tuple[int, int, int],
    axis: int,
) -> DriverKernel | None:
    """Return a kernel that Triton compiled for these arguments, or None: Triton launches it."""
    driver, metadata = cuda_driver(), compiled.metadata
    if driver is None or metadata.num_ctas != 1 or metadata.shared > _MOST_SHARED:
        return None
    # launch attributes and scratch memory are not set here
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    # the parameters: the addresses, the numbers, and two addresses of scratch memory
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
    widths: list[int] = []
    offset, width = c_size_t(), c_size_t()
    while not driver.parameter(function, len(widths), byref(offset), byref(width)):
        widths.append(width.value)
    return widths


def _refusal(status: int) -> str:
    """Return a message for an error of a launch."""
    driver, text = cuda_driver(), c_char_p()
    if driver is not None:
        driver.text(status, byref(text))
    said = (text.value or b"unknown error").decode(errors="replace")
    return (
        f"a kernel was not launched: {said} (CUresult {status}); an earlier kernel may be the cause"
    )
