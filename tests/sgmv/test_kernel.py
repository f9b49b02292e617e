"""What a `SpecializedKernel` compiles, and what it passes on to a compiled kernel."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.nvidia import driver
from triton.runtime.errors import OutOfResources

from lora_backends import LoRAWeights, UnsupportedInputError
from lora_backends.sgmv.launching import kernel as launching
from lora_backends.sgmv.launching.kernel import (
    ABSENT,
    Arguments,
    BoundKernel,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.launching.slice_tables import Located, located_b
from lora_backends.sgmv.launching.tma import allows_tma, descriptor, without_tensor

NAMES = ["x_ptr", "h_ptr", "width", "PROGRAMS", "SIZE", "WIDE"]
CONSTANTS = {"PROGRAMS": 5, "SIZE": 16, "WIDE": True}


class Compiled:
    """Stands for a compiled kernel: notes what its launcher is given."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launcher=None):
        self.noted = []
        self.run = launcher or (lambda *given: self.noted.append(given))

    def launch_metadata(self, grid, stream, *arguments):
        return "described", grid, stream, arguments


class Kernel:
    """Stands for a `triton.jit` function: notes what it compiles."""

    __name__, arg_names = "kernel", NAMES

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile(*arguments, **constants_and_options):
            made = Compiled()
            self.compiled.append((made, grid, arguments, constants_and_options))
            return made

        return compile


@pytest.fixture(autouse=True)
def _compiled_on_one_device(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "several_devices", lambda: False)
    monkeypatch.setattr(launching, "stream_of", lambda: lambda device: 11)


def floats(count, offset=0):
    """Return values that begin at a multiple of 16 bytes, or `offset` values after it."""
    return torch.zeros(count + 20)[offset:][:count]


def arguments(width=32, x=None, h=None):
    return Arguments((floats(64) if x is None else x, floats(8) if h is None else h), (), (width,))


@pytest.mark.parametrize(
    "constants",
    [
        {"PROGRAMS": 5, "SIZE": 16},
        {**CONSTANTS, "TILE": 16},
        {"PROGRAMS": 5, "SIZES": 16, "WIDE": True},
        {},
        {**CONSTANTS, "width": 32},
    ],
    ids=["missing", "unknown", "misspelt", "none", "no constant"],
)
def test_a_constant_that_is_missing_or_unknown_is_refused_when_the_kernel_is_made(constants):
    with pytest.raises(TypeError, match=r"kernel takes \['PROGRAMS', 'SIZE', 'WIDE'\], given"):
        SpecializedKernel(Kernel(), constants, programs=5)


def test_constants_are_passed_in_the_order_of_the_signature():
    for constants in (CONSTANTS, dict(reversed(CONSTANTS.items()))):
        jitted = Kernel()
        kernel = SpecializedKernel(jitted, constants, programs=5)
        given = arguments()
        for _ in range(2):
            kernel.launch(3, given)
        ((compiled, _, first, named),) = jitted.compiled
        assert first == (*given.tensors, 32)
        assert {name: named[name] for name in CONSTANTS} == CONSTANTS
        ((*_, x, h, width, programs, size, wide),) = compiled.noted
        assert (x, h) == tuple(t.data_ptr() for t in given.tensors)
        assert (width, programs, size, wide) == (32, 5, 16, True)


def test_a_kernel_is_compiled_once_for_each_kind_of_arguments():
    jitted = Kernel()
    kernel = SpecializedKernel(jitted, CONSTANTS, programs=5)
    kinds = [
        [arguments(32), arguments(4096), arguments(32, x=floats(8))],
        [arguments(33), arguments(35)],  # not a multiple of 16
        [arguments(1)],
        [arguments(2**31), arguments(2**40)],  # 64 bits
        [arguments(x=floats(64, offset=1)), arguments(x=floats(64, offset=3))],  # unaligned
        [arguments(h=floats(8, offset=1))],
        [arguments(x=torch.zeros(64, dtype=torch.bfloat16))],
    ]
    for kind in kinds:
        assert not kernel.is_compiled(kind[0])
        for given in kind * 2:
            kernel.launch(3, given)
            assert kernel.is_compiled(given)
    assert len(jitted.compiled) == len(kinds)
    assert [len(made.noted) for made, *_ in jitted.compiled] == [2 * len(k) - 1 for k in kinds]


@pytest.mark.parametrize("programs, grid", [(5, (15, 1, 1)), (0, (5, 3, 1))])
def test_the_grid_has_two_axes_where_the_kernel_says_so(programs, grid):
    jitted = Kernel()
    kernel = SpecializedKernel(jitted, CONSTANTS | {"PROGRAMS": programs}, programs=5)
    given = arguments()
    for _ in range(2):
        kernel.launch(3, given)
    kernel.bind(given, (0, 1)).launch(3, 11, (16, 32), hooks=False)
    ((compiled, first, _, _),) = jitted.compiled
    assert [first, *[noted[:3] for noted in compiled.noted]] == [grid] * 3


def test_options_are_those_of_the_kernel(monkeypatch):
    def options(**given):
        return SpecializedKernel(Kernel(), CONSTANTS, 5, **given).options

    fused = {"enable_fp_fusion": True}  # the default of Triton changes
    assert options() == {"num_warps": 4, "num_stages": 1} | fused
    programmatic = options(num_warps=8, num_stages=4, programmatic=True)
    assert programmatic == {"num_warps": 8, "num_stages": 4, "launch_pdl": True} | fused
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert options(num_stages=4)["num_stages"] == launching.STAGES_ON_ROCM == 2
    assert options(num_stages=1)["num_stages"] == 1


def test_a_kernel_that_does_not_fit_on_the_gpu_is_refused_with_its_bytes_and_the_limit():
    class TooLarge(Kernel):
        def __getitem__(self, grid):
            raise OutOfResources(237568, 101376, "shared memory")

    kernel = SpecializedKernel(TooLarge(), CONSTANTS, 5, num_stages=4)
    for _ in range(2):
        with pytest.raises(UnsupportedInputError, match="237568 bytes of shared memory") as error:
            kernel.launch(3, arguments())
        assert "allowed: 101376" in str(error.value) and "num_stages=4" in str(error.value)
        assert "if the rules chose these sizes, take another backend" in str(error.value)
    assert not kernel.is_compiled(arguments())


def test_a_launch_on_another_device_makes_it_the_current_one(monkeypatch):
    made_current = []

    @contextmanager
    def device(given):
        made_current.append(given)
        yield

    monkeypatch.setattr(launching, "several_devices", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    jitted, given = Kernel(), arguments()
    SpecializedKernel(jitted, CONSTANTS, 5).launch(3, given)
    assert made_current == [torch.device("cpu")] and len(jitted.compiled) == 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: given.tensors[0].device.index)
    SpecializedKernel(jitted, CONSTANTS, 5).launch(3, given)
    assert len(made_current) == 1 and len(jitted.compiled) == 2


def test_a_bound_kernel_takes_what_changes_and_keeps_the_rest():
    jitted = Kernel()
    kernel = SpecializedKernel(jitted, CONSTANTS, 5)
    given = arguments()
    kernel.launch(3, given)
    ((compiled, *_),) = jitted.compiled
    bound = kernel.bind(given, (0, 2))
    for stream, first, width in ((11, 64, 48), (12, 16, 32), (11, 64, 48)):
        bound.launch(7, stream, (first, width), hooks=False)
        passed = ("function", "metadata", None, None, None, first, given.tensors[1].data_ptr())
        assert compiled.noted.pop() == (35, 1, 1, stream, *passed, width, 5, 16, True)


def test_a_kernel_that_was_not_launched_cannot_be_bound():
    kernel = SpecializedKernel(Kernel(), CONSTANTS, 5)
    kernel.launch(3, arguments(32))
    with pytest.raises(KeyError):
        kernel.bind(arguments(33), (0, 1))


class OnGpu:
    """Stands for a tensor on a GPU."""

    is_cuda, device, dtype = True, SimpleNamespace(index=0), torch.float32

    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


def test_a_tensor_that_a_kernel_does_not_take_is_compiled_as_none_and_no_driver_sees_it(
    monkeypatch,
):
    given, made = [], object()
    monkeypatch.setattr(launching, "driver_kernel", lambda *args: given.append(args) or made)
    jitted = Kernel()
    jitted.arg_names = ["x_ptr", "table_ptr", "h_ptr", "width", "PROGRAMS", "SIZE", "WIDE"]
    jitted.params = [SimpleNamespace(do_not_specialize=False)] * 7
    kernel, x, h = SpecializedKernel(jitted, CONSTANTS, 5), OnGpu(64), OnGpu(128)
    kernel.launch(3, Arguments((x, ABSENT, h), (), (32,)))
    kernel.bind(Arguments((x, ABSENT, h), (), (32,)), (0, 2))
    ((compiled, _, first, _),) = jitted.compiled
    assert first == (x, None, h, 32)
    assert given == [(compiled, {0: 64, 2: 128, 3: 32}, 3, (0, 2), (5, 1, 1), 0)]


def test_the_driver_launches_a_compiled_kernel_with_all_its_arguments(monkeypatch):
    """What Triton has compiled in is left out; other kinds of arguments have other launches."""

    class Driven:
        def __init__(self, *given):
            self.given, self.launches, self.runs = given, [], True
            made.append(self)

        def launch(self, *given):
            self.launches.append(given)
            return self.runs

    made = []
    monkeypatch.setattr(launching, "driver_kernel", Driven)
    jitted = Kernel()
    jitted.arg_names = ["x_ptr", "table_ptr", "h_ptr", "width", "n", "PROGRAMS", "SIZE", "WIDE"]
    jitted.params = [SimpleNamespace(do_not_specialize=False)] * 8
    kernel, h = SpecializedKernel(jitted, CONSTANTS, 5), OnGpu(128)

    def launch(rows, address, width):
        kernel.launch(rows, Arguments((OnGpu(address), ABSENT, h), (), (width, 1)))

    for rows, address, width in ((3, 64, 32), (3, 64, 32), (4, 96, 48)):
        launch(rows, address, width)
    ((compiled, *_),) = jitted.compiled
    ((driven),) = made
    assert driven.given == (compiled, {0: 64, 2: 128, 3: 32}, 3, (0, 2, 3), (5, 1, 1), 0)
    assert driven.launches == [(3, 11, [64, 128, 32]), (4, 11, [96, 128, 48])]
    assert not compiled.noted
    driven.runs = False  # in a thread without a context
    launch(3, 64, 32)
    assert compiled.noted[0][9:] == (64, 0, 128, 32, 1, 5, 16, True)
    for _ in range(2):
        launch(3, 64, 33)
    assert len(made) == 2 and len(made[1].launches) == 1
    monkeypatch.setattr(launching, "has_launch_hooks", lambda: True)
    launch(3, 64, 33)
    assert len(made[1].launches) == 1, "a profiler is told by Triton"


def test_equal_constants_share_a_kernel_so_that_it_is_compiled_once():
    jitted = Kernel()
    given = {"SIZE": 16, "WIDE": True}
    kernel = specialized(jitted, 5, num_warps=8, **given)
    assert specialized(jitted, 5, num_warps=8, **given) is kernel
    assert kernel.constants == CONSTANTS and kernel.options["num_warps"] == 8
    assert specialized(jitted, 5, num_warps=4, **given) is not kernel
    two_axes = specialized(jitted, 5, PROGRAMS=0, **given)
    assert two_axes.constants["PROGRAMS"] == 0 and two_axes._grid(3) == (5, 3, 1)


class Hook:
    """Stands for Triton's chain of launch hooks."""

    def __init__(self, *calls):
        self.calls = calls


@pytest.mark.parametrize("side", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("bound", [False, True])
def test_a_profiler_is_told_of_every_launch(monkeypatch, side, bound):
    runtime = launching.knobs.runtime
    assert not launching.has_launch_hooks()  # Triton's own are chains without calls
    monkeypatch.setattr(runtime, side, hook := Hook(print))
    assert launching.has_launch_hooks()
    jitted, given = Kernel(), arguments()
    kernel = SpecializedKernel(jitted, CONSTANTS, 5)
    kernel.launch(3, given)
    ((compiled, *_),) = jitted.compiled
    pointers = [tensor.data_ptr() for tensor in given.tensors]
    if bound:
        kernel.bind(given, (0, 1)).launch(3, 11, pointers, launching.has_launch_hooks())
    else:
        kernel.launch(3, given)
    ((*_, metadata, enter, leave, x, h, width, programs, size, wide),) = compiled.noted
    assert (enter, leave) == (runtime.launch_enter_hook, runtime.launch_exit_hook)
    assert hook in (enter, leave)
    passed = (x, h, width, programs, size, wide)
    assert metadata == ("described", (15, 1, 1), 11, passed)
    monkeypatch.setattr(runtime, side, Hook())
    assert not launching.has_launch_hooks()
    kernel.launch(3, given)
    assert compiled.noted[-1][6:9] == (None, None, None)


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes NVIDIA's launcher of the installed Triton, without a device."""

    def make(launch, signature):
        maps = [{"swizzle": 3, "elem_size": 2, "elem_type": 0, "block_size": [128, 64]}]
        maps[0]["fp4_padded"] = False
        launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
        launch = driver.wrap_handle_tensordesc(launch, signature, maps)
        scratch = {f"{kind}_scratch_{of}": 0 for kind in KINDS for of in ("size", "align")}
        more = {"launch_cooperative_grid": False, "launch_pdl": True, "gsan_enabled": False}
        vars(launcher).update(scratch | more, launch=launch, num_ctas=1)
        vars(launcher).update(arg_annotations=[], kernel_signature=b"")
        return launcher

    KINDS = ("global", "profile")
    names = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")  # of Triton 3.6, and later
    utilities = SimpleNamespace(**dict.fromkeys(names, lambda *given: ("map of", *given)))
    active = SimpleNamespace(utils=utilities)
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    return make


def test_a_descriptor_without_its_tensor_is_launched_as_the_one_with_it(installed):
    """Triton's launcher makes the map that the device reads from a descriptor at every launch."""
    lora_b = torch.zeros(2, 256, 64, dtype=torch.bfloat16)
    whole = descriptor(Located(lora_b, lora_b.stride()[:2], lora_b), 64, 128, 64)
    signature = {0: "*fp32", 1: "*bf16", 2: "*bf16", 3: "tensordesc<bf16[128, 64]>", 4: "i32"}
    noted = []
    compiled = Compiled(installed(lambda *given: noted.append(given), signature))
    for given in (whole, without_tensor(whole)):
        bound = BoundKernel(compiled, [1, 2, 3, given, 7], (0, 2), (2, 1, 1), axis=1)
        for _ in range(2):
            bound.launch(9, 11, (64, 128), hooks=False)
    first, *others = (flattened(given) for given in noted)
    described = first.index("map of")
    assert first[described + 1] == lora_b.data_ptr()
    assert 512 in first[described:]  # rows of B over all slots
    assert others == [first] * 3


def flattened(values):
    """Return values with the lists and tuples among them taken apart."""
    found = []
    for value in values:
        found += flattened(value) if isinstance(value, (list, tuple)) else [value]
    return found


def test_a_kernel_without_tma_has_no_descriptor():
    assert without_tensor(None) is None


B = torch.zeros(4, 64, 32, dtype=torch.bfloat16)
LAYOUTS = {
    "whole": (B, True),
    "some slots": (B[1:3], True),
    "some columns": (B[:, 8:40], True),
    "few ranks": (B[..., :16], True),
    "float32": (B.float(), False),
    "8 bits": (B.to(torch.int8), True),
    "8 bits in rows of 24 bytes": (B[..., :24].to(torch.int8), False),
    "odd rank": (B[..., :12].contiguous(), False),
    "unaligned": (B[..., 4:12], False),
    "rows of an odd width": (torch.zeros(4, 64, 36, dtype=torch.bfloat16)[..., :32], False),
    "one row for all columns": (B[:, :1].expand(4, 64, 32), False),
    "rows that overlap": (B.as_strided((3, 64, 32), (2048, 16, 1)), False),
    "transposed slots": (B.reshape(64, 4, 32).transpose(0, 1), False),
}


@pytest.mark.parametrize("lora_b, allowed", LAYOUTS.values(), ids=LAYOUTS)
def test_b_is_loaded_through_tma_where_its_slots_form_one_matrix(lora_b, allowed):
    located, max_rank = Located(lora_b, lora_b.stride()[:2], lora_b), lora_b.shape[2]
    assert allows_tma(located, max_rank, max_rows=65535) is allowed
    assert not allows_tma(located, max_rank, max_rows=65536)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("apart, allowed", [(0, True), (32, True), (8, False)])
def test_slices_of_b_are_one_matrix_where_whole_rows_lie_between_them(order, apart, allowed):
    widths, slots, rank = (64, 16, 16), 4, 32
    memory = torch.zeros(
        sum(slots * width * rank + apart for width in widths), dtype=torch.bfloat16
    )
    parts, at = {}, 0
    for s in order:
        size = slots * widths[s] * rank
        parts[s] = memory[at : at + size].view(slots, widths[s], rank)
        at += size + apart
    weights = LoRAWeights(
        None,
        tuple(parts[s] for s in range(3)),
        torch.full((slots, 3), rank),
        torch.ones(slots, 3),
        output_slices=widths,
    )
    located = located_b(weights)
    assert located.base is parts[order[0]]
    assert allows_tma(located, rank, max_rows=1) is allowed
    for s, first in enumerate((0, 64, 80)):
        entry = (located.alignment * located.table[s]).tolist()
        distance, slot_stride, row_stride = entry
        start = located.base.data_ptr() + 2 * (distance + first * row_stride + 3 * slot_stride)
        assert start == parts[s][3].data_ptr()
