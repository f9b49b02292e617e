"""A direct launch gives the function in C just what Triton's launcher would."""

import functools

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from lora_backends.gpu import launching
from lora_backends.gpu.boxes import boxes_of, by_address
from lora_backends.gpu.direct import DirectLaunch

ARGUMENTS = (1000, 2000, 3000, "boxes", 7, (0, 4), True)  # the first and third are moved


class Kernel:
    """Stands for Triton's compiled kernel; its launcher calls a function that notes all."""

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, launcher, **more):
        self.noted = []
        self.run = launcher(lambda *given: self.noted.append(given))
        vars(self.run).update(more)

    def launch_metadata(self, grid, stream, *arguments):
        return "told"


class Flat:
    """Passes the kernel's arguments on one by one, as Triton 3.6 does."""

    scratch = None

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, *arguments):
        memory = None if self.scratch is None else self.scratch(x * y * z)
        self.launch(x, y, z, stream, function, False, True, memory, None, *arguments)


class Nested(Flat):
    """Passes the kernel's arguments on as a tuple, as Triton 3.9 does."""

    def __call__(self, x, y, z, stream, function, *arguments):
        told, arguments = arguments[:4], arguments[4:]
        self.launch(x, y, z, stream, function, False, True, *told, None, None, "i64", arguments)


class GridLast(Flat):
    """Has an order of its own."""

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(True, *arguments, stream, function, x, y, z)


LAUNCHERS = [Flat, Nested, GridLast]


def launched(kernel, grid, stream, arguments):
    """Return what Triton's launcher gives to the function in C."""
    kernel.noted.clear()
    launching._run(kernel, grid, stream, list(arguments))
    return kernel.noted.pop()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_direct_launch_gives_what_the_launcher_would(launcher):
    kernel = Kernel(launcher)
    direct = DirectLaunch.of(kernel, ARGUMENTS, 2)
    assert not kernel.noted  # asking launches nothing
    for grid, stream, first, second in (((5, 9), 11, 64, 128), ((1, 1), 0, 16, 16)):
        moved = (first, ARGUMENTS[1], second, *ARGUMENTS[3:])
        expected = launched(kernel, grid, stream, moved)
        direct.launch(*grid, stream, first, second)
        assert kernel.noted == [expected]


def test_memory_that_depends_on_the_grid_is_never_kept():
    kernel = Kernel(Flat, scratch=lambda programs: pytest.fail("allocated for no grid"))
    assert DirectLaunch.of(kernel, ARGUMENTS, 2) is None


def test_a_number_that_counts_launches_is_never_kept():
    class Counting(Nested):
        count = 1000  # no two such ints are one object

        def __call__(self, *given):
            self.count += 1
            super().__call__(*given, self.count)

    assert DirectLaunch.of(Kernel(Counting), ARGUMENTS, 2) is None


@pytest.mark.parametrize(
    "launcher",
    [
        lambda launch: lambda *given: None,  # has no function in C
        lambda launch: functools.partial(launch),
        type("Silent", (Flat,), {"__call__": lambda self, *given: None}),
        type("Twice", (Flat,), {"__call__": lambda self, *g: (self.launch(*g), self.launch(*g))}),
        type("Doubled", (Flat,), {"__call__": lambda self, x, *g: self.launch(x, x, *g)}),
        type("Without", (Flat,), {"__call__": lambda self, x, *g: self.launch(*g)}),
    ],
    ids=["function", "partial", "silent", "twice", "doubled", "without"],
)
def test_a_launcher_of_another_kind_is_left_alone(launcher):
    assert DirectLaunch.of(Kernel(launcher), ARGUMENTS, 2) is None


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("launcher", [*LAUNCHERS, lambda launch: lambda *given: launch(*given)])
def test_a_profiler_is_told_by_the_launcher(launcher, told, monkeypatch):
    class Hook:
        calls = (print,) if told else ()

    monkeypatch.setattr(launching.knobs.runtime, "launch_enter_hook", hook := Hook())
    assert launching.are_launches_told() is told
    kernel = Kernel(launcher)
    for flat, grid in ((True, (45, 1)), (False, (5, 9))):
        ready = launching.ReadyLaunch(kernel, ARGUMENTS, 2, 5, flat)
        expected = launched(kernel, grid, 11, (64, *ARGUMENTS[1:2], 128, *ARGUMENTS[3:]))
        ready.launch(9, 11, 64, 128, told)
        assert kernel.noted == [expected]
    assert (hook in expected) is told
    assert ("told" in expected) is told


@pytest.fixture
def installed(monkeypatch):
    """Return what makes the launcher for NVIDIA of this Triton, without a device."""

    def make(launch, boxes=False):
        launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
        if boxes:
            signature = dict(enumerate(["*fp32", "*bf16", "*fp32", "tensordesc<bf16[128, 64]>"]))
            signature |= {place: "i32" for place in range(4, len(ARGUMENTS))}
            launch = driver.wrap_handle_tensordesc(launch, signature, [None])
        sizes = {f"{kind}_scratch_{of}": 0 for kind in ("global", "profile") for of in SIZES}
        more = {"launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False}
        vars(launcher).update(sizes | more, launch=launch, num_ctas=1)
        vars(launcher).update(arg_annotations=[], kernel_signature=b"")
        return launcher

    SIZES = ("size", "align")
    monkeypatch.setattr(triton.runtime.driver, "_active", object(), raising=False)
    return make


def test_the_launcher_that_is_installed_can_be_asked(installed):
    kernel = Kernel(installed)
    direct = DirectLaunch.of(kernel, ARGUMENTS, 2)
    expected = launched(kernel, (5, 9), 11, (64, *ARGUMENTS[1:2], 128, *ARGUMENTS[3:]))
    direct.launch(5, 9, 11, 64, 128)
    assert kernel.noted == [expected]


def test_boxes_are_described_at_every_launch(installed):
    lora_b = torch.zeros(2, 256, 64, dtype=torch.bfloat16)
    arguments = list(ARGUMENTS)
    arguments[3] = by_address(boxes_of(lora_b, 128, 64))
    kernel = Kernel(lambda launch: installed(launch, boxes=True))
    direct = DirectLaunch.of(kernel, tuple(arguments), 2)
    arguments[0], arguments[2] = 64, 128
    expected = launched(kernel, (5, 9), 11, arguments)
    for _ in range(2):
        direct.launch(5, 9, 11, 64, 128)
    assert kernel.noted == [expected, expected]
    given = [*expected, *expected[-1]] if isinstance(expected[-1], list) else expected
    assert 512 in given and arguments[3] not in given  # rows of B: the box is taken apart
