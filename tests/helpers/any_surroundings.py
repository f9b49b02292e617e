"""A pytest plugin for what no test may depend on: the order of tests, and torch's default device.

    ORDER=1 DEVICE=meta python -m pytest -p helpers.any_surroundings tests/interface

With ORDER, files run in a random order and so do the tests of each: a number gives the same order
again. With DEVICE, the package's own code runs under `torch.set_default_device` while the tests'
own code does not, so that a tensor that the package makes without a device of its own shows: on
`meta` tensors have no values. Tests make theirs as ever.
"""

import os
import random
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors  # the functions that a default device changes

ORDER, DEVICE = os.environ.get("ORDER"), os.environ.get("DEVICE")
PACKAGE = str(Path(__file__).parents[2] / "lora_backends")
moved = 0


def pytest_collection_modifyitems(items):
    """Shuffle the files, and the tests of each file; fixtures of a file are made once, as ever."""
    if ORDER is None:
        return
    draw, files = random.Random(ORDER), {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


class _DeviceOfThePackage(torch.overrides.TorchFunctionMode):
    """Gives a default device to tensors that the package itself makes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        global moved
        kwargs = kwargs or {}
        if function in _device_constructors() and kwargs.get("device") is None:
            if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
                moved += 1
                kwargs = {**kwargs, "device": DEVICE}
        return function(*args, **kwargs)


@pytest.fixture(autouse=DEVICE is not None)
def _default_device():
    with _DeviceOfThePackage():
        yield


def pytest_terminal_summary(terminalreporter):
    """Show what was changed."""
    terminalreporter.write_line(f"order {ORDER}, default device {DEVICE}: {moved} tensors moved")
