"""Compiles kernels ahead of their first launch, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

from lora_backends.sgmv.launching.kernel import (
    ABSENT,
    INTERPRETED,
    RECORD,
    Arguments,
    SpecializedKernel,
)
from lora_backends.sgmv.launching.tma import without_tensor

MOST_THREADS = 16
"""Triton compiles outside of Python's lock for most of the time, but not for all of it."""


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor of which only dtype, device and alignment count: it keeps no memory."""

    dtype: torch.dtype
    device: torch.device
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        return cls(tensor.dtype, tensor.device, tensor.data_ptr() & 15)

    def data_ptr(self) -> int:
        return self.address


class Noted:
    """Kernels that launches have asked for, while nothing was launched."""

    def __init__(self) -> None:
        self.kernels: set[Hashable] = set()  # kernels and kinds of arguments
        self._missing: dict[Hashable, tuple[SpecializedKernel, Arguments]] = {}

    def note(self, kernel: SpecializedKernel, arguments: Arguments) -> None:
        """Note a launch; its tensors are not kept."""
        key = kernel, kernel.code_of(arguments)
        if key in self.kernels:
            return
        self.kernels.add(key)
        if INTERPRETED or not kernel.is_compiled(arguments):
            tensors, descriptors, numbers = arguments
            kept = tuple([each if each is ABSENT else _Shape.of(each) for each in tensors])
            without = tuple(map(without_tensor, descriptors))
            self._missing[key] = kernel, Arguments(kept, without, numbers)

    @property
    def missing(self) -> int:
        """Kernels that are not compiled yet."""
        return len(self._missing)

    def compile(self, on_each: Callable[[], None]) -> None:
        """Compile all kernels; a later launch of each finds it in Triton's cache.

        A kernel that fails to compile is left to its launch, which raises the error.

        Args:
            on_each: called after each kernel, from any thread.
        """
        mode: Any = getattr(triton, "AsyncCompileMode", None)
        if INTERPRETED or mode is None:
            return
        threads = min(MOST_THREADS, os.cpu_count() or 1)
        with (
            _Counting(threads, on_each) as executor,
            mode(executor, ignore_errors=True),
        ):
            for kernel, arguments in self._missing.values():
                kernel.compile(arguments)


class _Counting(ThreadPoolExecutor):
    """Threads that report each call they have made."""

    def __init__(self, threads: int, on_each: Callable[[], None]) -> None:
        super().__init__(threads)
        self._on_each = on_each

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(*args, **kwargs)
        future.add_done_callback(lambda _: self._on_each())
        return future


@contextmanager
def recording(recorded: Noted | None = None) -> Iterator[Noted]:
    """Note the kernels of this thread's launches instead of launching them.

    They are added to `recorded`, or to a new record.
    """
    recorded = Noted() if recorded is None else recorded
    token = RECORD.set(recorded)
    try:
        yield recorded
    finally:
        RECORD.reset(token)
