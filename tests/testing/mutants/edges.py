"""Faults that show only at an edge: a size, a layout, a later call, torch's own state."""

from dataclasses import replace

import torch

from lora_backends.torch_ref import TorchRefBackend
from mutants.base import Seeing, TwoSteps, caught_by
from mutants.eight_bit import Quantised
from mutants.experts import SeeingExperts
from mutants.features import Featured


@caught_by("large_layers_are_right")
class RankTailDropped(Seeing):
    """Ranks above 64 are cut to a multiple of 64."""

    def seen(self, weights):
        ranks = weights.ranks
        return replace(weights, ranks=torch.where(ranks > 64, ranks // 64 * 64, ranks))


@caught_by("large_layers_are_right")
class LastBlockDropped(Seeing):
    """Where 128 divides in_features, the last 128 of them are left out."""

    def seen(self, weights):
        if weights.in_features % 128 or not weights.in_features:
            return weights
        kept = torch.arange(weights.in_features) < weights.in_features - 128
        return replace(weights, lora_a=torch.where(kept, weights.lora_a, 0))


@caught_by("large_layers_are_right")
class InputsBeyond16Bits(Seeing):
    """Only the first 65,536 inputs are summed."""

    def seen(self, weights):
        kept = torch.arange(weights.in_features) < 65_536
        return replace(weights, lora_a=torch.where(kept, weights.lora_a, 0))


@caught_by("large_layers_are_right")
class ColumnsBeyond16Bits(Seeing):
    """Columns of y from the 65,536th on get no delta."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        kept = torch.arange(weights.out_features)[:, None] < 65_536
        cut = replace(weights, lora_b=torch.where(kept, weights.lora_b, 0))
        return super().run_lora_b(h, cut, plan, base_output)


@caught_by("large_offsets_do_not_wrap")
class EmbeddingOffsetWraps(TorchRefBackend):
    """Only run_embedding counts the offset of a slot in 32 bits."""

    features = frozenset()

    def run_embedding(self, token_ids, weights, plan, base_output=None):
        slots = torch.arange(weights.num_slots)
        wrapped = torch.where(slots * weights.lora_a.stride(0) < 1 << 31, slots, 0)
        if not torch.equal(slots, wrapped):
            weights = replace(weights, lora_a=weights.lora_a[wrapped])
        return super().run_embedding(token_ids, weights, plan, base_output)


@caught_by("large_and_small_deltas_are_right")
class DenormalWeightsFlushed(Seeing):
    """Denormal float16 weights are taken for zero."""

    def seen(self, weights):
        if weights.dtype != torch.float16:
            return weights
        a, b = (torch.where(w.abs() < 2.0**-14, 0, w) for w in (weights.lora_a, weights.lora_b))
        return replace(weights, lora_a=a, lora_b=b)


@caught_by("zeros_hide_no_nan_of_the_weights")
class ColumnsOfZerosSkipped(TwoSteps):
    """Inputs that are 0 in all tokens of a slot are left out of the sum."""

    def run_lora_a(self, x, weights, plan):
        a = weights.lora_a.clone()
        for slot, rows in plan.segments:
            a[slot][..., ~(x[rows] != 0).any(0)] = 0
        return super().run_lora_a(x, replace(weights, lora_a=a), plan)


@caught_by("zeros_hide_no_nan_of_the_weights")
class TokensWithoutDeltaSkipped(TwoSteps):
    """Tokens whose h is 0 keep base_output, and get the bias."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        b = weights.lora_b.clone()
        for slot, rows in plan.segments:
            if not h[:, rows, : int(weights.ranks[slot].min())].any():
                b[slot] = b[slot].nan_to_num(0.0, 0.0, 0.0)
        return super().run_lora_b(h, replace(weights, lora_b=b), plan, base_output)


@caught_by("run_linear_is_within_the_bound")
class LargestFloat8Clamped(Quantised):
    """float8_e4m3fn ends at 240, as in the format without a sign of zero."""

    def of(self, weights):
        if weights.dtype != torch.float8_e4m3fn:
            return weights
        a, b = (
            tuple(
                of(s).float().clamp(-240, 240).to(weights.dtype) for s in range(weights.num_slices)
            )
            for of in (weights.a_of, weights.b_of)
        )
        return replace(weights, lora_a=a, lora_b=b)


@caught_by("run_linear_is_within_the_bound")
class DenormalFloat8Flushed(Quantised):
    """Denormal float8_e5m2 values are taken for zero."""

    def of(self, weights):
        if weights.dtype != torch.float8_e5m2:
            return weights
        a, b = (
            tuple(_without_denormals(of(s)) for s in range(weights.num_slices))
            for of in (weights.a_of, weights.b_of)
        )
        return replace(weights, lora_a=a, lora_b=b)


def _without_denormals(values):
    wide = values.float()
    return torch.where(wide.abs() < 2.0**-14, 0, wide).to(values.dtype)


@caught_by("rows_do_not_depend_on_the_batch")
class OrderByAdapters(TwoSteps):
    """Row by row, but with five adapters or more in a batch x and A are summed from the end."""

    batch_invariant = True

    def run_lora_a(self, x, weights, plan):
        h = x.new_zeros(weights.num_slices, len(x), weights.max_rank, dtype=torch.float32)
        backwards = len(plan.segments) > 4
        if backwards:
            x, weights = x.flip(1), replace(weights, lora_a=weights.lora_a.flip(3))
        for row, alone in _rows_of(plan):
            h[:, row] = super().run_lora_a(x[row : row + 1].clone(), weights, alone)[:, 0]
        return h

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = base_output
        if y is None:
            y = torch.zeros(h.shape[1], weights.out_features, dtype=weights.dtype)
        for row, alone in _rows_of(plan):
            h_row, y_row = h[:, row : row + 1].clone(), y[row : row + 1].clone()
            y[row] = super().run_lora_b(h_row, weights, alone, y_row)[0]
        return y


def _rows_of(plan):
    """Yield each row that has an adapter, and a plan of that row alone."""
    for slot, rows in plan.segments:
        for row in torch.arange(plan.num_tokens)[rows].tolist():
            yield row, replace(plan, num_tokens=1, capacity=1, segments=[(slot, slice(0, 1))])


@caught_by("experts_do_not_depend_on_the_batch")
class PairsInOrderOfTheBatch(TorchRefBackend):
    """In a batch of more than 100 pairs the pairs of a token are summed in another order."""

    features = frozenset()
    batch_invariant = True

    def run_experts(self, x, weights, routing, base_output=None, **options):
        tokens, top_k = routing.topk_ids.shape
        if tokens * top_k > 100 and options["rows"] == "tokens" and options["reduce"]:
            order = [1, 0, *range(2, top_k)][:top_k]
            ids, factors = routing.topk_ids[:, order], routing.topk_weights[:, order]
            routing = replace(routing, topk_ids=ids, topk_weights=factors)
        return super().run_experts(x, weights, routing, base_output, **options)


@caught_by("many_experts_are_right")
class PairsBeyond64Dropped(SeeingExperts):
    """An expert takes 64 pairs of a batch."""

    def seen_ids(self, ids, weights):
        flat = ids.flatten()
        counts = torch.nn.functional.one_hot(flat.clamp(min=0), weights.num_experts).cumsum(0)
        place = counts.gather(1, flat.clamp(min=0)[:, None])[:, 0]
        return torch.where(place > 64, -1, flat).view(ids.shape)


@caught_by("experts_are_exact_on_integers")
class RouterStrideIgnored(TwoSteps):
    """The router's ids are read as if their rows lay side by side."""

    def prepare_experts(self, plan, topk_ids, topk_weights, num_experts, expert_map=None, out=None):
        flat = topk_ids.as_strided(topk_ids.shape, (topk_ids.shape[1], 1))
        if expert_map is None:
            flat = flat.clamp(-1, num_experts - 1)
        return super().prepare_experts(plan, flat, topk_weights, num_experts, expert_map, out)


@caught_by("one_plan_serves_layers_of_any_shape")
class FirstLayerOfAShape(TwoSteps):
    """A plan keeps the first layer of a shape for all layers of that shape."""

    def run_linear(self, x, weights, plan, base_output=None):
        kept = plan.__dict__.setdefault("kept", {})
        shapes = tuple((name, t.shape, t.dtype) for name, t in weights.tensors.items())
        first = kept.setdefault((shapes, weights.output_slices), weights)
        return super().run_linear(x, first, plan, base_output)


@caught_by("one_plan_serves_layers_of_any_shape")
class FirstXOfALayer(TwoSteps):
    """A plan keeps the x that a layer first met, as a captured program would."""

    def run_linear(self, x, weights, plan, base_output=None):
        kept = plan.__dict__.setdefault("kept", {})
        return super().run_linear(kept.setdefault(weights.handle, x), weights, plan, base_output)


@caught_by("weights_rewritten_in_place_are_followed")
class EmbeddingTableKept(Featured):
    """run_embedding keeps what a layer held at its first call."""

    def run_embedding(self, token_ids, weights, plan, base_output=None):
        kept = self.__dict__.setdefault("kept", {})
        if weights.handle not in kept:
            copies = {name: getattr(weights, name).clone() for name in ("ranks", "scalings")}
            kept[weights.handle] = replace(weights, **copies)
        return super().run_embedding(token_ids, kept[weights.handle], plan, base_output)


@caught_by("results_have_the_promised_shape_and_dtype")
class ResultRequiresGradient(TwoSteps):
    """A result of its own requires a gradient, so that torch keeps a graph for each call."""

    def run_linear(self, x, weights, plan, base_output=None):
        y = super().run_linear(x, weights, plan, base_output)
        return y if base_output is not None else y.requires_grad_()


@caught_by("inputs_are_not_modified")
class RandomNumbersDrawn(TwoSteps):
    """A run draws random numbers, so that a model samples other tokens."""

    def run_linear(self, x, weights, plan, base_output=None):
        torch.rand(1)
        return super().run_linear(x, weights, plan, base_output)


@caught_by("inputs_are_not_modified")
class GradientsLeftOff(TwoSteps):
    """A run leaves torch without gradients."""

    def run_linear(self, x, weights, plan, base_output=None):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            return super().run_linear(x, weights, plan, base_output)
        finally:
            torch.set_grad_enabled(before and len(x) == 0)


@caught_by("a_plan_with_room_takes_batches_of_any_size")
class RowsBehindTheBatchLeftOut(Featured):
    """Without base_output, y has a row for each token of the batch, not for each row of x."""

    def run_linear(self, x, weights, plan, base_output=None):
        y = super().run_linear(x, weights, plan, base_output)
        return y if base_output is not None else y[: plan.num_tokens]


@caught_by("experts_follow_a_plan_with_room")
class SlotsOfTheRouting(Featured):
    """A routing keeps the plan as it was when the routing was made."""

    def prepare_experts(self, plan, topk_ids, topk_weights, num_experts, expert_map=None, out=None):
        made = super().prepare_experts(plan, topk_ids, topk_weights, num_experts, expert_map, out)
        made.plan = replace(plan, segments=list(plan.segments))
        return made


@caught_by("a_refilled_routing_equals_a_fresh_one")
class FirstPlanOfTheRouting(TwoSteps):
    """A refilled routing keeps its first plan."""

    def prepare_experts(self, plan, topk_ids, topk_weights, num_experts, expert_map=None, out=None):
        first = plan if out is None else out.plan
        made = super().prepare_experts(plan, topk_ids, topk_weights, num_experts, expert_map, out)
        made.plan = first
        return made
