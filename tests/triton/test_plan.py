import random

import numpy as np
import pytest
import torch

from lora_backends import LoRABatch
from lora_backends.triton import plan as plans

CPU = torch.device("cpu")


def _plan(slots, num_slots, block_tokens=16):
    batch = LoRABatch(slots, num_slots)
    return plans.make_plan(batch, plans.count_tokens(batch), block_tokens, CPU)


def test_the_worked_example():
    plan = _plan([2, -1, 0, 2, 2], 3, block_tokens=2)
    assert plan.num_tiles == 3
    assert plan.tile_slots[:3].tolist() == [0, 2, 2]
    assert plan.tile_tokens[:3].tolist() == [[2, -1], [0, 3], [4, -1]]
    assert plan.active_slots == 2


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_every_token_with_an_adapter_stands_in_one_tile_of_its_slot(block_tokens):
    generator = random.Random(block_tokens)
    for _ in range(200):
        num_slots = generator.randint(1, 9)
        slots = [generator.randint(-1, num_slots - 1) for _ in range(generator.randint(0, 150))]
        plan = _plan(slots, num_slots, block_tokens)
        assert plan.num_tiles <= plan.max_tiles
        found = {}
        for tile in range(plan.max_tiles):
            tokens = [t for t in plan.tile_tokens[tile].tolist() if t >= 0]
            slot = int(plan.tile_slots[tile])
            assert bool(tokens) == (slot >= 0) == (tile < plan.num_tiles)
            assert tokens == sorted(tokens)
            found.update(dict.fromkeys(tokens, slot))
        assert found == {t: slot for t, slot in enumerate(slots) if slot >= 0}


def test_no_composition_needs_more_than_max_tiles_and_some_needs_all():
    generator = np.random.default_rng(0)
    for tokens, slots, block in [(1, 8, 16), (16, 8, 16), (50, 3, 16), (256, 8, 16), (64, 64, 16)]:
        bound = plans.max_tiles(tokens, slots, block)
        segments = min(tokens, slots)
        worst = [1] * (segments - 1) + [tokens - segments + 1]
        assert sum(-(-length // block) for length in worst) <= bound
        needed = max(
            int((-(-np.bincount(generator.integers(0, slots, tokens)) // block)).sum())
            for _ in range(50)
        )
        assert needed <= bound <= tokens


def test_refilling_keeps_the_addresses():
    plan = _plan([0, 0, 1, -1], 2)
    addresses = plan.packed.data_ptr(), plan.tile_slots.data_ptr(), plan.tile_tokens.data_ptr()
    batch = LoRABatch([-1, 1, 1, 1], 2)
    same = plans.refill(plan, batch, plans.count_tokens(batch))
    assert same is plan
    assert addresses == (
        plan.packed.data_ptr(),
        plan.tile_slots.data_ptr(),
        plan.tile_tokens.data_ptr(),
    )
    assert plan.tile_slots.tolist()[:1] == [1]
    assert plan.tile_tokens[0, :4].tolist() == [1, 2, 3, -1]


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_a_batch_without_adapters_has_no_tiles(slots):
    plan = _plan(slots, 3)
    assert plan.num_tiles == 0
    assert set(plan.tile_slots.tolist()) == {-1}
