"""Routings that the layers of a served model share."""

import pytest
import torch

from lora_backends import get_backend
from lora_backends.integrations import plans as module
from lora_backends.integrations.plans import MOST_ROUTINGS, Plans

SLOTS, EXPERTS = 3, 4


@pytest.fixture(params=["torch_ref", "numba_cpu"])
def plans(request):
    made = Plans(get_backend(request.param, device="cpu"), SLOTS, 64)
    made.set_slots([0, 1, -1, 2, 1])
    return made


def choice(seed, rows=5, top_k=2):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, EXPERTS, (rows, top_k), generator=generator)
    return ids, torch.rand(rows, top_k, generator=generator).bfloat16()


def test_layers_take_turns_with_one_routing(plans):
    first = plans.route(*choice(1), EXPERTS)
    assert first.is_current
    second = plans.route(*choice(2), EXPERTS)
    assert second.routing is first.routing
    assert second.is_current and not first.is_current
    ids, weights = choice(2)
    assert torch.equal(second.routing.topk_ids, ids)
    assert torch.equal(second.routing.topk_weights, weights.float())
    plans.set_slots([2, 2, 0, -1, 1])  # the next batch
    assert plans.route(*choice(3), EXPERTS).routing is first.routing


def test_choices_of_other_sizes_have_routings_of_their_own(plans):
    made = [
        plans.route(*choice(1), EXPERTS),
        plans.route(*choice(1, rows=6), EXPERTS),
        plans.route(*choice(1, top_k=1), EXPERTS),
        plans.route(*choice(1), EXPERTS + 1),
        plans.route(*choice(1), EXPERTS, torch.arange(EXPERTS)),  # as the first one
    ]
    assert len({id(each.routing) for each in made}) == 4 and made[4].routing is made[0].routing


def test_the_routing_used_last_is_kept_and_the_oldest_goes(plans):
    kept = [plans.route(*choice(1, rows=5 + i), EXPERTS).routing for i in range(MOST_ROUTINGS)]
    assert plans.route(*choice(2), EXPERTS).routing is kept[0]
    plans.route(*choice(1, rows=30), EXPERTS)
    assert plans.route(*choice(2), EXPERTS).routing is kept[0]
    assert plans.route(*choice(2, rows=6), EXPERTS).routing is not kept[1]
    assert len(plans._routings) == MOST_ROUTINGS


def test_every_layer_of_a_graph_has_a_routing_of_its_own(plans, monkeypatch):
    outside = plans.route(*choice(1), EXPERTS)
    monkeypatch.setattr(plans.backend, "cuda_graphs", True)
    monkeypatch.setattr(module, "is_capturing", lambda device: True)
    inside = [plans.route(*choice(2), EXPERTS) for _ in range(2)]
    monkeypatch.undo()
    made = [outside, *inside]
    assert len({id(each.routing) for each in made}) == 3 and all(each.is_current for each in made)
    assert plans.route(*choice(1), EXPERTS).routing is outside.routing
    assert all(each.is_current for each in inside)
