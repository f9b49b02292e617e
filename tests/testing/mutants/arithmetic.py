"""Wrong slots, tokens, scalings, ranks and sums."""

from dataclasses import replace

import torch

from lora_backends import LoRABatch
from mutants.base import Dropping, Seeing, TwoSteps, active_slices, caught_by


@caught_by("integers_are_exact")
class WrongSlot(TwoSteps):
    """Every token gets the next slot's adapter."""

    def prepare_batch(self, batch, out=None):
        slots = batch.token_slots
        moved = torch.where(slots >= 0, (slots + 1) % batch.num_slots, slots)
        return super().prepare_batch(LoRABatch(moved, batch.num_slots), out)


@caught_by("renumbering_slots_changes_nothing")
class SlotZeroIsNone(Dropping):
    """Slot 0 is taken for no adapter."""

    def keep(self, slots):
        return slots > 0


@caught_by("equal_adapters_are_interchangeable")
class SlotOfThreeBits(TwoSteps):
    """The slot is kept in 3 bits: slot 8 becomes slot 0."""

    def prepare_batch(self, batch, out=None):
        slots = batch.token_slots
        kept = torch.where(slots >= 0, slots % 8, slots)
        return super().prepare_batch(LoRABatch(kept, batch.num_slots), out)


@caught_by("large_batches_are_right")
class SlotOfEightBits(TwoSteps):
    """The slot is kept in 8 bits: slot 256 becomes slot 0."""

    def prepare_batch(self, batch, out=None):
        slots = batch.token_slots
        kept = torch.where(slots >= 0, slots % 256, slots)
        return super().prepare_batch(LoRABatch(kept, batch.num_slots), out)


@caught_by("large_batches_are_right")
class TokenOfFifteenBits(Dropping):
    """Tokens after the first 2^15 are forgotten."""

    def keep(self, slots):
        return torch.arange(len(slots)) < 2**15


@caught_by("splitting_a_batch_changes_nothing")
class LastTokenSkipped(Dropping):
    """The last token of a batch is skipped."""

    def keep(self, slots):
        return torch.arange(len(slots)) < len(slots) - 1


@caught_by("run_linear_is_within_the_bound")
class TailTokenSkipped(Dropping):
    """A tile of 16 tokens that is not full loses its last token."""

    def keep(self, slots):
        index = torch.arange(len(slots))
        return (index < len(slots) - 1) | (len(slots) % 16 == 0)


@caught_by("integers_are_exact")
class LastTokenOfTileSkipped(Dropping):
    """The last token of every full tile of 16 is skipped."""

    def keep(self, slots):
        return torch.arange(len(slots)) % 16 != 15


@caught_by("many_tokens_are_right")
class OneTileOnly(Dropping):
    """Tokens beyond the first 64 are forgotten."""

    def keep(self, slots):
        return torch.arange(len(slots)) < 64


@caught_by("run_linear_is_within_the_bound")
class LastAdapterSkipped(Dropping):
    """-1 takes a place in the list of active adapters, so that the last one is skipped."""

    def keep(self, slots):
        active = slots.unique()
        return (slots != active[-1]) if len(active) > 1 and active[0] < 0 else slots > -2


@caught_by("permuting_tokens_permutes_rows")
class SortedAssumed(TwoSteps):
    """Tokens of a slot are taken to be neighbours, from its first token on."""

    def prepare_batch(self, batch, out=None):
        slots, segments = batch.token_slots, []
        for slot in slots[slots >= 0].unique().tolist():
            rows = (slots == slot).nonzero().flatten()
            segments.append((slot, slice(int(rows[0]), int(rows[0]) + len(rows))))
        plan = super().prepare_batch(batch, out)
        plan.segments = segments
        return plan


@caught_by("batches_without_work_change_nothing")
class EmptyBatchCrashes(TwoSteps):
    """The plan looks for the largest slot of a batch, also where there is none."""

    def prepare_batch(self, batch, out=None):
        batch.token_slots.max()
        return super().prepare_batch(batch, out)


@caught_by("run_linear_is_within_the_bound")
class FivePercent(Seeing):
    """The scaling is 5% too large."""

    def seen(self, weights):
        return replace(weights, scalings=1.05 * weights.scalings)


@caught_by("integers_are_exact")
class ScalingDropped(Seeing):
    """The scaling is 1."""

    def seen(self, weights):
        return replace(weights, scalings=torch.ones_like(weights.scalings))


@caught_by("integers_are_exact")
class ScalingTwice(Seeing):
    """The scaling is applied to h and again to y."""

    def seen(self, weights):
        return replace(weights, scalings=weights.scalings**2)


@caught_by("integers_are_exact")
class NeighboursScaling(Seeing):
    """The scaling is that of the next slot."""

    def seen(self, weights):
        return replace(weights, scalings=weights.scalings.roll(1, 0))


@caught_by("stacked_slices_equal_separate_layers")
class FirstSlicesScaling(Seeing):
    """All slices take the scaling of the first."""

    def seen(self, weights):
        first = weights.scalings[:, :1].expand_as(weights.scalings)
        return replace(weights, scalings=first)


@caught_by("doubling_the_scaling_doubles_the_delta")
class ScalingClamped(Seeing):
    """The scaling is clamped to [-1, 1]."""

    def seen(self, weights):
        return replace(weights, scalings=weights.scalings.clamp(-1, 1))


@caught_by("run_linear_is_within_the_bound")
class ScalingUnsigned(Seeing):
    """The sign of the scaling is lost."""

    def seen(self, weights):
        return replace(weights, scalings=weights.scalings.abs())


@caught_by("wider_padding_changes_nothing")
class ScalingByPaddedRank(Seeing):
    """The scaling is divided by max_rank where the rank is meant."""

    def seen(self, weights):
        return replace(weights, scalings=weights.scalings * weights.ranks / weights.max_rank)


@caught_by("padding_beyond_a_rank_is_never_read")
class ReadsPastRank(Seeing):
    """The padded rank is computed where a slice has any rank."""

    def seen(self, weights):
        full = torch.full_like(weights.ranks, weights.max_rank)
        return replace(weights, ranks=torch.where(weights.ranks > 0, full, 0))


@caught_by("shrink_is_right")
class GarbageBeyondRank(Seeing):
    """h is not zero beyond a rank."""

    def run_lora_a(self, x, weights, plan):
        h = super().run_lora_a(x, weights, plan)
        for slot, rows in plan.segments:
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                h[s, rows, rank:] = 1.0
        return h


@caught_by("expand_is_right")
class MaskedByZero(Seeing):
    """Beyond a rank lora_b is masked to zero but h is read: zero times NaN."""

    def seen_h(self, h, weights, plan):
        return h + 0 * h.sum(-1, keepdim=True)


@caught_by("concatenated_ranks_are_a_sum")
class RankCutAt16(Seeing):
    """Ranks above 16 lose what lies beyond one tile."""

    def seen(self, weights):
        return replace(weights, ranks=weights.ranks.clamp(max=16))


@caught_by("large_layers_are_right")
class RankCutAt128(Seeing):
    """Ranks above 128 lose what lies beyond one tile."""

    def seen(self, weights):
        return replace(weights, ranks=weights.ranks.clamp(max=128))


@caught_by("large_layers_are_right")
class InputsOfOneTile(Seeing):
    """Inputs after the first tile of 1024 are forgotten."""

    def seen_x(self, x):
        kept = x.clone()
        kept[:, 1024:] = 0
        return kept


@caught_by("row_shards_recombine")
class InputTailSkipped(Seeing):
    """Inputs beyond the last full 16 are skipped."""

    def seen_x(self, x):
        kept = x.clone()
        kept[:, x.shape[1] // 16 * 16 :] = 0
        return kept


@caught_by("run_linear_is_within_the_bound")
class NarrowAccumulator(Seeing):
    """Sums of the shrink are kept in float16."""

    def run_lora_a(self, x, weights, plan):
        h = super().run_lora_a(x, weights, plan)
        for slot, rows, s, rank, _, _ in active_slices(weights, plan):
            total = torch.zeros_like(h[s, rows, :rank], dtype=torch.float16)
            for k in range(weights.in_features):
                total += x[rows, k, None] * weights.lora_a[slot, s, :rank, k]
            h[s, rows, :rank] = total.to(h.dtype)
        return h


@caught_by("run_linear_is_within_the_bound")
class NarrowH(Seeing):
    """h is rounded to bfloat16 without saying so."""

    def seen_h(self, h, weights, plan):
        return h.bfloat16().to(h.dtype)


@caught_by("run_linear_is_within_the_bound")
class TensorFloat32(Seeing):
    """float32 operands lose 13 bits, as TF32 does."""

    def seen_x(self, x):
        return (x.view(torch.int32) & -8192).view(torch.float32) if x.dtype == torch.float32 else x


@caught_by("delta_is_linear_in_x")
class NegativeHDropped(Seeing):
    """h is clamped at zero."""

    def seen_h(self, h, weights, plan):
        return h.clamp(min=0)


@caught_by("delta_is_linear_in_lora_b")
class QuantizedB(Seeing):
    """lora_b goes through 8 bits, scaled by its largest value."""

    def seen(self, weights):
        scale = weights.lora_b.nan_to_num().abs().amax().clamp(min=1e-6) / 127
        return replace(weights, lora_b=(weights.lora_b / scale).round() * scale)


@caught_by("integers_are_exact")
class DeltaRoundedFirst(TwoSteps):
    """The delta is rounded to y's dtype before it is added."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        delta = super().run_lora_b(h, weights, plan)
        if base_output is None:
            return delta
        for _, rows, _, _, columns, _ in active_slices(weights, plan):
            if weights.bias is None:
                base_output[rows, columns] += delta[rows, columns].to(base_output.dtype)
        for _, rows in plan.segments if weights.bias is not None else []:
            base_output[rows] += delta[rows].to(base_output.dtype)
        return base_output


@caught_by("large_and_small_deltas_are_right")
class HSaturates(Seeing):
    """h is clamped to 2048."""

    def seen_h(self, h, weights, plan):
        return h.clamp(-2048, 2048)


@caught_by("large_and_small_deltas_are_right")
class SmallHDropped(Seeing):
    """An h below 1e-3 counts as 0."""

    def seen_h(self, h, weights, plan):
        return torch.where(h.abs() < 1e-3, 0, h)


@caught_by("nan_and_infinity_stay_where_they_belong")
class NaNSwallowed(Seeing):
    """NaN and infinity in x count as numbers."""

    def seen_x(self, x):
        return x.nan_to_num()


@caught_by("nan_and_infinity_stay_where_they_belong")
class InfinityOfOneRowForAll(Seeing):
    """h is masked by a product with 0 over all tokens of a slot."""

    def run_lora_a(self, x, weights, plan):
        h = super().run_lora_a(x, weights, plan)
        for _, rows, s, rank, _, _ in active_slices(weights, plan):
            h[s, rows, :rank] += 0 * h[s, rows, :rank].sum(0)
        return h


@caught_by("integers_are_exact")
class SlotStrideOfA(Seeing):
    """The matrices of lora_a are taken to follow each other without a gap."""

    def seen(self, weights):
        a = weights.lora_a
        rows = a.shape[2] * a.stride(2)
        return replace(
            weights, lora_a=a.as_strided(a.shape, (a.shape[1] * rows, rows, *a.stride()[2:]))
        )


@caught_by("expand_is_right")
class SliceStrideOfH(Seeing):
    """The slices of h are taken to follow each other without a gap."""

    def seen_h(self, h, weights, plan):
        return h.as_strided(h.shape, (h.shape[1] * h.stride(1), *h.stride()[1:]))
