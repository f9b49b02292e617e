"""Wrong reading of 8-bit stacks and their scales."""

from dataclasses import replace

import torch

from lora_backends.eight_bit import b_row_groups
from lora_backends.testing.cases.inputs import on_each
from mutants.base import caught_by
from mutants.features import Featured


class Quantised(Featured):
    """torch_ref in two steps that sees another layer where the stacks have 8 bits."""

    def seen(self, weights):
        return (
            weights if weights.a_scales is None and weights.b_scales is None else self.of(weights)
        )

    def of(self, weights):
        raise NotImplementedError


@caught_by("run_linear_is_within_the_bound")
class NeighboursScale(Quantised):
    """A row of A gets the scale of the row before it."""

    def of(self, weights):
        return replace(weights, a_scales=weights.a_scales.roll(1, 2).contiguous())


@caught_by("integers_are_exact")
class ScaleOfAnotherSlot(Quantised):
    """B gets the scales of the slot before it."""

    def of(self, weights):
        return replace(weights, b_scales=weights.b_scales.roll(1, 0).contiguous())


@caught_by("run_linear_is_within_the_bound")
class ScaleOfAnotherSlice(Quantised):
    """Every slice of B begins at the scales of slice 0."""

    def of(self, weights):
        groups = b_row_groups(weights.output_slices, weights.scale_block)
        scales = weights.b_scales
        parts = [scales[:, torch.arange(count) % scales.shape[1]] for count in groups]
        return replace(weights, b_scales=torch.cat(parts, 1))


@caught_by("run_linear_is_within_the_bound")
class E5M2ReadAsE4M3(Quantised):
    """Values of float8_e5m2 are read as float8_e4m3fn."""

    def of(self, weights):
        if weights.dtype != torch.float8_e5m2:
            return weights

        def read(stack):
            if isinstance(stack, tuple):
                return tuple(map(read, stack))
            return stack.view(torch.float8_e4m3fn)

        return replace(weights, lora_a=read(weights.lora_a), lora_b=read(weights.lora_b))


@caught_by("run_linear_is_within_the_bound")
class PaddingsScaleRead(Quantised):
    """All rows of A are multiplied by a sum of scales, those beyond the rank times 0."""

    def of(self, weights):
        extra = 0 * weights.a_scales.sum(2, keepdim=True)
        return replace(weights, a_scales=weights.a_scales + extra)


@caught_by("run_linear_is_within_the_bound")
class BlockScaleOffByOne(Quantised):
    """The scale of a block of inputs is that of the next block."""

    def of(self, weights):
        return replace(weights, a_scales=weights.a_scales.roll(-1, 3).contiguous())


@caught_by("integers_are_exact")
class ScalesForgotten(Quantised):
    """Stored values of A count as they are."""

    def of(self, weights):
        return replace(weights, a_scales=torch.ones_like(weights.a_scales))


class Misread(Quantised):
    """Stored values are read as others."""

    def read(self, values):
        raise NotImplementedError

    def of(self, weights):
        a, b = (on_each(stack, self.read) for stack in (weights.lora_a, weights.lora_b))
        return replace(weights, lora_a=a, lora_b=b)


@caught_by("run_linear_is_within_the_bound")
class MostNegativeByte(Misread):
    """-128, whose magnitude int8 does not have, is read as 127."""

    def read(self, values):
        return torch.where(values == -128, 127, values) if values.dtype == torch.int8 else values


@caught_by("run_linear_is_within_the_bound")
class DenormalsFlushed(Misread):
    """Denormals of float8 are read as 0."""

    def read(self, values):
        if values.dtype == torch.int8:
            return values
        wide = values.float()
        flushed = wide.abs() < torch.finfo(values.dtype).smallest_normal
        return torch.where(flushed, 0, wide).to(values.dtype)
