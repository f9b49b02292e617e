"""The kernels of a site and a routing, and their arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from lora_backends.common.devices import is_capturing
from lora_backends.eight_bit import b_row_groups
from lora_backends.experts import ExpertWeights
from lora_backends.sgmv.experts import kernels, rules
from lora_backends.sgmv.experts.routing import SgmvRouting, launch_place, sort_tokens
from lora_backends.sgmv.experts.rules import PairShape, SiteShape, SiteTiles
from lora_backends.sgmv.kernels.operands import SiteSizes, SumSizes
from lora_backends.sgmv.launch import Options
from lora_backends.sgmv.launching.call_cache import Launched
from lora_backends.sgmv.launching.kernel import (
    INTERPRETED,
    Arguments,
    SpecializedKernel,
    specialized,
)
from lora_backends.sgmv.launching.sizes import expand_sizes, shrink_sizes
from lora_backends.sgmv.launching.slice_tables import Located, stride_unit
from lora_backends.sgmv.launching.tma import allows_tma, descriptor
from lora_backends.sgmv.storage import PLAIN, Storage, storage_kind, stored_bytes
from lora_backends.sgmv.tiles.gpu import Gpu
from lora_backends.sgmv.tiles.sizes import column_programs, padded_rank


class Site(NamedTuple):
    """The constants of a site's kernels, besides tile sizes."""

    shape: SiteShape
    slices: tuple[int, ...]  # widths that the expand tells apart; one where a single A feeds all
    num_a: int
    interleaved: bool
    top_k: int
    by_pair: bool  # whether every pair has a row of x
    by_token: bool  # whether all experts share an A, so that h has a row for every token
    weighted: bool
    storage: Storage = PLAIN
    scale_starts: tuple[int, ...] = (0,)  # first columns of the slices whose scales B has
    first_groups: tuple[int, ...] = (0,)  # of rows of B, by slice
    spread: bool = False  # whether column c belongs to slice c % slices, for scales


class SiteKernels(NamedTuple):
    """Both kernels of a site."""

    shrink: SpecializedKernel
    expand: SpecializedKernel
    split_k: int  # planes of h


@dataclass(frozen=True, eq=False)
class SiteChoice:
    """All that selects a site's kernels besides a routing.

    `choice_of` returns one object for equal values, so that a routing finds kernels by identity.
    """

    site: Site
    tma: bool  # whether B allows it
    options: Options

    def kernels(self, routing: SgmvRouting, place: Any) -> SiteKernels:
        """Return the kernels that add to y; a routing keeps them.

        `place` is the `launch_place`; with None the shrink waits before it reads the routing.
        """
        if routing.chosen is None:
            routing.chosen = {}
        settled = place is not None and place == routing.settled
        settled &= not self.site.by_token  # tokens are sorted before every call
        both: SiteKernels | None = routing.chosen.get((self, settled))
        if both is None:
            shrunk = routing.of_tokens if self.site.by_token else routing.shape
            assert shrunk is not None
            both = kernels_of(
                routing.shape, shrunk, self.site, False, self.tma, self.options, settled
            )
            routing.chosen[self, settled] = both
        return both


choice_of = lru_cache(maxsize=4096)(SiteChoice)


class SiteLaunches(NamedTuple):
    """Both launches of a call that added to y, and read the layer's own tables, not copies."""

    choice: SiteChoice
    shrink: Launched
    expand: Launched


class SiteCall(NamedTuple):
    """The tensors of one call."""

    x: torch.Tensor  # [num_tokens, in_features], or a row for every pair
    weights: ExpertWeights
    routing: SgmvRouting
    y: torch.Tensor  # [num_tokens, top_k, out_features], or [num_tokens, out_features] if summed
    ranks: torch.Tensor  # of the weights, contiguous
    scalings: torch.Tensor  # of the weights, contiguous
    factors: torch.Tensor  # of every pair [num_tokens, top_k] float32; read where `weighted`
    a_scales: torch.Tensor  # of the weights, contiguous; A where it has none
    b_scales: torch.Tensor  # of the weights, contiguous; B where it has none
    shrunk: SgmvRouting  # whose tiles the shrink runs on: the routing, or its tokens by slot


def add_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    weights: ExpertWeights,
    routing: SgmvRouting,
    options: Options,
    *,
    rows: str,
    weighted: bool,
    reduce: bool,
) -> SiteLaunches | None:
    """Add the delta of every live pair to y, in place; arguments as in `run_experts`.

    Returns:
        The launches; None if no call can repeat them: they read copied tables, or `reduce` is set.
    """
    factors = pair_factors(routing, weighted)
    weighted |= routing.plan.token_scales is not None
    site = site_of(weights, routing, x.dtype, options, by_pair=rows == "pairs", weighted=weighted)
    tma = options.tma and not reduce and weights.lora_b.element_size() == 2  # it does not widen
    tma = tma and allows_tma(_located(weights.lora_b), weights.max_rank, 0)
    shrunk = sort_tokens(routing, options.programmatic) if site.by_token else routing
    choice = choice_of(site, tma, options)
    place = launch_place(y.device) if options.programmatic else None
    if reduce:
        both = kernels_of(routing.shape, shrunk.shape, site, True, False, options)
    else:
        both = choice.kernels(routing, place)
    # copies are made before the first launch: no kernel may run between the shrink and an expand
    # that starts before the shrink has ended
    tables = weights.ranks.contiguous(), weights.scalings.contiguous()
    a, b = weights.lora_a, weights.lora_b
    of_stacks = (
        a if weights.a_scales is None else weights.a_scales.contiguous(),
        b if weights.b_scales is None else weights.b_scales.contiguous(),
    )
    call = SiteCall(x, weights, routing, y, *tables, factors, *of_stacks, shrunk)
    if not reduce:
        h = _new_h(call, both.split_k)
        if is_capturing(y.device) and not both.shrink.is_compiled(shrink_arguments(call, both, h)):
            # A capture cannot load modules, and a warm-up of one call compiled only the shrink that
            # waits first.
            both = choice.kernels(routing, None)
        launched = launch_shrink(call, both, h), launch_expand(call, both, h, y)
        routing.settled = place
        read = weights.ranks, weights.scalings, weights.a_scales, weights.b_scales
        is_copied = any(each is not None and not each.is_contiguous() for each in read)
        return None if is_copied else SiteLaunches(choice, *launched)
    shape = (routing.num_tokens, routing.top_k, weights.out_features)
    deltas = torch.empty(shape, dtype=torch.float32, device=y.device)
    h = _new_h(call, both.split_k)
    launch_shrink(call, both, h)
    launch_expand(call, both, h, deltas)
    routing.settled = place
    _launch_sum(call, deltas, _sum_kernel(site, options.programmatic))
    return None


def pair_factors(routing: SgmvRouting, weighted: bool) -> torch.Tensor:
    """Return the factor of every pair, [num_tokens, top_k]; read where the site is weighted."""
    factors, given = routing.topk_weights, routing.plan.token_scales
    if given is None:
        return factors
    # token scales multiply deltas as the router's weights do
    scales: torch.Tensor = given[: routing.num_tokens, None].expand_as(factors)
    return scales * factors if weighted else scales.contiguous()


def launch_shrink(call: SiteCall, both: SiteKernels, h: torch.Tensor) -> Launched:
    """Write h [planes, places, num_a * padded rank]."""
    arguments = shrink_arguments(call, both, h)
    both.shrink.launch(tiles_of(call.shrunk, parts_of(both.shrink))[1], arguments)
    return Launched(both.shrink, arguments)


def shrink_arguments(call: SiteCall, both: SiteKernels, h: torch.Tensor) -> Arguments:
    """Return the arguments of the shrink."""
    x, a, ranks, scales, shrunk = (
        call.x,
        call.weights.lora_a,
        call.ranks,
        call.a_scales,
        call.shrunk,
    )
    tables, _ = tiles_of(shrunk, parts_of(both.shrink))
    tensors = (x, stored_bytes(a), scales, ranks, *tables, h)
    strides = (x.stride(0), *strides_of(a, 4), *strides_of(scales, 4), *strides_of(ranks, 2))
    return Arguments(tensors, (), (a.shape[4], *strides, h.shape[1]))


def launch_expand(call: SiteCall, both: SiteKernels, h: torch.Tensor, to: torch.Tensor) -> Launched:
    """Add the deltas to `to` [num_tokens, top_k, out_features], or write them there."""
    routing, ranks, scalings, scales = call.routing, call.ranks, call.scalings, call.b_scales
    b, sizes, tma = call.weights.lora_b, both.expand.sizes, None
    if sizes.STAGES > 1:
        tma = descriptor(_located(b), b.shape[3], sizes.BLOCK_C, sizes.BLOCK_R)
    unit = stride_unit(b.shape[3], b.element_size())
    of_b = [unit * stride for stride in strides_of(b, 3)]
    strides = (*of_b, *strides_of(scales, 3), *to.stride()[:2])
    strides += (*strides_of(ranks, 2), *strides_of(scalings, 2))
    tiles, rows = tiles_of(routing, parts_of(both.expand))
    tensors = (h, stored_bytes(b), scales, to, ranks, scalings, call.factors, *tiles)
    arguments = Arguments(tensors, (tma,), (h.shape[1], *strides))
    both.expand.launch(rows, arguments)
    return Launched(both.expand, arguments)


def parts_of(kernel: SpecializedKernel) -> int:
    """Return the rows of the grid per tile; 0: a row per pair, each a tile of its own."""
    site = kernel.constants["SITE"]
    return 0 if site.ROWS == 1 else int(site.PARTS)


def tiles_of(routing: SgmvRouting, parts: int) -> tuple[tuple[torch.Tensor, ...], int]:
    """Return the tables of a kernel's tiles, and the rows of its grid; `parts` as `parts_of`."""
    if not parts:
        singles = routing.tiles if routing.shape.alone else routing.singles
        return (routing.order, singles, routing.count), routing.num_pairs
    return (routing.order, routing.tiles, routing.count), routing.max_tiles * parts


def _launch_sum(call: SiteCall, deltas: torch.Tensor, kernel: SpecializedKernel) -> None:
    """Add the sums of deltas over the pairs of a token to y."""
    weights, routing, y, ranks = call.weights, call.routing, call.y, call.ranks
    tensors = (y, deltas, routing.topk_ids, routing.plan.token_slots(), ranks)
    numbers = (weights.out_features, y.stride(0), *strides_of(ranks, 2))
    kernel.launch(routing.num_tokens, Arguments(tensors, (), numbers))


def _new_h(call: SiteCall, planes: int) -> torch.Tensor:
    """Return h: [planes, places, num_a * padded rank]."""
    width = call.weights.num_a * padded_rank(call.weights.max_rank)
    # a single plane has the dtype that h is rounded to for the expand
    dtype = torch.float32 if planes > 1 else call.x.dtype
    return torch.empty(planes, call.shrunk.num_pairs, width, dtype=dtype, device=call.x.device)


def strides_of(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """Return the first strides of a stack; of an expert axis of 1 it is 0: all experts read it."""
    slot, expert, *rest = tensor.stride()[:count]
    return (slot, expert if tensor.shape[1] > 1 else 0, *rest)


def _located(lora_b: torch.Tensor) -> Located:
    return Located(lora_b, lora_b.stride()[:3], lora_b)


def site_of(
    weights: ExpertWeights,
    routing: SgmvRouting,
    dtype: torch.dtype,
    options: Options,
    *,
    by_pair: bool,
    weighted: bool,
) -> Site:
    """Return the site of a call: the constants of its kernels; `dtype` is that of x."""
    shared = weights.lora_a.shape[1] == 1 and routing.of_tokens is not None and not by_pair
    if weights.a_scales is not None:  # a row of h is shared only with its scale
        shared = shared and weights.a_scales.shape[1] == 1
    alone = weights.num_a == 1
    interleaved = weights.interleaved and not alone
    slices = weights.output_slices
    if alone or interleaved:
        slices = (weights.out_features,)
    shape = SiteShape(
        weights.num_a,
        weights.max_rank,
        weights.in_features,
        weights.out_features,
        max(slices),
        dtype.itemsize,
        interleaved,
    )
    site = Site(shape, slices, weights.num_a, interleaved, routing.top_k, by_pair, shared, weighted)
    if weights.a_scales is None:
        return site
    kind = storage_kind(weights.dtype, options.programmatic)
    return with_scales(
        site,
        Storage(kind, weights.scale_block, dtype),
        weights.output_slices,
        weights.interleaved and weights.num_slices > 1,
    )


def with_scales(site: Site, storage: Storage, widths: tuple[int, ...], spread: bool) -> Site:
    """Return the site of 8-bit stacks; `widths` has all slices, also where one A feeds them."""
    groups = b_row_groups(widths, storage.block)
    return site._replace(
        storage=storage,
        scale_starts=tuple(accumulate(widths[:-1], initial=0)),
        first_groups=tuple(accumulate(groups[:-1], initial=0)),
        spread=spread,
    )


@lru_cache(maxsize=16384)
def kernels_of(
    pairs: PairShape,
    shrunk: PairShape,
    site: Site,
    fresh: bool,
    tma: bool,
    options: Options,
    settled: bool = False,
) -> SiteKernels:
    """Return both kernels of a site.

    `pairs` are those of the routing, `shrunk` those of the tiles that the shrink runs on. `fresh`:
    the expand writes deltas instead of adding them. `tma`: B allows TMA. `settled`: the shrink
    reads the routing before it waits.
    """
    tiles = _choose_tiles(pairs, site, options.gpu)
    if site.by_token:
        of_tokens = _choose_tiles(shrunk, site, options.gpu)
        rows = of_tokens.shrink_rows
        tiles = replace(tiles, shrink=of_tokens.shrink, shrink_rows=rows, eager_a=True)
    expand, general = tiles.expand, site.interleaved
    general |= padded_rank(site.shape.max_rank) > expand.block_r
    if general or fresh or not tma:
        # without TMA the loop over chunks is unrolled: more than 8 would make the code long
        expand = replace(expand, num_stages=1, chunks=min(8, expand.chunks))
    if general:
        expand = replace(expand, chunks=1)
    return SiteKernels(
        _shrink_kernel(tiles, shrunk.tile, site, options, settled),
        _expand_kernel(replace(tiles, expand=expand), pairs.tile, site, fresh, options),
        tiles.shrink.split_k,
    )


def _choose_tiles(pairs: PairShape, site: Site, gpu: Gpu) -> SiteTiles:
    shape = site.shape
    if site.storage.kind and site.storage.block[1] is not None:  # such products are float32
        shape = replace(shape, item_bytes=4)
    if site.storage.kind and site.storage.block[1] is None:
        return rules.choose_tiles_of_8_bits(pairs, shape, gpu)
    return rules.choose_tiles(pairs, shape, gpu)


def _shrink_kernel(
    tiles: SiteTiles, tile: int, site: Site, options: Options, settled: bool
) -> SpecializedKernel:
    shape, sizes = site.shape, tiles.shrink
    top_k = 1 if site.by_pair or site.by_token else site.top_k
    of_site = _site_sizes(site, top_k, tiles.shrink_rows, tile, tiles.eager_a)
    return specialized(
        kernels.shrink_kernel,
        -(-shape.stacked // sizes.block_n) * sizes.split_k,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        programmatic=options.programmatic,
        SITE=of_site._replace(SETTLED=settled),
        SIZES=shrink_sizes(
            sizes,
            shape.in_features,
            shape.max_rank,
            site.storage,
            PRECISION=options.precision,
            PROGRAMMATIC=options.programmatic,
            EVEN_R=8,  # wide stores, which may write anything beyond the rank
        ),
    )


def _expand_kernel(
    tiles: SiteTiles, tile: int, site: Site, fresh: bool, options: Options
) -> SpecializedKernel:
    columns = column_programs(site.slices, tiles.expand)
    return specialized(
        kernels.expand_kernel,
        columns.programs,
        num_warps=tiles.expand.num_warps,
        programmatic=options.programmatic,
        SITE=_site_sizes(site, site.top_k, tiles.expand_rows, tile, tiles.eager_b),
        SIZES=expand_sizes(
            tiles.expand,
            columns,
            tiles.shrink.split_k,
            site.shape.max_rank,
            site.storage,
            FIRST_GROUPS=site.first_groups,
            padded_h=True,
            PRECISION=options.precision,
            PROGRAMMATIC=options.programmatic,
            FRESH=fresh,
            SCALE_STARTS=site.scale_starts,
            SPREAD=site.spread,
        ),
    )


def _site_sizes(site: Site, top_k: int, rows: int, tile: int, eager: bool) -> SiteSizes:
    return SiteSizes(
        ROWS=rows,
        PARTS=1 if rows == 1 else tile // rows,
        TOP_K=top_k,
        NUM_A=site.num_a,
        MAX_RANK=site.shape.max_rank,
        EAGER=eager,
        BY_TOKEN=site.by_token,
        INTERLEAVED=site.interleaved,
        WEIGHTED=site.weighted,
    )


@lru_cache(maxsize=1024)
def _sum_kernel(site: Site, programmatic: bool) -> SpecializedKernel:
    sizes = SumSizes(
        STARTS=tuple(accumulate(site.slices[:-1], initial=0)),
        TOP_K=site.top_k,
        NUM_A=site.num_a,
        BLOCK_C=1024,
        INTERLEAVED=site.interleaved,
        INTERPRETED=INTERPRETED,
        PROGRAMMATIC=programmatic,
    )
    programs = -(-site.shape.out_features // sizes.BLOCK_C)
    return specialized(kernels.sum_kernel, programs, programmatic=programmatic, SIZES=sizes)
