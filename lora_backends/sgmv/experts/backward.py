"""The launches of the backward of experts: kernels of a site and a routing, and their arguments.

Each pair's u = scaling * (grad @ B) and h = x @ A are kept in float32, zero beyond the rank; the
factors of pairs come in where they are read. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from lora_backends.defaults.expert_gradients import ExpertGradients
from lora_backends.eight_bit import b_row_groups
from lora_backends.experts import ExpertWeights
from lora_backends.sgmv.backward.slots import slots_on
from lora_backends.sgmv.experts import backward_kernels as kernels
from lora_backends.sgmv.experts.backward_kernels import BackwardSizes
from lora_backends.sgmv.experts.launch import strides_of
from lora_backends.sgmv.experts.routing import SgmvRouting
from lora_backends.sgmv.kernels.operands import SiteSizes
from lora_backends.sgmv.launch import Options
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.storage import storage_kind, stored_bytes
from lora_backends.sgmv.tiles.sizes import padded_rank

_MOST_RANKS = 64  # of a block
_MOST_ROWS = 64  # pairs of a program
_COLUMNS = 128  # of a result, per program
_SUMMED = 1024  # columns of dx that a program sums over the pairs of a token


class SiteColumns(NamedTuple):
    """The columns that each A of a site belongs to."""

    starts: tuple[int, ...]
    widths: tuple[int, ...]
    step: int = 1
    first_groups: tuple[int, ...] = ()  # of the scales of rows of B


@dataclass(eq=False)
class Backward:
    """The backward of one call; tensors are made when a kernel first needs them."""

    grad: torch.Tensor  # [num_tokens, top_k, out_features], or [num_tokens, out_features]
    x: torch.Tensor | None
    weights: ExpertWeights
    routing: SgmvRouting
    options: Options
    by_pair: bool  # whether every pair has a row of x
    weighted: bool
    reduce: bool

    def write(self, out: ExpertGradients, slots: Sequence[int] | None) -> None:
        """Write the gradients that are wanted; arguments as in `run_experts_backward`."""
        if self.routing.num_pairs == 0:
            for tensor in out:
                if tensor is not None:
                    tensor.zero_()
            return
        if out.topk_weights is not None:
            # the rows of dead pairs are zero
            sums = torch.linalg.vecdot(self.u, self.h).view_as(out.topk_weights)
            if (scales := self._token_scales) is not None:
                # a sum with zeros, which makes 0.0 of -0.0
                sums = torch.addcmul(torch.zeros_like(sums), sums, scales)
            out.topk_weights.copy_(sums)
        if out.x is not None:
            self._write_dx(out.x)
        if out.lora_a is not None:
            a = out.lora_a  # [slots, experts or 1, num_a, max_rank, in_features]
            assert self.x is not None
            of_x = SiteColumns((0,), (self.weights.in_features,))
            self._write_outer(self.u, self.x, self._x_strides, of_x, a, a.stride(), slots)
        if out.lora_b is not None:
            b = out.lora_b  # [slots, experts or 1, out_features, max_rank]
            slot, expert, column, rank = b.stride()
            strides = slot, expert, 0, rank, column
            columns = self._columns(apart=False)
            self._write_outer(self.h, self.grad, self._grad_strides, columns, b, strides, slots)

    @cached_property
    def h(self) -> torch.Tensor:
        """Each pair's h [pairs, num_a * padded rank] float32, zero beyond the rank."""
        a, scales = self.weights.lora_a, self.weights.a_scales
        assert self.x is not None
        strides = strides_of(a, 5)
        of_scales = (0,) * 5 if scales is None else strides_of(scales, 5)
        columns = SiteColumns((0,), (self.weights.in_features,), first_groups=(0,))
        return self._products(
            self.x, self._x_strides, a, strides, scales, of_scales, columns, is_b=False
        )

    @cached_property
    def u(self) -> torch.Tensor:
        """Each pair's scaling * (grad @ B) [pairs, num_a * padded rank] float32."""
        b, scales = self.weights.lora_b, self.weights.b_scales
        slot, expert, column, rank = strides_of(b, 4)
        strides, of_scales = (slot, expert, 0, rank, column), (0,) * 5
        if scales is not None:
            slot, expert, column, rank = strides_of(scales, 4)
            of_scales = (slot, expert, 0, rank, column)
        columns = self._columns(apart=scales is not None)
        return self._products(
            self.grad, self._grad_strides, b, strides, scales, of_scales, columns, is_b=True
        )

    @cached_property
    def factors(self) -> torch.Tensor | None:
        """The factor of each pair [num_tokens, top_k] float32, or None where all are 1."""
        scales, factors = self._token_scales, self.routing.topk_weights
        if scales is None:
            return factors if self.weighted else None
        return scales * factors if self.weighted else scales.expand_as(factors).contiguous()

    @property
    def _token_scales(self) -> torch.Tensor | None:
        scales: torch.Tensor | None = self.routing.plan.token_scales
        return None if scales is None else scales[: self.routing.num_tokens, None]

    @cached_property
    def keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Live pairs by slot, expert and number, and where each slot and expert begins."""
        routing = self.routing
        experts, count = routing.num_experts, routing.num_slots * routing.num_experts
        slots = routing.plan.token_slots()[: routing.num_tokens, None]
        ids = routing.topk_ids.to(torch.int32)
        keys = torch.where((slots >= 0) & (ids >= 0), slots * experts + ids, count)
        # the places of `SgmvRouting.order` follow the arrival of programs: a sum over them would
        # have another order each time
        ordered, order = keys.flatten().sort(stable=True)
        numbers = torch.arange(count + 1, dtype=torch.int32, device=keys.device)
        return order, torch.searchsorted(ordered, numbers, out_int32=True)

    @property
    def _x_strides(self) -> tuple[int, int]:
        """From the row of x of one token, and of one pair, to the next."""
        assert self.x is not None
        row = self.x.stride(0)
        return (row * self.routing.top_k, row) if self.by_pair else (row, 0)

    @property
    def _grad_strides(self) -> tuple[int, int]:
        row, *pair = self.grad.stride()[:-1]
        return row, pair[0] if pair else 0

    def _columns(self, apart: bool) -> SiteColumns:
        """Return the columns of y of each A; `apart`: of each slice, though one A feeds all."""
        weights = self.weights
        widths = weights.output_slices
        if weights.num_a == 1 and not apart:
            return SiteColumns((0,), (weights.out_features,))
        groups = starts_of(b_row_groups(widths, weights.scale_block))
        if weights.interleaved:
            return SiteColumns(tuple(range(len(widths))), widths, len(widths), groups)
        return SiteColumns(starts_of(widths), widths, 1, groups)

    def _products(
        self,
        rows: torch.Tensor,
        row_strides: tuple[int, int],  # of tokens and pairs
        stack: torch.Tensor,
        strides: tuple[int, ...],  # of slot, expert, a, rank, column
        scales: torch.Tensor | None,
        scale_strides: tuple[int, ...],
        columns: SiteColumns,
        is_b: bool,  # rows are of grad, and sums are scaled
    ) -> torch.Tensor:
        weights, routing = self.weights, self.routing
        mixed = rows.dtype != stack.dtype
        kernel = self._kernel(kernels.product_kernel, columns, rows.dtype, mixed, scaled=is_b)
        width = weights.num_a * padded_rank(weights.max_rank)
        out = torch.zeros(routing.num_pairs, width, dtype=torch.float32, device=rows.device)
        ranks, scalings = weights.ranks.contiguous(), weights.scalings.contiguous()
        tables = routing.order, routing.tiles, routing.count
        of_stack = stored_bytes(stack), stack if scales is None else scales
        tensors = (rows, *of_stack, ranks, scalings, *tables, out)
        numbers = (*row_strides, *strides, *scale_strides)
        numbers += (*strides_of(ranks, 2), *strides_of(scalings, 2))
        kernel.launch(
            routing.max_tiles * kernel.constants["SITE"].PARTS, Arguments(tensors, (), numbers)
        )
        return out

    def _write_dx(self, dx: torch.Tensor) -> None:
        weights, routing, factors = self.weights, self.routing, self.factors
        a, scales, of_pairs = weights.lora_a, weights.a_scales, dx
        if self.by_pair:
            dx.zero_()  # rows of dead pairs
        else:
            shape = routing.num_pairs, weights.in_features
            of_pairs = torch.empty(shape, dtype=torch.float32, device=dx.device)
        columns = SiteColumns((0,), (weights.in_features,))
        has_factors = factors is not None
        kernel = self._kernel(kernels.dx_kernel, columns, a.dtype, False, has_factors=has_factors)
        ranks = weights.ranks.contiguous()
        of_stack = stored_bytes(a), a if scales is None else scales, ranks
        tables = routing.order, routing.tiles, routing.count
        tensors = (self.u, *of_stack, ranks if factors is None else factors, *tables, of_pairs)
        numbers = (weights.in_features, *strides_of(a, 4))
        numbers += (0,) * 5 if scales is None else strides_of(scales, 5)
        numbers += (*strides_of(ranks, 2), of_pairs.stride(0))
        kernel.launch(
            routing.max_tiles * kernel.constants["SITE"].PARTS,
            Arguments(tensors, (), numbers),
        )
        if not self.by_pair:
            sums = self._kernel(kernels.sum_pairs_kernel, columns, dx.dtype, False)
            live = routing.topk_ids, routing.plan.token_slots()
            numbers = weights.in_features, dx.stride(0)
            sums.launch(routing.num_tokens, Arguments((of_pairs, *live, dx), (), numbers))

    def _write_outer(
        self,
        left: torch.Tensor,  # u or h
        right: torch.Tensor,  # x or grad
        right_strides: tuple[int, int],  # of tokens and pairs
        columns: SiteColumns,
        out: torch.Tensor,
        out_strides: tuple[int, ...],  # of slot, expert, a, rank, column
        slots: Sequence[int] | None,
    ) -> None:
        """Write a stack's gradient."""
        if not out.numel():
            return
        weights, routing, factors = self.weights, self.routing, self.factors
        ranks, scalings = weights.ranks.contiguous(), weights.scalings.contiguous()
        order, starts = self.keys
        kernel = self._kernel(
            kernels.outer_kernel,
            columns,
            right.dtype,
            right.dtype != weights.dtype,
            scaled=out_strides[2] == 0,  # u is scaled already
            has_factors=factors is not None,
            shared=out.shape[1] == 1,
            every=slots is None,
        )
        wanted = starts if slots is None else slots_on(out.device, slots)
        tables = routing.topk_ids, order, starts, wanted
        given = ranks if factors is None else factors
        tensors = (left, right, given, ranks, scalings, *tables, out)
        numbers = (*right_strides, *strides_of(ranks, 2), *strides_of(scalings, 2), *out_strides)
        kernel.launch(out.shape[0] * out.shape[1], Arguments(tensors, (), numbers))

    def _kernel(
        self, kernel: Any, columns: SiteColumns, dtype: torch.dtype, mixed: bool, **constants: bool
    ) -> SpecializedKernel:
        weights = self.weights
        site = BackwardSite(
            weights.num_a,
            weights.max_rank,
            self.routing.top_k,
            self.routing.num_experts,
            storage_kind(weights.dtype, self.options.programmatic),
            weights.scale_block,
            self.routing.shape.tile,
        )
        return kernel_of(
            kernel, site, columns, dtype.itemsize, mixed, self.options.precision, **constants
        )


class BackwardSite(NamedTuple):
    """The constants of a site and a routing that kernels of its backward depend on."""

    num_a: int
    max_rank: int
    top_k: int
    num_experts: int
    storage: int
    scale_block: tuple[int | None, int | None]
    tile: int  # most pairs of a tile of the routing


@lru_cache(maxsize=4096)
def kernel_of(
    kernel: Any,  # of `backward_kernels`
    site: BackwardSite,
    columns: SiteColumns,  # of the operand that is summed over, or of the result
    item_bytes: int,  # of the operand in memory
    mixed: bool,  # the operands of products differ in dtype
    precision: str,
    *,
    scaled: bool = False,
    has_factors: bool = False,
    shared: bool = False,  # the result is one of all experts
    every: bool = True,  # results of all slots are wanted
) -> SpecializedKernel:
    """Return a kernel of the backward for a site."""
    narrow = item_bytes == 2 and not mixed and not site.storage
    block_r = min(padded_rank(site.max_rank), _MOST_RANKS)
    blocks = site.num_a * (padded_rank(site.max_rank) // block_r)
    widest, rows, stages = max(columns.widths), min(_MOST_ROWS, site.tile), 1
    if kernel is kernels.product_kernel:
        block, programs, stages = 64 if narrow else 32, blocks, 3 if narrow else 1
    elif kernel is kernels.dx_kernel:
        block, programs = _COLUMNS, -(-widest // _COLUMNS)
    elif kernel is kernels.sum_pairs_kernel:
        block, programs = _SUMMED, -(-widest // _SUMMED)
    else:
        rows, block, stages = 64 if narrow else 32, _COLUMNS, 3 if narrow else 1
        programs = blocks * -(-widest // _COLUMNS)
    # ranks are rows of A [rank, inputs], and columns of B [outputs, rank], which is scaled
    by_rank, by_column = site.scale_block[::-1] if scaled else site.scale_block
    sizes = BackwardSizes(
        BLOCK_R=block_r,
        BLOCK_K=block,
        RANK_PAD=padded_rank(site.max_rank),
        NUM_A=site.num_a,
        TOP_K=site.top_k,
        STARTS=columns.starts,
        WIDTHS=columns.widths,
        STEP=columns.step,
        FIRST_GROUPS=columns.first_groups,
        STORAGE=site.storage,
        GROUP_R=by_rank or 0,
        GROUP_K=by_column or 0,
        SCALED=scaled,
        HAS_FACTORS=has_factors,
        SHARED=shared,
        ALL=every,
        NUM_EXPERTS=site.num_experts,
        MIXED=mixed,
        PRECISION=precision,
        INTERPRETED=INTERPRETED,
    )
    constants: dict[str, Any] = {"SIZES": sizes}
    if kernel is not kernels.sum_pairs_kernel:
        constants["SITE"] = SiteSizes(
            ROWS=rows,
            PARTS=max(1, site.tile // rows),
            TOP_K=site.top_k,
            NUM_A=site.num_a,
            MAX_RANK=site.max_rank,
            EAGER=False,
            BY_TOKEN=False,
            INTERLEAVED=False,
            WEIGHTED=False,
        )
    return specialized(kernel, programs, num_warps=4, num_stages=stages, **constants)


def starts_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Return where each part begins."""
    return tuple(sum(counts[:i]) for i in range(len(counts)))
