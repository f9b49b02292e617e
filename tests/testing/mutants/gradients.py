"""Wrong backwards: scales, rows, sums, padding, and what is kept for them."""

from dataclasses import dataclass, replace

import torch

from lora_backends.features import FEATURES
from lora_backends.torch_ref import TorchRefBackend, TorchRefPlan
from mutants.base import caught_by

EXACT = "gradients_are_exact_on_integers"


class Backward(TorchRefBackend):
    """torch_ref whose backward sees other weights, plan or operands than it is given."""

    features = frozenset(FEATURES)

    def seen_b(self, grad, h, weights, plan):
        return grad, h, weights, plan

    def seen_a(self, dh, x, weights, plan):
        return dh, x, weights, plan

    def run_lora_b_backward(self, grad, h, weights, plan, **options):
        return super().run_lora_b_backward(*self.seen_b(grad, h, weights, plan), **options)

    def run_lora_a_backward(self, dh, x, weights, plan, **options):
        super().run_lora_a_backward(*self.seen_a(dh, x, weights, plan), **options)


def without_scalings(weights):
    return replace(weights, scalings=torch.ones_like(weights.scalings))


@caught_by(EXACT)
class ScalingForgottenInDh(Backward):
    """dh lacks the scaling."""

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, slots=None, **options):
        right = super().run_lora_b_backward
        if lora_b is not None:
            right(grad, h, weights, plan, needs_h=False, lora_b=lora_b, slots=slots)
        return right(grad, None, without_scalings(weights), plan, **options)


@caught_by(EXACT)
class ScalingForgottenInDb(Backward):
    """dlora_b lacks the scaling."""

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, slots=None, **options):
        right = super().run_lora_b_backward
        if lora_b is not None:
            plain = without_scalings(weights)
            right(grad, h, plain, plan, needs_h=False, lora_b=lora_b, slots=slots)
        return right(grad, None, weights, plan, **options)


@caught_by(EXACT)
class NeighboursRows(Backward):
    """dlora_a multiplies dh with the x of the token before."""

    def seen_a(self, dh, x, weights, plan):
        return dh, None if x is None else x.roll(1, 0).nan_to_num(), weights, plan


@caught_by(EXACT)
class TokenScaleSquared(Backward):
    """The scale of a token multiplies dL/dy, and then the products."""

    def seen_b(self, grad, h, weights, plan):
        if plan.token_scales is not None:
            grad = grad * plan.token_scales[: len(grad), None].to(grad.dtype)
        return grad, h, weights, plan


@caught_by(EXACT)
class BiasTwice(Backward):
    """dbias is added twice."""

    def sum_tokens(self, values, weights, plan, out, slots=None):
        super().sum_tokens(values, weights, plan, out, slots)
        out *= 2


@caught_by(EXACT)
class OutputScalesForgotten(Backward):
    """dL/dy is not multiplied by output_scales."""

    def token_slots(self, plan, num_rows, num_slots):
        return torch.full((num_rows,), -1)


@caught_by("gradients_are_within_the_bound")
class OutputScalesOfY(Backward):
    """doutput_scales multiplies dL/dy with a y that is rounded to 16 bits."""

    def forward_with_h(self, operation, x, weights, plan, base_output):
        y, h = super().forward_with_h(operation, x, weights, plan, base_output)
        if base_output is not None and base_output.dtype != x.dtype and x.element_size() == 2:
            y.copy_(y.to(x.dtype))
        return y, h


class BaseGradientDropped(Backward):
    """base_output gets no gradient."""


class GradientOfBLost(Backward):
    """run_linear passes no gradient to lora_b."""


def _on(detach):
    """Return run_linear that detaches one of its arguments."""

    def run_linear(self, x, weights, plan, base_output=None):
        if not torch.is_grad_enabled():  # as of run_qkv, which is recorded itself
            return TorchRefBackend.run_linear(self, x, weights, plan, base_output)
        if detach == "base_output" and base_output is not None:
            constant = base_output.detach().clone()
            y = TorchRefBackend.run_linear(self, x, weights, plan, constant)
            with torch.no_grad():
                base_output.copy_(y)
            return y
        if detach == "lora_b":
            weights = replace(weights, lora_b=_detached(weights.lora_b))
        return TorchRefBackend.run_linear(self, x, weights, plan, base_output)

    return run_linear


def _detached(stack):
    return tuple(map(_detached, stack)) if isinstance(stack, tuple) else stack.detach()


# after the classes are made, so that the interface does not record these calls
BaseGradientDropped.run_linear = _on("base_output")
GradientOfBLost.run_linear = _on("lora_b")
for lost in (BaseGradientDropped, GradientOfBLost):
    caught_by(EXACT)(lost)


@caught_by(EXACT)
class OtherAdaptersSegment(Backward):
    """dlora_a of an adapter is summed over the tokens of the next one too."""

    def seen_a(self, dh, x, weights, plan):
        return dh, x, weights, plan

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, slots=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, slots=slots, **options)
        if lora_a is not None and lora_a.shape[0] > 1:
            lora_a[1:] += lora_a[:-1].clone()


@caught_by("gradients_are_zero_where_nothing_is_read")
class LeakedBeyondTheRank(Backward):
    """dlora_b has values beyond the rank."""

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, **options):
        dh = super().run_lora_b_backward(grad, h, weights, plan, lora_b=lora_b, **options)
        if lora_b is not None:
            for slot, _ in plan.segments:
                rank = int(weights.ranks[slot, -1])
                lora_b[slot, -1, rank : rank + 1] = 1e-30
        return dh


@caught_by("gradients_are_zero_where_nothing_is_read")
class MaskedByProduct(Backward):
    """dx multiplies what lies beyond a rank with zero, which is NaN for infinity."""

    def run_lora_a_backward(self, dh, x, weights, plan, *, dx=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, dx=dx, **options)
        if dx is not None:
            for slot, rows in plan.segments:
                for s, rank in enumerate(weights.ranks[slot].tolist()):
                    rest = weights.a_of(s)[slot, rank:].float()
                    dx[rows] += (torch.zeros(len(rest)) @ rest).to(dx.dtype)


@caught_by("gradients_are_zero_where_nothing_is_read")
class AbsentSlotKeepsGarbage(Backward):
    """dlora_a of a slot without tokens is not written."""

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, **options)
        active = {slot for slot, _ in plan.segments}
        if lora_a is not None:
            lora_a[[slot for slot in range(len(lora_a)) if slot not in active]] = 3.0


@caught_by("gradients_are_zero_where_nothing_is_read")
class RowsWithoutAdapterNotZeroed(Backward):
    """dx of a token without an adapter is not written."""

    def run_lora_a_backward(self, dh, x, weights, plan, *, dx=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, dx=dx, **options)
        if dx is not None:
            has = torch.zeros(len(dx), dtype=torch.bool)
            for _, rows in plan.segments:
                has[rows] = True
            dx[~has] = 1.0


@caught_by("rows_after_the_batch_reach_no_gradient")
class PaddingsGradient(Backward):
    """Rows after the batch are taken for rows of its last adapter."""

    def seen_a(self, dh, x, weights, plan):
        rows = dh.shape[1]
        if plan.segments and rows > plan.num_tokens and x is not None:
            slot, own = plan.segments[-1]
            own = torch.arange(plan.num_tokens)[own]
            own = torch.cat([own, torch.arange(plan.num_tokens, rows)])
            plan = replace(plan, segments=[*plan.segments[:-1], (slot, own)])
        return dh, x, weights, plan


@caught_by("gradients_are_within_the_bound")
class SumsInSixteenBits(Backward):
    """dlora_a is added up in bfloat16, token by token."""

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, **options)
        for slot, rows in plan.segments if lora_a is not None else ():
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                total = torch.zeros(rank, weights.in_features, dtype=torch.bfloat16)
                for part, row in zip(dh[s, rows, :rank], x[rows], strict=True):
                    total += torch.outer(part, row.to(part.dtype)).bfloat16()
                lora_a[slot, s, :rank] = total.to(lora_a.dtype)


@caught_by("gradients_are_within_the_bound")
class RoundedTwice(Backward):
    """dh is rounded to 16 bits, which the backend does not declare."""

    def run_lora_b_backward(self, grad, h, weights, plan, **options):
        dh = super().run_lora_b_backward(grad, h, weights, plan, **options)
        return None if dh is None else dh.bfloat16().to(dh.dtype)


@caught_by("gradients_of_an_adapter_ignore_the_others")
class ZeroTimesTheOthers(Backward):
    """dlora_a multiplies the rows of other adapters with zero, which is NaN for NaN."""

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, **options)
        if lora_a is not None:
            for slot, rows in plan.segments:
                for s, rank in enumerate(weights.ranks[slot].tolist()):
                    others = torch.ones(len(x), 1)
                    others[rows] = 0
                    dead = (0 * others * x.float()).sum(0)
                    lora_a[slot, s, :rank] += dead.to(lora_a.dtype)


@caught_by("gradients_of_an_adapter_ignore_the_others")
class OrderOfTheBatch(Backward):
    """Claims rows that do not depend on the batch; the order of dlora_a's sum does."""

    batch_invariant = True

    def run_lora_a_backward(self, dh, x, weights, plan, *, lora_a=None, **options):
        super().run_lora_a_backward(dh, x, weights, plan, lora_a=lora_a, **options)
        for slot, rows in plan.segments if lora_a is not None else ():
            tokens = torch.arange(len(x))[rows]
            for s, rank in enumerate(weights.ranks[slot].tolist()):
                halves = [tokens[tokens % 3 == turn] for turn in range(3)]  # by the row, as tiles
                parts = [dh[s, own, :rank].float().T @ x[own].float() for own in halves]
                lora_a[slot, s, :rank] = (parts[0] + parts[1] + parts[2]).to(lora_a.dtype)


@caught_by("two_backward_runs_are_equal")
class SumsInAnyOrder(Backward):
    """dlora_b differs in its last bits from run to run, as sums of atomics do."""

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, **options):
        dh = super().run_lora_b_backward(grad, h, weights, plan, lora_b=lora_b, **options)
        self.runs = self.__dict__.get("runs", 0) + 1
        if lora_b is not None and self.runs % 2:
            lora_b *= 1 + 2 * torch.finfo(lora_b.dtype).eps
        return dh


@caught_by("gradients_add_up")
class ReadsDenseRows(Backward):
    """A dL/dy whose rows are one row, as that of a sum, is read as zeros after the first."""

    def seen_b(self, grad, h, weights, plan):
        if len(grad) > 1 and grad.stride(0) == 0:
            grad = torch.cat([grad[:1], torch.zeros_like(grad[1:])])
        return grad, h, weights, plan


@caught_by("gradients_asked_for_alone_are_the_same")
class DhNeedsDb(Backward):
    """dh is computed only where dlora_b is."""

    def run_lora_b_backward(self, grad, h, weights, plan, *, lora_b=None, **options):
        dh = super().run_lora_b_backward(grad, h, weights, plan, lora_b=lora_b, **options)
        return dh if dh is None or lora_b is not None else torch.zeros_like(dh)


@dataclass(eq=False)
class Forgetful(TorchRefPlan):
    """A plan whose count of refills stays 0."""

    @property
    def refills(self):
        return 0

    @refills.setter
    def refills(self, count):
        pass


@caught_by("late_and_second_backwards_are_refused")
class RefillNotNoticed(Backward):
    """A backward after a refill uses the tables of the next batch."""

    plan_type = Forgetful

    def prepare_batch(self, batch, out=None, capacity=None):
        plan = super().prepare_batch(batch, out, capacity)
        if out is not None:
            return plan
        sizes = {"capacity": plan.capacity, "token_scales": plan.token_scales}
        return Forgetful(plan.num_tokens, plan.num_slots, plan.segments, **sizes)


class GivesH(Backward):
    """torch_ref whose run_linear keeps h for the backward, as fused engines do."""

    def h_of(self, x, weights, plan):
        return TorchRefBackend.run_lora_a(self, x, weights, plan)

    def forward_with_h(self, operation, x, weights, plan, base_output):
        y, h = super().forward_with_h(operation, x, weights, plan, base_output)
        return y, self.h_of(x, weights, plan) if operation == "run_linear" else h


@caught_by("gradients_add_up")
class WorkspaceOfOneCall(GivesH):
    """h lies in memory that the next forward overwrites."""

    def h_of(self, x, weights, plan):
        h, kept = super().h_of(x, weights, plan), self.__dict__.setdefault("kept", {})
        space = kept.setdefault(h.shape, h)
        space.data.copy_(h)  # by address, which torch does not notice
        return space.detach()


@caught_by("tools_of_torch_change_no_gradient")
class KnownByAddress(GivesH):
    """A backward takes an h that lies elsewhere than the forward left it for zeros."""

    def h_of(self, x, weights, plan):
        h = super().h_of(x, weights, plan)
        self.__dict__.setdefault("kept", {})[h.data_ptr()] = h
        return h

    def seen_b(self, grad, h, weights, plan):
        if h is not None and h.data_ptr() not in self.__dict__.get("kept", {}):
            h = torch.zeros_like(h)
        return grad, h, weights, plan


@caught_by("gradcheck_passes")
class HalfInDouble(Backward):
    """Products of float64 gradients are half as large."""

    def seen_b(self, grad, h, weights, plan):
        return (grad / 2 if grad.dtype == torch.float64 else grad), h, weights, plan
