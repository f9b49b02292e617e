"""Launches of compiled kernels by the CUDA driver.

Triton's launcher parses all arguments of a kernel, constants included, at every launch, and encodes
each TMA descriptor anew. Here they stay in memory in the form that the driver reads, and a launch
overwrites the few that have changed.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
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

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_DATA_TYPES = {8: 10, 9: 8, 10: 9}  # CUtensorMapDataType of Triton's codes; others are equal
_NO_INTERLEAVE, _PROMOTE_128, _FILL_ZERO = 0, 2, 0  # what Triton asks of cuTensorMapEncodeTiled


class Driver(NamedTuple):
    """Functions of the CUDA driver."""

    launch: Any  # cuLaunchKernelEx
    parameter: Any  # cuFuncGetParamInfo
    text: Any  # cuGetErrorString
    encode: Any  # cuTensorMapEncodeTiled


@lru_cache(maxsize=1)
def cuda_driver() -> Driver | None:
    """Return the driver; None on ROCm, and with one older than CUDA 12.4."""
    if torch.version.hip is not None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, parameter = library.cuLaunchKernelEx, library.cuFuncGetParamInfo
        text, encode = library.cuGetErrorString, library.cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    launch.argtypes = [c_void_p] * 4
    parameter.argtypes = [c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)]
    text.argtypes = [c_int, POINTER(c_char_p)]
    sizes = [c_void_p, c_void_p, c_void_p, c_void_p]  # shape, strides, block, steps
    encode.argtypes = [c_void_p, c_int, c_uint32, c_void_p, *sizes, c_int, c_int, c_int, c_int]
    return Driver(launch, parameter, text, encode)


class _Frame(NamedTuple):
    """The memory of one launch: configuration, attribute, arguments, addresses of the arguments."""

    halves: memoryview  # of 4 bytes; the first three are the grid
    words: memoryview  # of 8 bytes
    config_at: int
    addresses_at: int


class TensorMap:
    """A TMA descriptor in the form that kernels take by value: a CUtensorMap."""

    __slots__ = ("_memory", "address")

    def __init__(self) -> None:
        self._memory = bytearray(_MAP_BYTES + _MAP_ALIGNMENT)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = -(-at // _MAP_ALIGNMENT) * _MAP_ALIGNMENT


class DriverKernel:
    """A compiled kernel with all of its arguments but those that change from call to call."""

    __slots__ = (
        *("_arguments", "_axis", "_frames", "_function"),
        *("_launch", "_places", "_programs", "_sizes"),
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
        arguments: Sequence[int | TensorMap],  # without constants; tensors must stay alive
        places: Sequence[int],  # of the arguments that change
    ) -> None:
        self._launch, self._function = launch, function
        self._axis, self._programs = axis, grid[axis]
        self._places = tuple([_ARGUMENTS + place for place in places])
        self._sizes = (*grid, threads, 1, 1, shared_bytes), int(programmatic)
        self._arguments = (*arguments, *[0] * _SCRATCH)
        self._frames: list[_Frame] = []  # not in use by any launch

    def launch(self, rows: int, stream: int, values: Sequence[int]) -> bool:
        """Launch on a stream of the current device, with the arguments that change, in order.

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
        words[_STREAM] = stream
        for place, value in zip(self._places, values, strict=True):
            words[place] = value
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
        values, addresses = [], []
        for i, argument in enumerate(self._arguments):
            values.append(0 if isinstance(argument, TensorMap) else argument)
            addresses.append(
                argument.address if isinstance(argument, TensorMap) else arguments_at + 8 * i
            )
        struct.pack_into(f"={n}q{n}Q", memory, 8 * _ARGUMENTS, *values, *addresses)
        view = memoryview(memory)
        # signed: where A is one tensor per slice, the stride between them may be negative
        return _Frame(view.cast("I"), view.cast("q"), at, arguments_at + 8 * n)


def driver_kernel(
    compiled: Any,
    given: Mapping[int, Any],  # arguments by their place in the kernel's signature
    addresses: int,  # how many places, from the first, hold addresses
    places: Sequence[int],  # of those that change from call to call
    grid: tuple[int, int, int],
    axis: int,
) -> DriverKernel | None:
    """Return a kernel that Triton compiled for these arguments, or None: Triton launches it.

    `given` leaves out arguments that Triton compiled in as constants. A descriptor is Triton's
    `TensorDescriptor`, which a kernel takes as its map, its shape and its strides.
    """
    driver, metadata = cuda_driver(), compiled.metadata
    if driver is None or metadata.num_ctas != 1 or metadata.shared > _MOST_SHARED:
        return None
    # launch attributes and scratch memory are not set here
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    if any(place not in given for place in places):
        return None  # it is compiled in, so it cannot change
    layouts = iter(getattr(metadata, "tensordesc_meta", None) or ())
    arguments: list[int | TensorMap] = []
    widths, found = [], {}  # bytes of each argument; its index, by its place in `given`
    for place, value in sorted(given.items()):
        found[place] = len(arguments)
        if isinstance(value, int):
            arguments.append(value)
            is_short = place >= addresses and -0x80000000 <= value <= 0x7FFFFFFF
            widths.append(4 if is_short else 8)
            continue
        encoded = _tensor_map(driver, value, next(layouts, None))
        if encoded is None:
            return None
        rank = len(value.shape)
        arguments += [encoded, *value.shape, *value.strides]
        widths += [_MAP_BYTES, *[4] * rank, *[8] * rank]
    if next(layouts, None) is not None:
        return None  # the kernel takes a descriptor that `given` lacks
    # the parameters: those, and two addresses of scratch memory
    if _widths(compiled) != (*widths, *[8] * _SCRATCH):
        return None
    return DriverKernel(
        driver.launch,
        compiled.function,
        grid,
        axis,
        32 * metadata.num_warps,
        metadata.shared,
        metadata.launch_pdl,
        arguments,
        [found[place] for place in places],
    )


def _tensor_map(driver: Driver, descriptor: Any, layout: Any) -> TensorMap | None:
    """Encode a descriptor as Triton's launcher does; None if its kind is unknown or it is refused.

    `layout` is Triton's: how the compiled kernel expects the descriptor's blocks in memory.
    """
    if layout is None or layout.get("fp4_padded") or layout.get("is_im2col"):
        return None
    if descriptor.padding != "zero" or getattr(descriptor, "round_f32_to_tf32", False):
        return None
    encoded, rank, size = TensorMap(), len(descriptor.shape), layout["elem_size"]
    # the driver counts axes from the innermost, whose stride it does not take
    shape = (c_uint64 * rank)(*descriptor.shape[::-1])
    strides = (c_uint64 * rank)(*[size * stride for stride in descriptor.strides[-2::-1]])
    block, steps = (c_uint32 * rank)(*layout["block_size"][::-1]), (c_uint32 * rank)(*[1] * rank)
    elements = _DATA_TYPES.get(layout["elem_type"], layout["elem_type"])
    status = driver.encode(
        encoded.address,
        elements,
        rank,
        descriptor.base.data_ptr(),
        shape,
        strides,
        block,
        steps,
        _NO_INTERLEAVE,
        layout["swizzle"],
        _PROMOTE_128,
        _FILL_ZERO,
    )
    return None if status else encoded


@lru_cache(maxsize=4096)  # many layers bind one kernel, and each parameter is a call of the driver
def _widths(compiled: Any) -> tuple[int, ...]:
    """Return the bytes of each parameter of a kernel that Triton compiled."""
    driver = cuda_driver()
    assert driver is not None
    widths: list[int] = []
    offset, width = c_size_t(), c_size_t()
    while not driver.parameter(compiled.function, len(widths), byref(offset), byref(width)):
        widths.append(width.value)
    return tuple(widths)


def _refusal(status: int) -> str:
    """Return a message for an error of a launch."""
    driver, text = cuda_driver(), c_char_p()
    if driver is not None:
        driver.text(status, byref(text))
    said = (text.value or b"unknown error").decode(errors="replace")
    return (
        f"a kernel was not launched: {said} (CUresult {status}); an earlier kernel may be the cause"
    )
