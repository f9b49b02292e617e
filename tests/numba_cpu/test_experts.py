"""Experts beyond what the conformance kit draws: long groups, threads, plans that move on."""

import copy

import pytest
import torch

from lora_backends import ExpertWeights, LoRABatch
from lora_backends.numba_cpu import NumbaCPUBackend, launch
from lora_backends.numba_cpu.config import LONG_SEGMENT, MAX_SEGMENT
from lora_backends.numba_cpu.machine.openmp import torch_openmp

SLOTS, EXPERTS, TOP_K, RANK, INPUTS, WIDTHS = 3, 4, 2, 9, 70, (35, 35)
FORMS = {
    "plain": {},
    "shared_a": {"shared_a": True},
    "shared_b": {"shared_b": True},
    "one_a": {"num_a": 1},
    "interleaved": {"interleaved": True},
}
OPTIONS = [
    {"rows": rows, "weighted": weighted, "reduce": reduce}
    for rows in ("tokens", "pairs")
    for weighted, reduce in ((False, False), (True, True))
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def two_threads(monkeypatch):
    if torch_openmp() is None:
        pytest.skip("torch runs on no OpenMP with GCC's entry points here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield lambda serial_bytes: monkeypatch.setattr(launch, "SERIAL_BYTES", serial_bytes)
    torch.set_num_threads(before)


def experts(dtype, shared_a=False, shared_b=False, num_a=2, interleaved=False, seed=0):
    make = torch.Generator().manual_seed(seed)
    of_a, of_b = (1 if shared else EXPERTS for shared in (shared_a, shared_b))
    table = (SLOTS, 1 if shared_b else EXPERTS, num_a)
    return ExpertWeights(
        lora_a=torch.randn(SLOTS, of_a, num_a, RANK, INPUTS, generator=make).to(dtype),
        lora_b=torch.randn(SLOTS, of_b, sum(WIDTHS), RANK, generator=make).to(dtype),
        ranks=torch.randint(0, RANK + 1, table, generator=make, dtype=torch.int32),
        scalings=torch.rand(table, generator=make),
        output_slices=WIDTHS,
        num_experts=EXPERTS,
        interleaved=interleaved,
    )


def call_of(tokens, dtype, options, seed=1):
    """Return slots, ids, router's weights, x and base_output."""
    make = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=make)
    ids = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=make)
    factors = torch.rand(tokens, TOP_K, generator=make)
    rows = tokens * TOP_K if options["rows"] == "pairs" else tokens
    x = torch.randn(rows, INPUTS, generator=make).to(dtype)
    shape = (tokens, sum(WIDTHS)) if options["reduce"] else (tokens, TOP_K, sum(WIDTHS))
    return slots, ids, factors, x, torch.randn(shape, generator=make).to(dtype)


def run(weights, slots, ids, factors, x, base, options, scales=None):
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(slots, SLOTS, scales))
    routing = backend.prepare_experts(plan, ids, factors, EXPERTS)
    return backend.run_experts(x, weights, routing, base.clone(), **options)


def by_formula(weights, slots, ids, factors, x, base, options, scales=None):
    """Return y in float64, pair by pair."""
    tokens = len(slots)
    delta = torch.zeros(tokens, TOP_K, sum(WIDTHS), dtype=torch.float64)
    for t in range(tokens):
        for j in range(TOP_K):
            slot, expert = int(slots[t]), int(ids[t, j])
            if slot < 0 or expert < 0:
                continue
            row = x[t * TOP_K + j if options["rows"] == "pairs" else t].double()
            factor = float(factors[t, j]) if options["weighted"] else 1.0
            factor *= 1.0 if scales is None else float(scales[t])
            for s in range(len(WIDTHS)):
                a = s if weights.num_a > 1 else 0
                own = (slot, expert if weights.ranks.shape[1] > 1 else 0, a)
                r, columns = int(weights.ranks[own]), weights.columns(s)
                lora_a = weights.lora_a[slot, expert if weights.lora_a.shape[1] > 1 else 0, a, :r]
                lora_b = weights.lora_b[slot, expert if weights.lora_b.shape[1] > 1 else 0]
                h = lora_a.double() @ row
                part = lora_b[columns, :r].double() @ h
                delta[t, j, columns] += factor * float(weights.scalings[own]) * part
    return base.double() + (delta.sum(1) if options["reduce"] else delta)


def assert_close(actual, expected):
    unit = torch.finfo(actual.dtype).eps
    error = (actual.double() - expected).abs()
    assert (error <= unit * expected.abs() + 1e-5 * expected.abs().max()).all(), error.max()


@DTYPES
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_long_groups_agree_with_the_formula(dtype, form):
    """One group of a slot and expert is longer than a segment, others are short."""
    weights, tokens = experts(dtype, **form), 2 * MAX_SEGMENT
    for options in OPTIONS:
        slots, ids, *rest = call_of(tokens, dtype, options)
        slots[:MAX_SEGMENT], ids[:MAX_SEGMENT] = 1, 2
        scales = torch.randn(tokens)
        case = (weights, slots, ids, *rest, options, scales)
        assert_close(run(*case), by_formula(*case))


@DTYPES
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_pairs_do_not_depend_on_threads_or_neighbours(dtype, form, two_threads):
    weights, tokens = experts(dtype, **form), 3 * LONG_SEGMENT * EXPERTS
    for options in OPTIONS:
        slots, ids, factors, x, base = call_of(tokens, dtype, options)
        step, alone = TOP_K if options["rows"] == "pairs" else 1, []
        for t in range(0, tokens, 5):
            one, rows = slice(t, t + 1), slice(t * step, (t + 1) * step)
            parts = (slots[one], ids[one], factors[one], x[rows], base[one])
            alone.append(run(weights, *parts, options))
        for serial_bytes in (0, 10**12):
            two_threads(serial_bytes)
            y = run(weights, slots, ids, factors, x, base, options)
            assert torch.equal(y[::5], torch.cat(alone))


def test_a_routing_follows_its_plan_and_its_copies_are_their_own():
    weights, options = experts(torch.float32), OPTIONS[0]
    slots, ids, factors, x, base = call_of(30, torch.float32, options)
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(slots, SLOTS), capacity=30)
    routing = backend.prepare_experts(plan, ids, factors, EXPERTS)
    before = backend.run_experts(x, weights, routing, base.clone())
    copied = copy.deepcopy(routing)
    turned = slots.flip(0)[:20]
    backend.prepare_batch(LoRABatch(turned, SLOTS), out=plan)
    y = backend.run_experts(x, weights, routing, base.clone())
    padded = torch.cat([turned, torch.full((10,), -1)])
    assert_close(y, by_formula(weights, padded, ids, factors, x, base, options))
    backend.prepare_experts(plan, ids.flip(1), factors, EXPERTS, out=routing)
    assert torch.equal(backend.run_experts(x, weights, copied, base.clone()), before)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_axis_of_a_single_pair_may_have_any_stride(form):
    """torch calls base_output contiguous, although its tokens are not that stride apart."""
    weights, options = experts(torch.float32, **form), OPTIONS[0]
    slots, ids, factors, x, base = call_of(20, torch.float32, options)
    ids, factors, base = ids[:, :1], factors[:, :1], base[:, :1]
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(slots, SLOTS))
    routing = backend.prepare_experts(plan, ids, factors, EXPERTS)
    expected = backend.run_experts(x, weights, routing, base.clone())
    room = torch.zeros(20 * base.numel())  # as far as that stride would reach
    y = room[: base.numel()].as_strided(base.shape, (base.shape[2], base.numel(), 1)).copy_(base)
    assert y.is_contiguous()
    assert torch.equal(backend.run_experts(x, weights, routing, y), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_base_output_may_have_any_strides_of_tokens_and_pairs(interleaved):
    """Where the pairs are not rows of one matrix, what lies between them stays as it is."""
    weights, options = experts(torch.float32, interleaved=interleaved), OPTIONS[0]
    *call, base = call_of(30, torch.float32, options)
    room = torch.randn(30, TOP_K + 1, sum(WIDTHS) + 5)
    expected_room = room.clone()
    view = room[:, :TOP_K, 2:-3]
    view.copy_(base)
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(call[0], SLOTS))
    routing = backend.prepare_experts(plan, call[1], call[2], EXPERTS)
    assert backend.run_experts(call[3], weights, routing, view) is view
    assert torch.equal(view, run(weights, *call, base, options))
    expected_room[:, :TOP_K, 2:-3] = view
    assert torch.equal(room, expected_room)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_may_have_any_strides_and_a_map(dtype):
    """The map names experts of this rank, of another, and none."""
    weights, options = experts(torch.float32), {"rows": "tokens", "weighted": True, "reduce": False}
    slots, _, factors, x, base = call_of(30, torch.float32, options)
    expert_map = torch.tensor([-1, 3, 0, -1, 2, 1], dtype=torch.int32)
    ids = torch.randint(-1, 6, (TOP_K, 30)).to(dtype).T
    local = torch.where(ids >= 0, expert_map[ids.clamp(0).long()], -1)
    backend = NumbaCPUBackend()
    plan = backend.prepare_batch(LoRABatch(slots, SLOTS))
    weights_of_pairs = factors.T.contiguous().T
    routing = backend.prepare_experts(plan, ids, weights_of_pairs, EXPERTS, expert_map)
    y = backend.run_experts(x, weights, routing, base.clone(), **options)
    assert torch.equal(routing.topk_ids, local.long())
    assert torch.equal(y, run(weights, slots, local.long(), factors, x, base, options))


def test_ranks_may_change_in_place():
    weights, options = experts(torch.float32, shared_a=True), OPTIONS[0]
    call = call_of(30, torch.float32, options)
    run(weights, *call, options)
    weights.ranks.clamp_(max=2)
    assert_close(run(weights, *call, options), by_formula(weights, *call, options))
