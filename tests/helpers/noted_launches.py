"""Stand-ins for kernels: launches are noted, nothing is compiled or run."""

from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lora_backends.sgmv.launching import kernel as launching


class Launch(NamedTuple):
    """What a kernel was launched with."""

    name: str
    grid: tuple[int, int, int]
    arguments: list[Any]  # tensors by their addresses
    stream: int
    told: tuple[Any, Any, Any]  # metadata and both hooks


class Compiled:
    """Stands for a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def launch_metadata(self, grid, stream, *arguments):
        return "metadata of", self.name, grid, stream, arguments

    def run(self, x, y, z, stream, function, metadata, told, enter, leave, *arguments):
        self.log(Launch(self.name, (x, y, z), list(arguments), stream, (told, enter, leave)))


class Jitted:
    """Stands for a `triton.jit` function: its first launch returns what was compiled."""

    def __init__(self, kernel, log):
        self.__name__, self.arg_names, self.log = kernel.__name__, kernel.arg_names, log

    def __getitem__(self, grid):
        def compile(*arguments, **constants):
            values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            pointers = {i for i, name in enumerate(self.arg_names) if name.endswith("_ptr")}
            values = [0 if a is None and i in pointers else a for i, a in enumerate(values)]
            values += [constants[name] for name in self.arg_names if name.isupper()]
            stream, told = launching.current_stream(0), (None, None, None)
            self.log(Launch(self.__name__, grid, values, stream, told))
            return Compiled(self.__name__, self.log)

        return compile


@contextmanager
def noted_launches(monkeypatch, current, caches, modules):
    """Give a list that gets every launch, in order.

    Args:
        monkeypatch: pytest's.
        current: has the current stream.
        caches: functions that keep kernels.
        modules: that ask for streams, besides the one of kernels.
    """
    launches = []

    class Noted(launching.SpecializedKernel):
        __slots__ = ()

        def __init__(self, kernel, *args, **kwargs):
            super().__init__(Jitted(kernel, launches.append), *args, **kwargs)

    def clear():
        for cache in caches:
            cache.cache_clear()

    monkeypatch.setattr(launching, "SpecializedKernel", Noted)
    for module in (launching, *modules):
        monkeypatch.setattr(module, "several_devices", lambda: False)
        monkeypatch.setattr(module, "stream_of", lambda: lambda device: current.stream)
    clear()
    yield launches
    clear()
