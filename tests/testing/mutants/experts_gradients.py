"""Wrong gradients of experts: of other pairs, experts, batches and sums."""

import torch

from lora_backends.defaults.expert_gradients import ExpertGradients
from mutants.base import TwoSteps, caught_by
from mutants.features import Featured


class AfterBackward(TwoSteps):
    """torch_ref with a fault in what the backward of experts has written."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        self.spoil(out, x, routing)

    def spoil(self, out, x, routing):
        raise NotImplementedError


@caught_by("expert_gradients_are_exact_on_integers")
class RouterForgotten(TwoSteps):
    """The router's weight does not multiply the gradient of a pair."""

    def run_experts_backward(self, *args, weighted=False, **options):
        super().run_experts_backward(*args, weighted=False, **options)


@caught_by("expert_gradients_are_exact_on_integers")
class GradientOfTheNextExpert(AfterBackward):
    """An expert's gradient of lora_b goes to the next expert."""

    def spoil(self, out, x, routing):
        if out.lora_b is not None:
            out.lora_b.copy_(out.lora_b.roll(1, 1))


@caught_by("expert_gradients_are_exact_on_integers")
class SharedAOfOneExpert(TwoSteps):
    """The gradient of an A that all experts share counts the first expert alone."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        if out.lora_a is not None and weights.lora_a.shape[1] == 1:
            kept = routing.topk_ids.clone()
            routing.topk_ids.masked_fill_(kept != 0, -1)
            first = ExpertGradients(lora_a=out.lora_a)
            super().run_experts_backward(grad, x, weights, routing, first, **options)
            routing.topk_ids.copy_(kept)


@caught_by("expert_gradients_are_exact_on_integers")
class FirstPairOfAToken(TwoSteps):
    """dx of a token is that of its first pair, not the sum over all."""

    def run_experts_backward(self, grad, x, weights, routing, out, rows="tokens", **options):
        super().run_experts_backward(grad, x, weights, routing, out, rows=rows, **options)
        if out.x is not None and rows == "tokens":
            kept = routing.topk_ids.clone()
            routing.topk_ids[:, 1:] = -1
            first = ExpertGradients(x=out.x)
            super().run_experts_backward(grad, x, weights, routing, first, rows=rows, **options)
            routing.topk_ids.copy_(kept)


@caught_by("expert_gradients_are_within_the_bound")
class ScalingOfGradientsFivePercent(AfterBackward):
    """The gradient of lora_a is 5% too large."""

    def spoil(self, out, x, routing):
        if out.lora_a is not None:
            out.lora_a.mul_(1.05)


@caught_by("expert_gradients_are_within_the_bound")
class RoutersGradientUnscaled(Featured):
    """The gradient of the router's weights lacks the scale of the token."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        scales = routing.plan.token_scales
        if out.topk_weights is not None and scales is not None:
            scales = scales[: routing.num_tokens, None]
            out.topk_weights.copy_(torch.where(scales != 0, out.topk_weights / scales, 0))


@caught_by("expert_gradients_are_zero_where_nothing_is_read")
class GradientOfDeadPairs(AfterBackward):
    """The router's weights of dead pairs get a gradient."""

    def spoil(self, out, x, routing):
        if out.topk_weights is not None:
            out.topk_weights.masked_fill_(routing.topk_ids < 0, 1.0)


@caught_by("expert_gradients_are_zero_where_nothing_is_read")
class GradientBeyondTheRank(AfterBackward):
    """What lies beyond a rank gets a gradient: the last row of lora_a."""

    def spoil(self, out, x, routing):
        if out.lora_a is not None:
            out.lora_a[..., -1, :] += 1e-3


@caught_by("expert_gradients_are_zero_where_nothing_is_read")
class GradientsOfAbsentExpertsKept(TwoSteps):
    """The gradient of an expert without pairs is whatever its memory held."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        for name in ("lora_a", "lora_b"):
            stack = getattr(out, name)
            if stack is not None:
                stack[(stack == 0).flatten(2).all(-1)] = 0.5


@caught_by("expert_gradients_ignore_other_adapters")
class EveryRowMultiplied(AfterBackward):
    """Rows of other adapters are multiplied by zero instead of skipped: NaN comes through."""

    def spoil(self, out, x, routing):
        if out.lora_a is not None:
            out.lora_a.add_(0 * x.sum())


@caught_by("expert_gradients_are_deterministic")
class ByArrival(AfterBackward):
    """Sums follow the arrival of programs, claimed deterministic."""

    runs = 0

    def spoil(self, out, x, routing):
        self.runs += 1
        if out.lora_b is not None:
            out.lora_b.mul_(1 + self.runs * 2.0**-20)


@caught_by("an_expert_gradient_alone_is_the_one_among_all")
class RouterAloneForgotten(AfterBackward):
    """The gradient of the router's weights is left out where no other is wanted."""

    def spoil(self, out, x, routing):
        if out.topk_weights is not None and out.x is None:
            out.topk_weights.zero_()


@caught_by("a_refilled_routing_has_its_own_gradients")
class RefillUnnoticed(TwoSteps):
    """A refill of a routing is not counted."""

    def prepare_experts(self, *args, out=None):
        routing = super().prepare_experts(*args, out=out)
        if out is not None:
            routing.refills = 0
        return routing


@caught_by("expert_gradients_of_several_adapters_add_up")
class LastAdaptersGradient(TwoSteps):
    """dx of a token is that of one adapter: a second backward finds nothing to do."""

    last = None

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        if out.x is not None and self.last is not None and self.last.data_ptr() == grad.data_ptr():
            out.x.zero_()
        self.last = grad
