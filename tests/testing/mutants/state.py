"""Wrong fused operations, plans, caches, claims and sizes."""

import time
from dataclasses import replace

import torch

from lora_backends.torch_ref import TorchRefBackend
from mutants.base import Seeing, TwoSteps, caught_by, new_y


@caught_by("two_steps_equal_run_linear")
class ExpandAloneWrong(Seeing):
    """run_lora_b alone drops the scaling; the fused run_linear is right."""

    def run_linear(self, x, weights, plan, base_output=None):
        return TorchRefBackend.run_linear(self, x, weights, plan, base_output)

    def seen(self, weights):
        return replace(weights, scalings=torch.ones_like(weights.scalings))


@caught_by("run_qkv_is_right")
class KeyAndValueSwapped(TwoSteps):
    """run_qkv exchanges the lora_a of k and v."""

    def run_qkv(self, x, weights, plan, base_output=None):
        h = self.run_lora_a(x, weights, plan)[[0, 2, 1]].nan_to_num()
        return self.run_lora_b(h, weights, plan, self.y(x, weights, base_output))

    def y(self, x, weights, base_output):
        return x.new_zeros(len(x), weights.out_features) if base_output is None else base_output


@caught_by("run_qkv_is_right")
class StridedBaseCopied(TwoSteps):
    """run_qkv adds to a dense copy of a strided base_output."""

    def run_qkv(self, x, weights, plan, base_output=None):
        y = None if base_output is None else base_output.contiguous()
        return self.run_linear(x, weights, plan, y)


@caught_by("run_gate_up_is_right")
class GateForUp(TwoSteps):
    """run_gate_up expands the h of gate for up as well."""

    def run_gate_up(self, x, weights, plan, base_output=None):
        h = self.run_lora_a(x, weights, plan)[[0, 0]]
        y = x.new_zeros(len(x), weights.out_features) if base_output is None else base_output
        return self.run_lora_b(h, weights, plan, y)


@caught_by("run_gate_up_is_right")
class UpOfEqualWidth(TwoSteps):
    """Where gate and up have one width, both read the lora_b of gate."""

    def run_gate_up(self, x, weights, plan, base_output=None):
        width, other = weights.output_slices
        if width == other:
            gate = weights.lora_b[:, :width]
            weights = replace(weights, lora_b=torch.cat([gate, gate], 1))
        return self.run_linear(x, weights, plan, base_output)


@caught_by("run_logits_is_right")
class LogitsOfEarlierRow(TwoSteps):
    """run_logits reads the row before the sampled one."""

    def run_logits(self, hidden, weights, plan, base_output=None):
        return self.run_linear(hidden.nan_to_num().roll(1, 0), weights, plan, base_output)


@caught_by("run_embedding_is_right")
class EmbeddingOffByOne(TwoSteps):
    """run_embedding takes the column before the token's."""

    def run_embedding(self, token_ids, weights, plan, base_output=None):
        return super().run_embedding((token_ids - 1).clamp(min=0), weights, plan, base_output)


@caught_by("a_refilled_plan_follows_the_batch")
class RefillIgnored(TwoSteps):
    """A refill leaves the plan as it was."""

    def prepare_batch(self, batch, out=None):
        return super().prepare_batch(batch) if out is None else out


@caught_by("inputs_are_not_modified")
class RefillWritesIntoTheBatch(TwoSteps):
    """A plan holds the batch's own tensor, and a refill writes into it."""

    def prepare_batch(self, batch, out=None):
        plan = super().prepare_batch(batch, out)
        if out is None:
            plan.slots = batch.token_slots
        plan.slots.copy_(batch.token_slots)
        return plan


@caught_by("a_refilled_plan_equals_a_fresh_one")
class StaleAfterIdleBatch(TwoSteps):
    """A batch without adapters leaves the former token map in the plan."""

    def prepare_batch(self, batch, out=None):
        if out is not None and bool((batch.token_slots < 0).any()):
            return out
        return super().prepare_batch(batch, out)


@caught_by("a_refilled_plan_follows_the_batch")
class RefillMakesAnother(TwoSteps):
    """A refill returns a new plan."""

    def prepare_batch(self, batch, out=None):
        return super().prepare_batch(batch)


@caught_by("two_plans_in_flight_are_independent")
class PlanInTheBackend(TwoSteps):
    """Every run uses the plan that was prepared last."""

    def prepare_batch(self, batch, out=None):
        self.last = super().prepare_batch(batch, out)
        return self.last

    def run_linear(self, x, weights, plan, base_output=None):
        same_size = self.last.num_tokens == plan.num_tokens
        return super().run_linear(x, weights, self.last if same_size else plan, base_output)


@caught_by("steps_of_two_plans_interleave")
class HInTheBackend(TwoSteps):
    """run_lora_b expands the h that was shrunk last, whichever it is given."""

    def run_lora_a(self, x, weights, plan):
        self.last = super().run_lora_a(x, weights, plan)
        return self.last

    def run_lora_b(self, h, weights, plan, base_output=None):
        last = getattr(self, "last", h)
        return super().run_lora_b(last if last.shape == h.shape else h, weights, plan, base_output)


@caught_by("one_plan_serves_layers_of_any_shape")
class CachedWithoutWidth(TwoSteps):
    """The kernel is cached by max_rank and input width: the first output width stays."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = new_y(weights, plan) if base_output is None else base_output
        key = (weights.max_rank, weights.in_features, weights.num_slices)
        width = plan.__dict__.setdefault("widths", {}).setdefault(key, weights.out_features)
        kept = y[:, width:].clone()
        super().run_lora_b(h, weights, plan, y)
        y[:, width:] = kept
        return y


@caught_by("layers_sharing_an_address_are_told_apart")
class CachedByAddress(TwoSteps):
    """What is derived from the weights is cached by the address of lora_a alone."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        kept = plan.__dict__.setdefault("widths", {})
        width = kept.setdefault(weights.lora_a.data_ptr(), weights.out_features)
        y = new_y(weights, plan) if base_output is None else base_output
        return y if width != weights.out_features else super().run_lora_b(h, weights, plan, y)


@caught_by("weights_rewritten_in_place_are_followed")
class CachedRanks(Seeing):
    """Ranks and scalings are copied to the host once per layer."""

    def seen(self, weights):
        kept = self.__dict__.setdefault("kept", {})
        entry = (weights.ranks.clone(), weights.scalings.clone(), weights)
        ranks, scalings, _ = kept.setdefault(id(weights), entry)
        return replace(weights, ranks=ranks, scalings=scalings)


@caught_by("pool_machine")
class ReplacedAdapterKept(Seeing):
    """A slot's scaled lora_b is kept until its rank changes."""

    def seen(self, weights):
        kept = self.__dict__.setdefault("kept", {})
        for slot in range(weights.num_slots):
            key, ranks = (id(weights), slot), weights.ranks[slot].tolist()
            if kept.get(key, [None])[0] != ranks:
                kept[key] = (ranks, weights.lora_b[slot].clone(), weights)
        b = torch.stack([kept[id(weights), slot][1] for slot in range(weights.num_slots)])
        return replace(weights, lora_b=b)


@caught_by("threads_do_not_disturb_each_other")
class SharedScratch(TwoSteps):
    """h passes through an attribute of the backend within one call."""

    def run_linear(self, x, weights, plan, base_output=None):
        self.scratch = self.run_lora_a(x, weights, plan)
        time.sleep(0.002)
        y = x.new_zeros(len(x), weights.out_features) if base_output is None else base_output
        return self.run_lora_b(self.scratch, weights, plan, y)


@caught_by("unused_slots_change_nothing")
class AllSlotsComputed(TwoSteps):
    """Every slot is computed for every token and masked by a product with zero."""

    def run_lora_a(self, x, weights, plan):
        h = super().run_lora_a(x, weights, plan)
        for slot in range(weights.num_slots):
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                h[s, :, :rank] += 0 * weights.lora_a[slot, s, :rank].sum(-1)
        return h


@caught_by("two_runs_are_equal")
class RandomOrder(Seeing):
    """Sums in an order that differs from run to run, claimed deterministic."""

    def run_lora_a(self, x, weights, plan):
        order = torch.randperm(weights.in_features)
        shuffled = replace(weights, lora_a=weights.lora_a[..., order])
        return super().run_lora_a(x[:, order].contiguous(), shuffled, plan)


@caught_by("rows_do_not_depend_on_the_batch")
class SplitByBatchSize(Seeing):
    """The sum is split by the number of tokens, claimed batch-invariant."""

    batch_invariant = True

    def run_lora_a(self, x, weights, plan):
        order = torch.arange(weights.in_features).roll(len(x))
        shuffled = replace(weights, lora_a=weights.lora_a[..., order])
        return super().run_lora_a(x[:, order].contiguous(), shuffled, plan)


class Unchecked(TwoSteps):
    """run_linear is put in place behind the checks, and writes before it fails."""


def _write_then_fail(self, x, weights, plan, base_output=None):
    base_output[:1] += 1
    return TorchRefBackend.run_linear(self, x, weights, plan, base_output)


Unchecked.run_linear = _write_then_fail
caught_by("bad_input_is_refused_before_anything_is_written")(Unchecked)


@caught_by("large_offsets_do_not_wrap")
class Int32Offsets(Seeing):
    """Slot times stride wraps at 2^31 elements."""

    def seen(self, weights):
        a = weights.lora_a
        slots = []
        for slot in range(weights.num_slots):
            offset = (slot * a.stride(0) + 2**31) % 2**32 - 2**31
            slots.append(a.as_strided(a.shape[1:], a.stride()[1:], a.storage_offset() + offset))
        return replace(weights, lora_a=torch.stack(slots))


@caught_by("large_offsets_do_not_wrap")
class Int32OutputOffsets(TwoSteps):
    """Token times row stride of y wraps at 2^31 elements."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = new_y(weights, plan) if base_output is None else base_output
        after = super().run_lora_b(h, weights, plan, y.clone())
        for token in range(len(y)):
            offset = (token * y.stride(0) + 2**31) % 2**32 - 2**31
            y.as_strided((y.shape[1],), (1,), y.storage_offset() + offset).copy_(after[token])
        return y
