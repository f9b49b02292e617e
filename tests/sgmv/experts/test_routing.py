"""Pairs are sorted by slot and expert on the device, and cut into tiles of one of each."""

import copy
import dataclasses
import itertools
import pickle
from functools import partial

import pytest
import torch
from helpers.engines import ON_GPU, make_engine

from lora_backends import InvalidInputError, LoRABatch, get_backend
from lora_backends.sgmv import engine
from lora_backends.sgmv.experts import routing as routing_of_pairs
from lora_backends.sgmv.experts.rules import expected_keys, pair_shape, tile_pairs

SLOTS, EXPERTS = 5, 7


@pytest.fixture(params=["triton", "csgmv-16"])
def make(device, request):
    """Return a function to an engine of either kind of plan."""
    return partial(make_engine, request.param, device)


@pytest.fixture(params=["alone", "compared", "counted"])
def way(request, monkeypatch):
    """Sort nothing, in one launch, or in two."""
    take(request.param, monkeypatch)
    return request.param


def take(way, monkeypatch):
    """Force a way of routing."""

    def shape_of(*given):
        return dataclasses.replace(pair_shape(*given), alone=way == "alone")

    monkeypatch.setattr(routing_of_pairs, "pair_shape", shape_of)
    if way == "counted":
        monkeypatch.setattr(routing_of_pairs, "MOST_COMPARED", 0)


def choice(tokens, top_k, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, SLOTS, (tokens,), generator=generator)
    ids = torch.randint(-1, EXPERTS + 2 * (device.type != "cpu"), (tokens, top_k))
    weights = torch.rand(tokens, top_k, generator=generator)
    return LoRABatch(slots, SLOTS), ids.int().to(device), weights.to(device)


def tiles_of(routing):
    """Return {(slot, expert): pairs in the order of places}, and check every tile on the way."""
    found, places = {}, {}
    used, live = routing.count.tolist()
    if routing.shape.alone:
        assert used == live == routing.num_pairs == len(routing.tiles)
        assert routing.order.tolist() == list(range(used))
        for i, (slot, expert, *rest) in enumerate(routing.tiles[:, :5].tolist()):
            is_live = bool(rest[1])
            assert rest == [i, is_live, i] and (is_live or slot == expert == 0)
            if is_live:
                found.setdefault((slot, expert), []).append(i)
        return found
    for slot, expert, first, count, pair, *_ in routing.tiles[:used].tolist():
        assert pair == routing.order[first]
        assert 1 <= count <= routing.shape.tile
        places.setdefault((slot, expert), []).append((first, count))
    for key, runs in places.items():
        runs.sort()
        for (first, count), (later, _) in zip(runs, runs[1:], strict=False):
            assert first + count == later and count == routing.shape.tile
        start, end = runs[0][0], sum(runs[-1])
        found[key] = routing.order[start:end].tolist()
    assert routing.shape.has_singles == (len(routing.singles) > 0)
    if routing.shape.has_singles:
        singles = routing.singles[:live, :5].tolist()
        assert live == sum(map(len, found.values()))
        for (slot, expert), pairs in found.items():
            first = places[slot, expert][0][0]
            expected = [[slot, expert, first + i, 1, pair] for i, pair in enumerate(pairs)]
            assert singles[first : first + len(pairs)] == expected
    return found


def pairs_of(batch, ids):
    """Return what `tiles_of` must be."""
    wanted = {}
    for p, expert in enumerate(ids.cpu().flatten().tolist()):
        slot = int(batch.token_slots[p // ids.shape[1]])
        if slot >= 0 and 0 <= expert < EXPERTS:
            wanted.setdefault((slot, expert), []).append(p)
    return wanted


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (17, 2), (70, 8)])
def test_every_live_pair_stands_in_one_tile_of_its_slot_and_expert(make, device, way, shape):
    backend = make()
    batch, ids, weights = choice(*shape, device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), ids, weights, EXPERTS)
    found = tiles_of(routing)
    if way == "alone" or ids.numel() <= routing_of_pairs.MOST_COMPARED:
        assert found == pairs_of(batch, ids)
    else:  # atomics number the pairs of a key
        assert {k: sorted(v) for k, v in found.items()} == pairs_of(batch, ids)
    assert int(routing.count[0]) <= routing.max_tiles


@pytest.mark.parametrize(
    ("shape", "mapped", "programs"),
    [
        ((1, 8), True, 1),
        ((3, 3), False, 5),
        ((17, 1), True, 9),
        ((64, 8), True, 128),
        ((171, 3), True, 5),  # 513 pairs are counted, 128 to a program
    ],
)
def test_pairs_are_compared_two_or_four_to_a_program_up_to_512(
    device, monkeypatch, shape, mapped, programs
):
    """Dead pairs among them: of tokens without an adapter, and of experts of another process."""
    take("compared", monkeypatch)
    backend, rows = make_engine("triton", device), []
    launches = routing_of_pairs._launches

    def noted(*given):
        for launch in launches(*given):
            rows.append(launch[0])
            yield launch

    monkeypatch.setattr(routing_of_pairs, "_launches", noted)
    batch, ids, weights = choice(*shape, device, seed=3)
    mapping, local = None, ids
    if mapped:
        ids = ids.clamp(max=EXPERTS - 1)
        mapping = torch.tensor([4, -1, 0, 6, -1, 2, 1], dtype=torch.int32, device=device)
        local = torch.where(ids < 0, -1, mapping[ids.clamp(min=0).long()])
    plan, routing, counted = backend.prepare_batch(batch), None, ids.numel() > 512
    for _ in range(1 if programs == 128 else 2):  # the second is a refill
        routing = backend.prepare_experts(plan, ids, weights, EXPERTS, mapping, out=routing)
        found = tiles_of(routing)
        if counted:
            found = {key: sorted(pairs) for key, pairs in found.items()}
        assert found == pairs_of(batch, local)
    assert set(rows) == {programs}


def test_a_routing_is_refilled_over_and_over(make, device, way):
    backend, routing = make(), None
    for seed in range(5):
        batch, ids, weights = choice(33, 3, device, seed)
        plan = backend.prepare_batch(batch)
        routing = backend.prepare_experts(plan, ids, weights, EXPERTS, out=routing)
        found = {key: sorted(pairs) for key, pairs in tiles_of(routing).items()}
        assert found == pairs_of(batch, ids)


def test_a_map_and_strided_choices_are_read(make, device, way):
    backend = make()
    batch, ids, weights = choice(20, 3, device)
    mapping = torch.tensor([-1, 3, 0, EXPERTS + 5, 6, -1, 2], dtype=torch.int32, device=device)
    if device.type == "cpu":
        mapping[3] = 1
    wide = torch.stack([ids, ids], 2).long()[..., 0].clamp(max=6)
    factors = torch.stack([weights, weights], 2)[..., 1]
    plan = backend.prepare_batch(batch)
    routing = backend.prepare_experts(plan, wide, factors, EXPERTS, mapping)
    mapped = torch.where(wide >= 0, mapping[wide.clamp(min=0)].long(), -1)
    mapped = torch.where(mapped < EXPERTS, mapped, -1)
    found = {key: sorted(pairs) for key, pairs in tiles_of(routing).items()}
    assert found == pairs_of(batch, mapped)
    assert torch.equal(routing.topk_ids, mapped)
    assert torch.equal(routing.topk_weights, weights)


@pytest.mark.parametrize("mapped", [False, True])
def test_pairs_that_are_not_sorted_follow_a_refill_that_fills_one_slot(device, mapped):
    """Every token chooses one expert, twice, and an expert that is not here."""
    backend, reference = make_engine("triton", device), get_backend("torch_ref", device=device)
    layer, x = experts_layer(device), torch.randn(5, 8, device=device)
    ids = torch.arange(15, device=device).view(5, 3) % EXPERTS
    mapping = torch.tensor([6, 5, -1, 3, 2, 1, 0], dtype=torch.int32, device=device)
    crowded = torch.tensor([[1, 1, -1]] * 5, device=device)
    if mapped:
        crowded[:, 2] = 2
    factors, scales = torch.rand(5, 3, device=device), torch.rand(5)
    first, last = LoRABatch([0, 1, 2, 3, 4], SLOTS), LoRABatch([2] * 5, SLOTS, scales)
    results = []
    for each in (backend, reference):
        plan = each.prepare_batch(first, capacity=16)
        given = factors, EXPERTS, mapping if mapped else None
        routing = each.prepare_experts(plan, ids, *given)
        assert each is reference or routing.shape.alone
        each.prepare_batch(last, out=plan)
        each.prepare_experts(plan, crowded, *given, out=routing)
        results.append(each.run_experts(x, layer, routing, weighted=True))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert results[0][:, :2].any() and not results[0][:, 2].any()


def test_keys_beyond_one_block_of_counts_are_placed(device, make, monkeypatch):
    take("counted", monkeypatch)
    backend = make()
    slots, experts = 3, 3000  # the counts of 9000 keys take two blocks
    tokens = 80  # 160 pairs take two programs
    ids = torch.randint(0, experts, (tokens, 2), device=device)
    batch = LoRABatch([t % slots for t in range(tokens)], slots)
    plan = backend.prepare_batch(batch)
    for _ in range(3):
        ids = (ids + 777) % experts
        factors = torch.ones(tokens, 2, device=device)
        routing = backend.prepare_experts(plan, ids, factors, experts)
        assert routing.shape.has_singles
        found = tiles_of(routing)
        assert sorted(p for pairs in found.values() for p in pairs) == list(range(2 * tokens))
        for (slot, expert), pairs in found.items():
            assert {(p // 2 % slots, int(ids[p // 2, p % 2])) for p in pairs} == {(slot, expert)}


def test_a_routing_follows_a_plan_that_is_refilled_after_it(make, device):
    backend = make()
    batch, ids, weights = choice(9, 2, device)
    other = LoRABatch(batch.token_slots.flip(0), SLOTS)
    layer = experts_layer(device)
    x = torch.randn(9, 8, device=device)
    plan = backend.prepare_batch(batch)
    routing = backend.prepare_experts(plan, ids, weights, EXPERTS)
    backend.prepare_batch(other, out=plan)
    y = backend.run_experts(x, layer, routing)
    plan = backend.prepare_batch(other)
    fresh = backend.prepare_experts(plan, ids, weights, EXPERTS)
    assert torch.equal(y, backend.run_experts(x, layer, fresh))


def test_a_copied_routing_outlives_the_original(make, device):
    backend, layer = make(), experts_layer(device)
    batch, ids, weights = choice(9, 2, device)
    x = torch.randn(9, 8, device=device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), ids, weights, EXPERTS)
    y = backend.run_experts(x, layer, routing)
    copied = copy.deepcopy(routing)
    backend.prepare_experts(routing.plan, ids.flip(0), weights, EXPERTS, out=routing)
    assert torch.equal(backend.run_experts(x, layer, copied), y)


@pytest.mark.parametrize(
    ("copied", "way"),
    [(copy.deepcopy, "compared"), (lambda r: pickle.loads(pickle.dumps(r)), "alone")],
)
def test_a_copied_routing_can_be_refilled(make, device, monkeypatch, copied, way):
    """The copy of a routing with two live pairs, refilled with twelve."""
    take(way, monkeypatch)
    backend, layer = make(), experts_layer(device)
    plan = backend.prepare_batch(LoRABatch([0, 1, 2, 3, 4, 0], SLOTS))
    ids = torch.arange(12, dtype=torch.int32, device=device).view(6, 2) % EXPERTS
    weights = torch.ones(6, 2, device=device)
    few = ids.clone()
    few[1:] = -1
    x = torch.randn(6, 8, device=device)
    routing = copied(backend.prepare_experts(plan, few, weights, EXPERTS))
    assert routing.shape.has_singles
    backend.prepare_experts(plan, ids, weights, EXPERTS, out=routing)
    fresh = backend.prepare_experts(plan, ids, weights, EXPERTS)
    y = backend.run_experts(x, layer, routing)
    assert torch.equal(y, backend.run_experts(x, layer, fresh))
    assert y.abs().sum(2).ne(0).all()


def test_a_routing_of_other_slots_is_not_refilled(make, device):
    backend = make()
    batch, ids, weights = choice(4, 2, device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), ids, weights, EXPERTS)
    wider = backend.prepare_batch(LoRABatch([0, 1, 2, 3], SLOTS + 1))
    with pytest.raises(InvalidInputError, match="6 slots"):
        backend.prepare_experts(wider, ids, weights, EXPERTS, out=routing)


def test_a_graph_of_experts_alone_keeps_whether_tokens_have_scales(make, device, monkeypatch):
    backend, layer = make(), experts_layer(device)
    batch, ids, weights = choice(9, 2, device)
    scaled = LoRABatch(batch.token_slots, SLOTS, torch.full((9,), 0.5))
    x = torch.randn(9, 8, device=device)

    def captured(batch):
        """Return a plan of which a graph captures the experts, and nothing else."""
        plan = backend.prepare_batch(batch)
        routing = backend.prepare_experts(plan, ids, weights, EXPERTS)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "is_capturing", lambda _: True)
            backend.run_experts(x, layer, routing)
        return plan

    with pytest.raises(InvalidInputError, match="captured the plan without token_scales"):
        backend.prepare_batch(scaled, out=captured(batch))
    plan = captured(scaled)
    backend.prepare_batch(batch, out=plan)
    assert plan.token_scales.eq(1).all(), "the graph reads them"


def experts_layer(device):
    from lora_backends import ExpertWeights

    return ExpertWeights(
        lora_a=torch.randn(SLOTS, EXPERTS, 1, 3, 8, device=device),
        lora_b=torch.randn(SLOTS, EXPERTS, 10, 3, device=device),
        ranks=torch.full((SLOTS, EXPERTS, 1), 3, dtype=torch.int32, device=device),
        scalings=torch.ones(SLOTS, EXPERTS, 1, device=device),
        output_slices=(10,),
        num_experts=EXPERTS,
    )


def test_expected_keys_are_those_of_a_uniform_router():
    torch.manual_seed(0)
    for tokens, top_k, experts, slots in [(16, 8, 128, 8), (256, 2, 8, 64), (64, 4, 32, 1)]:
        seen = 0
        for _ in range(20):
            ids = torch.rand(tokens, experts).topk(top_k).indices
            keys = ids + experts * (torch.arange(tokens) % slots)[:, None]
            seen += keys.unique().numel() / 20
        assert abs(expected_keys(tokens, top_k, experts, slots) - seen) <= 0.05 * seen
    assert expected_keys(0, 2, 8, 0) >= 1


@pytest.mark.parametrize(
    ("tokens", "slots", "capacity", "alone"),
    [
        (1, 1, None, True),
        (16, 8, None, True),
        (16, 1, None, False),  # pairs share their experts
        (64, 64, None, True),
        (64, 50, None, True),  # one slot may have 15 tokens
        (64, 45, None, False),
        (16, 16, 16, True),
        (17, 17, 17, False),  # a refill may give all tokens to one slot
        (1, 1, 17, True),
    ],
)
def test_nothing_is_sorted_where_pairs_have_keys_to_themselves(
    device, tokens, slots, capacity, alone
):
    backend, top_k, experts = make_engine("triton", device), 2, 16
    batch = LoRABatch([t % slots for t in range(tokens)], slots)
    plan = backend.prepare_batch(batch, capacity=capacity)
    ids = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % experts
    weights = torch.ones(tokens, top_k, device=device)
    routing = backend.prepare_experts(plan, ids, weights, experts)
    assert routing.shape.alone == alone
    found = tiles_of(routing)
    assert sorted(p for pairs in found.values() for p in pairs) == list(range(tokens * top_k))


def test_tiles_grow_with_the_pairs_of_a_key():
    sizes = [tile_pairs(pairs, 100) for pairs in (0, 100, 1000, 2000, 5000, 50000)]
    assert sizes == sorted(sizes) and sizes[0] == 16 and sizes[-1] == 128


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(256, 8), (4096, 8)])
def test_large_routings_are_sorted(make, device, shape):
    backend = make()
    batch, ids, weights = choice(*shape, device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), ids, weights, EXPERTS)
    found = {key: sorted(pairs) for key, pairs in tiles_of(routing).items()}
    assert found == pairs_of(batch, ids)


def test_a_routing_is_made_in_one_piece_of_memory(make, device, way):
    """And the tokens by slot are sorted only for an A that all experts share."""
    backend = make()
    tokens = 3 if way == "alone" else 9
    batch, ids, weights = choice(tokens, 3, device)
    routing = backend.prepare_experts(backend.prepare_batch(batch), ids, weights, EXPERTS)
    assert routing.shape.alone == (way == "alone")
    tables = (routing.topk_ids, routing.topk_weights, routing.order, routing.tiles)
    tables += (routing.singles, routing.count, *routing.scratch)
    assert len({table.untyped_storage().data_ptr() for table in tables}) == 1
    spans = sorted((table.data_ptr(), table.nbytes) for table in tables if table.numel())
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
    assert all((at - spans[0][0]) % 128 == 0 for at, _ in spans)
    layer, x = experts_layer(device), torch.randn(tokens, 8, device=device)
    backend.run_experts(x, layer, routing)
    assert routing.tokens is None
    shared = dataclasses.replace(layer, lora_a=layer.lora_a[:, :1])
    each = dataclasses.replace(
        layer, lora_a=layer.lora_a[:, :1].expand(-1, EXPERTS, -1, -1, -1).contiguous()
    )
    expected = backend.run_experts(x, each, routing)
    for _ in range(2):
        y = backend.run_experts(x, shared, routing)
        tokens = routing.tokens
        torch.testing.assert_close(y, expected)
    assert routing.tokens is tokens is not None and y.any()
