"""How plans cut a batch: what both engines share, and that their tables agree."""

import copy
import dataclasses
import doctest
import pickle
import random

import numpy as np
import pytest
import torch
from helpers.engines import VARIANTS, make_engine

from lora_backends import InvalidInputError, LoRABatch, csgmv
from lora_backends.csgmv import plan as csgmv_plan
from lora_backends.dispatch import many_adapters
from lora_backends.sgmv import layout, runs
from lora_backends.sgmv.blends import plan as blends
from lora_backends.sgmv.launching.kernel import ABSENT
from lora_backends.triton import plan as triton_plan

CPU = torch.device("cpu")
CUTS = {  # tokens per segment, segments per group; None: the tiles of triton
    "triton-16": (16, None),
    "triton-32": (32, None),
    "triton-64": (64, None),
    "csgmv-16": (16, 1),
    "csgmv-16x4": (16, 4),
    "csgmv-32x2": (32, 2),
    "csgmv-128": (128, 1),
}


def make_plan(slots, num_slots, size=16, group=None, room=()):
    """Return the plan of triton, or of csgmv where `group` is given; `room` for other sizes."""
    batch = LoRABatch(slots, num_slots)
    counts = runs.count_tokens(batch)
    if group is None:
        plan = triton_plan.TritonPlan.with_room(batch, batch.num_tokens, (size, *room), CPU)
        plan.fill(batch, counts, size)
    else:
        plan = csgmv_plan.CsgmvPlan.with_room(batch, batch.num_tokens, (size, *room), CPU)
        plan.fill(batch, counts, size, group)
    return plan


def refill(plan, slots):
    batch = LoRABatch(slots, plan.num_slots)
    counts = runs.count_tokens(batch)
    if isinstance(plan, triton_plan.TritonPlan):
        plan.fill(batch, counts, plan.tile_tokens)
    else:
        plan.fill(batch, counts, plan.run_tokens, plan.tile_tokens // plan.run_tokens)
    return plan


def views_of(plan):
    """Return the tables that the plan has."""
    return [table for table in plan.tables() if table is not ABSENT]


def rows_of(plan):
    """Return the slots and the tokens of every row of the grid, unused rows included."""
    starts = range(plan.grid_rows(True, plan.num_tokens) + 1)
    if isinstance(plan, csgmv_plan.CsgmvPlan):
        starts = plan.group_starts.tolist()
    rows = []
    for first, end in zip(starts, starts[1:], strict=False):
        tokens = plan.token_table[first:end].flatten().tolist()
        rows.append((plan.slot_table[first:end].tolist(), [t for t in tokens if t >= 0]))
    return rows


def random_batches(seed, count, tokens):
    generator = random.Random(seed)
    for _ in range(count):
        num_slots = generator.randint(1, 9)
        length = generator.randint(0, tokens)
        yield [generator.randint(-1, num_slots - 1) for _ in range(length)], num_slots


@pytest.mark.parametrize("module", [runs, csgmv, csgmv_plan, blends, many_adapters])
def test_worked_examples_of_functions(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


@pytest.mark.parametrize("size, group", CUTS.values(), ids=CUTS)
def test_every_token_with_an_adapter_has_one_place_in_a_row_of_its_slot(size, group):
    for slots, num_slots in random_batches(size, 200, tokens=400):
        plan = make_plan(slots, num_slots, size, group)
        in_use, found = plan.grid_rows(False, plan.num_tokens), {}
        assert in_use <= plan.grid_rows(True, plan.num_tokens)
        for row, (row_slots, tokens) in enumerate(rows_of(plan)):
            assert bool(tokens) == (row < in_use)
            assert tokens == sorted(tokens)
            assert len(tokens) <= plan.tile_tokens == size * (group or 1)
            if tokens:
                (slot,) = set(row_slots)
                assert slot >= 0
                found.update(dict.fromkeys(tokens, slot))
            else:
                assert set(row_slots) <= {-1}
        assert found == {t: slot for t, slot in enumerate(slots) if slot >= 0}
        assert plan.active_slots == len(set(slots) - {-1})


@pytest.mark.parametrize("size, group", CUTS.values(), ids=CUTS)
def test_unused_rows_have_no_slot_and_no_token(size, group):
    for slots, num_slots in random_batches(size, 50, tokens=200):
        plan = make_plan(slots, num_slots, size, group)
        used = plan.num_runs
        assert (plan.slot_table[:used] >= 0).all() and (plan.slot_table[used:] == -1).all()
        assert (plan.token_table[used:] == -1).all()
        assert (plan.token_table[:used, 0] >= 0).all()


@pytest.mark.parametrize("num_slots", [126, 127, 128, 129, 32766, 32767, 40000])
def test_slots_of_any_number_are_sorted(num_slots):
    """They are sorted as the narrowest integers that hold them."""
    slots = random.Random(num_slots).choices([-1, 0, 125, 126, 127, num_slots - 1], k=300)
    slots = [min(slot, num_slots - 1) for slot in slots]
    found = runs.permutation(runs.count_tokens(LoRABatch(slots, num_slots)))
    tokens = [token for token, slot in enumerate(slots) if slot >= 0]
    assert found.tolist() == sorted(tokens, key=slots.__getitem__)


@pytest.mark.parametrize("group", [None, 1, 4])
def test_tables_are_seen_where_the_last_refill_put_them(group):
    """A plan with room cuts each batch into runs of another size."""
    plan = make_plan([0, 1, 1] * 30, 3, 32, group, room=(16, 32))
    assert plan.token_table.shape[1] == 32
    batch = LoRABatch([2, 2, -1] * 20, 3)
    plan.fill(batch, runs.count_tokens(batch), 16, *([] if group is None else [group]))
    fresh = make_plan(batch.token_slots, 3, 16, group)
    assert plan.token_table.shape[1] == 16
    assert [row for row in rows_of(plan) if row[1]] == [row for row in rows_of(fresh) if row[1]]


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_the_tables_of_a_copied_plan_follow_its_refills(how, group):
    plan = make_plan([0, 1, 2] * 30, 3, 16, group)
    before = [table.clone() for table in views_of(plan)]
    copied, fresh = refill(how(plan), [2, -1] * 45), make_plan([2, -1] * 45, 3, 16, group)
    assert all(map(torch.equal, views_of(copied), views_of(fresh)))
    assert all(map(torch.equal, views_of(plan), before))


@pytest.mark.parametrize("group", [None, 4])
def test_a_launch_changes_no_field_of_a_plan(group):
    """Properties of graphs compare the addresses of tensors in fields, before and after calls."""
    plan = make_plan([0, 1, 2] * 30, 3, 16, group)
    before = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    assert len(views_of(plan)) >= 2
    assert all(getattr(plan, name) is value for name, value in before.items())


@pytest.mark.parametrize("group", [None, 1])
def test_rows_are_full_but_for_the_last_of_a_slot(group):
    plan = make_plan([1] * 40 + [0] * 16 + [-1] * 3, 2, 16, group)
    assert (plan.token_table[:4] >= 0).sum(1).tolist() == [16, 16, 16, 8]


@pytest.mark.parametrize(
    "tokens, slots, size", [(1, 8, 16), (16, 8, 16), (50, 3, 16), (256, 8, 64), (64, 64, 16)]
)
def test_no_composition_needs_more_runs_than_the_bound_and_one_needs_them_all(tokens, slots, size):
    bound = runs.max_runs(tokens, slots, size)
    assert bound <= tokens // size + min(tokens, slots) and bound <= tokens

    def needed(counts):
        return int(runs.split(np.asarray(counts), size).sum())

    generator = np.random.default_rng(0)
    for _ in range(50):
        assert needed(np.bincount(generator.integers(0, slots, tokens))) <= bound
    used = min(tokens, slots)
    assert needed([1] * (used - 1) + [tokens - used + 1]) == bound


@pytest.mark.parametrize("size, group", CUTS.values(), ids=CUTS)
def test_a_refilled_plan_is_the_plan_of_its_new_batch_at_the_old_addresses(size, group):
    for slots, num_slots in random_batches(size, 50, tokens=200):
        plan = make_plan(slots, num_slots, size, group)
        addresses = [table.data_ptr() for table in (plan.packed, *views_of(plan))]
        composition = [slots[::-1], [num_slots - 1] * len(slots), [-1] * len(slots)][size % 3]
        assert refill(plan, composition) is plan
        assert addresses == [table.data_ptr() for table in (plan.packed, *views_of(plan))]
        fresh = make_plan(composition, num_slots, size, group)
        assert all(map(torch.equal, views_of(plan), views_of(fresh)))
        for capturing in (False, True):
            assert plan.grid_rows(capturing, plan.num_tokens) == fresh.grid_rows(
                capturing, fresh.num_tokens
            )
        assert plan.h_rows(plan.num_tokens) == fresh.h_rows(fresh.num_tokens)


@pytest.mark.parametrize("slots", [[], [-1, -1]])
@pytest.mark.parametrize("group", [None, 1, 4])
def test_a_batch_without_adapters_has_no_rows(slots, group):
    plan = make_plan(slots, 3, 16, group)
    assert plan.grid_rows(False, plan.num_tokens) == 0 < plan.grid_rows(True, plan.num_tokens)
    assert set(plan.slot_table.tolist()) == {-1}
    assert set(plan.token_table.flatten().tolist()) == {-1}


@pytest.mark.parametrize("size, group", CUTS.values(), ids=CUTS)
def test_tables_lie_apart_at_multiples_of_128_bytes(size, group):
    """Writing one table never changes another."""
    plan = make_plan([0, 1, 2] * 30, 3, size, group)
    spans = []
    for table in views_of(plan):
        assert table.is_contiguous() and table.dtype == torch.int32
        first = table.storage_offset()
        assert first % runs.ALIGNMENT == 0
        spans.append((first, first + table.numel()))
    assert spans == sorted(spans) and spans[-1][1] <= plan.packed.numel()
    assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:], strict=False))


def test_tables_of_triton_are_those_of_csgmv_with_groups_of_one_segment():
    generator = random.Random(0)
    for slots, num_slots in random_batches(0, 300, tokens=400):
        size = generator.choice([16, 32, 64, 128])
        tiles, groups = make_plan(slots, num_slots, size), make_plan(slots, num_slots, size, 1)
        assert torch.equal(tiles.slot_table, groups.slot_table)
        assert torch.equal(tiles.token_table, groups.token_table)
        assert tiles.num_runs == groups.num_runs == groups.num_groups
        assert tiles.most_runs == groups.most_runs == groups.most_rows
        assert groups.group_starts.tolist() == [
            min(group, groups.num_groups) for group in range(groups.most_rows + 1)
        ]
        assert (tiles.tile_tokens, tiles.active_slots) == (groups.tile_tokens, groups.active_slots)


def test_a_group_of_csgmv_holds_the_tokens_of_a_tile_of_triton():
    generator = random.Random(1)
    for slots, num_slots in random_batches(1, 100, tokens=400):
        segment, group = generator.choice([(16, 2), (16, 4), (32, 2)])
        tiles = make_plan(slots, num_slots, segment * group)
        groups = make_plan(slots, num_slots, segment, group)
        assert tiles.most_runs == groups.most_rows
        assert [tokens for _, tokens in rows_of(tiles)] == [tokens for _, tokens in rows_of(groups)]


def single_refills(engine, num_slots, capacities):
    """Return a plan for each number of tokens, made and refilled alone."""
    empty = LoRABatch([], num_slots)
    return [engine.prepare_batch(empty, capacity=capacity) for capacity in capacities]


def assert_same(plan, wanted):
    assert (plan.num_tokens, plan.num_runs, plan.cut) == (
        wanted.num_tokens,
        wanted.num_runs,
        wanted.cut,
    )
    assert torch.equal(plan.token_slots(), wanted.token_slots())
    assert all(map(torch.equal, views_of(plan), views_of(wanted)))
    rows = wanted.num_tokens
    assert all(plan.grid_rows(c, rows) == wanted.grid_rows(c, rows) for c in (False, True))


@pytest.fixture(params=VARIANTS)
def engine(request):
    """Return an engine that prepares batches; it need not launch."""
    return make_engine(request.param, "cpu")


def test_plans_refilled_together_are_those_refilled_alone(engine):
    """Captured plans keep their sizes, the others follow each batch."""
    capacities, num_slots, generator = (8, 32, 256, 2000), 5, random.Random(0)
    plans = engine.prepare_rooms(num_slots, capacities)
    alone = single_refills(engine, num_slots, capacities)
    for step, tokens in enumerate([8, 3, 0, 1, 32, 20, 256, 2000, 5, 1500, 8, 2]):
        slots = [generator.randint(-1, num_slots - 1) for _ in range(tokens)]
        fits = [i for i, capacity in enumerate(capacities) if capacity >= tokens]
        engine.refill(LoRABatch(slots, num_slots), [plans[i] for i in fits])
        for i in fits:
            engine.prepare_batch(LoRABatch(slots, num_slots), out=alone[i])
            assert_same(plans[i], alone[i])
            assert plans[i].refills == alone[i].refills
        if step in (0, 5):
            for plan in (plans[step // 5 * 2], alone[step // 5 * 2]):
                plan.is_captured = True


def test_one_copy_sends_plans_that_lie_side_by_side_and_leaves_the_others(engine, monkeypatch):
    plans = engine.prepare_rooms(3, (8, 16, 32, 64))
    engine.refill(LoRABatch([0, 1, 2], 3), plans)
    sent, fill = [], layout._fill_side_by_side
    monkeypatch.setattr(
        layout, "_fill_side_by_side", lambda group, *more: sent.append(group) or fill(group, *more)
    )
    engine.refill(LoRABatch([2, -1], 3), plans)
    assert [list(map(id, group)) for group in sent] == [list(map(id, plans))]
    sent.clear()
    batch, left = LoRABatch([1] * 5, 3), plans[1].packed.clone()
    engine.refill(batch, [plans[0], *plans[2:]])
    assert [len(group) for group in sent] == [1, 2]
    assert torch.equal(plans[1].packed, left), "it lies between the others"
    wanted = engine.prepare_batch(batch, out=single_refills(engine, 3, (64,))[0])
    assert_same(plans[3], wanted)
    sent.clear()
    engine.refill(batch, plans[::-1])  # in another order: a copy for each
    assert [len(group) for group in sent] == [1] * 4
    assert_same(plans[3], wanted)


def test_plans_made_in_inference_mode_are_refilled_outside_of_it(engine):
    batches = LoRABatch([0, 1, 2], 3), LoRABatch([2], 3, [0.5]), LoRABatch([1, -1], 3)
    with torch.inference_mode():
        plans = engine.prepare_rooms(3, (8, 16))
        engine.refill(batches[0], plans)
    for batch in batches:
        engine.refill(batch, plans)
        with torch.inference_mode():
            engine.refill(batch, plans)
        engine.prepare_batch(batch, out=plans[1])
        assert plans[0].token_slots().tolist() == plans[1].token_slots()[:8].tolist()


def test_a_batch_that_a_plan_cannot_take_changes_none(engine):
    plans = engine.prepare_rooms(3, (8, 16))
    engine.refill(LoRABatch([0, 1, 2], 3), plans)
    before = [(plan.packed.clone(), plan.refills) for plan in plans]
    plans[1].is_captured = True
    for refused in (LoRABatch([0] * 9, 3), LoRABatch([0], 4), LoRABatch([0], 3, [0.5])):
        with pytest.raises(InvalidInputError):
            engine.refill(refused, plans[::-1])
    for plan, (packed, refills) in zip(plans, before, strict=True):
        assert torch.equal(plan.packed, packed) and plan.num_tokens == 3
        assert plan.refills <= refills + 1


def test_a_subclass_that_prepares_batches_in_its_own_way_is_asked(engine):
    asked = []

    class Noting(type(engine)):
        def prepare_batch(self, batch, out=None, capacity=None):
            asked.append(out)
            return super().prepare_batch(batch, out, capacity)

    noting = Noting("cpu")
    plans = noting.prepare_rooms(3, (8, 16))
    noting.refill(LoRABatch([0, 1], 3), plans)
    assert asked == [None, None, *plans]


def test_runs_longer_than_any_that_a_plan_has_room_for_are_refused(engine):
    """They would reach into the next plan of the buffer."""
    plans, batch = engine.prepare_rooms(3, (8, 16)), LoRABatch([0], 3)
    before = plans[1].packed.clone()
    with pytest.raises(AssertionError, match="no room for runs of 128 tokens"):
        counted = runs.count_tokens(batch)
        plans[0].fill(batch, counted, *(128, 1)[: len(engine._cut(1, counted))])
    assert torch.equal(plans[1].packed, before)


def test_a_copy_of_a_plan_has_memory_of_its_own(engine):
    plans = engine.prepare_rooms(3, (8, 16, 32))
    engine.refill(LoRABatch([0, 1, 2], 3), plans)
    copied, before = copy.deepcopy(plans[1]), plans[1].packed.clone()
    size = copied.packed.numel() * copied.packed.element_size()
    assert copied.packed.untyped_storage().nbytes() == size
    engine.refill(LoRABatch([2, 2], 3), [copied, plans[2]])
    assert torch.equal(plans[1].packed, before)
    assert_same(copied, engine.prepare_batch(LoRABatch([2, 2], 3), capacity=16))
