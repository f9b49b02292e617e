"""Faults that show only where two sizes are large, or in what a shape does not tell."""

from dataclasses import replace

import torch

from lora_backends import LoRABatch
from lora_backends.testing.cases.inputs import on_each
from mutants.base import Seeing, TwoSteps, caught_by
from mutants.experts import SeeingExperts
from mutants.features import Featured
from mutants.gradients import Backward

LARGE = "two_large_sizes_are_right"
LARGE_GRADIENTS = "gradients_of_two_large_sizes_are_right"


@caught_by("large_layers_are_right")
class NarrowHOfWideLayers(Seeing):
    """run_linear alone rounds h to bfloat16 where there are more than 512 inputs."""

    def run_linear(self, x, weights, plan, base_output=None):
        h = self.run_lora_a(x, weights, plan)
        if weights.in_features > 512:
            h = h.bfloat16().to(h.dtype)
        return self.run_lora_b(h, weights, plan, base_output)


@caught_by("large_layers_are_right")
class TensorFloat32OfWideLayers(Seeing):
    """float32 operands of more than 256 inputs lose 13 bits."""

    def seen_x(self, x):
        if x.dtype != torch.float32 or x.shape[1] <= 256:
            return x
        return (x.contiguous().view(torch.int32) & -8192).view(torch.float32)


@caught_by(LARGE)
class RankOfHalfATile(Seeing):
    """Ranks from 65 to 128 are cut to 64."""

    def seen(self, weights):
        ranks = weights.ranks
        return replace(weights, ranks=torch.where((ranks > 64) & (ranks <= 128), 64, ranks))


@caught_by(LARGE)
class TokensOfOneTile(TwoSteps):
    """Of more than 512 columns, those behind get a delta in the first 64 tokens alone."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        if weights.out_features > 512:
            y[64:, 512:] = 0
        return y


class Forgetting(Featured):
    """torch_ref that forgets some tokens of a batch."""

    def forgotten(self, slots):
        raise NotImplementedError

    def prepare_batch(self, batch, out=None, capacity=None):
        slots = torch.where(self.forgotten(batch.token_slots), -1, batch.token_slots)
        seen = LoRABatch(slots, batch.num_slots, batch.token_scales)
        return super().prepare_batch(seen, out, capacity)


@caught_by(LARGE)
class TailOfOneAdapter(Forgetting):
    """A batch of one adapter alone loses what 256 does not divide, from 256 tokens on."""

    def forgotten(self, slots):
        tail = torch.arange(len(slots)) >= len(slots) // 256 * 256
        return tail & (len(slots) > 256) & (len(slots.unique()) == 1)


@caught_by(LARGE)
class SlotsBeyond16(Forgetting):
    """Of 17 to 64 active slots the first 16 are served."""

    def forgotten(self, slots):
        active = slots[slots >= 0].unique()
        return slots >= (active[16] if 16 < len(active) <= 64 else len(slots) + 2000)


@caught_by("one_plan_serves_layers_of_any_shape")
class StrideOfTheFirstY(TwoSteps):
    """A plan keeps the row stride of y by its shape: another stride gets no delta."""

    def run_linear(self, x, weights, plan, base_output=None):
        if base_output is None:
            return super().run_linear(x, weights, plan)
        kept = plan.__dict__.setdefault("strides", {})
        stride = kept.setdefault(base_output.shape, base_output.stride())
        y = base_output if stride == base_output.stride() else base_output.clone()
        super().run_linear(x, weights, plan, y)
        return base_output


@caught_by("one_plan_serves_layers_of_any_shape")
class StrideOfTheFirstA(Seeing):
    """A plan keeps the strides of lora_a by its shape: another layout counts as zeros."""

    def run_lora_a(self, x, weights, plan):
        a, kept = weights.lora_a, plan.__dict__.setdefault("strides", {})
        if kept.setdefault((a.shape, a.dtype), a.stride()) != a.stride():
            weights = replace(weights, lora_a=on_each(a, torch.zeros_like))
        return super().run_lora_a(x, weights, plan)


@caught_by("rows_of_x_may_overlap")
class DenseRowsOfX(Seeing):
    """Rows of x that begin less than a row after each other are taken for one row."""

    def seen_x(self, x):
        if len(x) < 2 or x.stride(0) >= x.shape[1]:
            return x
        return torch.cat([x[:1], torch.zeros_like(x[1:])])


@caught_by("large_and_small_deltas_are_right")
class DenormalResultsFlushed(TwoSteps):
    """A float16 y below 2^-14 becomes 0 where it has an adapter."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        for _, rows in plan.segments if y.dtype == torch.float16 else ():
            y[rows] = torch.where(y[rows].abs() < 2.0**-14, 0, y[rows])
        return y


class FourthAdapterForgotten(Featured):
    """Of several adapters the first three are added."""


def _fourth(self, batch, out=None, capacity=None):
    plan = Featured.prepare_batch(self, batch, out, capacity)
    if batch.adapters_per_token > 1:
        plan.plans = plan.plans[:3]
    return plan


FourthAdapterForgotten.prepare_batch = _fourth
caught_by("several_adapters_are_the_sum_of_single_runs")(FourthAdapterForgotten)


@caught_by("many_experts_are_right")
class EightSlotsOfExperts(SeeingExperts):
    """Experts know the slots below 8."""

    def run_experts(self, x, weights, routing, base_output=None, **options):
        self.plan = routing.plan
        return super().run_experts(x, weights, routing, base_output, **options)

    def seen_ids(self, ids, weights):
        seen = ids.clone()
        for slot, rows in self.plan.segments:
            if slot > 7:
                seen[rows] = -1
        return seen


class AfterBackward(Backward):
    """torch_ref with a fault in what the backward has written."""

    def spoil_a(self, lora_a, weights):
        pass

    def spoil_b(self, lora_b, weights):
        pass

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, **options):
        dh = super().run_lora_b_backward(grad, h, weights, plan, lora_b=lora_b, **options)
        if lora_b is not None:
            self.spoil_b(lora_b, weights)
        return dh

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, **options)
        if lora_a is not None:
            self.spoil_a(lora_a, weights)


@caught_by("gradients_above_all_thresholds_are_right")
class GradientOf256Inputs(AfterBackward):
    """dlora_a of inputs after the 256th is 0."""

    def spoil_a(self, lora_a, weights):
        lora_a[..., 256:] = 0


@caught_by(LARGE_GRADIENTS)
class NarrowGradientOfWideLayers(AfterBackward):
    """dlora_a of more than 128 inputs is rounded to bfloat16."""

    def spoil_a(self, lora_a, weights):
        if weights.in_features > 128:
            lora_a.copy_(lora_a.bfloat16())


@caught_by(LARGE_GRADIENTS)
class GradientOfSixteenSlots(AfterBackward):
    """dlora_b is written for 16 slots."""

    def spoil_b(self, lora_b, weights):
        lora_b[16:] = 0


@caught_by("gradients_of_many_experts_are_right")
class GradientOfEightExperts(Featured):
    """dlora_a of experts after the eighth is 0."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        if out.lora_a is not None:
            out.lora_a[:, 8:] = 0
