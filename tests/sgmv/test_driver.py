"""Launches by the CUDA driver: the memory that it is given, as its header describes it."""

import ctypes
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.engines import ENGINES, device_or_skip, on
from helpers.small_layers import small_batch, small_weights
from triton.tools.tensor_descriptor import TensorDescriptor

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.sgmv.kernels import entry
from lora_backends.sgmv.launching import driver as launching
from lora_backends.sgmv.launching.driver import Driver, DriverKernel, TensorMap, driver_kernel
from lora_backends.sgmv.launching.kernel import Arguments, _taken


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * (8 - ctypes.sizeof(ctypes.c_int))),
        ("value", ctypes.c_char * 64),
    ]


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Cuda:
    """Stands for the driver: notes what a launch reads."""

    def __init__(self, widths, status=0):
        self.widths, self.status, self.launches = widths, status, []

    def parameter(self, function, index, offset, width):
        if index >= len(self.widths):
            return 1  # CUDA_ERROR_INVALID_VALUE
        width._obj.value = self.widths[index]
        return 0

    def text(self, status, text):
        if status != 1:
            return 1  # and the text stays NULL
        text._obj.value = b"invalid argument"
        return 0

    def encode(self, at, elements, rank, base, shape, strides, block, steps, *modes):
        given = (elements, rank, base, *shape, *strides, *block, *steps, *modes)
        ctypes.memmove(at, repr(given).encode().ljust(128), 128)
        return int(base == 0)

    def launch(self, config_at, function, addresses_at, extra):
        config = Config.from_address(config_at)
        addresses = (ctypes.c_void_p * len(self.widths)).from_address(addresses_at)
        kinds = {4: ctypes.c_int32, 8: ctypes.c_int64}
        given = zip(self.widths, addresses, strict=True)
        values = [
            ctypes.string_at(at, 128) if width == 128 else kinds[width].from_address(at).value
            for width, at in given
        ]
        given = zip(self.widths, addresses, strict=True)
        assert not any(at % 64 for width, at in given if width == 128)
        grid = config.grid_x, config.grid_y, config.grid_z
        block = config.block_x, config.block_y, config.block_z
        attributes = [
            (config.attributes[i].id, int.from_bytes(config.attributes[i].value, "little"))
            for i in range(config.num_attributes)
        ]
        stream = config.stream or 0
        self.launches.append((grid, block, config.shared_bytes, stream, attributes, values))
        assert function == 77 and extra is None
        return self.status


class Compiled:
    """A compiled kernel, hashed by identity as Triton's is."""

    function = 77

    def __init__(self, metadata):
        self.metadata = metadata


POINTERS, NUMBERS = [4096, 8192, 1 << 46], [5, -3, 1 << 40, 2**31 - 1]
WIDTHS = [8, 8, 8, 4, 4, 8, 4, 8, 8]


@pytest.fixture
def made(monkeypatch):
    """Return a function that makes a kernel whose launches a stand-in for the driver notes."""

    def make(cuda, given=None, places=(0, 2), **changed):
        found = Driver(cuda.launch, cuda.parameter, cuda.text, cuda.encode)
        monkeypatch.setattr(launching, "cuda_driver", lambda: found)
        sizes = {"num_ctas": 1, "num_warps": 8, "shared": 2048, "launch_pdl": True}
        sizes |= {"global_scratch_size": 0, "profile_scratch_size": 0, **changed}
        compiled = Compiled(SimpleNamespace(**sizes))
        given = dict(enumerate([*POINTERS, *NUMBERS])) if given is None else given
        addresses = sum(width == 8 for width in cuda.widths[:3])
        return driver_kernel(compiled, given, addresses, places, (6, 1, 1), 0)

    return make


@pytest.mark.parametrize("programmatic", [False, True])
def test_the_driver_reads_the_sizes_and_every_argument_of_a_launch(made, programmatic):
    kernel = made(cuda := Cuda(WIDTHS), launch_pdl=programmatic)
    attributes = [(6, 1)] * programmatic
    for rows, stream, first, second in ((3, 0, 64, 1 << 45), (2, 1 << 46, 16, 32)):
        assert kernel.launch(rows, stream, (first, second))
        values = [first, 8192, second, 5, -3, 1 << 40, 2**31 - 1, 0, 0]
        found = ((6 * rows, 1, 1), (256, 1, 1), 2048, stream, attributes, values)
        assert cuda.launches.pop() == found


@pytest.mark.parametrize(
    "widths",
    [
        WIDTHS[:-1],
        [*WIDTHS, 8],
        [8, 8, 8, 4, 4, 4, 4, 8, 8],  # a number of another width
        [8, 8, 8, 4, 4, 4, 8, 4, 8, 8],  # a number more
    ],
)
def test_triton_launches_kernels_with_other_parameters(made, widths):
    assert made(Cuda(widths)) is None


@pytest.mark.parametrize("size", ["global_scratch_size", "profile_scratch_size"])
def test_triton_launches_kernels_that_need_its_memory(made, size):
    assert made(Cuda(WIDTHS), **{size: 128}) is None


def test_triton_launches_clusters(made):
    assert made(Cuda(WIDTHS), num_ctas=2) is None


def test_triton_launches_kernels_with_more_shared_memory_than_one_launch_takes(made):
    assert made(Cuda(WIDTHS), shared=228 << 10) is not None
    assert made(Cuda(WIDTHS), shared=(228 << 10) + 1) is None


def test_kernels_take_a_1_that_triton_does_not_specialize():
    for kernel, first in (
        (entry.shrink_kernel, "in_features"),
        (entry.expand_kernel, "h_rows"),
    ):
        if not hasattr(kernel, "params"):
            pytest.skip("kernels are interpreted")
        at = kernel.arg_names.index(first)
        count = sum(name.islower() for name in kernel.arg_names[at:])
        given = Arguments((), (None,) * at, (1,) * count)
        values = [*given.descriptors, *given.numbers]
        # h_rows is 1 whenever one token is decoded
        rows = kernel.arg_names.index("h_rows")
        assert _taken(kernel.params, given, values) == {rows: 1}
        values[-1] = 7
        assert _taken(kernel.params, given, values) == {rows: 1, len(values) - 1: 7}


LAYOUT = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64]}
LAYOUT |= {"fp4_padded": False}
MATRIX = TensorDescriptor(torch.zeros(256, 64, dtype=torch.bfloat16), [256, 64], [64, 1], [128, 64])
WITH_MAP = [8, 8, 128, 4, 4, 8, 8, 4, 8, 8]
GIVEN = {0: 4096, 1: 8192, 2: MATRIX, 4: 5}  # the third argument is compiled in


def test_a_descriptor_is_encoded_once_and_taken_by_value(made):
    kernel = made(cuda := Cuda(WITH_MAP), GIVEN, (0, 4), tensordesc_meta=[LAYOUT])
    at = MATRIX.base.data_ptr()
    cuda.encode = None  # not at a launch
    for first, number in ((16, 3), (32, 9)):
        assert kernel.launch(2, 0, (first, number))
        *_, values = cuda.launches.pop()
        # bfloat16, two axes from the innermost, strides in bytes but for the innermost
        expected = (9, 2, at, 64, 256, 128, 0, 64, 128, 1, 1, 0, 3, 2, 0)
        assert values[:2] + values[3:] == [first, 8192, 256, 64, 64, 1, number, 0, 0]
        assert values[2].decode().strip() == repr(expected)


def test_a_number_that_changes_may_be_negative(made):
    """As the stride of slices is, if the tensors of A lie in descending order."""
    kernel = made(cuda := Cuda(WIDTHS), places=range(7))
    values = [64, 128, 1 << 46, -7, 5, -(1 << 40), -(1 << 31)]
    for _ in range(2):
        assert kernel.launch(2, 1 << 46, values)
        *_, stream, _, found = cuda.launches.pop()
        assert (stream, found) == (1 << 46, [*values, 0, 0])


@pytest.mark.parametrize(
    "layouts",
    [
        [],
        None,
        [LAYOUT, LAYOUT],
        [{**LAYOUT, "fp4_padded": True}],
        [{**LAYOUT, "is_im2col": True}],
    ],
)
def test_triton_launches_kernels_with_descriptors_of_other_kinds(made, layouts):
    assert made(Cuda(WITH_MAP), GIVEN, tensordesc_meta=layouts) is None


def test_triton_launches_kernels_whose_descriptor_cannot_be_encoded(made):
    nan = replace(MATRIX, padding="nan")
    assert made(Cuda(WITH_MAP), {**GIVEN, 2: nan}, tensordesc_meta=[LAYOUT]) is None
    cuda = Cuda(WITH_MAP)
    cuda.encode = lambda *given: 1  # CUDA_ERROR_INVALID_VALUE
    assert made(cuda, GIVEN, (0, 4), tensordesc_meta=[LAYOUT]) is None


def test_triton_launches_kernels_that_have_a_changing_argument_compiled_in(made):
    assert made(Cuda(WITH_MAP), GIVEN, (0, 3), tensordesc_meta=[LAYOUT]) is None


def test_there_is_no_cuda_driver_on_rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launching.cuda_driver.__wrapped__() is None


def test_a_launch_that_the_driver_refuses_is_an_error(made):
    kernel = made(cuda := Cuda(WIDTHS, status=1))
    with pytest.raises(RuntimeError, match=r"not launched: invalid argument \(CUresult 1\)"):
        kernel.launch(1, 0, (16, 32))
    cuda.status = 999
    with pytest.raises(RuntimeError, match=r"not launched: unknown error \(CUresult 999\)"):
        kernel.launch(1, 0, (16, 32))
    cuda.status = 201  # CUDA_ERROR_INVALID_CONTEXT: a new thread
    assert kernel.launch(1, 0, (16, 32)) is False
    cuda.status = 0
    assert kernel.launch(1, 0, (16, 32)) is True


def test_launches_at_the_same_time_have_memory_of_their_own(made):
    class Reentered(Cuda):
        def launch(self, *given):
            if not self.launches:
                self.launches.append("inner")
                kernel.launch(9, 9, (9, 9))  # as another thread may, while the driver reads
            return super().launch(*given)

    kernel = made(cuda := Reentered(WIDTHS))
    kernel.launch(3, 5, (64, 128))
    grid, _, _, stream, _, values = cuda.launches[-1]
    assert len(cuda.launches) == 3
    assert (grid, stream, values[0], values[2]) == ((18, 1, 1), 5, 64, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
def test_repeated_calls_are_launched_by_the_driver_in_new_threads_too(monkeypatch, engine):
    device = device_or_skip()
    if launching.cuda_driver() is None:
        pytest.skip("no CUDA driver")
    launch, done = DriverKernel.launch, []
    monkeypatch.setattr(
        DriverKernel, "launch", lambda *given: done.append(launch(*given)) or done[-1]
    )
    backend = ENGINES[engine](device)
    weights, plan = on(device, small_weights(torch.bfloat16)), backend.prepare_batch(small_batch())
    x = torch.randn(7, weights.in_features, dtype=torch.bfloat16, device=device)
    start = torch.randn(7, weights.out_features, dtype=torch.bfloat16, device=device)
    expected, found = start.clone(), [start.clone() for _ in range(3)]
    backend.run_linear(x, weights, plan, expected)
    assert not done
    for y in found[:2]:
        backend.run_linear(x, weights, plan, y)
    assert done == [True] * 4
    thread = threading.Thread(target=backend.run_linear, args=(x, weights, plan, found[2]))
    thread.start()
    thread.join()
    assert len(done) == 6 and all(torch.equal(y, expected) for y in found)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rank", [16, 64])
def test_kernels_with_tma_are_launched_by_the_driver_for_any_rows(monkeypatch, engine, rank):
    device = device_or_skip()
    launch, given = DriverKernel.launch, []
    monkeypatch.setattr(
        DriverKernel, "launch", lambda *args: given.append(args[0]) or launch(*args)
    )
    backend = ENGINES[engine](device)
    if launching.cuda_driver() is None or not backend._options.tma:
        pytest.skip("no CUDA driver, or no TMA")
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    weights = LoRAWeights(
        drawn(4, 3, rank, 512),
        drawn(4, 6144, rank),
        torch.full((4, 3), rank, dtype=torch.int32, device=device),
        torch.ones(4, 3, device=device),
        (4096, 1024, 1024),
    )
    slots = [3] * 2500 + [0] * 1500 + [-1] * 20
    plan = backend.prepare_batch(LoRABatch(slots, 4), capacity=4096)
    fresh = ENGINES[engine](device)
    for rows in (4096, 4020, 4077):
        x, y = drawn(rows, 512), drawn(rows, 6144)
        expected = y.clone()
        given.clear()
        backend.run_linear(x, weights, plan, y)
        if rows < 4096:  # both kernels of a repeated call, of which the expand uses TMA
            by_value = [any(isinstance(a, TensorMap) for a in k._arguments) for k in given]
            assert by_value == [False, True]
        fresh.run_linear(
            x, weights, fresh.prepare_batch(LoRABatch(slots, 4), capacity=4096), expected
        )
        assert torch.equal(y, expected)
