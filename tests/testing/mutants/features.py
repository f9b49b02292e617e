"""Wrong plans with room, tensors per slice, halves, and scales of tokens and columns."""

from dataclasses import replace

import torch

from lora_backends.features import FEATURES
from lora_backends.torch_ref import TorchRefBackend
from mutants.base import TwoSteps, caught_by


class Featured(TwoSteps):
    """torch_ref in two steps, with every feature, that sees other weights or scales."""

    features = frozenset(FEATURES)

    def seen(self, weights):
        return weights

    def seen_scales(self, scales):
        return scales

    def prepare_batch(self, batch, out=None, capacity=None):
        plan = super().prepare_batch(batch, out, capacity)
        if plan.token_scales is not None:
            plan.token_scales = self.seen_scales(plan.token_scales)
        return plan

    def run_lora_a(self, x, weights, plan, out=None):
        return super().run_lora_a(x, self.seen(weights), plan, out)

    def run_lora_b(self, h, weights, plan, base_output=None):
        return super().run_lora_b(h, self.seen(weights), plan, base_output)


@caught_by("doubling_a_token_scale_doubles_the_delta")
class TokenScaleIgnored(Featured):
    """Scales of tokens are 1."""

    def seen_scales(self, scales):
        return None


@caught_by("integers_are_exact")
class NeighboursTokenScale(Featured):
    """A token gets the scale of the one before it."""

    def seen_scales(self, scales):
        return scales.roll(1)


@caught_by("a_token_scale_of_zero_keeps_the_row")
class TokenScaleZeroIsNone(Featured):
    """A scale of 0 is taken for none."""

    def seen_scales(self, scales):
        return torch.where(scales == 0, 1.0, scales)


@caught_by("token_scales_of_one_change_nothing")
class TokenScaleAsIncrement(Featured):
    """The delta is added both with and without the scale."""

    def seen_scales(self, scales):
        return 1 + scales


@caught_by("run_linear_is_within_the_bound")
class TokenScaleOnBias(Featured):
    """The scale of a token multiplies the bias too."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        if plan.token_scales is not None and weights.bias is not None:
            for slot, rows in plan.segments:
                y[rows] += ((plan.token_scales[rows, None] - 1) * weights.bias[slot]).to(y.dtype)
        return y


@caught_by("a_refill_may_bring_and_drop_scales")
class StaleTokenScales(Featured):
    """A refill without scales keeps the former ones."""

    def prepare_batch(self, batch, out=None, capacity=None):
        former = None if out is None else out.token_scales
        plan = super().prepare_batch(batch, out, capacity)
        if plan.token_scales is None:
            plan.token_scales = former
        return plan


class SecondAdaptersScaleIgnored(Featured):
    """The scale of a token's second adapter is 1."""


class SecondAdapterForgotten(Featured):
    """Of several adapters only the first is added."""


def _behind(name):
    """Return the interface's prepare_batch with a fault in what it makes of several adapters."""

    def prepare_batch(self, batch, out=None, capacity=None):
        plan = Featured.prepare_batch(self, batch, out, capacity)
        if batch.adapters_per_token > 1:
            if name == "scale":
                plan.plans[1].token_scales = None
            else:
                plan.plans = plan.plans[:1]
        return plan

    return prepare_batch


@caught_by("several_adapters_are_the_sum_of_single_runs")
class RoundedForEachAdapter(Featured):
    """y is rounded for each adapter of a token."""

    def prepare_together(self, batch, out, capacity):
        return [self.prepare_batch(part) for part in batch.per_adapter(batch.adapters_per_token)]

    def add_together(self, operation, x, weights, joint, y):
        for plan in joint:
            getattr(self, operation)(x, weights, plan, y)
        return True


SecondAdaptersScaleIgnored.prepare_batch = _behind("scale")
caught_by("several_adapters_are_the_sum_of_single_runs")(SecondAdaptersScaleIgnored)
SecondAdapterForgotten.prepare_batch = _behind("adapter")


@caught_by("dora_equals_the_merged_weight")
class OutputScalesOnDelta(Featured):
    """output_scales multiply the delta and not base_output."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, replace(weights, output_scales=None), plan, base_output)
        if weights.output_scales is not None:
            only = replace(weights, output_scales=None, bias=None)
            delta = super().run_lora_b(h, only, plan, torch.zeros_like(y))
            for slot, rows in plan.segments:
                y[rows] += ((weights.output_scales[slot] - 1) * delta[rows]).to(y.dtype)
        return y


@caught_by("run_linear_is_within_the_bound")
class OutputScalesOnBias(Featured):
    """output_scales multiply the bias too."""

    def seen(self, weights):
        if weights.output_scales is None or weights.bias is None:
            return weights
        return replace(weights, bias=weights.bias.float() * weights.output_scales)


@caught_by("integers_are_exact")
class NeighboursOutputScales(Featured):
    """output_scales are those of the next slot."""

    def seen(self, weights):
        if weights.output_scales is None:
            return weights
        return replace(weights, output_scales=weights.output_scales.roll(1, 0))


@caught_by("dora_equals_the_merged_weight")
class OutputScalesNeedRank(Featured):
    """output_scales are applied only where a slice has a rank."""

    def seen(self, weights):
        if weights.output_scales is None:
            return weights
        adapted = (weights.ranks > 0).repeat_interleave(torch.tensor(weights.output_slices), 1)
        return replace(weights, output_scales=torch.where(adapted, weights.output_scales, 1.0))


@caught_by("output_scales_of_one_change_nothing")
class OutputScalesAsIncrement(Featured):
    """base_output and delta are multiplied by 1 plus the scale."""

    def seen(self, weights):
        if weights.output_scales is None:
            return weights
        return replace(weights, output_scales=1 + weights.output_scales)


@caught_by("a_plan_with_room_takes_batches_of_any_size")
class RowsBehindWritten(Featured):
    """Zero is added to the rows after the batch."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        y[plan.num_tokens :] += 0.0
        return y


@caught_by("a_plan_with_room_takes_batches_of_any_size")
class LongerBatchStays(Featured):
    """A refill with fewer tokens leaves the adapters of the former ones after them."""

    def prepare_batch(self, batch, out=None, capacity=None):
        former = [] if out is None else out.segments
        plan = super().prepare_batch(batch, out, capacity)
        for slot, rows in former:
            index = torch.arange(plan.capacity)[rows]
            plan.segments.append((slot, index[index >= batch.num_tokens]))
        return plan

    def cut(self, plan, rows):
        """Return the plan of a call that has fewer rows than the former batch."""
        segments = [(slot, torch.arange(plan.capacity)[own]) for slot, own in plan.segments]
        return replace(plan, segments=[(slot, own[own < rows]) for slot, own in segments])

    def run_lora_a(self, x, weights, plan, out=None):
        return super().run_lora_a(x, weights, self.cut(plan, len(x)), out)

    def run_lora_b(self, h, weights, plan, base_output=None):
        return super().run_lora_b(h, weights, self.cut(plan, h.shape[1]), base_output)


@caught_by("tensors_per_slice_equal_the_stack")
class FirstTensorForAllSlices(Featured):
    """Of a tuple of A every slice reads the first tensor."""

    def seen(self, weights):
        a = weights.lora_a
        return replace(weights, lora_a=(a[0],) * len(a)) if isinstance(a, tuple) else weights


@caught_by("integers_are_exact")
class StrideOfTheFirstTensor(Featured):
    """Of a tuple of A every slice is read with the row stride of the first tensor."""

    def seen(self, weights):
        a = weights.lora_a
        if not isinstance(a, tuple):
            return weights
        strides = a[0].stride()
        return replace(weights, lora_a=tuple(part.as_strided(part.shape, strides) for part in a))


@caught_by("out_is_written_whole_and_returned")
class OutNotWritten(Featured):
    """out is returned as it was."""

    def run_lora_a(self, x, weights, plan, out=None):
        h = super().run_lora_a(x, weights, plan)
        return h if out is None else out


@caught_by("out_is_written_whole_and_returned")
class OutWrittenWithinRanks(Featured):
    """out is written only within the ranks of the tokens' adapters."""

    def run_lora_a(self, x, weights, plan, out=None):
        h = super().run_lora_a(x, weights, plan)
        if out is None:
            return h
        for slot, rows in plan.segments:
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                out[s, rows, :rank] = h[s, rows, :rank]
        return out


class MissingHalfIsNoAdapter(Featured):
    """run_linear of a layer without lora_b changes nothing and says nothing."""


def _run_linear(self, x, weights, plan, base_output=None):
    if weights.lora_b is None:
        y = x.new_zeros(len(x), weights.out_features)
        return y if base_output is None else base_output
    return TorchRefBackend.run_linear(self, x, weights, plan, base_output)


MissingHalfIsNoAdapter.run_linear = _run_linear
caught_by("halves_of_a_layer_run_alone")(MissingHalfIsNoAdapter)


@caught_by("weights_rewritten_in_place_are_followed")
class CachedOutputScales(Featured):
    """output_scales are copied once per layer."""

    def seen(self, weights):
        if weights.output_scales is None:
            return weights
        kept = self.__dict__.setdefault("kept", {})
        scales, _ = kept.setdefault(id(weights), (weights.output_scales.clone(), weights))
        return replace(weights, output_scales=scales)
