"""Both engines against the definition, with tiles other than those that would be chosen."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.engines import (
    DTYPES,
    ENGINES,
    ON_GPU,
    UNITS,
    VARIANTS,
    make_engine,
    on,
    ones,
    poisoned,
)
from helpers.small_layers import per_token, small_batch, small_weights

from lora_backends import LoRABatch, LoRAWeights, get_backend, quantize_weights
from lora_backends.sgmv import launch
from lora_backends.sgmv.kernels import blocks, entry, prefetch
from lora_backends.sgmv.kernels.operands import AStack, Input, ShrinkSizes
from lora_backends.sgmv.launching.kernel import INTERPRETED
from lora_backends.sgmv.tiles.gpu import H200
from lora_backends.sgmv.tiles.sizes import (
    TILE_TOKENS,
    ExpandTiles,
    LayerShape,
    ShrinkTiles,
    TileConfig,
    tile_faults,
)
from lora_backends.sgmv.tiles.source import fixed_source

TILES = [
    TileConfig(ShrinkTiles(16, 16, split_k=1), ExpandTiles(16, 16)),
    TileConfig(ShrinkTiles(64, 32, split_k=3), ExpandTiles(32, 16, chunks=4)),
    TileConfig(ShrinkTiles(16, 64, split_k=2, warps_k=4), ExpandTiles(64, 16, chunks=2)),
    TileConfig(ShrinkTiles(16, 16, split_k=2, warps_k=0), ExpandTiles(16, 16, 2, num_stages=0)),
]
ROWS = {  # tokens per tile, and the options that cut a batch into them
    "triton": [(16, {}), (64, {}), (32, {}), (16, {})],
    "csgmv": [
        (16, {"segment_size": 16}),
        (64, {"segment_size": 16}),  # groups of four segments
        (64, {"segment_size": 32}),  # of two
        (64, {"segment_size": 16}),
    ],
}


WAYS = [
    (case, dtype, bias)
    for case in range(len(TILES))
    for dtype, bias in [*((dtype, True) for dtype in DTYPES), (torch.bfloat16, False)]
]
if not ON_GPU:  # the interpreter takes a second for each: every pair with a case, once
    WAYS = [way for place, way in enumerate(WAYS) if place % 4 == way[0]]


@pytest.mark.parametrize("case, dtype, bias", WAYS)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_tiles_compute_the_formula(device, monkeypatch, engine, case, bias, dtype):
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    weights, small = small_weights(dtype, bias), small_batch()
    batch = LoRABatch([*small.token_slots.tolist(), *[3] * 70, *[1] * 17], num_slots=4)
    x, base = torch.randn(94, 10).to(dtype), torch.randn(94, 14).to(dtype)
    tile, options = ROWS[engine][case]
    backend = ENGINES[engine](device, tiles=fixed_source(tile, TILES[case]), **options)
    plan = backend.prepare_batch(batch)
    assert plan.tile_tokens == tile
    y = backend.run_linear(x.to(device), on(device, weights), plan, base.clone().to(device))
    expected = per_token(x, weights, batch, base)
    room = 20 * UNITS[dtype] + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[1].cpu(), base[1])


@pytest.mark.parametrize("max_rank", [1, 24, 130])
def test_ranks_beyond_one_block_and_beside_it(backend, max_rank):
    """Sums of ones are exact in bfloat16 while they have 8 bits."""
    weights = ones(2, (3, 40), max_rank, 4, backend.device)
    x = torch.ones(4, 4, dtype=torch.bfloat16, device=backend.device)
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([1, 0, -1, 1], 2)))
    assert y[:, 0].tolist() == pytest.approx([4 * max_rank, 4 * max_rank, 0, 4 * max_rank])
    assert (y[0] == y[0, 0]).all()


def test_more_slices_than_a_fused_projection_has(backend):
    weights = ones(1, (5, 1, 7, 16, 33), 3, 8, backend.device, torch.float32)
    x = torch.ones(1, 8, device=backend.device)
    y = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch([0], 1)))
    assert y.unique().tolist() == [24.0]


def test_a_batch_invariant_row_is_equal_in_any_batch(device, make):
    """A token's row is the same alone as among 70."""
    backend = make(batch_invariant=True)
    weights = on(device, small_weights(torch.bfloat16))
    x = torch.randn(70, 10, device=device).to(torch.bfloat16)
    slots = [token % 4 for token in range(70)]
    together = backend.run_linear(x, weights, backend.prepare_batch(LoRABatch(slots, 4)))
    alone = [
        backend.run_linear(x[t : t + 1], weights, backend.prepare_batch(LoRABatch([slot], 4)))
        for t, slot in enumerate(slots[:8])
    ]
    assert torch.equal(together[:8], torch.cat(alone))


def legal_tiles(generator, tile_tokens, layer):
    """Return sizes that a table may hold."""
    while True:
        shrink = ShrinkTiles(
            block_n=generator.choice([16, 32, 64, 128]),
            block_k=generator.choice([16, 32, 64, 128, 256]),
            split_k=generator.randint(1, 9),
            warps_k=generator.choice([1, 2, 4, 8]),
            num_warps=generator.choice([4, 8]),
            num_stages=generator.randint(1, 5),
        )
        expand = ExpandTiles(
            block_c=generator.choice([16, 32, 64, 128, 256]),
            block_r=generator.choice([16, 32, 64]),
            chunks=generator.choice([1, 2, 4, 8]),
            num_warps=generator.choice([2, 4, 8]),
            num_stages=generator.randint(1, 3),
        )
        tiles = TileConfig(shrink, expand)
        if not tile_faults(tiles, tile_tokens, layer):
            return tiles


@pytest.mark.parametrize("tile", TILE_TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_tiles_of_a_table_compute_the_formula(device, engine, dtype, tile):
    weights = LoRAWeights(
        lora_a=torch.randn(4, 2, 40, 10).to(dtype),
        lora_b=torch.randn(4, 14, 40).to(dtype),
        ranks=torch.tensor([[40, 2], [1, 17], [0, 0], [33, 40]], dtype=torch.int32),
        scalings=torch.randn(4, 2),
        output_slices=(9, 5),
    )
    magnitudes = replace(
        weights,
        lora_a=weights.lora_a.abs(),
        lora_b=weights.lora_b.abs(),
        scalings=weights.scalings.abs(),
    )
    layer, batch = LayerShape(2, 40, 10, 14, dtype.itemsize), small_batch()
    x, base = torch.randn(7, 10).to(dtype), torch.randn(7, 14).to(dtype)
    expected = per_token(x, weights, batch, base)
    room = 2 * UNITS[dtype] * per_token(x.abs(), magnitudes, batch, base.abs())
    on_device, generator = on(device, weights), random.Random(tile)
    for _ in range(4 if ON_GPU else 1):
        tiles = legal_tiles(generator, tile, layer)
        backend = ENGINES[engine](device, tiles=fixed_source(tile, tiles))
        plan, y = backend.prepare_batch(batch), base.clone().to(device)
        backend.run_linear(x.to(device), on_device, plan, y)
        assert ((y.cpu().double() - expected).abs() <= room).all(), tiles


LAYOUTS = ["whole", "part of a stack", "wide rows", "unaligned rows"]
LOADS = [(torch.bfloat16, True, layout) for layout in LAYOUTS]
LOADS += [(torch.float16, False, "whole"), (torch.float32, False, "whole")]


@pytest.mark.parametrize("dtype, bias, layout", LOADS)
def test_loads_of_b_through_tma_compute_the_formula(make, monkeypatch, dtype, bias, layout):
    """B is loaded through TMA wherever its layout and its dtype allow that."""
    described, descriptor = [], launch.descriptor
    monkeypatch.setattr(launch, "descriptor", lambda *a: described.append(a) or descriptor(*a))
    weights, batch = _wide_weights(dtype, bias, layout), _long_batch()
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(batch.num_tokens, 40, generator=generator).to(dtype)
    base = torch.randn(batch.num_tokens, weights.out_features, generator=generator).to(dtype)
    backend = make(tiles=fixed_source(64, TMA_TILES))
    plan, y = backend.prepare_batch(batch), base.clone().to(backend.device)
    moved = on(backend.device, weights)
    object.__setattr__(moved, "lora_b", _laid_out(moved.lora_b, layout))
    for _ in range(2 if ON_GPU else 1):  # the second call may repeat the launches of the first
        y.copy_(base)
        backend.run_linear(x.to(backend.device), moved, plan, y)
    expected = per_token(x, weights, batch, base)
    largest_a = weights.lora_a.float().nan_to_num().norm(dim=-1).amax()
    largest_b = weights.lora_b.float().nan_to_num().norm(dim=-1).amax()
    room = 4 * UNITS[dtype] * largest_a * largest_b + 2 * UNITS[dtype] * expected.abs()
    assert ((y.cpu().double() - expected).abs() <= room).all()
    assert torch.equal(y[70].cpu(), base[70])
    assert bool(described) is (dtype != torch.float32 and layout != "unaligned rows")


@pytest.mark.parametrize(
    "stored, block", [(torch.int8, (1, None)), (torch.float8_e4m3fn, (3, None))]
)
def test_8_bits_through_tma_compute_what_16_bits_do(make, monkeypatch, stored, block):
    described, descriptor = [], launch.descriptor
    monkeypatch.setattr(launch, "descriptor", lambda *a: described.append(a) or descriptor(*a))
    ranks, slices = torch.tensor([[32, 3], [16, 32], [0, 0], [9, 17]]), (72, 40)
    whole = LoRAWeights(
        torch.randn(4, 2, 32, 40),
        torch.randn(4, sum(slices), 32),
        ranks,
        torch.randn(4, 2),
        output_slices=slices,
    )
    weights, batch = quantize_weights(whole, stored, block), _long_batch()
    for slot, s in itertools.product(range(4), range(2)):  # beyond a rank values may be anything
        columns = slice(sum(slices[:s]), sum(slices[: s + 1]))
        weights.lora_b[slot, columns, ranks[slot, s] :].view(torch.int8).fill_(127)
    x = torch.randn(batch.num_tokens, 40).bfloat16()
    base = torch.randn(batch.num_tokens, sum(slices)).bfloat16()
    backend = make(tiles=fixed_source(64, TMA_TILES))
    plan, y = backend.prepare_batch(batch), base.clone().to(backend.device)
    names = ("lora_a", "lora_b", "ranks", "scalings", "a_scales", "b_scales")
    moved = {name: getattr(weights, name).to(backend.device) for name in names}
    backend.run_linear(x.to(backend.device), replace(weights, **moved), plan, y)
    reference = get_backend("torch_ref", device="cpu")
    reference_plan = reference.prepare_batch(batch)
    expected = reference.run_linear(x, weights, reference_plan, base.clone()).float()
    h = reference.run_lora_a(x, weights, reference_plan).norm(dim=-1).amax()
    largest_b = whole.lora_b.norm(dim=-1).amax() * whole.scalings.abs().amax()
    room = UNITS[torch.bfloat16] * (h * largest_b + 2 * expected.abs())  # h is rounded, then y
    assert ((y.cpu().float() - expected).abs() <= room).all()
    assert torch.equal(y[70].cpu(), base[70]) and described


def test_run_lora_b_takes_h_as_it_is_whatever_the_tiles(make):
    """Tiles that load B through TMA round h; callers of `run_lora_b` are promised float32."""
    weights, batch = _wide_weights(torch.bfloat16, False, "whole"), _long_batch()
    h = torch.randn(3, batch.num_tokens, 24)
    results = []
    for tiles in ("rules", fixed_source(64, TMA_TILES)):
        backend = make(tiles=tiles)
        y = torch.zeros(batch.num_tokens, weights.out_features, device=backend.device)
        moved, plan = on(backend.device, weights), backend.prepare_batch(batch)
        results.append(backend.run_lora_b(h.to(backend.device), moved, plan, y))
    expected, found = results
    assert (found - expected).abs().amax() <= 2.0**-20 * expected.abs().amax()


@pytest.mark.parametrize("slots", [8, 40])
@pytest.mark.parametrize("engine", ENGINES)
def test_programs_beyond_the_ranks_end_early_only_in_a_grid_of_many_rows(device, engine, slots):
    """Of the blocks of 16 rows of A, NaN beyond the ranks, a rank of 0 has none and 5 has one."""
    generator = torch.Generator().manual_seed(3)
    ranks = torch.tensor([0, 5, 40])[torch.arange(slots) % 3].int()[:, None]
    beyond = torch.arange(40) >= ranks
    a = torch.randn(slots, 1, 40, 64, generator=generator).masked_fill(
        beyond[:, None, :, None], torch.nan
    )
    b = torch.randn(slots, 32, 40, generator=generator).masked_fill(beyond[:, None], torch.nan)
    weights = LoRAWeights(a, b, ranks, torch.ones(slots, 1), (32,))
    tiles = fixed_source(16, TileConfig(ShrinkTiles(16, 32, 2), ExpandTiles(32, 64)))
    backend = ENGINES[engine](device, tiles=tiles)
    backend._options = backend._options._replace(gpu=H200)  # others count rows as fewer or more
    batch = LoRABatch(torch.arange(slots).repeat(2), slots)
    x, y = torch.randn(2 * slots, 64, generator=generator), torch.full((2 * slots, 32), -0.0)
    moved, plan, found = on(device, weights), backend.prepare_batch(batch), y.clone().to(device)
    kernels = launch.kernels_of(
        moved, launch.stacks_of(moved), plan, 2 * slots, torch.float32, backend._options
    )
    assert kernels.shrink.sizes.EXITS == (slots == 40)
    backend.run_linear(x.to(device), moved, plan, found)
    reference = get_backend("torch_ref", device="cpu")
    expected = reference.run_linear(x, weights, reference.prepare_batch(batch), y.clone())
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    without = ranks[batch.token_slots, 0] == 0
    assert found.cpu()[without].signbit().all()  # y was not written


@triton.jit
def prefetching_kernel(
    a_ptr,
    ranks_ptr,
    slot_ptr,
    in_features,
    stride_l,
    stride_s,
    stride_r,
    SIZES: tl.constexpr,
):
    slot = tl.load(slot_ptr).to(tl.int64)
    x = Input(ptr=a_ptr, stride_t=0, features=in_features)
    a = AStack(
        ptr=a_ptr, ranks=ranks_ptr, slices=None, scales=None, stride_l=stride_l, stride_s=stride_s,
        stride_r=stride_r, scales_stride_l=0, scales_stride_s=0, scales_stride_r=0,
    )  # fmt: skip
    prefetch.prefetch_a(x, a, slot, tl.program_id(0), SIZES)


def prefetching(**sizes):
    """Return the constants of a shrink that prefetches; others are not read."""
    return ShrinkSizes(**dict.fromkeys(ShrinkSizes._fields) | {"STEPS": 3} | sizes)


@pytest.mark.skipif(not INTERPRETED, reason="addresses are seen in the interpreter alone")
@pytest.mark.parametrize("slot", [0, 1, 2, -1])
@pytest.mark.parametrize(
    "dtype, split_k, columns",
    [
        (torch.bfloat16, 2, (0, 64, 128, 192, 256)),  # 192 columns for each part of the inputs
        (torch.int8, 2, (0, 128, 192)),
        (torch.float32, 2, (0, 32, 64, 96, 192, 224, 256, 288)),
        (torch.bfloat16, 1, (0, 64, 128, 192)),  # no more than 512 bytes
    ],
)
def test_a_shrink_of_triton_prefetches_lines_of_its_own_rows_alone(
    monkeypatch, dtype, split_k, columns, slot
):
    """RANK_PAD, 32, is above max_rank, 20: the rows after those of a slice are another's."""
    noted = noted_lines(monkeypatch)
    a = torch.zeros(3, 2, 20, 300, dtype=dtype)
    ranks = torch.tensor([[20, 3], [0, 17], [1, 20]], dtype=torch.int32)
    block_k = 64 if split_k == 2 else 128
    sizes = prefetching(
        NUM_SLICES=2, SLICE_ALIGN=0, RANK_PAD=32, BLOCK_N=16, BLOCK_K=block_k, SPLIT_K=split_k
    )
    prefetching_kernel[(4 * split_k,)](
        a, ranks, torch.tensor([slot], dtype=torch.int32), 300, *a.stride()[:3], sizes
    )
    rows = [(s, r) for s in range(2) for r in range(ranks[slot, s] if slot >= 0 else 0)]
    expected = [a[slot, s, r, k:].data_ptr() for s, r in rows for k in columns]
    assert sorted(noted) == sorted(expected)


@triton.jit
def prefetching_x_kernel(x_ptr, row_ptr, in_features, stride, SIZES: tl.constexpr):
    tokens = tl.load(row_ptr + tl.arange(0, 4)).to(tl.int64)
    x = Input(ptr=x_ptr, stride_t=stride, features=in_features)
    prefetch.prefetch_x(x, tokens, tl.program_id(0), SIZES)


@pytest.mark.skipif(not INTERPRETED, reason="addresses are seen in the interpreter alone")
@pytest.mark.parametrize(
    "dtype, split_k, columns",
    [
        (torch.bfloat16, 2, (0, 64, 128, 192, 256)),  # 192 columns for each part of the inputs
        (torch.float32, 2, (0, 32, 64, 96, 192, 224, 256, 288)),
        (torch.bfloat16, 1, (0, 64, 128)),
    ],
)
def test_a_shrink_prefetches_lines_of_its_rows_of_x_once(monkeypatch, dtype, split_k, columns):
    """Programs of other rows of A leave them alone, and so does a place without a token."""
    noted = noted_lines(monkeypatch)
    x = torch.zeros(9, 320, dtype=dtype)[:, :300]
    rows = torch.tensor([7, 0, -1, 3], dtype=torch.int32)
    sizes = prefetching(PREFETCH=4, BLOCK_K=64, SPLIT_K=split_k)
    prefetching_x_kernel[(3 * split_k,)](x, rows, 300, x.stride(0), sizes)
    expected = [x[row, k:].data_ptr() for row in (7, 0, 3) for k in columns]
    assert sorted(noted) == sorted(expected)


@pytest.mark.skipif(not INTERPRETED, reason="addresses are seen in the interpreter alone")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_expand_behind_tma_prefetches_lines_of_its_rows_of_y(monkeypatch, engine):
    """Slices of 80 and 48 columns, with 64 columns a program: lines end with their slice."""
    noted = noted_lines(monkeypatch)
    weights, batch = ones(2, (80, 48), 16, 4, "cpu"), LoRABatch([0, -1, 0], 1)
    tiles = fixed_source(
        16, TileConfig(ShrinkTiles(16, 16, 1), ExpandTiles(32, 16, 2, num_stages=2))
    )
    backend = ENGINES[engine]("cpu", tiles=tiles)
    plan, options = backend.prepare_batch(batch), backend._options
    monkeypatch.setattr(launch, "prefetched_lines", lambda *_: (4, 4))
    for name in ("gdc_wait", "gdc_launch_dependents"):
        for module in (blocks, entry):
            monkeypatch.setattr(module, name, lambda: None)
    kernels = launch.kernels_of(
        weights,
        launch.stacks_of(weights),
        plan,
        3,
        torch.bfloat16,
        options._replace(programmatic=True),
    )
    assert kernels.shrink.sizes.PREFETCH and kernels.expand.sizes.PREFETCH
    h = torch.zeros(kernels.split_k, 2, plan.h_rows(3), 16)
    y = torch.zeros(3, 128, dtype=torch.bfloat16)
    launch.expand(h, launch.stacks_of(weights), plan, y, plan.grid_rows(False, 0), kernels.expand)
    # 128 bytes are 64 columns; a program asks for four lines, as far as its slice goes
    columns = [0, 64, 64, 80]
    assert sorted(noted) == sorted(y[t, c:].data_ptr() for t in (0, 2) for c in columns)


def noted_lines(monkeypatch):
    """Return a list of the addresses that kernels will prefetch."""
    noted = []

    def note(pointers, wanted):
        at, is_wanted = np.broadcast_arrays(pointers.handle.data, wanted.handle.data)
        noted.extend(at[is_wanted.astype(bool)].tolist())

    monkeypatch.setattr(prefetch, "prefetch_lines", note)
    return noted


@pytest.mark.skipif(not ON_GPU, reason="as many tokens take minutes in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefill_that_prefetches_rows_computes_the_formula(device, engine, dtype):
    """7,000 tokens of four slots or none; widths that no block divides, ranks down to 0."""
    generator = torch.Generator().manual_seed(5)
    ranks = torch.tensor([[16, 5], [0, 16], [3, 1], [16, 16]], dtype=torch.int32)
    a = torch.randn(4, 2, 16, 200, generator=generator).to(dtype)
    b = torch.randn(4, 608, 16, generator=generator).to(dtype) / 16
    weights = LoRAWeights(a, b, ranks, torch.ones(4, 2), (512, 96))
    batch = LoRABatch(torch.randint(-1, 4, (7000,), generator=generator), 4)
    x = torch.randn(7000, 200, generator=generator).to(dtype)
    y = torch.randn(7000, 608, generator=generator).to(dtype)
    moved, backend = on(device, weights), ENGINES[engine](device, tiles="rules")
    backend._options = backend._options._replace(gpu=H200)
    plan, found = backend.prepare_batch(batch), y.clone().to(device)
    kernels = launch.kernels_of(moved, launch.stacks_of(moved), plan, 7000, dtype, backend._options)
    assert bool(kernels.shrink.sizes.PREFETCH) == backend._options.programmatic
    backend.run_linear(x.to(device), moved, plan, found)
    reference = get_backend("torch_ref", device="cpu")
    expected = reference.run_linear(x, weights, reference.prepare_batch(batch), y.clone())
    torch.testing.assert_close(
        found.cpu().float(), expected.float(), rtol=4 * UNITS[dtype], atol=16 * UNITS[dtype]
    )
    assert torch.equal(found.cpu()[batch.token_slots < 0], y[batch.token_slots < 0])


EXPANDS = {
    "rows": ExpandTiles(16, 16, 2, num_stages=0),
    "columns": ExpandTiles(16, 32, 2),
    "long ranks": ExpandTiles(32, 16),
    "tma": ExpandTiles(16, 32, 2, num_stages=2),
}


@pytest.mark.skipif(not INTERPRETED, reason="the wait is replaced in the interpreter alone")
@pytest.mark.parametrize("form", ["linear", "beside"])
@pytest.mark.parametrize("tiles", EXPANDS.values(), ids=EXPANDS.keys())
def test_an_expand_of_triton_waits_for_what_kernels_in_front_write(monkeypatch, tiles, form):
    """Before the wait h is NaN, and so is y where a base product writes it beside the shrink."""
    weights, batch = ones(1, (32,), 24, 4, "cpu"), LoRABatch([0] * 3, 1, [1.0, -2.0, 0.5])
    tiles = fixed_source(16, TileConfig(ShrinkTiles(16, 16, 2), tiles))
    backend = ENGINES["triton"]("cpu", tiles=tiles)
    plan, options = backend.prepare_batch(batch), backend._options._replace(programmatic=True)
    kernels = launch.kernels_of(
        weights, launch.stacks_of(weights), plan, 3, torch.bfloat16, options, form
    )
    h = torch.full((kernels.split_k, 1, 3, 24), torch.nan)
    y = torch.full((3, 32), torch.nan if form == "beside" else 1.0, dtype=torch.bfloat16)
    untouched = y.clone()

    def wait():
        torch.testing.assert_close(y, untouched, rtol=0, atol=0, equal_nan=True)
        h.fill_(1)
        y.fill_(1)

    monkeypatch.setattr(blocks, "gdc_wait", wait)
    monkeypatch.setattr(blocks, "gdc_launch_dependents", lambda: None)
    launch.expand(h, launch.stacks_of(weights), plan, y, 1, kernels.expand)
    assert kernels.expand.sizes.STAGES == tiles.choose_tiles(None, None).expand.num_stages
    assert y.T.unique(dim=0).tolist() == [[1 + 48 * scale for scale in (1, -2, 0.5)]]


TMA_TILES = TileConfig(ShrinkTiles(16, 16, 2), ExpandTiles(16, 32, 4, num_stages=3))


def _long_batch():
    return LoRABatch([3] * 70 + [-1, 0, 2] + [1] * 9 + [0, 3] * 5, num_slots=4)


def _wide_weights(dtype, bias, layout):
    """Return a layer for `TMA_TILES` with NaN beyond every rank."""
    generator = torch.Generator().manual_seed(7)
    slices, max_rank = (72, 40, 8), 24
    ranks = torch.tensor([[24, 3, 0], [16, 24, 1], [0, 0, 0], [9, 17, 24]], dtype=torch.int32)
    lora_a = torch.randn(4, 3, max_rank, 40, generator=generator)
    lora_b = torch.randn(4, sum(slices), max_rank, generator=generator)
    for slot, s in itertools.product(range(4), range(3)):
        lora_a[slot, s, ranks[slot, s] :] = float("nan")
        lora_b[slot, sum(slices[:s]) : sum(slices[: s + 1]), ranks[slot, s] :] = float("nan")
    return LoRAWeights(
        lora_a=lora_a.to(dtype),
        lora_b=_laid_out(lora_b.to(dtype), layout),
        ranks=ranks,
        scalings=torch.randn(4, 3, generator=generator),
        output_slices=slices,
        bias=torch.randn(4, sum(slices), generator=generator).to(dtype) if bias else None,
    )


def _laid_out(lora_b, layout):
    """Return a copy of B whose slots, or whose rows, are apart."""
    num_slots, columns, max_rank = lora_b.shape
    room = {"part of a stack": (31, 0), "wide rows": (0, 8), "unaligned rows": (0, 3)}
    more_columns, more_ranks = room.get(layout, (0, 0))
    whole = lora_b.new_full(
        (num_slots, columns + more_columns, max_rank + more_ranks), float("nan")
    )
    part = whole[:, more_columns:, :max_rank]
    part.copy_(lora_b)
    return part


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_graph_replay_equals_eager_over_changing_compositions(variant):
    """One captured call follows its plan over compositions of 96 tokens."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    backend = make_engine(variant, "cuda")
    generator = torch.Generator().manual_seed(0)
    weights = on("cuda", small_weights(torch.bfloat16))
    x = torch.randn(96, 10, generator=generator).cuda().to(torch.bfloat16)
    base = torch.randn(96, 14, generator=generator).cuda().to(torch.bfloat16)
    y = base.clone()
    plan = backend.prepare_batch(LoRABatch([0] * 96, 4))
    backend.run_linear(x, weights, plan, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run_linear(x, weights, plan, y)
    compositions = [[-1] * 96, [3] * 96, [t % 5 - 1 for t in range(96)], [0, 3] + [-1] * 94]
    compositions += [torch.randint(-1, 4, (96,), generator=generator).tolist() for _ in range(8)]
    for slots in compositions:
        backend.prepare_batch(LoRABatch(slots, 4), out=plan)
        y.copy_(base)
        graph.replay()
        eager = backend.run_linear(x, weights, plan, base.clone())
        assert torch.equal(y, eager)


@pytest.mark.parametrize("apart", [False, True])
def test_strides_of_8_ranks_are_multiples_of_16_as_triton_needs_for_loads_of_16_bytes(apart):
    b = torch.zeros(3, 6, 8, dtype=torch.bfloat16)
    slices = (b[:, :4].clone(),) if apart else b
    weights = LoRAWeights(
        lora_a=None, lora_b=slices, ranks=torch.ones(3, 1, dtype=torch.int32),
        scalings=torch.ones(3, 1),
        output_slices=(4,) if apart else (6,),
    )  # fmt: skip
    assert launch.stacks_of(weights).b_strides == ((64, 16) if apart else (96, 16))
