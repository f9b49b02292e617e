import doctest
import random

import numpy as np
import pytest
import torch

from lora_backends import LoRABatch
from lora_backends.csgmv import config
from lora_backends.csgmv import plan as plans

CPU = torch.device("cpu")
ROWS = [(16, 1), (16, 4), (32, 2), (128, 1)]


def _plan(slots, num_slots, segment_size=16, group_size=1):
    return plans.make_plan(LoRABatch(slots, num_slots), segment_size, group_size, 0, CPU)


@pytest.mark.parametrize("module", [plans, config])
def test_worked_examples_of_functions(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed


def test_the_worked_example_of_the_plan():
    plan = _plan([2, -1, 0, 2, 2, 2, 2], 3, segment_size=2, group_size=2)
    assert plan.segment_slots.tolist() == [0, 2, 2, 2, -1]
    assert plan.segment_tokens.tolist() == [[2, -1], [0, 3], [4, 5], [6, -1], [-1, -1]]
    assert plan.group_starts.tolist() == [0, 1, 3, 4, 4]
    assert (plan.num_segments, plan.max_segments, plan.num_groups, plan.max_groups) == (4, 5, 3, 4)


@pytest.mark.parametrize("segment_size, group_size", ROWS)
def test_every_token_with_an_adapter_has_one_place_in_a_row_of_its_slot(segment_size, group_size):
    generator = random.Random(segment_size + group_size)
    for _ in range(100):
        num_slots = generator.randint(1, 9)
        slots = [generator.randint(-1, num_slots - 1) for _ in range(generator.randint(0, 400))]
        plan = _plan(slots, num_slots, segment_size, group_size)
        found = {}
        for group in range(plan.max_groups):
            first, end = plan.group_starts[group : group + 2].tolist()
            assert (first < end) == (group < plan.num_groups)
            assert end - first <= group_size
            of_group = plan.segment_slots[first:end]
            assert (of_group == of_group[:1]).all()
            tokens = [t for t in plan.segment_tokens[first:end].flatten().tolist() if t >= 0]
            assert tokens == sorted(tokens)
            found.update({token: int(of_group[0]) for token in tokens})
        assert found == {t: slot for t, slot in enumerate(slots) if slot >= 0}
        assert int(plan.group_starts[plan.num_groups]) == plan.num_segments <= plan.max_segments
        assert (plan.segment_slots[plan.num_segments :] == -1).all()
        assert (plan.segment_tokens[plan.num_segments :] == -1).all()


def test_segments_are_full_but_for_the_last_of_a_slot():
    plan = _plan([1] * 40 + [0] * 16 + [-1] * 3, 2)
    assert (plan.segment_tokens[:4] >= 0).sum(1).tolist() == [16, 16, 16, 8]


@pytest.mark.parametrize(
    "tokens, slots, length", [(1, 8, 16), (16, 8, 16), (50, 3, 16), (256, 8, 64), (64, 64, 16)]
)
def test_no_composition_needs_more_than_the_bound_and_one_needs_it_all(tokens, slots, length):
    bound = plans.most_runs(tokens, slots, length)
    assert bound <= tokens // length + min(tokens, slots)

    def needed(counts):
        return int(plans.split(np.asarray(counts), length).sum())

    generator = np.random.default_rng(0)
    for _ in range(50):
        assert needed(np.bincount(generator.integers(0, slots, tokens))) <= bound
    used = min(tokens, slots)
    assert needed([1] * (used - 1) + [tokens - used + 1]) == bound


def test_refilling_keeps_the_addresses():
    plan = _plan([0, 0, 1, -1], 2)
    tables = ("packed", "segment_slots", "segment_tokens", "group_starts")
    addresses = [getattr(plan, name).data_ptr() for name in tables]
    assert plans.refill(plan, LoRABatch([-1, 1, 1, 1], 2)) is plan
    assert addresses == [getattr(plan, name).data_ptr() for name in tables]
    assert plan.segment_slots.tolist() == [1, -1]
    assert plan.segment_tokens[0, :4].tolist() == [1, 2, 3, -1]
    assert plan.group_starts.tolist() == [0, 1, 1]


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_a_batch_without_adapters_has_no_segments(slots):
    plan = _plan(slots, 3)
    assert plan.num_segments == plan.num_groups == 0
    assert set(plan.segment_slots.tolist()) == {-1}
    assert set(plan.group_starts.tolist()) == {0}
