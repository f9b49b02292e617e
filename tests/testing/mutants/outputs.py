"""Wrong columns, bias, y, views and memory."""

from dataclasses import replace

import torch

from mutants.base import Seeing, TwoSteps, active_slices, caught_by, new_y


@caught_by("run_linear_is_within_the_bound")
class SliceOffByOne(TwoSteps):
    """The columns of every slice but the first begin one column early."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = new_y(weights, plan) if base_output is None else base_output
        delta = super().run_lora_b(h, replace(weights, bias=None), plan, new_y(weights, plan))
        first = weights.output_slices[0]
        delta[:, first:] = delta[:, first:].roll(-1, 1)
        only_bias = replace(weights, ranks=torch.zeros_like(weights.ranks))
        y = super().run_lora_b(h, only_bias, plan, y)
        for _, rows in plan.segments:
            y[rows] += delta[rows].to(y.dtype)
        return y


@caught_by("column_shards_recombine")
class OddColumnDropped(TwoSteps):
    """Columns are computed in pairs; the last of an odd width is dropped."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = new_y(weights, plan) if base_output is None else base_output
        before = y[:, -1:].clone()
        super().run_lora_b(h, weights, plan, y)
        if weights.out_features % 2:
            y[:, -1:] = before
        return y


@caught_by("run_linear_is_within_the_bound")
class FloatOutputOfSlices(TwoSteps):
    """Several slices into a float32 y give NaN."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        if weights.num_slices > 1 and y.dtype == torch.float32:
            for _, rows in plan.segments:
                y[rows, -1] = torch.nan
        return y


@caught_by("merged_weights_equal_unmerged")
class BiasForgotten(Seeing):
    """The bias is not added."""

    def seen(self, weights):
        return replace(weights, bias=None)


@caught_by("run_linear_is_within_the_bound")
class BiasScaled(Seeing):
    """The bias is scaled like the delta."""

    def seen(self, weights):
        if weights.bias is None:
            return weights
        widths = torch.tensor(weights.output_slices)
        scaling = weights.scalings.repeat_interleave(widths, dim=1)
        return replace(weights, bias=(weights.bias * scaling).to(weights.dtype))


@caught_by("run_linear_is_within_the_bound")
class BiasNeedsRank(Seeing):
    """The bias is added only where a slice has a rank."""

    def seen(self, weights):
        if weights.bias is None:
            return weights
        adapted = (weights.ranks > 0).repeat_interleave(torch.tensor(weights.output_slices), 1)
        return replace(weights, bias=torch.where(adapted, weights.bias, 0))


@caught_by("untouched_elements_keep_their_bits")
class BiasOnBaseRows(TwoSteps):
    """The bias of slot 0 is added to rows without an adapter."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        idle = torch.ones(plan.num_tokens, dtype=torch.bool)
        for _, rows in plan.segments:
            idle[rows] = False
        if weights.bias is not None:
            y[idle] += weights.bias[0].to(y.dtype)
        return y


@caught_by("zero_adapters_keep_base_output")
class BaseOverwritten(TwoSteps):
    """The delta replaces base_output."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        for _, rows in plan.segments if base_output is not None else []:
            base_output[rows] = 0
        return super().run_lora_b(h, weights, plan, base_output)


@caught_by("untouched_elements_keep_their_bits")
class ZeroAdded(TwoSteps):
    """Zero is added to rows without an adapter: -0.0 becomes 0.0."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        return super().run_lora_b(h, weights, plan, base_output).add_(0.0)


@caught_by("untouched_elements_keep_their_bits")
class PayloadLost(TwoSteps):
    """Rows without an adapter are read and written: every NaN becomes the same one."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        return y.copy_(torch.where(y.isnan(), torch.nan, y))


@caught_by("base_output_is_returned_itself")
class CopyReturned(TwoSteps):
    """base_output is added to in place, but a copy is returned."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        return super().run_lora_b(h, weights, plan, base_output).clone()


@caught_by("results_have_the_promised_shape_and_dtype")
class SumsReturned(TwoSteps):
    """A new result has the dtype of the sums."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        return y.float() if base_output is None else y


@caught_by("only_the_view_is_written")
class WritesBesideTheView(TwoSteps):
    """Whole groups of 4 columns are written, also beyond an odd width."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = super().run_lora_b(h, weights, plan, base_output)
        tail = -y.shape[1] % 4
        if base_output is not None and tail and y.stride(0) >= y.shape[1] + tail:
            beside = y.as_strided((len(y), tail), y.stride(), y.storage_offset() + y.shape[1])
            beside.fill_(1.0)
        return y


@caught_by("run_linear_is_within_the_bound")
class InputStrideIgnored(Seeing):
    """x is read as if its rows were dense."""

    def seen_x(self, x):
        return x.as_strided(x.shape, (x.shape[1], 1))


@caught_by("only_the_view_is_written")
class OutputStrideIgnored(TwoSteps):
    """y is written as if its rows were dense."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        if base_output is None:
            return super().run_lora_b(h, weights, plan)
        dense = base_output.as_strided(base_output.shape, (base_output.shape[1], 1))
        super().run_lora_b(h, weights, plan, dense)
        return base_output


@caught_by("rows_start_from_zero")
class DirtyResult(TwoSteps):
    """A new result starts from what was in memory."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = new_y(weights, plan).fill_(3.0) if base_output is None else base_output
        return super().run_lora_b(h, weights, plan, y)


@caught_by("memory_is_written_before_it_is_read")
class EmptyResult(TwoSteps):
    """A new result comes from torch.empty; rows without an adapter are never written."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        y = base_output
        if y is None:
            y = torch.empty(plan.num_tokens, weights.out_features, dtype=weights.dtype)
            for _, rows in plan.segments:
                y[rows] = 0
        return super().run_lora_b(h, weights, plan, y)


@caught_by("results_are_independent")
class ReusedBuffer(TwoSteps):
    """h is written into one buffer of the backend and handed out."""

    def run_lora_a(self, x, weights, plan):
        h = super().run_lora_a(x, weights, plan)
        kept = self.__dict__.setdefault("buffers", {}).setdefault((h.shape, h.dtype), h)
        return kept.copy_(h)


@caught_by("inputs_are_not_modified")
class ScalesHInPlace(TwoSteps):
    """The scaling is multiplied into the caller's h."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        for _, rows, s, _, _, scaling in active_slices(weights, plan):
            h[s, rows] *= scaling
        unit = replace(weights, scalings=torch.ones_like(weights.scalings))
        return super().run_lora_b(h, unit, plan, base_output)


@caught_by("inputs_are_not_modified")
class ScalingsCleaned(TwoSteps):
    """Scalings of rank 0, which may be NaN, are set to 0 in the layer."""

    def run_lora_b(self, h, weights, plan, base_output=None):
        weights.scalings.nan_to_num_(0.0)
        return super().run_lora_b(h, weights, plan, base_output)
