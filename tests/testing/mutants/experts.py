"""Wrong experts: matrices, pairs, routings and sums of others."""

import copy
from dataclasses import replace

import torch

from lora_backends.features import EIGHT_BIT
from mutants.base import TwoSteps, caught_by
from mutants.features import Featured, SecondAdapterForgotten


class SeeingExperts(TwoSteps):
    """torch_ref whose experts see other weights or ids than they are given."""

    def seen_weights(self, weights):
        return weights

    def seen_ids(self, ids, weights):
        return ids

    def run_experts(self, x, weights, routing, base_output=None, **options):
        kept = routing.topk_ids.clone()
        routing.topk_ids.copy_(self.seen_ids(kept, weights))
        try:
            weights = self.seen_weights(weights)
            return super().run_experts(x, weights, routing, base_output, **options)
        finally:
            routing.topk_ids.copy_(kept)


@caught_by("experts_are_exact_on_integers")
class WrongExpert(SeeingExperts):
    """Every pair gets the next expert's matrices."""

    def seen_ids(self, ids, weights):
        return torch.where(ids >= 0, (ids + 1) % weights.num_experts, ids)


@caught_by("run_experts_is_within_the_bound")
class ExpertScalingFivePercent(SeeingExperts):
    """The scaling of experts is 5% too large."""

    def seen_weights(self, weights):
        return replace(weights, scalings=1.05 * weights.scalings)


@caught_by("run_experts_is_within_the_bound")
class MapIgnored(TwoSteps):
    """Global ids are taken for local ones."""

    def prepare_experts(self, plan, topk_ids, topk_weights, num_experts, expert_map=None, out=None):
        if expert_map is not None:
            topk_ids = torch.where(topk_ids < num_experts, topk_ids, -1)
        return super().prepare_experts(plan, topk_ids, topk_weights, num_experts, None, out)


@caught_by("dead_pairs_keep_their_bits")
class ZeroAddedToDeadPairs(TwoSteps):
    """Zero is added to dead pairs: -0.0 becomes 0.0."""

    def run_experts(self, x, weights, routing, base_output=None, **options):
        return super().run_experts(x, weights, routing, base_output, **options).add_(0.0)


@caught_by("experts_are_exact_on_integers")
class InterleavedAsBlocks(SeeingExperts):
    """Interleaved columns are taken for blocks."""

    def seen_weights(self, weights):
        return replace(weights, interleaved=False)


@caught_by("experts_equal_dense_slots")
class FirstExpertsRank(SeeingExperts):
    """Every expert has the rank of its slot's first."""

    def seen_weights(self, weights):
        first = weights.ranks[:, :1].expand_as(weights.ranks).clone()
        return replace(weights, ranks=first, scalings=weights.scalings.nan_to_num(1.0))


@caught_by("experts_are_exact_on_integers")
class ScaleOfAnotherExpert(SeeingExperts):
    """A of 8 bits gets the scales of the expert before it."""

    features = frozenset({EIGHT_BIT})

    def seen_weights(self, weights):
        if weights.a_scales is None:
            return weights
        return replace(weights, a_scales=weights.a_scales.roll(1, 1).contiguous())


@caught_by("reduce_is_the_sum_over_pairs")
class ReduceForgetsTheLast(SeeingExperts):
    """A sum over pairs ends before the last of them."""

    def run_experts(self, x, weights, routing, base_output=None, **options):
        self.reduces = options["reduce"]
        return super().run_experts(x, weights, routing, base_output, **options)

    def seen_ids(self, ids, weights):
        last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
        return torch.where(last & self.reduces & (ids.shape[1] > 1), -1, ids)


@caught_by("many_experts_are_right")
class FourExpertsAToken(SeeingExperts):
    """Pairs after the fourth of a token are dropped."""

    def seen_ids(self, ids, weights):
        return torch.where(torch.arange(ids.shape[1]) < 4, ids, -1)


@caught_by("many_experts_are_right")
class ExpertOfFiveBits(SeeingExperts):
    """The expert is kept in 5 bits: expert 32 becomes expert 0."""

    def seen_ids(self, ids, weights):
        return torch.where(ids >= 0, ids % 32, ids)


@caught_by("many_experts_are_right")
class ExpertRanksCutAt64(SeeingExperts):
    """Ranks above 64 lose what lies beyond one tile."""

    def seen_weights(self, weights):
        return replace(weights, ranks=weights.ranks.clamp(max=64))


@caught_by("experts_keep_no_state")
class RouterCleaned(TwoSteps):
    """Weights of dead pairs, which may be NaN, are set to 0 in the router's own tensor."""

    def prepare_experts(self, plan, topk_ids, topk_weights, *args, **options):
        topk_weights.nan_to_num_(0.0)
        return super().prepare_experts(plan, topk_ids, topk_weights, *args, **options)


@caught_by("experts_keep_no_state")
class ExpertScalingsKept(SeeingExperts):
    """The scalings of experts are copied once per layer."""

    def seen_weights(self, weights):
        kept = self.__dict__.setdefault("kept", {})
        scalings, _ = kept.setdefault(id(weights), (weights.scalings.clone(), weights))
        return replace(weights, scalings=scalings)


@caught_by("run_experts_is_within_the_bound")
class WeightedTwice(TwoSteps):
    """The router's weight is squared."""

    def prepare_experts(self, plan, topk_ids, topk_weights, num_experts, expert_map=None, out=None):
        squared = topk_weights**2
        return super().prepare_experts(plan, topk_ids, squared, num_experts, expert_map, out)


@caught_by("experts_are_exact_on_integers")
class RowOfTheToken(TwoSteps):
    """A row of x per pair is read as a row per token."""

    def run_experts(self, x, weights, routing, base_output=None, rows="tokens", **options):
        if rows == "pairs":
            x = x[: routing.num_tokens].nan_to_num()
        return super().run_experts(x, weights, routing, base_output, **options)


@caught_by("a_refilled_routing_equals_a_fresh_one")
class RoutingRefillIgnored(TwoSteps):
    """A refill leaves the routing as it was."""

    def prepare_experts(self, *args, out=None):
        return super().prepare_experts(*args) if out is None else out


@caught_by("experts_do_not_depend_on_the_batch")
class ExpertSumsByBatchSize(SeeingExperts):
    """Sums of experts are ordered by the number of tokens, claimed batch-invariant."""

    batch_invariant = True

    def run_experts(self, x, weights, routing, base_output=None, **options):
        self.order = torch.arange(weights.in_features).roll(routing.num_tokens)
        x = x[:, self.order].contiguous()
        return super().run_experts(x, weights, routing, base_output, **options)

    def seen_weights(self, weights):
        return replace(weights, lora_a=weights.lora_a[..., self.order])


@caught_by("experts_follow_a_plan_with_room")
class RoutingKeepsThePlan(Featured):
    """A routing keeps the tokens of its plan as they were when it was made."""

    def prepare_experts(self, plan, *args, out=None):
        kept = copy.copy(plan) if out is None else out.plan
        return super().prepare_experts(kept, *args, out=out)


@caught_by("run_experts_is_within_the_bound")
class ExpertsWithoutTokenScales(Featured):
    """Experts ignore the scales of tokens."""

    def run_experts(self, x, weights, routing, base_output=None, **options):
        kept, routing.plan.token_scales = routing.plan.token_scales, None
        try:
            return super().run_experts(x, weights, routing, base_output, **options)
        finally:
            routing.plan.token_scales = kept


class UncheckedExperts(TwoSteps):
    """run_experts is put in place behind the checks, and writes before it fails."""


def _write_then_fail(self, x, weights, routing, base_output=None, **options):
    base_output[:1] += 1
    return TwoSteps.run_experts(self, x, weights, routing, base_output, **options)


UncheckedExperts.run_experts = _write_then_fail
caught_by("bad_experts_are_refused_before_anything_is_written")(UncheckedExperts)
caught_by("experts_of_several_adapters_are_a_sum")(SecondAdapterForgotten)
