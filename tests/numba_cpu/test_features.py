"""Tensors per slice, halves, factors and plans with room, against `torch_ref` in float64."""

import doctest
from dataclasses import replace

import pytest
import torch

from lora_backends import LoRABatch, LoRAWeights
from lora_backends.numba_cpu import NumbaCPUBackend, blends, launch
from lora_backends.numba_cpu.config import LONG_SEGMENT, MAX_SEGMENT
from lora_backends.numba_cpu.machine.openmp import torch_openmp
from lora_backends.torch_ref import TorchRefBackend

SLOTS, RANK, INPUTS, WIDTHS = 4, 21, 75, (83, 35, 16)
FEATURES = ("tuple_a", "tuple_b", "token_scales", "output_scales", "bias")
SETS = [(), *[(name,) for name in FEATURES], FEATURES[:2], FEATURES[2:4], FEATURES]
DTYPES = pytest.mark.parametrize("dtype", NumbaCPUBackend.dtypes, ids=str)


def strided(tensor, pad):
    """Return the values in memory of another layout, NaN around them."""
    room = torch.full((*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + pad), torch.nan)
    room = room.to(tensor.dtype)
    view = room[..., :-1, :-pad]
    return view.copy_(tensor)


def layer(dtype, features, seed=0):
    """Return a layer with NaN beyond every rank; the last slot of the first slice has rank 0."""
    make = torch.Generator().manual_seed(seed)
    slices, out = len(WIDTHS), sum(WIDTHS)
    ranks = torch.randint(1, RANK + 1, (SLOTS, slices), generator=make, dtype=torch.int32)
    ranks[-1, 0] = 0
    a = torch.randn(SLOTS, slices, RANK, INPUTS, generator=make)
    b = torch.randn(SLOTS, out, RANK, generator=make)
    index = torch.arange(RANK)
    a[index.expand(SLOTS, slices, -1) >= ranks[..., None]] = torch.nan
    per_column = ranks.repeat_interleave(torch.tensor(WIDTHS), 1)
    b[index.expand(SLOTS, out, -1) >= per_column[..., None]] = torch.nan
    a, b = a.to(dtype), b.to(dtype)
    scalings = torch.rand(SLOTS, slices, generator=make).masked_fill(ranks == 0, torch.nan)
    scales = torch.rand(SLOTS, out, generator=make) + 0.5
    tuple_a = [strided(a[:, s], s + 1) for s in range(slices)]
    tuple_b = [strided(part, s + 2) for s, part in enumerate(b.split(WIDTHS, 1))]
    return LoRAWeights(
        tuple_a if "tuple_a" in features else a,
        tuple_b if "tuple_b" in features else b,
        ranks,
        scalings,
        WIDTHS,
        torch.randn(SLOTS, out, generator=make).to(dtype) if "bias" in features else None,
        scales if "output_scales" in features else None,
    )


def doubled(weights):
    def double(stack):
        return tuple(t.double() for t in stack) if isinstance(stack, tuple) else stack.double()

    return replace(weights, lora_a=double(weights.lora_a), lora_b=double(weights.lora_b))


def batch_of(tokens, features, seed=0):
    make = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=make)
    slots[tokens // 3 : tokens // 3 + tokens // 2] = SLOTS - 1  # a long segment in a long batch
    scales = torch.randn(tokens, generator=make)
    return LoRABatch(slots, SLOTS, scales if "token_scales" in features else None)


def both(operation, x, weights, batch, base, rows=None):
    """Return what the backend adds to base, and the same in float64; `rows` are those of x."""
    backend, reference = NumbaCPUBackend(), TorchRefBackend()
    plan = backend.prepare_batch(batch, capacity=x.shape[0])
    actual = getattr(backend, operation)(x, weights, plan, base.clone())
    plan = reference.prepare_batch(batch, capacity=x.shape[0])
    wide = x if x.dtype == torch.int64 else x.double()
    expected = getattr(reference, operation)(wide, doubled(weights), plan, base.double())
    return actual, expected


def assert_close(actual, expected):
    """Rounded once: sums in float32, one rounding into the result."""
    unit = torch.finfo(actual.dtype).eps
    error = (actual.double() - expected).abs()
    assert (error <= unit * expected.abs() + 1e-5 * expected.abs().max()).all(), error.max()


@DTYPES
@pytest.mark.parametrize("features", SETS, ids="+".join)
@pytest.mark.parametrize("tokens", [1, 9, LONG_SEGMENT * 5, 2 * MAX_SEGMENT + 20])
def test_every_feature_alone_and_together(dtype, features, tokens):
    weights, batch = layer(dtype, features), batch_of(tokens, features)
    make = torch.Generator().manual_seed(3)
    rows = tokens + 2  # after the batch, without an adapter
    x = torch.randn(rows, INPUTS, generator=make).to(dtype)
    base = torch.randn(rows, sum(WIDTHS), generator=make).to(dtype)
    untouched = torch.cat([batch.token_slots == -1, torch.tensor([True, True])])
    for operation in ("run_qkv", "run_logits"):
        actual, expected = both(operation, x, weights, batch, base)
        assert_close(actual, expected)
        assert torch.equal(actual[untouched], base[untouched])
    ids = torch.randint(0, INPUTS, (rows,), generator=make)
    assert_close(*both("run_embedding", ids, weights, batch, base))


@DTYPES
@pytest.mark.parametrize("features", [(), FEATURES], ids=["plain", "all"])
def test_either_half_runs_without_the_other_stack(dtype, features):
    whole, batch, backend = layer(dtype, features), batch_of(50, features), NumbaCPUBackend()
    x = torch.randn(52, INPUTS).to(dtype)
    base = torch.randn(52, sum(WIDTHS)).to(dtype)
    plan = backend.prepare_batch(batch, capacity=52)
    expected_h = backend.run_lora_a(x, whole, plan)
    out = torch.full_like(expected_h, torch.nan)
    assert backend.run_lora_a(x, replace(whole, lora_b=None), plan, out=out) is out
    assert torch.equal(out, expected_h)
    y = backend.run_lora_b(out, replace(whole, lora_a=None), plan, base.clone())
    assert torch.equal(y, backend.run_linear(x, whole, plan, base.clone()))


@DTYPES
def test_rows_do_not_depend_on_the_batch_or_the_threads(dtype, monkeypatch):
    if torch_openmp() is None:
        pytest.skip("torch runs on no OpenMP with GCC's entry points here")
    before, tokens = torch.get_num_threads(), 130
    weights, batch = layer(dtype, FEATURES), batch_of(tokens, FEATURES)
    x, base = torch.randn(tokens, INPUTS).to(dtype), torch.randn(tokens, sum(WIDTHS)).to(dtype)
    backend = NumbaCPUBackend()
    alone = []
    for t in range(tokens):
        one = LoRABatch(batch.token_slots[t : t + 1], SLOTS, batch.token_scales[t : t + 1])
        plan = backend.prepare_batch(one)
        alone.append(backend.run_linear(x[t : t + 1], weights, plan, base[t : t + 1].clone()))
    torch.set_num_threads(2)
    try:
        for serial_bytes in (0, 10**12):
            monkeypatch.setattr(launch, "SERIAL_BYTES", serial_bytes)
            for segments_per_thread in (0, 10**6):
                monkeypatch.setattr(launch, "SEGMENTS_PER_THREAD", segments_per_thread)
                y = backend.run_linear(x, weights, backend.prepare_batch(batch), base.clone())
                assert torch.equal(y, torch.cat(alone))
    finally:
        torch.set_num_threads(before)


def test_scales_of_one_change_no_bit():
    """With a weight of one each sum is that of a plain layer, in the same order."""
    weights, batch = layer(torch.float32, ()), batch_of(100, ())
    x, base = torch.randn(100, INPUTS), torch.randn(100, sum(WIDTHS))
    backend = NumbaCPUBackend()
    expected = backend.run_linear(x, weights, backend.prepare_batch(batch), base.clone())
    ones = LoRABatch(batch.token_slots, SLOTS, torch.ones(100))
    scaled = backend.run_linear(x, weights, backend.prepare_batch(ones), base.clone())
    assert torch.equal(scaled, expected)


def test_a_slice_of_rank_0_is_multiplied_by_output_scales():
    weights, batch = layer(torch.float32, ("output_scales",)), LoRABatch([SLOTS - 1], SLOTS)
    x, base = torch.randn(1, INPUTS), torch.randn(1, sum(WIDTHS))
    backend = NumbaCPUBackend()
    y = backend.run_linear(x, weights, backend.prepare_batch(batch), base.clone())
    first = slice(0, WIDTHS[0])
    assert torch.equal(y[:, first], base[:, first] * weights.output_scales[-1, first])


def test_ranks_and_factors_may_change_in_place():
    features = ("tuple_a", "tuple_b", "output_scales")
    weights, batch = layer(torch.float32, features), batch_of(40, ())
    weights.ranks.clamp_(max=3)
    x, base = torch.randn(40, INPUTS), torch.randn(40, sum(WIDTHS))
    assert_close(*both("run_linear", x, weights, batch, base))
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(batch)
    backend.run_linear(x, weights, plan, base.clone())
    weights.ranks.clamp_(max=1)
    weights.scalings.mul_(2)
    weights.output_scales.mul_(3)
    y = backend.run_linear(x, weights, plan, base.clone())
    fresh = replace(weights)  # nothing is known about it
    assert torch.equal(y, backend.run_linear(x, fresh, plan, base.clone()))
    assert_close(y, both("run_linear", x, weights, batch, base)[1])


def test_a_refill_changes_the_number_of_tokens_and_whether_they_have_scales():
    weights, backend = layer(torch.float32, ()), NumbaCPUBackend()
    x, base = torch.randn(90, INPUTS), torch.randn(90, sum(WIDTHS))
    plan = backend.prepare_batch(batch_of(5, ()), capacity=90)
    for tokens, features in ((70, ("token_scales",)), (1, ()), (90, ("token_scales",)), (0, ())):
        batch = batch_of(tokens, features, seed=tokens)
        assert backend.prepare_batch(batch, out=plan) is plan
        y = backend.run_linear(x, weights, plan, base.clone())
        assert_close(y, both("run_linear", x, weights, batch, base)[1])


@pytest.mark.parametrize("tokens", [3, 2 * MAX_SEGMENT + 9])
@DTYPES
def test_all_adapters_of_a_token_are_added_in_one_pass_and_rounded_once(dtype, tokens):
    generator = torch.Generator().manual_seed(tokens)
    weights, backend = layer(dtype, ("bias",)), NumbaCPUBackend()
    slots = torch.randint(-1, SLOTS, (tokens, 3), generator=generator)
    slots[0], slots[1] = -1, 1  # none, and one three times
    batch = LoRABatch(slots, SLOTS, torch.rand(tokens, 3, generator=generator))
    x = torch.randn(tokens, INPUTS, generator=generator).to(dtype)
    base = torch.randn(tokens, sum(WIDTHS), generator=generator).to(dtype)
    plan, reference = backend.prepare_batch(batch), TorchRefBackend()
    wanted = reference.run_linear(x, weights, reference.prepare_batch(batch), base.float().clone())
    plan.plans = plan.plans[:1]  # passes of one adapter would leave some out
    for _ in range(2):  # the second is a stored call
        y = backend.run_linear(x, weights, plan, base.clone())
        one_rounding = torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-5 * wanted.abs().max()
        assert ((y.float() - wanted).abs() <= one_rounding).all()
        assert torch.equal(y[0], base[0])


def test_worked_examples_of_blends():
    failed, attempted = doctest.testmod(blends)
    assert attempted and not failed
