"""8-bit stacks on `numba_cpu`, against `torch_ref` on the same stored values."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numba import njit

from lora_backends import ExpertWeights, LoRABatch, LoRAWeights, quantize_weights
from lora_backends.eight_bit import LARGEST
from lora_backends.numba_cpu import NumbaCPUBackend, launch, routines
from lora_backends.numba_cpu.config import (
    FLOAT32_BLOCKS,
    LONG_PANEL,
    LONG_SEGMENT,
    MAX_SEGMENT,
    PAIR_BLOCKS,
)
from lora_backends.numba_cpu.kernels import eight_bit_shrink
from lora_backends.numba_cpu.machine import plain
from lora_backends.numba_cpu.machine import vectors as v
from lora_backends.numba_cpu.machine.cpu import has_bfloat16
from lora_backends.torch_ref import TorchRefBackend

STORED = pytest.mark.parametrize("stored", list(LARGEST), ids=str)
BLOCKS = pytest.mark.parametrize("block", [(1, None), (None, None), (3, 5), (4, 16), (1, 32)])
MARKERS = {torch.int8: v.INT8, torch.float8_e4m3fn: v.E4M3, torch.float8_e5m2: v.E5M2}
LANES = v.LANES
SLOTS, RANK, INPUTS, WIDTHS = 3, 21, 75, (83, 35, 16)


@njit
def widen(kind, source, target):
    for i in range(16):
        v.store_all(target + 64 * i, 64, (v.load(kind, source + 16 * i),))


@njit
def columns_of(kind, source, target):
    v.store_all(target, 64, v.load_columns(kind, source, 16))


@njit
def square_of(kind, source, target):
    v.store_all(target, 64, v.load_square(kind, source))


@njit
def to_bfloat16(source, target):
    for i in range(8):
        v.store_all(target + 64 * i, 64, v.load_wide(v.INT8, (source,), 32 * i, (0,)))


@njit
def add_wide(a_rows, x_rows, sums, like):
    a, x = v.load_wide(v.BFLOAT16, a_rows, 0, like), v.load_wide(v.BFLOAT16, x_rows, 0, like)
    v.store_all(sums, 64, v.add_wide(v.load_all(sums, (0, 0, 0, 0)), a, x, like))


def eight_bit(stored, block, extras=False, spread=False):
    """Return a layer of 8 bits; NaN in the scales of rows of A beyond the ranks."""
    make = torch.Generator().manual_seed(3)
    out = sum(WIDTHS)
    wide = LoRAWeights(
        torch.randn(SLOTS, 3, RANK, INPUTS, generator=make),
        torch.randn(SLOTS, out, RANK, generator=make),
        torch.tensor([[RANK, 3, 5], [0, 20, 1], [16, 8, RANK]]),
        torch.rand(SLOTS, 3, generator=make) + 0.5,
        WIDTHS,
        torch.randn(SLOTS, out, generator=make) if extras else None,
        torch.rand(SLOTS, out, generator=make) + 0.5 if extras else None,
    )
    weights = quantize_weights(wide, stored, block)
    if block == (1, None):
        weights.a_scales[torch.arange(RANK) >= weights.ranks[..., None]] = torch.nan
    if spread:
        a = tuple(with_gaps(weights.a_of(s)) for s in range(len(WIDTHS)))
        b = tuple(with_gaps(weights.b_of(s)) for s in range(len(WIDTHS)))
        weights = replace(weights, lora_a=a, lora_b=b)
    return weights


def with_gaps(part):
    """Return the values in other memory, 0x7f around them: NaN of either float8."""
    shape = (part.shape[0], part.shape[1] + 1, part.shape[2] + 3)
    room = torch.full(shape, 0x7F, dtype=torch.uint8).view(part.dtype)
    return room[:, :-1, :-3].copy_(part)


def batch_of(tokens, scaled):
    make = torch.Generator().manual_seed(tokens)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=make)
    slots[tokens // 3 : tokens // 3 + tokens // 2] = SLOTS - 1  # a long segment in a long batch
    return LoRABatch(slots, SLOTS, torch.randn(tokens, generator=make) if scaled else None)


def agree(actual, expected):
    unit = torch.finfo(actual.dtype).eps if actual.dtype != torch.float32 else 2.0**-19
    bound = unit * expected.abs() + 1e-5 * expected.abs().max()
    assert ((actual.double() - expected).abs() <= bound).all()


@STORED
@BLOCKS
def test_stored_values_times_scales_are_what_is_multiplied(stored, block):
    backend, reference = NumbaCPUBackend(), TorchRefBackend()
    make = torch.Generator().manual_seed(4)
    for step, tokens in enumerate([1, 9, 5 * LONG_SEGMENT, MAX_SEGMENT + 30]):
        weights = eight_bit(stored, block, extras=step % 2, spread=step > 1)
        batch = batch_of(tokens, scaled=step > 1)
        plan, other = backend.prepare_batch(batch), reference.prepare_batch(batch)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[step % 3]
        x = torch.randn(tokens, INPUTS, generator=make).to(dtype)
        base = torch.randn(tokens, sum(WIDTHS), generator=make).to(dtype)
        expected = reference.run_linear(
            x.float(), weights, other, base.to(torch.float32, copy=True)
        )
        agree(backend.run_linear(x, weights, plan, base.clone()), expected.double())
        ids = torch.randint(0, INPUTS, (tokens,), generator=make)
        expected = reference.run_embedding(ids, weights, other, base.to(torch.float32, copy=True))
        agree(backend.run_embedding(ids, weights, plan, base.clone()), expected.double())


@STORED
def test_rows_are_the_same_alone_and_in_a_long_segment(stored):
    for block in ((1, None), (4, 16)):
        weights, backend = eight_bit(stored, block), NumbaCPUBackend()
        tokens = LONG_SEGMENT + 5
        x, base = torch.randn(tokens, INPUTS).bfloat16(), torch.zeros(tokens, sum(WIDTHS)).half()

        def run(rows, weights=weights, backend=backend, x=x, base=base):
            plan = backend.prepare_batch(LoRABatch([1] * len(x[rows]), SLOTS))
            return backend.run_linear(x[rows], weights, plan, base[rows].clone())

        alone = torch.cat([run(slice(t, t + 1)) for t in range(tokens)])
        assert torch.equal(run(slice(None)), alone)
        few = torch.cat([run(slice(0, 7)), run(slice(7, 9)), run(slice(9, None))])
        assert torch.equal(few, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_rank_16_give_the_same_with_and_without_gaps(dtype):
    make = torch.Generator().manual_seed(7)
    a = torch.randint(-128, 128, (2, 1, 16, INPUTS), generator=make, dtype=torch.int8)
    b = torch.randint(-128, 128, (2, 83, 16), generator=make, dtype=torch.int8)
    scales = torch.rand(2, 1, 16, 1, generator=make), torch.rand(2, 83, 1, generator=make)
    ranks = torch.tensor([[16], [15]])
    packed = LoRAWeights(
        a, b, ranks, torch.ones(2, 1), (83,), a_scales=scales[0], b_scales=scales[1]
    )
    x, batch = torch.randn(30, INPUTS, generator=make).to(dtype), LoRABatch([0, 1] * 15, 2)
    backend, reference = NumbaCPUBackend(), TorchRefBackend()
    plan = backend.prepare_batch(batch)  # 8, 4, 2 and 1 tokens of each slot
    found = backend.run_linear(x, packed, plan)
    assert torch.equal(found, backend.run_linear(x, replace(packed, lora_b=with_gaps(b)), plan))
    expected = reference.run_linear(x.float(), packed, reference.prepare_batch(batch))
    agree(found, expected.double())


def choose(way, monkeypatch):
    """Let shrinks of int8 by bfloat16 multiply in this way on any CPU."""
    if way == "pairs" and not has_bfloat16():
        pytest.skip("this CPU multiplies no pairs of bfloat16")
    monkeypatch.setattr(routines, "has_bfloat16", lambda: way != "stored")
    monkeypatch.setattr(routines, "has_fast_pairs", lambda: way == "pairs")
    monkeypatch.setattr(launch, "eight_bit_table", routines.eight_bit_table.__wrapped__)
    monkeypatch.setattr(launch, "eight_bit_kernel", launch.eight_bit_kernel.__wrapped__)


def sums_exactly(inputs, rank, slots, spread=False):
    """Shrink integers, whose sums are exact in any order."""
    make = torch.Generator().manual_seed(5)
    a = torch.randint(-128, 128, (2, 1, rank, inputs), generator=make, dtype=torch.int8)
    a[0, 0, 0], a[0, 0, -1, ::2] = -128, 127
    b = torch.ones(2, LANES, rank, dtype=torch.int8)
    options = {"a_scales": torch.ones(2, 1, rank, 1), "b_scales": torch.ones(2, LANES, 1)}
    ranks = torch.full((2, 1), rank, dtype=torch.int32)
    weights = LoRAWeights(
        with_gaps(a[:, 0])[:, None] if spread else a,
        b,
        ranks,
        torch.ones(2, 1),
        (LANES,),
        **options,
        compute_dtype=torch.bfloat16,
    )
    x = torch.randint(-4, 5, (len(slots), inputs), generator=make).bfloat16()
    backend = NumbaCPUBackend()
    h = backend.run_lora_a(x, weights, backend.prepare_batch(LoRABatch(slots, 2)))
    expected = torch.einsum("ti,tri->tr", x.double(), a[slots, 0].double())
    assert torch.equal(h[0].double(), expected)


@pytest.mark.parametrize("way", ["stored", "float32", "pairs"])
@pytest.mark.parametrize("inputs", [LANES, 2 * PAIR_BLOCKS.inputs, 2 * PAIR_BLOCKS.inputs + 77])
def test_every_product_of_int8_and_bfloat16_is_summed_once(inputs, way, monkeypatch):
    """In chunks of wide inputs, in panels of high ranks, by either instruction: exact integers."""
    choose(way, monkeypatch)
    sums_exactly(inputs, LONG_PANEL + 3, [0] * 8 + [1] * (LONG_SEGMENT - 1))


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
@pytest.mark.parametrize("rest", [-1, 0, 2 * LANES, 77])
def test_sums_of_int8_as_float32_keep_to_short_chunks_and_few_rows(rest, rank, monkeypatch):
    """Short last chunks, short last blocks of rows, and gaps between rows."""
    choose("float32", monkeypatch)
    inputs, slots = FLOAT32_BLOCKS.inputs + rest, [0] * 15 + [1] * 3  # 8, 4, 2 and 1 tokens
    sums_exactly(inputs, rank, slots, spread=True)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [4, 8, 15, 16])
def test_int8_is_prefetched_in_the_order_of_use(count, ranks):
    """Row by row, chunk by chunk, and at last the first rows of the stack that follows."""
    ahead_of = getattr(eight_bit_shrink.ahead_of, "py_func", eight_bit_shrink.ahead_of)
    width, chunks = FLOAT32_BLOCKS.inputs, 3
    a_row = chunks * width
    used = [
        (j * a_row + chunk * width, (j, chunk))
        for chunk in range(chunks)
        for j in range(0, count, ranks)
    ]
    fetched = []
    for at, (j, chunk) in used:
        columns = (chunk * width, width, chunk + 1 < chunks)
        fetched.append(at + ahead_of(FLOAT32_BLOCKS, ranks, (j, count, a_row), columns))
    early = min(FLOAT32_BLOCKS.ahead // width, -(-count // ranks))
    assert fetched[:-early] == [at for at, _ in used][early:]
    stack = -(-count // ranks) * ranks * a_row
    assert fetched[-early:] == [stack + i * ranks * a_row for i in range(early)]


def test_what_one_8_bit_dtype_has_compiled_serves_the_others():
    compiled = []
    for stored in LARGEST:
        weights = eight_bit(stored, (3, 5))
        backend = NumbaCPUBackend()
        plan = backend.prepare_batch(LoRABatch([0, 1], SLOTS))
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            backend.run_linear(torch.randn(2, INPUTS).to(dtype), weights, plan)
            compiled.append(routines._routine.cache_info().misses)
    assert len(set(compiled)) == 1


def test_every_pattern_of_int8_is_exact_in_bfloat16():
    values = torch.arange(-128, 128).to(torch.int8)
    for start in range(0, 256, 32):
        (twin,) = plain.load_wide(v.INT8, (values[start:].data_ptr(),), 0, (0,))
        assert torch.equal(
            torch.from_numpy(twin).view(torch.bfloat16).int(), values[start:][:32].int()
        )
    if not has_bfloat16():
        pytest.skip("this CPU multiplies no pairs of bfloat16")
    narrow = torch.empty(256, dtype=torch.bfloat16)
    to_bfloat16(values.data_ptr(), narrow.data_ptr())
    assert torch.equal(narrow.int(), values.int())


@pytest.mark.parametrize("like", [(0,), (0, 0)], ids=["pairs", "float32"])
def test_products_of_32_elements_are_summed_lane_by_lane(like):
    if len(like) == 1 and not has_bfloat16():
        pytest.skip("this CPU multiplies no pairs of bfloat16")
    make = torch.Generator().manual_seed(1)
    a, x = (torch.randint(-9, 10, (2, 32), generator=make).bfloat16() for _ in range(2))
    sums = torch.arange(64.0).view(4, 16)
    products = (x.float()[:, None] * a.float()).view(4, 32)
    # neighbours share a lane, or the elements of the two halves
    products = products.view(4, 16, 2).sum(2) if len(like) == 1 else products.view(4, 2, 16).sum(1)
    rows = ((a.data_ptr(), a.data_ptr() + 64), (x.data_ptr(), x.data_ptr() + 64))
    vectors = [plain.load_wide(v.BFLOAT16, row, 0, like) for row in rows]
    twins = plain.add_wide(tuple(sums.numpy()), *vectors, like)
    assert torch.equal(torch.stack([torch.from_numpy(twin) for twin in twins]), sums + products)
    expected = sums + products
    add_wide(*rows, sums.data_ptr(), like)
    assert torch.equal(sums, expected)


@STORED
def test_every_8_bit_pattern_widens_exactly(stored):
    values = torch.arange(256, dtype=torch.uint8).view(stored)
    wide, expected = torch.empty(256), values.float()
    widen(MARKERS[stored], values.data_ptr(), wide.data_ptr())
    torch.testing.assert_close(wide, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(wide.signbit()[~wide.isnan()], expected.signbit()[~wide.isnan()])
    columns = torch.empty(16, 16)
    columns_of(MARKERS[stored], values.data_ptr(), columns.data_ptr())
    wanted = expected.view(16, 16).T
    torch.testing.assert_close(columns, wanted, rtol=0, atol=0, equal_nan=True)
    twins = torch.stack(
        [torch.from_numpy(c) for c in plain.load_columns(MARKERS[stored], values.data_ptr(), 16)]
    )
    torch.testing.assert_close(twins, wanted, rtol=0, atol=0, equal_nan=True)
    square_of(MARKERS[stored], values.data_ptr(), columns.data_ptr())
    torch.testing.assert_close(columns, wanted, rtol=0, atol=0, equal_nan=True)
    twins = np.stack(plain.load_square(MARKERS[stored], values.data_ptr()))
    torch.testing.assert_close(torch.from_numpy(twins), wanted, rtol=0, atol=0, equal_nan=True)


@STORED
@pytest.mark.parametrize("block", [(1, None), (3, 5)])
@pytest.mark.parametrize("shared", ["", "a", "b"])
@pytest.mark.parametrize("num_a", [1, 2])
def test_experts_of_8_bits_agree_with_the_reference(stored, block, shared, num_a):
    make, experts, widths = torch.Generator().manual_seed(6), 4, (20, 20)
    a_experts, b_experts = (1 if name in shared else experts for name in "ab")
    ranks = torch.randint(0, 9, (2, experts, num_a), generator=make)
    for interleaved, dtype in product((False, True), (torch.float32, torch.bfloat16)):
        weights = ExpertWeights(
            torch.randn(2, a_experts, num_a, 8, 40, generator=make),
            torch.randn(2, b_experts, sum(widths), 8, generator=make),
            ranks,
            torch.rand(2, experts, num_a, generator=make),
            output_slices=widths,
            num_experts=experts,
            interleaved=interleaved,
        )
        weights = quantize_weights(weights, stored, block)
        if a_experts == 1 and not interleaved:  # one A, but scales of its own for every expert
            factors = torch.rand(2, experts, *weights.a_scales.shape[2:], generator=make)
            weights = replace(weights, a_scales=weights.a_scales * factors)
        results = []
        x = torch.randn(9, 40, generator=make).to(dtype)
        ids = torch.randint(-1, experts, (9, 2), generator=make)
        factors = torch.rand(9, 2, generator=make)
        for backend in (NumbaCPUBackend(), TorchRefBackend()):
            plan = backend.prepare_batch(LoRABatch([0, 1, -1, 1, 1, 0, 0, 1, 0], 2))
            routing = backend.prepare_experts(plan, ids, factors, experts)
            for reduce in (False, True):
                results.append(
                    backend.run_experts(x, weights, routing, weighted=True, reduce=reduce)
                )
        for actual, expected in zip(results[:2], results[2:], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_result_of_experts_has_the_compute_dtype_whatever_x_has():
    weights = ExpertWeights(
        torch.randn(1, 2, 1, 4, 20),
        torch.randn(1, 2, 16, 4),
        torch.full((1, 2, 1), 4),
        torch.ones(1, 2, 1),
        output_slices=(16,),
        num_experts=2,
    )
    weights = replace(quantize_weights(weights, torch.int8), compute_dtype=torch.float16)
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch([0, 0, -1], 1))
    for ids in ([[0], [1], [0]], [[-1], [-1], [-1]]):  # with live pairs, and without
        routing = backend.prepare_experts(plan, torch.tensor(ids), torch.ones(3, 1), 2)
        for reduce in (False, True):
            y = backend.run_experts(torch.randn(3, 20), weights, routing, reduce=reduce)
            assert y.dtype == torch.float16
