"""Experts: the stacked LoRA weights of a mixture's layer, and which experts every token uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lora_backends.dispatch.handles import Handled
from lora_backends.eight_bit import ScaleBlock, b_row_groups, groups_of, quantized, spread
from lora_backends.errors import InvalidInputError
from lora_backends.layer_weights import LayerWeights, check_last_axis, check_stacks


@dataclass(frozen=True, eq=False)
class ExpertWeights(LayerWeights):
    """The A and B matrices of every slot and expert for one site of a mixture of experts.

    Gate and up of 8 experts, widths (32, 32) over 16 inputs, 4 slots of rank at most 2, where one
    A feeds both slices:

        ExpertWeights(
            lora_a,    # [4, 8, 1, 2, 16]
            lora_b,    # [4, 8, 64, 2]
            ranks,     # [4, 8, 1] int32; 0: no adapter on this expert
            scalings,  # [4, 8, 1] float32
            output_slices=(32, 32),
            num_experts=8,
        )

    An expert axis of 1 means that all experts share the values; each tensor has its own. Tensors
    are kept, not copied, as in `LoRAWeights`, and values beyond a rank may be anything.

    Raises:
        InvalidInputError: shapes, dtypes or devices contradict each other, or a rank is not in
            0..max_rank. Reading the ranks waits for the device once, here.
    """

    lora_a: Tensor  # [num_slots, num_experts or 1, num_a, max_rank, in_features]
    lora_b: Tensor  # [num_slots, num_experts or 1, out_features, max_rank]
    ranks: Tensor  # [num_slots, num_experts or 1, num_a] int32, 0..max_rank
    scalings: Tensor  # [num_slots, num_experts or 1, num_a] float32
    output_slices: tuple[int, ...]  # one width > 0 per slice, sum == out_features
    num_experts: int  # experts of this rank of a parallel group, at least 1
    interleaved: bool = False  # column o belongs to slice o % num_slices, not to a block of columns
    a_scales: Tensor | None = None  # [num_slots, num_experts or 1, num_a, groups of max_rank,
    # groups of in_features] float32, of an 8-bit lora_a
    b_scales: Tensor | None = None  # [num_slots, num_experts or 1, groups of rows summed over
    # slices, groups of max_rank] float32, of an 8-bit lora_b
    scale_block: ScaleBlock = (1, None)  # as in `LoRAWeights`; rows of B count within their slice
    compute_dtype: torch.dtype | None = None  # as in `LoRAWeights`

    num_a: int = field(init=False)  # num_slices, or 1: one A feeds every slice

    def __post_init__(self) -> None:
        stacks = {"lora_a": self.lora_a, "lora_b": self.lora_b}
        for name, axes in zip(stacks, _AXES, strict=True):
            _check_axes(name, stacks[name], axes)
        check_stacks(stacks)
        for name, stack in stacks.items():
            check_last_axis(name, stack)
        self._keep(dtype=self.lora_a.dtype, device=self.lora_a.device)
        self._keep_numbers()
        _check_shapes(self)
        _, _, num_a, max_rank, inputs = self.lora_a.shape
        self._keep_sizes(stacks, num_a=num_a, max_rank=max_rank, in_features=inputs)

    def columns(self, slice_index: int) -> slice:
        """Return the output columns of a slice."""
        if self.interleaved:
            return slice(slice_index, None, self.num_slices)
        offsets = list(accumulate(self.output_slices, initial=0))
        return slice(offsets[slice_index], offsets[slice_index + 1])

    def a_values(self, slot: int, expert: int, a: int, rank: int, dtype: torch.dtype) -> Tensor:
        """Return an A of a slot and expert, [rank, in_features], scales applied in `dtype`."""
        values = _of_expert(self.lora_a, slot, expert)[a, :rank].to(dtype)
        if self.a_scales is None:
            return values
        scales = _of_expert(self.a_scales, slot, expert)[a]
        return values * spread(scales, rank, self.in_features, self.scale_block)

    def b_values(self, slot: int, expert: int, s: int, rank: int, dtype: torch.dtype) -> Tensor:
        """Return B of slice s, [width of the slice, rank], scales applied in `dtype`."""
        values = _of_expert(self.lora_b, slot, expert)[self.columns(s), :rank].to(dtype)
        if self.b_scales is None:
            return values
        groups = b_row_groups(self.output_slices, self.scale_block)
        first = sum(groups[:s])
        scales = _of_expert(self.b_scales, slot, expert)[first : first + groups[s]]
        return values * spread(scales, values.shape[0], rank, self.scale_block)

    def _quantized(self, dtype: torch.dtype, block: ScaleBlock) -> dict[str, Any]:
        """Return the fields that `quantize_weights` replaces."""
        ranks = self.ranks  # [L, E or 1, num_a]
        if self.lora_a.shape[1] < ranks.shape[1]:  # experts share A: to their highest rank
            a_ranks = ranks.amax(1, keepdim=True)
        else:
            a_ranks = ranks
        counted = torch.arange(self.max_rank, device=self.device)
        used = counted < a_ranks[..., None]
        a, a_scales = quantized(self.lora_a, used[..., None], dtype, block)
        b_ranks = ranks.amax(1, keepdim=True) if self.lora_b.shape[1] < ranks.shape[1] else ranks
        stored, scales = torch.empty_like(self.lora_b, dtype=dtype), []
        for s in range(self.num_slices):
            slice_ranks = b_ranks[:, :, s if self.num_a > 1 else 0]
            used = (counted < slice_ranks[..., None])[:, :, None]
            part, part_scales = quantized(self.lora_b[:, :, self.columns(s)], used, dtype, block)
            stored.view(torch.int8)[:, :, self.columns(s)] = part.view(torch.int8)
            scales.append(part_scales)
        return {
            "lora_a": a,
            "lora_b": stored,
            "a_scales": a_scales,
            "b_scales": torch.cat(scales, 2),
            "scale_block": block,
        }

    def __repr__(self) -> str:
        return (
            f"ExpertWeights(num_slots={self.num_slots}, num_experts={self.num_experts}, "
            f"max_rank={self.max_rank}, in_features={self.in_features}, "
            f"output_slices={self.output_slices}, interleaved={self.interleaved}, "
            f"dtype={self.dtype}, device={self.device})"
        )


@dataclass(eq=False)
class ExpertRouting(Handled):
    """The router's choice for one layer; an engine's own routing adds the tables of its kernels.

    Pair (t, j) is the j-th expert of token t. It is dead, so that it changes nothing and reads
    nothing, if its id is -1 or its token has no adapter.
    """

    plan: Any  # of the tokens; read when an operation runs, so a refilled plan is followed
    num_experts: int  # that ids stay below
    topk_ids: Tensor  # [num_tokens, top_k] int64, -1 <= id < num_experts, on the device
    topk_weights: Tensor  # [num_tokens, top_k] float32, on the device
    refills: int = field(default=0, init=False)  # how often another choice took this one's place
    differentiable_weights: Tensor | None = field(default=None, init=False, repr=False)
    # the tensor that topk_weights was copied from, where it requires a gradient
    accepted: Any = field(default=None, init=False, repr=False)
    # the kind of the last choice that passed the checks of `prepare_experts`

    # the kind holds an engine's handle, which means another engine in another process
    _transient: ClassVar[tuple[str, ...]] = (*Handled._transient, "accepted")

    @property
    def num_tokens(self) -> int:
        """Tokens that are routed."""
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.topk_ids.shape[1]

    @classmethod
    def of(
        cls,
        plan: Any,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
    ) -> Self:
        """Return a routing with memory of its own; arguments as in `prepare_experts`."""
        local = local_ids(topk_ids, num_experts, expert_map)
        return cls(plan, num_experts, local, topk_weights.clone())

    def refill(
        self, plan: Any, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None
    ) -> None:
        """Take another choice of the same sizes; the tensors keep their addresses."""
        self.plan = plan
        self.topk_ids.copy_(local_ids(topk_ids, self.num_experts, expert_map))
        self.topk_weights.copy_(topk_weights)


def _of_expert(stack: Tensor, slot: int, expert: int) -> Tensor:
    """Return the part of [num_slots, num_experts or 1, ...] that is an expert's, a view."""
    return stack[slot, expert if stack.shape[1] > 1 else 0]


def local_ids(topk_ids: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """Return the id of each pair's expert on this rank, int64; -1 for dead pairs."""
    ids = topk_ids.long()
    if expert_map is not None:
        mapped = expert_map[ids.clamp(0, expert_map.shape[0] - 1)].long()
        ids = torch.where((ids >= 0) & (ids < expert_map.shape[0]), mapped, -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, -1)


_AXES = (
    "[num_slots, num_experts or 1, num_a, max_rank, in_features]",
    "[num_slots, num_experts or 1, out_features, max_rank]",
)
"""Of lora_a and lora_b."""


def _check_axes(name: str, stack: Any, axes: str) -> None:
    if not isinstance(stack, Tensor):
        return  # refused by its type
    if stack.layout != torch.strided or stack.ndim != axes.count(",") + 1:
        raise InvalidInputError(
            f"{name} has the wrong axes\n  given: {list(stack.shape)} {stack.layout}\n"
            f"  allowed: a dense tensor {axes}"
        )


def _check_shapes(weights: ExpertWeights) -> None:
    widths, experts = weights.output_slices, weights.num_experts
    if isinstance(experts, bool) or not isinstance(experts, int) or experts < 1:
        raise InvalidInputError(
            f"num_experts is not a number of experts\n  given: {experts!r}\n  allowed: an int >= 1"
        )
    num_slots, _, num_a, max_rank, _ = weights.lora_a.shape
    if num_a not in (1, len(widths)):
        raise InvalidInputError(
            f"output_slices does not match lora_a\n"
            f"  given: {len(widths)} widths {widths}, lora_a {list(weights.lora_a.shape)}\n"
            f"  allowed: the third axis of lora_a is 1 or {len(widths)}, the number of slices"
        )
    if weights.interleaved and len(set(widths)) > 1:
        raise InvalidInputError(
            f"interleaved slices differ in width\n  given: output_slices {widths}\n"
            f"  allowed: one width for all slices"
        )
    expected = {
        "lora_a": (num_slots, *weights.lora_a.shape[2:]),
        "lora_b": (num_slots, sum(widths), max_rank),
        "ranks": (num_slots, num_a),
        "scalings": (num_slots, num_a),
    }
    block, rows = weights.scale_block, sum(b_row_groups(widths, weights.scale_block))
    if weights.a_scales is not None:
        groups = (groups_of(max_rank, block[0]), groups_of(weights.lora_a.shape[4], block[1]))
        expected["a_scales"] = (num_slots, num_a, *groups)
    if weights.b_scales is not None:
        expected["b_scales"] = (num_slots, rows, groups_of(max_rank, block[1]))
    for name, (slots, *rest) in expected.items():
        shape = list(getattr(weights, name).shape)
        if shape not in ([slots, 1, *rest], [slots, experts, *rest]):
            raise InvalidInputError(
                f"{name} has the wrong shape\n  given: {shape}\n"
                f"  allowed: {[slots, experts, *rest]}, or 1 for its second axis, from lora_a "
                f"{list(weights.lora_a.shape)}, output_slices {widths} and num_experts {experts}"
            )
