"""A backend without a backward of its own, and with a plan of its own type, has right gradients."""

from dataclasses import dataclass, replace

import pytest
import torch

from lora_backends import InvalidInputError, LoRABackend, LoRABatch, LoRAWeights, features
from lora_backends.testing import DEFAULT, verify
from lora_backends.testing.properties import PROPERTIES, gradients

GRADIENTS = [
    name
    for name, prop in PROPERTIES.items()
    if prop.check.__module__.startswith(gradients.__name__)
]


class OpenPlan:
    """Takes attributes."""

    def __init__(self, slots, num_slots, scales):
        self.slots, self.num_tokens, self.num_slots = slots, len(slots), num_slots
        self.token_scales = scales


class SlottedPlan:
    """Takes no attribute, and no weak reference."""

    __slots__ = ("num_slots", "num_tokens", "slots", "token_scales")
    __init__ = OpenPlan.__init__


class CountingPlan(OpenPlan):
    """Has another meaning for `refills`."""

    refills = ["a", "list"]


@dataclass(frozen=True)
class FrozenPlan:
    """Its fields stay; what they hold changes."""

    tensors: dict[str, torch.Tensor | None]
    num_tokens: int
    num_slots: int
    refills: int = 0

    @classmethod
    def of(cls, slots, num_slots, scales):
        return cls({"slots": slots, "token_scales": scales}, len(slots), num_slots)

    slots = property(lambda self: self.tensors["slots"])
    token_scales = property(lambda self: self.tensors["token_scales"])


PLANS = (OpenPlan, SlottedPlan, CountingPlan, FrozenPlan)


class Plain(LoRABackend):
    """The three methods that a backend must have, token by token."""

    features = frozenset({features.TOKEN_SCALES})
    deterministic = True

    def prepare_batch(self, batch, out=None):
        if out is None:
            scales = batch.token_scales
            make = getattr(self.plan_type, "of", self.plan_type)
            return make(batch.token_slots.clone(), batch.num_slots, scales)
        out.slots.copy_(batch.token_slots)
        if isinstance(out, FrozenPlan):
            out.tensors["token_scales"] = batch.token_scales
        else:
            out.token_scales = batch.token_scales
        return out

    def run_lora_a(self, x, weights, plan):
        h = torch.zeros(weights.num_slices, len(x), weights.max_rank)
        for token, slot in enumerate(plan.slots.tolist()):
            for s in range(weights.num_slices) if slot >= 0 else ():
                rank = int(weights.ranks[slot, s])
                h[s, token, :rank] = weights.lora_a[slot, s, :rank].float() @ x[token].float()
        return h

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = base_output
        if y is None:
            y = torch.zeros(h.shape[1], weights.out_features, dtype=weights.dtype)
        offsets = weights.slice_offsets
        for token, slot in enumerate(plan.slots.tolist()):
            for s in range(weights.num_slices) if slot >= 0 else ():
                rank, cols = int(weights.ranks[slot, s]), slice(*offsets[s : s + 2])
                total = y[token, cols].float()
                if rank:
                    delta = weights.lora_b[slot, cols, :rank].float() @ h[s, token, :rank]
                    scale = 1 if plan.token_scales is None else plan.token_scales[token]
                    total = total + scale * weights.scalings[slot, s] * delta
                if weights.bias is not None:
                    total = total + weights.bias[slot, cols]
                if rank or weights.bias is not None:
                    y[token, cols] = total.to(y.dtype)
        return y


def backend_with(plan_type):
    return type("Plain", (Plain,), {"plan_type": plan_type})("cpu")


@pytest.mark.parametrize("plan_type", PLANS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_defaults_keep_every_property_of_gradients(plan_type, name):
    report = verify(backend_with(plan_type), profile=replace(DEFAULT, effort=0.5), only=[name])
    assert report.passed, report.to_text()
    (result,) = report.results
    needs = {  # room, float64, a GPU
        "rows_after_the_batch_reach_no_gradient",
        "gradcheck_passes",
        "graph_replay_of_expert_gradients_equals_eager",
    }
    assert (result.status == "not applicable") == (name in needs)


def test_a_backend_may_say_that_it_has_no_gradients():
    class Without(Plain):
        plan_type, differentiable = OpenPlan, False

    report = verify(Without("cpu"), only=GRADIENTS)
    assert {result.status for result in report.results} == {"not applicable"}
    assert {result.reason for result in report.results} == {
        "the backend does not claim to be differentiable"
    }


@pytest.mark.parametrize("plan_type", PLANS)
def test_a_refill_of_another_plan_refuses_nothing(plan_type):
    backend = backend_with(plan_type)
    weights = LoRAWeights(
        torch.randn(2, 1, 2, 3, requires_grad=True),
        torch.randn(2, 4, 2),
        torch.full((2, 1), 2),
        torch.ones(2, 1),
        (4,),
    )
    batch, other = LoRABatch([0, 1], 2), LoRABatch([1, 0], 2)
    plan, second = backend.prepare_batch(batch), backend.prepare_batch(batch)
    for _ in range(2):
        y = backend.run_linear(torch.randn(2, 3), weights, plan)
        backend.prepare_batch(other, out=second)
        y.sum().backward()
        y = backend.run_linear(torch.randn(2, 3), weights, plan)
        backend.prepare_batch(other, out=plan)
        with pytest.raises(InvalidInputError, match="refilled between forward and backward"):
            y.sum().backward()
