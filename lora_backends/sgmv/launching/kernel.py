"""Launches with little host time.

Triton binds and specialises the arguments of every launch anew: 20 us of host time for a kernel
that runs 3. A `SpecializedKernel` fixes the constants once and finds the compiled kernel by what is
left: dtypes, alignment and widths of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.errors import OutOfResources

from lora_backends.errors import UnsupportedInputError
from lora_backends.sgmv.launching.driver import DriverKernel, driver_kernel

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU."""

STAGES_ON_ROCM = 2
"""The most loop steps in flight on ROCm: a workgroup of an MI300 has 64 KB of shared memory."""

_SIZES = (
    *("TILE", "SEGMENT", "GROUP", "ROWS", "BLOCK_N", "BLOCK_K", "WARPS_K"),
    *("BLOCK_C", "BLOCK_R", "STAGES", "num_warps", "num_stages"),
)  # constants and options named in an error


_FIRST = 9
"""Values that Triton's launcher takes in front of a kernel's arguments."""


class Absent:
    """Stands for a tensor that a kernel does not take: Triton compiles None in as a constant."""

    dtype = None

    def data_ptr(self) -> int:
        """Return an address that nothing reads."""
        return 0


ABSENT = Absent()

RECORD: ContextVar[Any] = ContextVar("lora_backends_record", default=None)
"""The `ahead.Noted` that takes this thread's launches; None where they are made."""


class Arguments(NamedTuple):
    """A kernel's arguments besides its constants, in the order of its signature."""

    tensors: tuple[Any, ...]  # `ABSENT` for one that the kernel does not take
    descriptors: tuple[Any, ...]  # TMA descriptors; None where the kernel uses no TMA
    numbers: tuple[int, ...]


class _Driven(NamedTuple):
    kernel: DriverKernel
    places: tuple[int, ...]  # of all arguments that Triton did not compile in


class SpecializedKernel:
    """A kernel with fixed constants and options, compiled once per kind of arguments.

    Raises:
        TypeError: a constant is missing or unknown.
    """

    __slots__ = (
        "_axis",
        "_compiled",
        "_driven",
        "_programs",
        "_values",
        "constants",
        "kernel",
        "options",
        "sizes",
    )

    def __init__(
        self,
        kernel: Any,  # has tensors, descriptors, ints, constants, in that order
        constants: Mapping[str, Any],  # a value for each of the signature, by name
        programs: int,  # in a row of the grid
        num_warps: int = 4,  # of a program
        num_stages: int = 1,  # loop steps whose loads are in flight together
        programmatic: bool = False,  # launch before the kernel in front has ended
        max_registers: int = 0,  # of a thread, on a CUDA device; 0 leaves it to the compiler
    ) -> None:
        names = [name for name in kernel.arg_names if name.isupper()]
        if set(names) != set(constants):
            raise TypeError(f"{kernel.__name__} takes {names}, given {sorted(constants)}")
        self.kernel, self.constants, self._programs = kernel, dict(constants), programs
        self.sizes: Any = constants.get("SIZES")  # as `sgmv.kernels.operands` names them
        self._values = tuple(constants[name] for name in names)
        self._axis = 0 if constants["PROGRAMS"] else 1  # of the grid, along which rows lie
        if torch.version.hip is not None:
            num_stages = min(num_stages, STAGES_ON_ROCM)
        # Triton 3.9 warns that its successor fuses multiply-adds only on request
        fused = {"enable_fp_fusion": True}
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages} | fused
        if programmatic:
            self.options["launch_pdl"] = True
        if max_registers:
            self.options["maxnreg"] = max_registers
        self._compiled: dict[Any, Any] = {}
        self._driven: dict[Any, _Driven | None] = {}  # None: Triton launches this kind

    def is_compiled(self, arguments: Arguments) -> bool:
        """Return whether it is compiled for such arguments, so that a CUDA graph can capture it."""
        tensors, _, numbers = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        return INTERPRETED or _kind(tensors, pointers, numbers) in self._compiled

    def code_of(self, arguments: Arguments) -> tuple[Any, ...]:
        """Return a key of the code for such arguments: Triton compiles equal keys once.

        `_kind` also looks at numbers that Triton does not specialise: to leave them out would take
        longer in each launch than to launch through Triton once.
        """
        tensors, descriptors, numbers = arguments
        found = getattr(self.kernel, "do_not_specialize", None)  # not of the interpreter's
        loose = found or getattr(self.kernel, "kwargs", {}).get("do_not_specialize") or ()
        names = self.kernel.arg_names[len(tensors) + len(descriptors) :]
        pairs = zip(names, numbers, strict=False)
        rest = tuple([number for name, number in pairs if name not in loose])
        return _kind(tensors, [tensor.data_ptr() for tensor in tensors], rest)

    def launch(self, rows: int, arguments: Arguments) -> None:
        """Launch `rows` rows of the grid on the device of the first tensor, on its current stream.

        `arguments` are all but the constants.

        Raises:
            UnsupportedInputError: the kernel takes more shared memory or threads than the GPU has.
        """
        recorded = RECORD.get()
        if recorded is not None:
            recorded.note(self, arguments)
            return
        device = arguments.tensors[0].device
        if INTERPRETED:
            tensors, descriptors, numbers = arguments
            grid = self._grid(rows)
            self.kernel[grid](*_to_compile(tensors), *descriptors, *numbers, **self.constants)
        elif is_current(device):
            self._launch(device.index, rows, arguments)
        else:
            with torch.cuda.device(device):
                self._launch(device.index, rows, arguments)

    def compile(self, arguments: Arguments) -> None:
        """Compile for such arguments, or begin to, without a launch; tensors need no memory."""
        tensors, descriptors, numbers = arguments
        with torch.cuda.device(tensors[0].device):
            self.kernel.run(
                *_to_compile(tensors),
                *descriptors,
                *numbers,
                grid=self._grid(1),
                warmup=True,
                **self.constants,
                **self.options,
            )

    def bind(self, arguments: Arguments, places: Sequence[int]) -> BoundKernel:
        """Return the compiled kernel of an earlier launch with its arguments filled in.

        `places` are the positions, among all tensors, descriptors and numbers, of those that change
        from call to call. Triton specialises on dtypes, on the 16-byte alignment of addresses, and
        on whether a number is 1, is a multiple of 16, or fits 32 bits: none of these may change.
        """
        tensors, descriptors, numbers = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        compiled = self._compiled[_kind(tensors, pointers, numbers)]
        values = [*pointers, *descriptors, *numbers]
        grid, axis = self._grid(1), self._axis
        driver = None
        if tensors[0].is_cuda:
            taken = _taken(self.kernel.params, arguments, values)
            driver = driver_kernel(compiled, taken, len(tensors), places, grid, axis)
        return BoundKernel(compiled, [*values, *self._values], places, grid, axis, driver)

    def _grid(self, rows: int) -> tuple[int, int, int]:
        """Return one axis in which the programs of a row follow each other, or two axes."""
        # programs of one axis start sooner, but the division that finds their row may cost
        # registers
        if self._axis == 0:
            return self._programs * rows, 1, 1
        return self._programs, rows, 1

    def _too_large(self, error: OutOfResources) -> UnsupportedInputError:
        unit = "bytes of shared memory" if error.name == "shared memory" else error.name
        sizes = self.options | self.constants
        for bundle in self.constants.values():
            sizes |= bundle._asdict() if hasattr(bundle, "_asdict") else {}
        given = ", ".join(f"{name}={sizes[name]}" for name in _SIZES if name in sizes)
        return UnsupportedInputError(
            f"{self.kernel.__name__} does not fit on the GPU: it takes {error.required} {unit}\n"
            f"  given: {given}\n"
            f"  allowed: {error.limit}\n"
            f"  to do: pass tiles='rules', or a table tuned on this GPU (lora-backends tune); if "
            f"the rules chose these sizes, take another backend, e.g. torch_ref"
        )

    def _launch(self, device: int, rows: int, arguments: Arguments) -> None:
        tensors, descriptors, numbers = arguments
        pointers = [tensor.data_ptr() for tensor in tensors]
        kind, grid = _kind(tensors, pointers, numbers), self._grid(rows)
        compiled = self._compiled.get(kind)
        if compiled is None:
            try:
                self._compiled[kind] = self.kernel[grid](
                    *_to_compile(tensors),
                    *descriptors,
                    *numbers,
                    **self.constants,
                    **self.options,
                )
            except OutOfResources as error:
                raise self._too_large(error) from error
            return
        values, stream = [*pointers, *descriptors, *numbers], current_stream(device)
        hooks = has_launch_hooks()
        if not hooks and not any(descriptors):
            if kind not in self._driven:
                self._driven[kind] = self._drive(compiled, arguments, values)
            driven = self._driven[kind]
            if driven is not None and driven.kernel.launch(
                rows, stream, [values[p] for p in driven.places]
            ):
                return
        _run(compiled, grid, stream, [*values, *self._values], hooks)

    def _drive(self, compiled: Any, arguments: Arguments, values: list[Any]) -> _Driven | None:
        """Return a compiled kernel that the driver launches with any arguments of this kind."""
        if not arguments.tensors[0].is_cuda:
            return None
        taken = _taken(self.kernel.params, arguments, values)
        given = len(arguments.tensors), tuple(taken), self._grid(1), self._axis
        kernel = driver_kernel(compiled, taken, *given)
        return None if kernel is None else _Driven(kernel, tuple(taken))


@lru_cache(maxsize=16384)
def specialized(kernel: Any, programs: int, **given: Any) -> SpecializedKernel:
    """Return the `SpecializedKernel` with these constants, in capitals, and other arguments.

    A PROGRAMS that is not among the constants is `programs`.
    """
    constants = {"PROGRAMS": programs} | {k: v for k, v in given.items() if k.isupper()}
    others = {name: value for name, value in given.items() if not name.isupper()}
    # one object serves all batches and layers with these constants, so that it is compiled once
    return SpecializedKernel(kernel, constants, programs, **others)


class BoundKernel:
    """A compiled kernel, launched before, with all of its arguments but those that change."""

    __slots__ = ("_axis", "_compiled", "_driver", "_given", "_places", "_programs", "_run")

    def __init__(
        self,
        compiled: Any,
        arguments: list[Any],
        places: Sequence[int],  # of the arguments that change
        grid: tuple[int, int, int],  # of one row
        axis: int = 0,  # of the grid along which rows follow each other
        driver: DriverKernel | None = None,  # the same, launched in less time
    ) -> None:
        self._driver = driver
        # built once: reading Triton's `run` property and filling the list would slow each launch
        self._compiled, self._run = compiled, compiled.run
        fixed = compiled.function, compiled.packed_metadata, None, None, None
        self._given = [*grid, 0, *fixed, *arguments]
        self._axis, self._programs = axis, grid[axis]
        self._places = tuple([_FIRST + place for place in places])

    def launch(self, rows: int, stream: int, values: Sequence[int], hooks: bool) -> None:
        """Launch on a stream of the current device, with the arguments that change, in order.

        `hooks` is `has_launch_hooks`.
        """
        driver = None if hooks else self._driver
        if driver is not None and driver.launch(rows, stream, values):
            return
        given = self._given.copy()  # threads share the kernel
        given[self._axis], given[3] = self._programs * rows, stream
        for place, value in zip(self._places, values, strict=True):
            given[place] = value
        if hooks:
            _run(self._compiled, tuple(given[:3]), stream, given[_FIRST:], hooks)
        else:
            self._run(*given)


def _run(
    compiled: Any, grid: tuple[int, int, int], stream: int, arguments: list[Any], hooks: bool
) -> None:
    enter = leave = metadata = None  # calling Triton's empty hooks takes longer than the launch
    if hooks:
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        metadata = compiled.launch_metadata(grid, stream, *arguments)
    compiled.run(
        *grid,
        stream,
        compiled.function,
        compiled.packed_metadata,
        metadata,
        enter,
        leave,
        *arguments,
    )


def has_launch_hooks() -> bool:
    """Return whether a profiler has hooked launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
    )


def _to_compile(tensors: tuple[Any, ...]) -> list[Any]:
    """Return tensors as a `triton.jit` function takes them."""
    return [None if tensor is ABSENT else tensor for tensor in tensors]


def _kind(
    tensors: tuple[Any, ...], pointers: list[int], numbers: tuple[int, ...]
) -> tuple[Any, ...]:
    """Return all that Triton specialises a kernel on besides its constants."""
    return (
        tensors[0].device.index,
        *[tensor.dtype for tensor in tensors],
        *[pointer & 15 == 0 for pointer in pointers],
        *[n if n == 1 else (n & 15 == 0, not -0x80000000 <= n <= 0x7FFFFFFF) for n in numbers],
    )


def _taken(
    parameters: Sequence[Any], arguments: Arguments, values: Sequence[Any]
) -> dict[int, Any]:
    """Return the arguments that a compiled kernel takes, by their places among `values`.

    Args:
        parameters: of the `triton.jit` function.
        arguments: of the launch.
        values: the same in one list, tensors by their addresses.
    """
    first_number = len(arguments.tensors) + len(arguments.descriptors)
    taken = {}
    for place, value in enumerate(values):
        if place < len(arguments.tensors):
            is_constant = arguments.tensors[place] is ABSENT
        elif place < first_number:
            is_constant = value is None
        else:  # Triton compiles a 1 in, except for parameters named in `do_not_specialize`
            is_constant = value == 1 and not parameters[place].do_not_specialize
        if not is_constant:
            taken[place] = value
    return taken


def is_current(device: torch.device) -> bool:
    """Return whether `device` is the current device, so that kernels for it can be launched."""
    return not several_devices() or device.index == torch.cuda.current_device()


def current_stream(device: int) -> int:
    """Return the address of a device's current stream."""
    stream: int = stream_of()(device)
    return stream


def has_programmatic_launch(device: torch.device) -> bool:
    """Return whether a kernel can start before the one in front has ended."""
    if device.type != "cuda" or torch.version.hip is not None or INTERPRETED:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=1)
def several_devices() -> bool:
    """Return whether torch finds more than one device."""
    return torch.cuda.device_count() > 1


@lru_cache(maxsize=1)
def stream_of() -> Any:
    """Return Triton's function from a device index to the address of its current stream."""
    return triton.runtime.driver.active.get_current_stream
