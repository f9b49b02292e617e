"""The plan of `triton`; `tests/sgmv/test_layout.py` has the rules of both engines' plans."""

import torch

from lora_backends import LoRABatch
from lora_backends.sgmv.runs import count_tokens
from lora_backends.triton.plan import TritonPlan


def _plan(slots, num_slots, tile_tokens=16):
    batch = LoRABatch(slots, num_slots)
    plan = TritonPlan.with_room(batch, batch.num_tokens, (tile_tokens,), torch.device("cpu"))
    plan.fill(batch, count_tokens(batch), tile_tokens)
    return plan


def test_the_worked_example_of_the_plan():
    plan = _plan([2, -1, 0, 2, 2], 3, tile_tokens=2)
    assert plan.slot_table.tolist() == [0, 2, 2, -1]
    assert plan.token_table.tolist() == [[2, -1], [0, 3], [4, -1], [-1, -1]]
    assert (plan.num_runs, plan.most_runs, plan.active_slots) == (3, 4, 2)


def test_h_has_a_row_for_every_token():
    plan = _plan([0, -1, 1] * 7, 2)
    assert plan.h_rows(plan.num_tokens) == 32  # 21, and up to a multiple of 16
    assert plan.row_constants(by_token=True) == plan.row_constants(by_token=False)
