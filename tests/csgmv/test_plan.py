"""The plan of `csgmv`; `tests/sgmv/test_layout.py` has the rules of both engines' plans."""

import random

import pytest
import torch

from lora_backends import LoRABatch
from lora_backends.csgmv import SEGMENT_SIZES, segment_and_group
from lora_backends.csgmv.plan import CsgmvPlan
from lora_backends.sgmv.runs import count_tokens
from lora_backends.sgmv.tiles.sizes import TILE_TOKENS


def _plan(slots, num_slots, segment_size=16, group_size=1):
    batch = LoRABatch(slots, num_slots)
    counts = count_tokens(batch)
    plan = CsgmvPlan.with_room(batch, batch.num_tokens, (segment_size,), torch.device("cpu"))
    plan.fill(batch, counts, segment_size, group_size)
    return plan


def test_the_worked_example_of_the_plan():
    plan = _plan([2, -1, 0, 2, 2, 2, 2], 3, segment_size=2, group_size=2)
    assert plan.slot_table.tolist() == [0, 2, 2, 2, -1]
    assert plan.token_table.tolist() == [[2, -1], [0, 3], [4, 5], [6, -1], [-1, -1]]
    assert plan.group_starts.tolist() == [0, 1, 3, 4, 4]
    assert (plan.num_runs, plan.most_runs, plan.num_groups, plan.most_rows) == (4, 5, 3, 4)


@pytest.mark.parametrize("segment_size, group_size", [(16, 1), (16, 4), (32, 2), (128, 1)])
def test_groups_share_out_the_segments_in_use(segment_size, group_size):
    generator = random.Random(segment_size + group_size)
    for _ in range(100):
        num_slots = generator.randint(1, 9)
        slots = [generator.randint(-1, num_slots - 1) for _ in range(generator.randint(0, 400))]
        plan = _plan(slots, num_slots, segment_size, group_size)
        assert int(plan.group_starts[0]) == 0
        for group in range(plan.most_rows):
            first, end = plan.group_starts[group : group + 2].tolist()
            assert (first < end) == (group < plan.num_groups)
            assert end - first <= group_size
        assert int(plan.group_starts[plan.num_groups]) == plan.num_runs <= plan.most_runs
        assert int(plan.group_starts[plan.most_rows]) == plan.num_runs


def test_a_batch_without_adapters_has_no_segments():
    for slots in ([], [-1, -1]):
        plan = _plan(slots, 3)
        assert plan.num_runs == plan.num_groups == 0
        assert set(plan.group_starts.tolist()) == {0}


def test_h_has_a_row_for_every_place_that_a_refill_can_use():
    plan = _plan([0, -1, 1] * 7, 2)
    assert plan.h_rows(plan.num_tokens) == 16 * plan.most_runs == plan.token_table.numel()


@pytest.mark.parametrize("tile_tokens", TILE_TOKENS)
def test_segments_and_groups_make_rows_of_the_tokens_wanted(tile_tokens):
    assert segment_and_group("auto", tile_tokens) == (tile_tokens, 1)
    for size in SEGMENT_SIZES:
        segment, group = segment_and_group(size, tile_tokens)
        assert segment == size and segment * group == max(size, tile_tokens)
