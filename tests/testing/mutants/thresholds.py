"""Faults behind two thresholds, or behind one and an option."""

import torch

from lora_backends.features import FEATURES
from lora_backends.torch_ref import TorchRefBackend
from mutants.base import caught_by

LARGE = "sizes_above_all_thresholds_are_right"
LARGE_GRADIENTS = "gradients_above_all_thresholds_are_right"
EXPERTS = "many_experts_are_right"
GRADIENTS_OF_EXPERTS = "gradients_of_many_experts_are_right"


class Whole(TorchRefBackend):
    """torch_ref with every feature."""

    features = frozenset(FEATURES)


@caught_by(LARGE)
class NarrowHOfLargeRanks(Whole):
    """h is rounded to bfloat16 for a rank above 32 together with more than 512 inputs."""

    def run_linear(self, x, weights, plan, base_output=None):
        if weights.max_rank <= 32 or weights.in_features <= 512:
            return super().run_linear(x, weights, plan, base_output)
        h = self.run_lora_a(x, weights, plan)
        return self.run_lora_b(h.bfloat16().to(h.dtype), weights, plan, base_output)


@caught_by(LARGE)
class ColumnsOfV(Whole):
    """run_qkv leaves out columns of v after the 256th."""

    def run_qkv(self, x, weights, plan, base_output=None):
        first = sum(weights.output_slices[:2]) + 256
        before = 0 if base_output is None else base_output[:, first:].clone()
        y = super().run_qkv(x, weights, plan, base_output)
        y[:, first:] = before
        return y


@caught_by(LARGE)
class LogitsBeyond15Bits(Whole):
    """run_logits leaves out columns after the 32,768th."""

    def run_logits(self, hidden, weights, plan, base_output=None):
        before = 0 if base_output is None else base_output[:, 32_768:].clone()
        y = super().run_logits(hidden, weights, plan, base_output)
        y[:, 32_768:] = before
        return y


@caught_by(LARGE)
class StaleTailOfARefill(Whole):
    """A plan refilled with fewer tokens loses the last one, in layers of more than 256 inputs."""

    def prepare_batch(self, batch, out=None, capacity=None):
        shrinks = out is not None and batch.num_tokens < out.num_tokens
        plan = super().prepare_batch(batch, out, capacity)
        plan.shrunk = shrinks
        return plan

    def run_embedding(self, token_ids, weights, plan, base_output=None):
        last = slice(plan.num_tokens - 1, plan.num_tokens)
        before = 0 if base_output is None else base_output[last].clone()
        y = super().run_embedding(token_ids, weights, plan, base_output)
        if plan.shrunk and weights.in_features > 256:
            y[last] = before
        return y


class OnExperts(Whole):
    """torch_ref whose experts are 5% too large under a condition."""

    def is_wrong(self, weights, routing, options):
        raise NotImplementedError

    def run_experts(self, x, weights, routing, base_output=None, **options):
        before = 0 if base_output is None else base_output.clone()
        y = super().run_experts(x, weights, routing, base_output, **options)
        if self.is_wrong(weights, routing, options):
            y.copy_(before + 1.05 * (y - before))
        return y


@caught_by(EXPERTS)
class InterleavedManyExperts(OnExperts):
    """Interleaved columns of more than 64 experts are 5% too large."""

    def is_wrong(self, weights, routing, options):
        return weights.interleaved and weights.num_experts > 64


@caught_by(EXPERTS)
class WideExperts(OnExperts):
    """Experts of more than 2,048 inputs are 5% too large."""

    def is_wrong(self, weights, routing, options):
        return weights.in_features > 2048


@caught_by(EXPERTS)
class ManyPairsOfWideExperts(OnExperts):
    """More than four experts per token with more than 512 inputs: 5% too large."""

    def is_wrong(self, weights, routing, options):
        return routing.top_k > 4 and weights.in_features > 512


@caught_by(LARGE_GRADIENTS)
class EmbeddingGradientOfWideLayers(Whole):
    """dlora_a of an embedding is 5% too large for more than 512 ids and 512 columns."""

    def run_embedding_backward(self, dh, token_ids, weights, plan, *, lora_a, **options):
        super().run_embedding_backward(dh, token_ids, weights, plan, lora_a=lora_a, **options)
        if weights.in_features > 512 and weights.out_features > 512:
            lora_a *= 1.05


@caught_by(LARGE_GRADIENTS)
class GradientOfWideBias(Whole):
    """dbias of more than 1,024 columns is 5% too large."""

    def sum_tokens(self, values, weights, plan, out, slots=None):
        super().sum_tokens(values, weights, plan, out, slots)
        if weights.out_features > 1024:
            out *= 1.05


@caught_by(GRADIENTS_OF_EXPERTS)
class RoutersGradientOfManyExperts(Whole):
    """The gradient of the router's weights is 5% too large for more than four per token."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        if out.topk_weights is not None and routing.top_k > 4:
            out.topk_weights.mul_(1.05)


@caught_by(GRADIENTS_OF_EXPERTS)
class GradientOfInterleavedColumns(Whole):
    """dlora_b of interleaved columns of more than 64 experts is that of the next expert."""

    def run_experts_backward(self, grad, x, weights, routing, out, **options):
        super().run_experts_backward(grad, x, weights, routing, out, **options)
        if out.lora_b is not None and weights.interleaved and weights.num_experts > 64:
            out.lora_b.copy_(torch.roll(out.lora_b, 1, 1))
