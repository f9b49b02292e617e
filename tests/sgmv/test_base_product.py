"""A base product beside a layer's LoRA, against both in turn."""

from types import SimpleNamespace

import pytest
import torch
from helpers.engines import VARIANTS, make_engine, on, poisoned
from helpers.small_layers import small_batch

from lora_backends import NO_ADAPTER, LoRABatch, LoRAWeights
from lora_backends.sgmv import engine
from lora_backends.sgmv.base import product
from lora_backends.sgmv.base.product import base_kernel_of, base_tiles
from lora_backends.sgmv.launching.kernel import SpecializedKernel
from lora_backends.sgmv.tiles.gpu import H200, Gpu
from lora_backends.triton import TritonBackend

INPUTS, SLICES = 24, (9, 5)


@pytest.fixture
def narrow(monkeypatch):
    """Let the kernel run on layers that cuBLAS would multiply faster."""
    monkeypatch.setattr(product, "MULTIPROCESSORS_PER_PROGRAM", H200.multiprocessors)


def whole(*shape, seed, dtype=torch.bfloat16):
    """Return small whole numbers: their products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def layer(dtype=torch.bfloat16, bias=False):
    return LoRAWeights(
        lora_a=whole(4, 2, 3, INPUTS, seed=1, dtype=dtype),
        lora_b=whole(4, sum(SLICES), 3, seed=2, dtype=dtype),
        ranks=torch.tensor([[3, 1], [2, 2], [0, 0], [3, 3]], dtype=torch.int32),
        scalings=torch.tensor([[0.5, 1.0], [2.0, 1.0], [1.0, 1.0], [0.25, 0.5]]),
        output_slices=SLICES,
        bias=whole(4, sum(SLICES), seed=3, dtype=dtype) if bias else None,
    )


def given(device, rows):
    """Return a layer, x, the base weight and its bias."""
    x, weight = whole(rows, INPUTS, seed=4), whole(sum(SLICES), INPUTS, seed=5)
    bias = whole(sum(SLICES), seed=6)
    return on(device, layer()), x.to(device), weight.to(device), bias.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_the_product_and_then_the_lora(device, monkeypatch, narrow, variant, bias, dtype):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    backend = make_engine(variant, device)
    if not backend.multiplies_bases:
        pytest.skip("the device has no TMA, or the backend is batch-invariant")
    weights, batch = on(device, layer(dtype, bias)), small_batch()
    x = whole(batch.num_tokens, INPUTS, seed=4, dtype=dtype).to(device)
    weight = whole(sum(SLICES), INPUTS, seed=5, dtype=dtype).to(device)
    base_bias = whole(sum(SLICES), seed=6, dtype=dtype).to(device) if bias else None
    plan = backend.prepare_batch(batch)
    wanted = torch.nn.functional.linear(x, weight, base_bias)
    backend.run_linear(x, weights, plan, wanted)
    got = backend.run_with_base(x, weight, base_bias, weights, plan)
    assert torch.equal(got, wanted) and got.dtype == dtype


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_behind_the_batch_and_without_adapters_are_the_product(device, narrow, variant):
    backend = make_engine(variant, device)
    if not backend.multiplies_bases:
        pytest.skip("the device has no TMA, or the backend is batch-invariant")
    weights, x, weight, _ = given(device, 20)
    for slots in ([NO_ADAPTER] * 3, [2, 2], [0, NO_ADAPTER, 3]):
        plan = backend.prepare_batch(LoRABatch(slots, 4), capacity=20)
        wanted = torch.nn.functional.linear(x, weight)
        backend.run_linear(x, weights, plan, wanted)
        got = backend.run_with_base(x, weight, None, weights, plan)
        assert torch.equal(got, wanted)
        assert torch.equal(got[len(slots) :], torch.nn.functional.linear(x, weight)[len(slots) :])


def test_what_it_does_not_take_it_leaves_to_others(device, narrow):
    backend = make_engine("triton", device)
    if not backend.multiplies_bases:
        pytest.skip("the device has no TMA")
    batch = small_batch()
    weights, x, weight, bias = given(device, batch.num_tokens)
    plan = backend.prepare_batch(batch)
    assert backend.run_with_base(x, weight, bias, weights, plan) is not None
    strided = on(device, layer())
    object.__setattr__(strided, "ranks", strided.ranks.T.contiguous().T)
    wide = whole(sum(SLICES), INPUTS + 4, seed=5).to(device)
    wider = whole(sum(SLICES), INPUTS + 8, seed=5).to(device)
    assert backend.run_with_base(x, wider[:, 8:], bias, weights, plan) is not None
    wide_x = whole(batch.num_tokens, INPUTS + 8, seed=4).to(device)
    learned = torch.nn.Parameter(weight)
    for refused in (
        (x.float(), weight.float(), None, on(device, layer(torch.float32)), plan),
        (x, weight.half(), bias, weights, plan),
        (x, weight, bias.half(), weights, plan),
        (x, weight, bias[:-1], weights, plan),
        (x, weight[:-1], bias, weights, plan),
        (x, weight.T.contiguous().T, bias, weights, plan),
        (x, wide[:, :INPUTS], bias, weights, plan),  # its rows begin at no multiple of 16 bytes
        (x, wider[:, 4:-4], bias, weights, plan),  # nor does the first of these
        (wide_x[:, 4:-4], weight, bias, weights, plan),
        (x[:, :16], weight, bias, weights, plan),
        (x, learned, bias, weights, plan),  # no gradient would reach it
        (x, weight, torch.nn.Parameter(bias), weights, plan),
        (x, weight, bias, strided, plan),  # a copy of the ranks would be launched between
    ):
        assert backend.run_with_base(*refused) is None
    with torch.no_grad():
        assert backend.run_with_base(x, learned, bias, weights, plan) is not None
    invariant = make_engine("triton", device, batch_invariant=True)
    assert not invariant.multiplies_bases
    plan = invariant.prepare_batch(batch)
    assert invariant.run_with_base(x, weight, bias, weights, plan) is None


@pytest.mark.parametrize("missing", range(4))
def test_a_graph_captures_only_what_is_compiled(device, monkeypatch, narrow, missing):
    """Of three kernels; Triton cannot compile one while a graph captures."""
    backend = make_engine("triton", device)
    if not backend.multiplies_bases:
        pytest.skip("the device has no TMA")
    batch = small_batch()
    weights, x, weight, _ = given(device, batch.num_tokens)
    plan, asked = backend.prepare_batch(batch), []

    def is_compiled(kernel, arguments):
        asked.append(arguments)
        return len(asked) != missing + 1

    monkeypatch.setattr(engine, "is_capturing", lambda device: True)
    monkeypatch.setattr(SpecializedKernel, "is_compiled", is_compiled)
    y = backend.run_with_base(x, weight, None, weights, plan)
    assert (y is None) == (missing < 3) and len(asked) == min(3, missing + 1)


class Own(TritonBackend):
    """An engine with arithmetic of its own."""

    def run_linear(self, x, weights, plan, base_output=None):
        return base_output


class OwnGroups(TritonBackend):
    def run_qkv(self, x, weights, plan, base_output=None):
        return base_output


class Both(Own):
    def run_with_base(self, x, base_weight, base_bias, weights, plan):
        return x @ base_weight.T


class Mixed(Both, TritonBackend):
    """Nothing of its own."""


class Changed(TritonBackend):
    """Prepares batches in its own way."""

    def prepare_batch(self, batch, out=None, capacity=None):
        return super().prepare_batch(batch, out, capacity)


@pytest.mark.parametrize(
    ("engine", "multiplies"),
    [(TritonBackend, True), (Changed, True), (Both, True), (Mixed, True)]
    + [(Own, False), (OwnGroups, False)],
)
def test_an_override_of_run_linear_is_not_passed_over(engine, multiplies):
    """Graphs of a model would compute with the engine that it inherits from."""
    backend = object.__new__(engine)  # a device with TMA is not here
    backend._options, backend.batch_invariant = SimpleNamespace(tma=True), False
    assert backend.multiplies_bases is multiplies
    backend.run_linear = None
    assert not backend.multiplies_bases


def test_it_takes_what_it_multiplies_faster_than_cublas():
    assert base_tiles(64, 4096, H200) and not base_tiles(65, 4096, H200)
    assert base_tiles(1, 2817, H200) and not base_tiles(1, 2816 - 64, H200)
    for rows in (1, 32, 33, 64):
        for out_features in (3200, 8448, 8512, 16896, 16960, 65536):
            for gpu in (H200, Gpu(132, 99 << 10), Gpu(148, 227 << 10)):
                tiles = base_tiles(rows, out_features, gpu)
                step = (tiles.block_c + max(16, rows)) * tiles.block_k * 2
                assert 2 <= tiles.num_stages and tiles.num_stages * step < gpu.shared_bytes
    assert base_tiles(64, 4096, Gpu(132, 48 << 10)) is None, "two steps do not fit"


def test_x_without_rows_is_left_to_others():
    x, weight = whole(0, INPUTS, seed=4), whole(4096, INPUTS, seed=5)
    assert base_kernel_of(x, weight, None, H200, False) is None


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows, columns", [(1, 6144), (8, 10240), (33, 6144), (64, 28672)])
def test_a_graph_captures_a_base_product_beside_the_lora(variant, rows, columns):
    """Kernels that came too early or too late would err: each reads what the last one wrote."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch finds no CUDA device with TMA")
    backend = make_engine(variant, "cuda")
    if not backend.multiplies_bases:
        pytest.skip("the backend is batch-invariant")
    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    slices = (columns - 2048, 1024, 1024)
    weights = LoRAWeights(
        lora_a=random(4, 3, 16, 512),
        lora_b=random(4, columns, 16),
        ranks=torch.tensor([[16, 3, 0], [8, 8, 8], [0, 0, 0], [1, 16, 9]], dtype=torch.int32),
        scalings=torch.rand(4, 3),
        output_slices=slices,
    )
    weights = on("cuda", weights)
    base_weight, bias, source = random(columns, 512), random(columns), random(rows, 512)
    x, linear = torch.empty_like(source), torch.nn.functional.linear
    wide = source[:, :, None].expand(-1, -1, 4096)
    plan = backend.prepare_batch(LoRABatch([t % 4 for t in range(rows)], 4), capacity=rows)
    both = backend.run_with_base(source, base_weight, bias, weights, plan)
    apart = backend.run_linear(source, weights, plan, linear(source, base_weight, bias))
    # two more roundings to 8 bits apart, of values up to the larger of product and sum
    close = (both.float() - apart.float()).abs() <= 2**-7 * (apart.float().abs() + 64)
    assert close.all()
    torch.amax(wide, -1, out=x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):  # each writes x, slowly, and y anew
            torch.amax(wide, -1, out=x)
            y = backend.run_with_base(x, base_weight, bias, weights, plan)
            source.add_(y[:, :512], alpha=1e-3)
    start = source.clone()
    for slots in ([-1] * rows, [3] * rows, [t % 3 for t in range(rows)]):
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        source.copy_(start)
        graph.replay()
        given = y.clone(), source.clone()
        source.copy_(start)
        for _ in range(20):
            torch.cuda.synchronize()
            wanted = backend.run_with_base(source, base_weight, bias, weights, plan)
            torch.cuda.synchronize()
            source.add_(wanted[:, :512], alpha=1e-3)
        assert torch.equal(given[1], source) and torch.equal(given[0], wanted)
